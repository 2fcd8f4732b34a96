"""A real federation on this machine: nginx, a SuperLink and three silos, each in its own process, whoever dies.

`bash scripts/engines` runs this, in an environment that has Flower.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flwr.supercore.inflatable import inflatable_protobuf_utils
from flwr.supernode import node_auth_http_interceptor as interceptor
from safetensors.torch import load_file

import descant
from descant import Federation
from descant.config import read as recipe_of
from descant.deployment.flower import driver_transport, flower_connection
from descant.deployment.flower.driver_transport import Hub
from descant.deployment.flower.flower_connection import HEARTBEAT, Away, Held, TurnedAway
from descant.deployment.flower.silo_transport import Spoke
from descant.deployment.flower.superlink_process import Papers, superlink
from descant.deployment.nginx_proxy import Proxy, find_nginx
from descant.deployment.pki.roster import Roster
from descant.deployment.server.serve import Serving, free_port
from descant.deployment.silo import SiloFile
from descant.deployment.silo.silo_state import Keeping
from descant.engines.remote import Lost, Patience
from descant.errors import EngineError
from descant.rounds.checkpoint import models_digest
from descant.serialization.wire import Letter
from descant.storage.spill import Filed
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import Run
from descant.tracking import read as recorded
from teams import TALKATIVE, canaries, together
from ways import WAYS, Way

try:
    find_nginx()
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

NAMES = ("north", "south", "west")
ROUNDS = 4
MOST = 2**30  # bytes of an answer
PATIENCE = 900.0  # seconds: a machine may be busy
RUN = """
[run]
rounds = {rounds}
seed = 5
points = 1
"""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
}


class Lab:
    """A federation in a folder, and its processes."""

    def __init__(self, folder: Path, way: Way, rounds: int = ROUNDS, more: str = "", policy: str = "") -> None:
        self.folder, self.rounds, self.team, self.policy = folder, rounds, way.team, policy
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.paths: dict[str, str] = {}  # by process: a folder whose modules it finds first
        (folder / "recipe.toml").write_text(RUN.format(rounds=rounds) + way.text + more)
        self.call("server", "init", "lab", "recipe.toml", "--port", str(free_port()))
        for at, name in enumerate(NAMES):
            self.invite(name, at)

    def invite(self, name: str, at: int) -> None:
        self.call("server", "invite", "lab", name)
        (self.folder / f"{name}.py").write_text(self.team.format(name=str(at)) + self.policy)

    def call(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "descant", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> None:
        command, path = [sys.executable, "-m", "descant", *arguments], self.paths.get(name, "")
        given = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([path, ENVIRONMENT["PYTHONPATH"]])}
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, env=given, stdout=log, stderr=log)

    def serve(self, *patience: str, gather: int = len(NAMES)) -> None:
        self.start("server", "server", "start", "lab", "--gather", str(gather), *patience)

    def join(self, name: str) -> None:
        self.start(name, "silo", "join", f"{name}.invite", f"{name}.py")

    def begin(self, *patience: str) -> None:
        self.serve(*patience)
        for name in NAMES:
            self.join(name)

    def said(self, name: str = "server") -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, true: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "\n".join(f"{name}:\n{self.said(name)[-2000:]}" for name in self.processes)
            time.sleep(0.1)

    def reached(self, round: int) -> None:
        self.until(lambda: f"Round {round}:" in self.said() or self.processes["server"].poll() is not None)
        assert f"Round {round}:" in self.said(), self.said()

    @property
    def training(self) -> Path:
        """The folder of the run."""
        return self.folder / "lab" / "run" / "training"

    def done(self) -> torch.Tensor:
        """The centre after the last round."""
        self.until(lambda: self.processes["server"].poll() is not None)
        assert self.processes["server"].returncode == 0, self.said()
        [file] = (self.training / "models" / f"{self.rounds:08}").glob("center*")
        return load_file(file)["center"]

    def child(self, name: str, word: str) -> psutil.Process:
        """A process that another one has started."""
        found = psutil.Process(self.processes[name].pid).children(recursive=True)
        return next(one for one in found if any(word in part for part in one.cmdline()))

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def waited_for_its_place(self, name: str) -> bool:
        """Kill a silo and let it join at once: whether it said that its place is still held, or was too late for it."""
        self.kill(name)
        before = self.said(name)
        self.join(name)
        told = ("Joined.", "still holds our place from before")
        self.until(lambda: any(text in self.said(name).removeprefix(before) for text in told))
        return told[1] in self.said(name).removeprefix(before)

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(*arguments: Any) -> Lab:
        made.append(Lab(tmp_path, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


def simulated(one: Lab, **more: Any) -> Federation:
    """The same training in one process, recorded beside the lab."""
    recipe = recipe_of(one.folder / "recipe.toml")
    files = [SiloFile(one.folder / f"{name}.py", name) for name in NAMES]
    fed = Federation(recipe.model(), together(files), recipe.algorithm(), solver=recipe.solver(), seed=5, **more)
    with Run.start(one.folder / "simulated", fed) as run:
        for _ in run.rounds(one.rounds, one.rounds):
            pass
    return fed


def same(one: Lab, away: Collection[str] = (), **more: Any) -> Federation:
    """The centre, the numbers on record, and of each silo its own model and all that it remembers: the simulation's."""
    center, twin = one.done(), simulated(one, **more)
    assert torch.equal(center, twin.state.center)
    ours, theirs = (recorded(place).numbers for place in (one.training, one.folder / "simulated"))
    assert ours.scores.keys() == theirs.scores.keys() and ours.metrics.keys() == theirs.metrics.keys()
    here = [name not in away for name in ours.parties]
    for name in theirs.scores:
        np.testing.assert_array_equal(ours.scores[name][:, here], theirs.scores[name][:, here], name)
    for name in theirs.metrics.keys() - {"seconds"}:
        np.testing.assert_array_equal(ours.metrics[name], theirs.metrics[name], name)
    for name in [name for name in NAMES if name not in away]:
        state = one.folder / f"{name}.silo" / "state"
        alike(load_file(state / "own.safetensors"), twin.models_[name].state_dict())
        left = ("coreset.rows", "coreset.weights")  # a silo seals them, and a simulation without a vault has them here
        known = {key: tensor for key, tensor in twin.engine_.memory.get(name).items() if key not in left}
        alike(Keeping(state).memory(one.rounds), known)
    return twin


def alike(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "RFA", "matching", "FedAvg, secure", "FedRL, DQN"])
def test_deployment_is_the_simulation(lab: Callable[..., Lab], name: str) -> None:
    one = lab(WAYS[name])
    one.begin()
    twin = same(one)
    assert models_digest(twin.state) in one.said()
    told = json.loads(one.call("server", "status", "lab", "--json"))
    assert told["round"] == ROUNDS and [party["state"] for party in told["parties"]] == ["joined"] * 3
    alike(load_file(one.folder / told["center"]), twin.center_.state_dict())
    assert [row["judged"] for row in json.loads(one.call("report", "lab", "--json"))["table"]] == [ROUNDS] * 3


def test_whoever_is_killed_the_same_commands_go_on_to_the_same_model(lab: Callable[..., Lab]) -> None:
    """One kill of each kind of process, in one run."""
    one = lab(WAYS["FedGeoMedPlus"])
    one.begin()
    one.reached(1)
    one.child("server", "flower-superlink").kill()
    one.until(lambda: "started anew" in one.said())
    one.child("north", "descant.deployment.silo.silo_worker").kill()
    one.until(lambda: one.said("south").count("Joined.") == 2)
    assert any(one.waited_for_its_place("south") for _ in range(5))  # a machine may be too busy to be in time
    one.reached(2)
    one.kill("server")
    time.sleep(1)
    one.serve()
    same(one)


def test_nginx_that_is_killed_is_started_anew_and_the_run_goes_on_to_the_same_model(lab: Callable[..., Lab]) -> None:
    """First its master alone, whose worker then holds the port and goes on; then both."""
    one = lab(WAYS["FedGeoMedPlus"])
    one.begin()
    for round, whole in ((1, False), (2, True)):
        one.reached(round)
        master = one.child("server", "nginx")
        workers = master.children()
        assert workers
        for process in (master, *(workers if whole else ())):
            process.kill()
        one.until(lambda: one.said().count("nginx has ended") == round)  # noqa: B023  it is called here
        one.until(lambda: not any(alive(worker) for worker in workers))  # noqa: B023
    same(one)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def listening(process: psutil.Process) -> list[str]:
    """Where a process can be reached."""
    found = process.net_connections("inet") if hasattr(process, "net_connections") else process.connections("inet")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]


def test_a_federation_of_this_machine_listens_on_loopback_alone(lab: Callable[..., Lab]) -> None:
    one = lab(WAYS["FedAvg"], 5000)
    one.begin()
    one.reached(1)
    begun = {name: psutil.Process(process.pid) for name, process in one.processes.items()}
    found = {
        name: [at for one in (process, *process.children(recursive=True)) for at in listening(one)]
        for name, process in begun.items()
    }
    assert listening(one.child("server", "nginx")) and listening(one.child("server", "flower-superlink"))
    assert set(found.pop("server")) == {"127.0.0.1"} and not any(found.values())


def test_an_invite_on_a_second_machine_ends_with_the_reason(lab: Callable[..., Lab]) -> None:
    """While the first is there, because Flower holds its place; and when it has left, because its machine is known."""
    one = lab(WAYS["FedAvg"])
    one.serve()
    one.join("north")
    one.until(lambda: "Taking part" in one.said("north"))

    def comes(told: str) -> None:
        one.start("second", "silo", "join", "north.invite", "north.py", "--folder", "second.silo")
        assert one.processes["second"].wait(300) == 1
        assert told in one.said("second")

    comes("in use in another place")
    assert one.processes["north"].poll() is None
    one.call("silo", "leave", "north.silo")
    assert one.processes["north"].wait(300) == 0
    comes("another machine")
    assert "used in two places" in one.said()
    assert (one.folder / "north.silo" / "state" / "machine").read_text() not in one.said("second")


def keys_in(*texts: str) -> list[bytes]:
    """The lines of private keys, without the first, which says of what kind they are."""
    lines = [flower_connection for text in texts for flower_connection in text.splitlines()[2:]]
    return [
        flower_connection.encode()
        for flower_connection in lines
        if len(flower_connection) > 40 and "-----" not in flower_connection
    ]


def test_no_row_no_key_and_nothing_that_a_team_s_code_says_is_found_elsewhere(lab: Callable[..., Lab]) -> None:
    """Each has its own keys in its own folder, nobody has any in what it prints, and north's rows are with north."""
    one = lab(WAYS["FedAvg"])
    (one.folder / "north.py").write_text(TALKATIVE.format(name="0"))
    one.begin()
    one.reached(1)
    (one.folder / "north.py.mark").touch()
    one.done()
    assert "4711-0815" in one.said("north") and "without north: error: ValueError" in one.said()
    invites = {name: json.loads((one.folder / f"{name}.invite").read_text()) for name in NAMES}
    keys = {name: keys_in(held["key"], held["node_key"]) for name, held in invites.items()}
    ours = one.folder / "lab" / "keys"
    keys["lab"] = keys_in((ours / "ca.key").read_text(), (ours / "server.key").read_text())
    keys["lab"].append((ours / "driver.secret").read_bytes())
    for name in keys:
        folder = one.folder / ("lab" if name == "lab" else f"{name}.silo")
        files = [file for file in folder.rglob("*") if file.is_file()]
        said = one.said("server" if name == "lab" else name).encode()
        held = said + b"\n".join(file.read_bytes() for file in files)
        printed = said + b"\n".join(file.read_bytes() for file in files if file.suffix == ".log")
        others = [key for other, some in keys.items() if other != name for key in some]
        others += [] if name == "north" else canaries()
        assert len(files) > 5 and all(key in held for key in keys[name]), name
        assert not [secret for secret in others if secret in held], name
        assert not [key for key in keys[name] if key in printed], name


@pytest.fixture
def roster(tmp_path: Path) -> Roster:
    (tmp_path / "recipe.toml").write_text("")
    return Roster.create(tmp_path / "lab", tmp_path / "recipe.toml")


def spoke(roster: Roster, folder: Path, name: str, port: int, expired: bool = False) -> Spoke:
    invite = roster.invite(name, folder / f"{name}.invite")
    keys = invite.unpack(folder / name)
    if expired:
        roster.authority.party(name, 0).write(keys.folder, "party")
        time.sleep(1.1)  # its last second
    return Spoke(f"127.0.0.1:{port}", invite.authority, keys.certificate, keys.key, invite.node_key.encode())


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_an_answer_that_was_announced_and_never_comes_keeps_nobody_waiting(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own way would wait for the parts of the first for ever, and never fetch the second."""
    with linked(roster, tmp_path, "north", "south") as (hub, north, south), north.joined(), south.joined():
        assert hub.here().keys() == {"north", "south"}
        late = hub.send("south", b"nobody fetches it", 1.0)
        time.sleep(2)
        assert isinstance(hub.fetch([late], MOST)[late], Lost)  # what has run out is said, so that it can go out again
        first, second = (hub.send(name, b"a letter", 60.0) for name in ("north", "south"))
        with monkeypatch.context() as without:
            without.setattr(inflatable_protobuf_utils, "make_push_object_fn_protobuf", lambda *_: lambda *_: None)
            assert answered(north, b"never uploaded") == b"a letter"
        assert answered(south, b"an answer") == b"a letter"
        began = time.monotonic()
        assert read(hub.fetch([first, second], MOST)) == {second: b"an answer"}
        assert hub.fetch([first], MOST) == {} and time.monotonic() - began < 10


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_who_leaves_in_order_has_left_and_who_falls_silent_or_is_back_has_not(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_transport, "HEARTBEAT", 1.0)  # so often it looks
    with linked(roster, tmp_path, "north", "south") as (hub, north, south):
        with south.joined(), north.joined():
            assert hub.here().keys() == {"north", "south"} and not hub.left()
            monkeypatch.setattr(south._client, "DeactivateNode", lambda request: None)  # as if it were killed
        end = time.monotonic() + PATIENCE
        while hub.here().keys() | hub.left() != {"north"}:
            assert "south" not in hub.left() and time.monotonic() < end
            time.sleep(0.2)
        assert hub.left() == {"north"} and not hub.here()  # and of south nobody knows anything
        with north.joined():
            assert hub.here().keys() == {"north"} and not hub.left()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_heartbeat_that_is_slow_does_not_bring_back_who_has_left(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(roster, tmp_path, "north") as (hub, north):
        beat, begun = north._client.SendNodeHeartbeat, threading.Event()

        def slow(request: Any) -> None:
            begun.set()
            time.sleep(1)
            beat(request)

        monkeypatch.setattr(north._client, "SendNodeHeartbeat", slow)
        with north.joined():
            assert hub.here().keys() == {"north"} and begun.wait(HEARTBEAT)
        time.sleep(1.5)
        assert not hub.here()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_an_answer_by_a_key_that_was_revoked_is_not_that_of_who_is_invited_by_the_same_name(
    roster: Roster, tmp_path: Path
) -> None:
    """Both commands may be given between two looks of the driver: the name alone tells it nothing."""
    with linked(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()
        number = hub.send("north", b"a letter", 60.0)
        assert answered(north, b"by the old key") == b"a letter"
        roster.revoke("north")
        (tmp_path / "again").mkdir()
        port = int(hub._address.rpartition(":")[2])
        with closing(spoke(roster, tmp_path / "again", "north", port)) as again:
            for one, why in ((north, Held), (again, Away)):  # its place is taken; it has none yet
                with pytest.raises(Away) as told, one.joined():
                    pass
                assert told.type is why
            hub.admit({entry.name: entry.node_key.encode() for entry in roster.parties()})
            lost = hub.fetch([number], MOST)[number]
            assert isinstance(lost, Lost) and not lost.final  # the letter goes out again, to the new key
            with again.joined():
                assert hub.here().keys() == {"north"}
                number = hub.send("north", b"a letter", 60.0)
                assert answered(again, b"by the new key") == b"a letter"
                assert read(hub.fetch([number], MOST)) == {number: b"by the new key"}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_driver_that_the_superlink_does_not_know_any_more_is_told_so_and_not_ended(roster: Roster) -> None:
    """Flower's own way would interrupt this process: after a kill of the SuperLink, or when its clock has jumped."""
    port, papers = free_port(), Serving(roster.folder, Patience())._papers(roster)
    with superlink(papers, port, roster.run):
        hub = hub_of(roster, papers, port)
        assert hub.here() == {}
    with superlink(papers, port, roster.run):
        with pytest.raises(Away, match="answers with 401"):
            hub.here()
        assert hub._beat.heartbeat_fn()  # it was refused, and is not tried again and again
    with closing(hub):
        assert not hub._beat.heartbeat_fn()  # nobody is there: it is


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_what_flower_cuts_into_chunks_comes_whole_and_what_is_too_long_is_not_taken(
    roster: Roster, tmp_path: Path
) -> None:
    """Flower sends chunks that are alike once: an answer of few bytes on the line may be as long as it says."""
    answers = {"zeros": bytes(12 * 2**20), "numbers": b"".join(i.to_bytes(4, "big") for i in range(3 * 2**20)) + b"!"}
    with linked(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()
        for answer in answers.values():
            number = hub.send("north", answer, 60.0)
            assert answered(north, answer) == answer
            assert read(hub.fetch([number], len(answer))) == {number: answer}
        file = Filed()
        file.add(answers["numbers"])
        dropped = hub.send("north", file, 60.0)
        assert answered(north, b"an answer") == answers["numbers"]
        number = hub.send("north", b"a letter", 60.0)
        answered(north, answers["zeros"])
        lost = hub.fetch([number], len(answers["zeros"]) - 1)[number]
        assert isinstance(lost, Lost) and lost.final and "more than" in str(lost)
        assert hub._sent.keys() == {dropped}
        hub.drop([dropped, number])
        assert not hub._sent and not hub._coming


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_part_that_flower_does_not_have_or_take_any_more_ends_nobody(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes none a second time, as when the answer to the first got lost, and none three minutes after the last."""
    with linked(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()

        def twice(push: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda request: (push(request), push(request))[1]

        hub.send("north", b"a letter", 60.0)
        with monkeypatch.context() as without:
            without.setattr(north._client, "PushObject", twice(north._client.PushObject))
            with pytest.raises(Away, match="has taken an answer, and not a part of it"):
                answered(north, b"an answer")
        hub.send("north", b"another letter", 60.0)
        with monkeypatch.context() as without:
            without.setattr(north._client, "PullObject", lambda request: SimpleNamespace(object_found=False))
            with pytest.raises(Away, match="was given up: what came was never whole"):
                north.pull()
        with monkeypatch.context() as without:
            without.setattr(hub._client, "PushObject", twice(hub._client.PushObject))
            with pytest.raises(Lost, match="Flower did not take all of the letter"):
                hub.send("north", b"a third", 60.0)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_letter_of_which_half_has_come_holds_nobody_and_a_newer_one_takes_its_place(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is slow, or has died over it: the silo looks again, and may leave at any time."""
    long = b"".join(i.to_bytes(4, "big") for i in range(3 * 2**20))
    with linked(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()
        push, kept = hub._client.PushObject, list[Any]()

        def by_half(request: Any) -> Any:
            kept.append(request)
            return push(request) if len(kept) < 4 else SimpleNamespace(stored=True)

        with monkeypatch.context() as without:
            without.setattr(hub._client, "PushObject", by_half)
            number = hub.send("north", long, 60.0)
        began = time.monotonic()
        assert [north.pull() for _ in range(5)] == [None] * 5
        assert time.monotonic() - began < 20 and len(kept) > 4
        for request in kept[3:-1]:
            push(request)
        assert north.pull() is None  # the last part
        push(kept[-1])
        assert answered(north, b"an answer") == long
        while not (found := read(hub.fetch([number], MOST))):
            time.sleep(0.1)
        assert found == {number: b"an answer"}
        kept.clear()
        with monkeypatch.context() as without:
            without.setattr(hub._client, "PushObject", by_half)
            hub.send("north", long, 60.0)
        assert north.pull() is None
        hub.send("north", b"a newer one", 60.0)
        assert answered(north, b"an answer") == b"a newer one" and north.pull() is None


def read(found: dict[str, Letter | Lost]) -> dict[str, bytes]:
    return {number: answer[:] for number, answer in found.items() if not isinstance(answer, Lost)}


@contextmanager
def linked(roster: Roster, folder: Path, *names: str) -> Iterator[Any]:
    """A SuperLink, its driver, and the lines of some parties, who have not joined yet."""
    port, papers = free_port(), Serving(roster.folder, Patience())._papers(roster)
    with ExitStack() as stack:
        spokes = [stack.enter_context(closing(spoke(roster, folder, name, port))) for name in names]
        stack.enter_context(superlink(papers, port, roster.run))
        yield stack.enter_context(closing(hub_of(roster, papers, port))), *spokes


def hub_of(roster: Roster, papers: Papers, port: int) -> Hub:
    keys = {entry.name: entry.node_key.encode() for entry in roster.parties()}
    return Hub(f"127.0.0.1:{port}", papers.ca.read_bytes(), papers.secret.read_bytes(), keys)


def answered(one: Spoke, answer: bytes) -> bytes:
    """Answer the next letter; which one it was."""
    while (got := one.pull()) is None:
        time.sleep(0.1)
    to, letter = got
    one.push(to, answer)
    return letter[:]


def test_a_certificate_that_has_expired_and_a_clock_that_is_off_are_said(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, port, papers = free_port(), free_port(), Serving(roster.folder, Patience())._papers(roster)
    with (
        superlink(papers, inner, roster.run),
        Proxy(inner, "127.0.0.1", port).start(roster.folder),
        closing(spoke(roster, tmp_path, "north", port)) as north,
        closing(spoke(roster, tmp_path, "south", port, expired=True)) as south,
    ):
        with pytest.raises(TurnedAway, match=r"does not take our certificate.*expired"), south.joined():
            pass
        true = interceptor.now
        for hours, off in ((1, "ahead"), (-1, "behind")):
            with monkeypatch.context() as wrong:
                wrong.setattr(interceptor, "now", lambda by=hours: true() + timedelta(hours=by))
                wrong.setattr(flower_connection, "time", SimpleNamespace(time=lambda by=hours: time.time() + 3600 * by))
                with pytest.raises(TurnedAway, match=rf"clock of this machine is 3\d+ s {off}. Set"), north.joined():
                    pass


def test_a_party_that_is_revoked_is_not_heard_any_more(lab: Callable[..., Lab]) -> None:
    one = lab(WAYS["FedAvg"])
    one.call("server", "revoke", "lab", "west")
    one.begin()
    one.until(lambda: "certificate" in one.said("west"))
    assert one.processes["west"].wait(300) == 1


def test_a_quorum_goes_on_without_a_silo_that_was_killed_and_says_so(lab: Callable[..., Lab]) -> None:
    """First with it, because Flower does not know yet that it is gone; then without. Of one that is left it is none."""
    one = lab(WAYS["FedAvg"], 5000)
    one.begin("--quorum", "2", "--deadline", "20")
    one.until(lambda: ", 3 parties" in one.said())
    one.kill("west")
    one.until(lambda: "; without west: lost: no answer within 20 s: the round went on without it" in one.said())
    one.until(lambda: " begins without west." in one.said())
    one.call("server", "revoke", "lab", "west")
    before = one.said()
    one.until(lambda: ", 2 parties" in one.said().removeprefix(before))
    assert "Waiting for" not in one.said()
    one.call("server", "revoke", "lab", "south")
    one.until(lambda: "1 of 2 parties are there. Waiting for new invites" in one.said())


def test_a_party_that_is_revoked_while_it_takes_part_ends_and_the_others_go_on(lab: Callable[..., Lab]) -> None:
    one = lab(WAYS["FedAvg"], 5000)
    one.start("server", "server", "start", "lab", "--gather", "2")
    for name in NAMES:
        one.join(name)
    one.until(lambda: ", 3 parties" in one.said())
    one.call("server", "revoke", "lab", "west")
    assert one.processes["west"].wait(300) == 1
    assert "does not take our certificate" in one.said("west")
    before = one.said()
    one.until(lambda: ", 2 parties" in one.said().removeprefix(before))


SEALED = """
wrap = [{{by = "stand-ins", share = 0.4}}]
[vault]
folder = "{folder}/vault"
key = "{folder}/key"
"""


def test_who_is_forgotten_is_not_stood_in_for_and_no_row_of_it_is_left(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """North joins, leaves, is stood in for and is forgotten: what it has sealed is gone, and was never in the clear."""
    key = PrivateKey.new()
    key.write(tmp_path / "key")
    vault = Vault.create(tmp_path / "vault", key)
    one = lab(WAYS["FedAvg"], 5000, SEALED.format(folder=tmp_path))
    (one.folder / "north.py").write_text(TALKATIVE.format(name="0") + 'policy = {"share": 0.5}\n')
    one.start("server", "server", "start", "lab", "--gather", "2", "--quorum", "2", "--deadline", "20")
    for name in NAMES:
        one.join(name)
    held = lambda: {one.party: one for one in vault.parties()}["north"]  # noqa: E731
    one.until(lambda: any(party.state == "sealed" for party in vault.parties()))
    assert held().state == "sealed"
    one.call("silo", "leave", "north.silo")
    assert one.processes["north"].wait(300) == 0
    one.until(lambda: held().opened > 0)
    told = json.loads(one.call("silo", "forget", "north.silo", "--json"))
    assert "destroyed its sealed rows" in told["server"] and held().state == "forgotten"
    opened, before = held().opened, one.said()
    one.until(lambda: one.said().removeprefix(before).count("without north") >= 2)
    assert "north wishes to be forgotten: the vault has destroyed" in one.said()
    assert held().opened == opened and not list((tmp_path / "vault").rglob("coreset*"))
    found = json.loads(one.call("vault", "verify", "vault", "--key", "key", "--json"))
    assert found["coresets"] == 0 and found["with_key"]
    one.call("server", "audit", "lab", "--verify")
    kept = sorted(file.name for part in ("state", "keys") for file in (one.folder / "north.silo" / part).iterdir())
    assert kept == ["left.safetensors", "machine"]
    check_nothing_is_shown(one)


def check_nothing_is_shown(one: Lab) -> None:
    """No row of north is with anybody else, no key in what anybody prints, and the SuperLink has a log and no more."""
    invites = [json.loads((one.folder / f"{name}.invite").read_text()) for name in NAMES]
    ours = one.folder / "lab" / "keys"
    secrets = keys_in(*(held[name] for held in invites for name in ("key", "node_key")))
    secrets += keys_in((ours / "ca.key").read_text(), (ours / "server.key").read_text())
    secrets += [(ours / "driver.secret").read_bytes(), (one.folder / "key").read_bytes().strip()[-64:]]
    logs = b"\n".join(file.read_bytes() for file in one.folder.rglob("*.log"))
    others = [file for part in ("lab", "vault", "south.silo", "west.silo") for file in (one.folder / part).rglob("*")]
    held = logs + b"\n".join(file.read_bytes() for file in others if file.is_file())
    assert len(logs) > 1000 and not [secret for secret in secrets if secret in logs]
    assert len(held) > 100_000 and not [canary for canary in canaries() if canary in held]
    link = one.child("server", "flower-superlink")
    files = [Path(file.path) for process in (link, *link.children(recursive=True)) for file in process.open_files()]
    assert files and {file.suffix for file in files} == {".log"}, files


def test_who_is_invited_while_the_training_runs_is_part_of_it_from_then_on(lab: Callable[..., Lab]) -> None:
    one = lab(WAYS["FedAvg"], 5000)
    one.begin()
    one.reached(1)
    one.invite("east", 3)
    one.join("east")
    one.until(lambda: "part of it from now on: east" in one.said() and ", 4 parties" in one.said())
    one.kill("server")
    before = one.said()
    one.serve()
    one.until(lambda: ", 4 parties" in one.said().removeprefix(before))
    told = json.loads(one.call("server", "status", "lab", "--json"))
    first = {party["name"]: party["first round"] for party in told["parties"]}
    assert {first[name] for name in NAMES} == {1} and 1 < first["east"] <= told["round"]


def test_a_driver_does_not_import_what_only_a_superlink_needs() -> None:
    files = [Path(descant.__file__).parent / "engines" / f"{name}.py" for name in ("flower", "line", "parts", "steady")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    wanted = sorted(name for name in modules if name.startswith("flwr."))
    assert "flwr.supercore.runtime" in wanted
    code = f"import sys, {', '.join(wanted)}\nprint(*sorted({{'sqlalchemy', 'alembic'}} & sys.modules.keys()))"
    assert not subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
