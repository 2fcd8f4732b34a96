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
from descant.config import read_recipe as recipe_of
from descant.deployment.flower import driver_transport, flower_connection
from descant.deployment.flower.driver_transport import FlowerServerTransport
from descant.deployment.flower.flower_connection import (
    HEARTBEAT_INTERVAL,
    ConnectionRejected,
    PeerUnavailable,
    SessionInUse,
)
from descant.deployment.flower.silo_transport import FlowerSiloTransport
from descant.deployment.flower.superlink_process import SuperLinkCredentials, run_superlink
from descant.deployment.nginx_proxy import Proxy, find_nginx
from descant.deployment.pki.roster import Roster
from descant.deployment.server.serve import FederationServer, free_port
from descant.deployment.silo import SiloFile
from descant.deployment.silo.silo_state import SiloState
from descant.engines.remote import UndeliveredError, WaitLimits
from descant.errors import EngineError
from descant.rounds.checkpoint import digest_of_models
from descant.serialization.wire import MessageBytes
from descant.storage.spill import SpillFile
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import Run
from descant.tracking import read_run as recorded
from recipe_matrix import SILO_CASES, RecipeCase
from silo_file_templates import LEAKING_SILO_FILE, canary_bytes, simulated_population

try:
    find_nginx()
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

SILO_NAMES = ("north", "south", "west")
ROUNDS = 4
MAX_REPLY_BYTES = 2**30  # bytes of an answer
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
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]),
}


class LocalDeployment:
    """A federation in a folder, and its processes."""

    def __init__(
        self, folder: Path, recipe_case: RecipeCase, rounds: int = ROUNDS, extra_recipe_text: str = "", policy: str = ""
    ) -> None:
        self.folder = folder
        self.rounds = rounds
        self.silo_file_template = recipe_case.silo_file_template
        self.policy = policy
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.python_paths: dict[str, str] = {}  # by process: a folder whose modules it finds first
        (folder / "recipe.toml").write_text(RUN.format(rounds=rounds) + recipe_case.recipe_text + extra_recipe_text)
        self.run_command("server", "init", "lab", "recipe.toml", "--port", str(free_port()))
        for at, name in enumerate(SILO_NAMES):
            self.invite(name, at)

    def invite(self, name: str, at: int) -> None:
        self.run_command("server", "invite", "lab", name)
        (self.folder / f"{name}.py").write_text(self.silo_file_template.format(name=str(at)) + self.policy)

    def run_command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "descant", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "descant", *arguments]
        path = self.python_paths.get(name, "")
        given = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([path, ENVIRONMENT["PYTHONPATH"]])}
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, env=given, stdout=log, stderr=log)

    def start_server(self, *patience: str, gather: int = len(SILO_NAMES)) -> None:
        self.start("server", "server", "start", "lab", "--gather", str(gather), *patience)

    def start_silo(self, name: str) -> None:
        self.start(name, "silo", "join", f"{name}.invite", f"{name}.py")

    def start_all(self, *patience: str) -> None:
        self.start_server(*patience)
        for name in SILO_NAMES:
            self.start_silo(name)

    def log_text(self, name: str = "server") -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(
                f"{name}:\n{self.log_text(name)[-2000:]}" for name in self.processes
            )
            time.sleep(0.1)

    def wait_for_round(self, round: int) -> None:
        self.wait_until(lambda: f"Round {round}:" in self.log_text() or self.processes["server"].poll() is not None)
        assert f"Round {round}:" in self.log_text(), self.log_text()

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self.folder / "lab" / "run" / "training"

    def final_global_model(self) -> torch.Tensor:
        """The centre after the last round."""
        self.wait_until(lambda: self.processes["server"].poll() is not None)
        assert self.processes["server"].returncode == 0, self.log_text()
        [file] = (self.run_folder / "models" / f"{self.rounds:08}").glob("center*")
        return load_file(file)["global_model"]

    def child_process(self, name: str, word: str) -> psutil.Process:
        """A process that another one has started."""
        found = psutil.Process(self.processes[name].pid).children(recursive=True)
        return next(one for one in found if any(word in part for part in one.cmdline()))

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def rejoin_waits_for_session(self, name: str) -> bool:
        """Kill a silo and let it join at once: whether it said that its place is still held, or was too late for it."""
        self.kill(name)
        before = self.log_text(name)
        self.start_silo(name)
        told = ("Joined.", "still holds our place from before")
        self.wait_until(lambda: any(text in self.log_text(name).removeprefix(before) for text in told))
        return told[1] in self.log_text(name).removeprefix(before)

    def terminate(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., LocalDeployment]]:
    made: list[LocalDeployment] = []

    def make(*arguments: Any) -> LocalDeployment:
        made.append(LocalDeployment(tmp_path, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.terminate()


def simulated_deployment(deployment: LocalDeployment, **more: Any) -> Federation:
    """The same training in one process, recorded beside the lab."""
    recipe = recipe_of(deployment.folder / "recipe.toml")
    files = [SiloFile(deployment.folder / f"{name}.py", name) for name in SILO_NAMES]
    fed = Federation(
        recipe.model(), simulated_population(files), recipe.algorithm(), solver=recipe.solver(), seed=5, **more
    )
    with Run.start(deployment.folder / "simulated", fed) as run:
        for _ in run.rounds(deployment.rounds, deployment.rounds):
            pass
    return fed


def assert_equals_simulation(deployment: LocalDeployment, absent: Collection[str] = (), **more: Any) -> Federation:
    """The centre, the numbers on record, and of each silo its own model and all that it remembers: the simulation's."""
    center = deployment.final_global_model()
    twin = simulated_deployment(deployment, **more)
    assert torch.equal(center, twin.state.global_model)
    ours, theirs = (recorded(place).numbers for place in (deployment.run_folder, deployment.folder / "simulated"))
    assert ours.scores.keys() == theirs.scores.keys() and ours.metrics.keys() == theirs.metrics.keys()
    here = [name not in absent for name in ours.parties]
    for name in theirs.scores:
        np.testing.assert_array_equal(ours.scores[name][:, here], theirs.scores[name][:, here], name)
    for name in theirs.metrics.keys() - {"seconds"}:
        np.testing.assert_array_equal(ours.metrics[name], theirs.metrics[name], name)
    for name in [name for name in SILO_NAMES if name not in absent]:
        state = deployment.folder / f"{name}.silo" / "state"
        assert_equal_tensors(load_file(state / "personal_model.safetensors"), twin.models_[name].state_dict())
        left = ("coreset.rows", "coreset.weights")  # a silo seals them, and a simulation without a vault has them here
        known = {key: tensor for key, tensor in twin.engine_.party_states.get(name).items() if key not in left}
        assert_equal_tensors(SiloState(state).load_party_state(deployment.rounds), known)
    return twin


def assert_equal_tensors(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "RFA", "matching", "FedAvg, secure", "FedRL, DQN"])
def test_deployment_equals_the_simulation(lab: Callable[..., LocalDeployment], name: str) -> None:
    one = lab(SILO_CASES[name])
    one.start_all()
    twin = assert_equals_simulation(one)
    assert digest_of_models(twin.state) in one.log_text()
    told = json.loads(one.run_command("server", "status", "lab", "--json"))
    assert told["round"] == ROUNDS and [party["state"] for party in told["parties"]] == ["joined"] * 3
    assert_equal_tensors(load_file(one.folder / told["global_model"]), twin.global_model_.state_dict())
    assert [row["evaluated"] for row in json.loads(one.run_command("report", "lab", "--json"))["table"]] == [ROUNDS] * 3


def test_a_kill_of_any_process_leads_to_the_same_model(lab: Callable[..., LocalDeployment]) -> None:
    """One kill of each kind of process, in one run."""
    one = lab(SILO_CASES["FedGeoMedPlus"])
    one.start_all()
    one.wait_for_round(1)
    one.child_process("server", "flower-superlink").kill()
    one.wait_until(lambda: "started anew" in one.log_text())
    one.child_process("north", "descant.deployment.silo.silo_worker").kill()
    one.wait_until(lambda: one.log_text("south").count("Joined.") == 2)
    assert any(one.rejoin_waits_for_session("south") for _ in range(5))  # a machine may be too busy to be in time
    one.wait_for_round(2)
    one.kill("server")
    time.sleep(1)
    one.start_server()
    assert_equals_simulation(one)


def test_a_killed_nginx_is_restarted_and_the_run_gives_the_same_model(
    lab: Callable[..., LocalDeployment],
) -> None:
    """First its master alone, whose worker then holds the port and goes on; then both."""
    one = lab(SILO_CASES["FedGeoMedPlus"])
    one.start_all()
    for round, whole in ((1, False), (2, True)):
        one.wait_for_round(round)
        master = one.child_process("server", "nginx")
        workers = master.children()
        assert workers
        for process in (master, *(workers if whole else ())):
            process.kill()
        one.wait_until(lambda: one.log_text().count("nginx has ended") == round)  # noqa: B023  it is called here
        one.wait_until(lambda: not any(alive(worker) for worker in workers))  # noqa: B023
    assert_equals_simulation(one)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def listening(process: psutil.Process) -> list[str]:
    """Where a process can be reached."""
    found = process.net_connections("inet") if hasattr(process, "net_connections") else process.connections("inet")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]


def test_a_local_federation_listens_on_loopback_only(lab: Callable[..., LocalDeployment]) -> None:
    one = lab(SILO_CASES["FedAvg"], 5000)
    one.start_all()
    one.wait_for_round(1)
    begun = {name: psutil.Process(process.pid) for name, process in one.processes.items()}
    found = {
        name: [at for one in (process, *process.children(recursive=True)) for at in listening(one)]
        for name, process in begun.items()
    }
    assert listening(one.child_process("server", "nginx")) and listening(
        one.child_process("server", "flower-superlink")
    )
    assert set(found.pop("server")) == {"127.0.0.1"} and not any(found.values())


def test_an_invite_on_a_second_machine_ends_with_a_reason(lab: Callable[..., LocalDeployment]) -> None:
    """While the first is there, because Flower holds its place; and when it has left, because its machine is known."""
    one = lab(SILO_CASES["FedAvg"])
    one.start_server()
    one.start_silo("north")
    one.wait_until(lambda: "Taking part" in one.log_text("north"))

    def comes(told: str) -> None:
        one.start("second", "silo", "join", "north.invite", "north.py", "--folder", "second.silo")
        assert one.processes["second"].wait(300) == 1
        assert told in one.log_text("second")

    comes("in use in another place")
    assert one.processes["north"].poll() is None
    one.run_command("silo", "leave", "north.silo")
    assert one.processes["north"].wait(300) == 0
    comes("another machine")
    assert "used in two places" in one.log_text()
    assert (one.folder / "north.silo" / "state" / "machine").read_text() not in one.log_text("second")


def keys_in(*texts: str) -> list[bytes]:
    """The lines of private keys, without the first, which says of what kind they are."""
    lines = [flower_connection for text in texts for flower_connection in text.splitlines()[2:]]
    return [
        flower_connection.encode()
        for flower_connection in lines
        if len(flower_connection) > 40 and "-----" not in flower_connection
    ]


def test_rows_keys_and_output_of_silo_code_stay_in_their_folder(
    lab: Callable[..., LocalDeployment],
) -> None:
    """Each has its own keys in its own folder, nobody has any in what it prints, and north's rows are with north."""
    one = lab(SILO_CASES["FedAvg"])
    (one.folder / "north.py").write_text(LEAKING_SILO_FILE.format(name="0"))
    one.start_all()
    one.wait_for_round(1)
    (one.folder / "north.py.mark").touch()
    one.final_global_model()
    assert "4711-0815" in one.log_text("north") and "without north: error: ValueError" in one.log_text()
    invites = {name: json.loads((one.folder / f"{name}.invite").read_text()) for name in SILO_NAMES}
    keys = {name: keys_in(held["key"], held["node_key"]) for name, held in invites.items()}
    ours = one.folder / "lab" / "keys"
    keys["lab"] = keys_in((ours / "ca.key").read_text(), (ours / "server.key").read_text())
    keys["lab"].append((ours / "driver.secret").read_bytes())
    for name in keys:
        folder = one.folder / ("lab" if name == "lab" else f"{name}.silo")
        files = [file for file in folder.rglob("*") if file.is_file()]
        said = one.log_text("server" if name == "lab" else name).encode()
        held = said + b"\n".join(file.read_bytes() for file in files)
        printed = said + b"\n".join(file.read_bytes() for file in files if file.suffix == ".log")
        others = [key for other, some in keys.items() if other != name for key in some]
        others += [] if name == "north" else canary_bytes()
        assert len(files) > 5 and all(key in held for key in keys[name]), name
        assert not [secret for secret in others if secret in held], name
        assert not [key for key in keys[name] if key in printed], name


@pytest.fixture
def roster(tmp_path: Path) -> Roster:
    (tmp_path / "recipe.toml").write_text("")
    return Roster.create(tmp_path / "lab", tmp_path / "recipe.toml")


def make_silo_transport(
    roster: Roster, folder: Path, name: str, port: int, expired: bool = False
) -> FlowerSiloTransport:
    invite = roster.invite(name, folder / f"{name}.invite")
    keys = invite.unpack(folder / name)
    if expired:
        roster.authority.issue_party_certificate(name, 0).write(keys.folder, "party")
        time.sleep(1.1)  # its last second
    return FlowerSiloTransport(
        f"127.0.0.1:{port}", invite.authority, keys.certificate, key=keys.key, node_key=invite.node_key.encode()
    )


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_reply_that_is_announced_and_never_uploaded_blocks_nothing(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own way would wait for the parts of the first for ever, and never fetch the second."""
    with (
        superlink_transports(roster, tmp_path, "north", "south") as (hub, north, south),
        north.joined(),
        south.joined(),
    ):
        assert hub.here().keys() == {"north", "south"}
        late = hub.send("south", b"nobody fetches it", 1.0)
        time.sleep(2)
        assert isinstance(
            hub.fetch([late], MAX_REPLY_BYTES)[late], UndeliveredError
        )  # what has run out is said, so that it can go out again
        first, second = (hub.send(name, b"a letter", 60.0) for name in ("north", "south"))
        with monkeypatch.context() as without:
            without.setattr(inflatable_protobuf_utils, "make_push_object_fn_protobuf", lambda *_: lambda *_: None)
            assert answer_next_task(north, b"never uploaded") == b"a letter"
        assert answer_next_task(south, b"an answer") == b"a letter"
        began = time.monotonic()
        assert reply_bytes(hub.fetch([first, second], MAX_REPLY_BYTES)) == {second: b"an answer"}
        assert hub.fetch([first], MAX_REPLY_BYTES) == {} and time.monotonic() - began < 10


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_only_parties_that_left_in_order_are_departed(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_transport, "HEARTBEAT_INTERVAL", 1.0)  # so often it looks
    with superlink_transports(roster, tmp_path, "north", "south") as (hub, north, south):
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
def test_a_slow_heartbeat_does_not_reconnect_a_party_that_left(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with superlink_transports(roster, tmp_path, "north") as (hub, north):
        beat = north._client.SendNodeHeartbeat
        begun = threading.Event()

        def slow(request: Any) -> None:
            begun.set()
            time.sleep(1)
            beat(request)

        monkeypatch.setattr(north._client, "SendNodeHeartbeat", slow)
        with north.joined():
            assert hub.here().keys() == {"north"} and begun.wait(HEARTBEAT_INTERVAL)
        time.sleep(1.5)
        assert not hub.here()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_reply_signed_by_a_revoked_key_is_not_taken_for_the_new_party(
    roster: Roster, tmp_path: Path
) -> None:
    """Both commands may be given between two looks of the driver: the name alone tells it nothing."""
    with superlink_transports(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()
        number = hub.send("north", b"a letter", 60.0)
        assert answer_next_task(north, b"by the old key") == b"a letter"
        roster.revoke("north")
        (tmp_path / "again").mkdir()
        port = int(hub._address.rpartition(":")[2])
        with closing(make_silo_transport(roster, tmp_path / "again", "north", port)) as again:
            for one, why in ((north, SessionInUse), (again, PeerUnavailable)):  # its place is taken; it has none yet
                with pytest.raises(PeerUnavailable) as told, one.session():
                    pass
                assert told.type is why
            hub.admit({entry.name: entry.node_key.encode() for entry in roster.parties()})
            lost = hub.fetch([number], MAX_REPLY_BYTES)[number]
            assert isinstance(lost, UndeliveredError) and not lost.is_final  # the letter goes out again, to the new key
            with again.session():
                assert hub.here().keys() == {"north"}
                number = hub.send("north", b"a letter", 60.0)
                assert answer_next_task(again, b"by the new key") == b"a letter"
                assert reply_bytes(hub.fetch([number], MAX_REPLY_BYTES)) == {number: b"by the new key"}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_driver_unknown_to_the_superlink_gets_an_error_and_keeps_running(roster: Roster) -> None:
    """Flower's own way would interrupt this process: after a kill of the SuperLink, or when its clock has jumped."""
    port = free_port()
    papers = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with run_superlink(papers, port, roster.run_folder):
        hub = make_driver_transport(roster, papers, port)
        assert hub.connected_parties() == {}
    with run_superlink(papers, port, roster.run_folder):
        with pytest.raises(PeerUnavailable, match="answers with 401"):
            hub.connected_parties()
        assert hub._heartbeat.heartbeat_fn()  # it was refused, and is not tried again and again
    with closing(hub):
        assert not hub._heartbeat.heartbeat_fn()  # nobody is there: it is


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_chunked_messages_arrive_whole_and_oversized_ones_are_rejected(
    roster: Roster, tmp_path: Path
) -> None:
    """Flower sends chunks that are alike once: an answer of few bytes on the line may be as long as it says."""
    answers = {"zeros": bytes(12 * 2**20), "numbers": b"".join(i.to_bytes(4, "big") for i in range(3 * 2**20)) + b"!"}
    with superlink_transports(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()
        for answer in answers.values():
            number = hub.send("north", answer, 60.0)
            assert answer_next_task(north, answer) == answer
            assert reply_bytes(hub.fetch([number], len(answer))) == {number: answer}
        file = SpillFile()
        file.append(answers["numbers"])
        dropped = hub.send("north", file, 60.0)
        assert answer_next_task(north, b"an answer") == answers["numbers"]
        number = hub.send("north", b"a letter", 60.0)
        answer_next_task(north, answers["zeros"])
        lost = hub.fetch([number], len(answers["zeros"]) - 1)[number]
        assert isinstance(lost, UndeliveredError) and lost.is_final and "more than" in str(lost)
        assert hub._sent.keys() == {dropped}
        hub.drop([dropped, number])
        assert not hub._sent and not hub._coming


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_part_that_flower_lacks_or_rejects_ends_no_process(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes none a second time, as when the answer to the first got lost, and none three minutes after the last."""
    with superlink_transports(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()

        def twice(push: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda request: (push(request), push(request))[1]

        hub.send("north", b"a letter", 60.0)
        with monkeypatch.context() as without:
            without.setattr(north._client, "PushObject", twice(north._client.PushObject))
            with pytest.raises(PeerUnavailable, match="has taken an answer, and not a part of it"):
                answer_next_task(north, b"an answer")
        hub.send("north", b"another letter", 60.0)
        with monkeypatch.context() as without:
            without.setattr(north._client, "PullObject", lambda request: SimpleNamespace(object_found=False))
            with pytest.raises(PeerUnavailable, match="was given up: what came was never whole"):
                north.pull()
        with monkeypatch.context() as without:
            without.setattr(hub._client, "PushObject", twice(hub._client.PushObject))
            with pytest.raises(UndeliveredError, match="Flower did not take all of the letter"):
                hub.send("north", b"a third", 60.0)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_an_incomplete_task_blocks_nothing_and_is_replaced_by_a_newer_one(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is slow, or has died over it: the silo looks again, and may leave at any time."""
    long = b"".join(i.to_bytes(4, "big") for i in range(3 * 2**20))
    with superlink_transports(roster, tmp_path, "north") as (hub, north), north.joined():
        hub.here()
        push = hub._client.PushObject
        kept = list[Any]()

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
        assert answer_next_task(north, b"an answer") == long
        while not (found := reply_bytes(hub.fetch([number], MAX_REPLY_BYTES))):
            time.sleep(0.1)
        assert found == {number: b"an answer"}
        kept.clear()
        with monkeypatch.context() as without:
            without.setattr(hub._client, "PushObject", by_half)
            hub.send("north", long, 60.0)
        assert north.pull() is None
        hub.send("north", b"a newer one", 60.0)
        assert answer_next_task(north, b"an answer") == b"a newer one" and north.pull() is None


def reply_bytes(found: dict[str, MessageBytes | UndeliveredError]) -> dict[str, bytes]:
    return {number: answer[:] for number, answer in found.items() if not isinstance(answer, UndeliveredError)}


@contextmanager
def superlink_transports(roster: Roster, folder: Path, *names: str) -> Iterator[Any]:
    """A SuperLink, its driver, and the lines of some parties, who have not joined yet."""
    port = free_port()
    papers = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with ExitStack() as stack:
        spokes = [stack.enter_context(closing(make_silo_transport(roster, folder, name, port))) for name in names]
        stack.enter_context(run_superlink(papers, port, roster.run_folder))
        yield stack.enter_context(closing(make_driver_transport(roster, papers, port))), *spokes


def make_driver_transport(roster: Roster, papers: SuperLinkCredentials, port: int) -> FlowerServerTransport:
    keys = {entry.name: entry.node_key.encode() for entry in roster.parties()}
    return FlowerServerTransport(
        f"127.0.0.1:{port}", papers.authority.read_bytes(), papers.secret.read_bytes(), parties=keys
    )


def answer_next_task(transport: FlowerSiloTransport, answer: bytes) -> bytes:
    """Answer the next letter; which one it was."""
    while (got := transport.pull()) is None:
        time.sleep(0.1)
    to, letter = got
    transport.push(to, answer)
    return letter[:]


def test_an_expired_certificate_and_a_wrong_clock_are_reported(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = free_port()
    port = free_port()
    papers = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with (
        run_superlink(papers, inner, roster.run_folder),
        Proxy(inner, "127.0.0.1", port).start(roster.folder),
        closing(make_silo_transport(roster, tmp_path, "north", port)) as north,
        closing(make_silo_transport(roster, tmp_path, "south", port, expired=True)) as south,
    ):
        with pytest.raises(ConnectionRejected, match=r"does not take our certificate.*expired"), south.session():
            pass
        true = interceptor.now
        for hours, off in ((1, "ahead"), (-1, "behind")):
            with monkeypatch.context() as wrong:
                wrong.setattr(interceptor, "now", lambda by=hours: true() + timedelta(hours=by))
                wrong.setattr(flower_connection, "time", SimpleNamespace(time=lambda by=hours: time.time() + 3600 * by))
                with (
                    pytest.raises(ConnectionRejected, match=rf"clock of this machine is 3\d+ s {off}. Set"),
                    north.session(),
                ):
                    pass


def test_a_revoked_party_cannot_connect(lab: Callable[..., LocalDeployment]) -> None:
    one = lab(SILO_CASES["FedAvg"])
    one.run_command("server", "revoke", "lab", "west")
    one.start_all()
    one.wait_until(lambda: "certificate" in one.log_text("west"))
    assert one.processes["west"].wait(300) == 1


def test_a_quorum_continues_without_a_killed_silo_and_names_it(lab: Callable[..., LocalDeployment]) -> None:
    """First with it, because Flower does not know yet that it is gone; then without. Of one that is left it is none."""
    one = lab(SILO_CASES["FedAvg"], 5000)
    one.start_all("--quorum", "2", "--deadline", "20")
    one.wait_until(lambda: ", 3 parties" in one.log_text())
    one.kill("west")
    one.wait_until(
        lambda: "; without west: lost: no reply within 20 s: the round went on without it" in one.log_text()
    )
    one.wait_until(lambda: " begins without west." in one.log_text())
    one.run_command("server", "revoke", "lab", "west")
    before = one.log_text()
    one.wait_until(lambda: ", 2 parties" in one.log_text().removeprefix(before))
    assert "Waiting for" not in one.log_text()
    one.run_command("server", "revoke", "lab", "south")
    one.wait_until(lambda: "1 of 2 parties are connected. Waiting for new invites" in one.log_text())


def test_a_party_revoked_during_training_ends_and_the_others_continue(
    lab: Callable[..., LocalDeployment],
) -> None:
    one = lab(SILO_CASES["FedAvg"], 5000)
    one.start("server", "server", "start", "lab", "--gather", "2")
    for name in SILO_NAMES:
        one.start_silo(name)
    one.wait_until(lambda: ", 3 parties" in one.log_text())
    one.run_command("server", "revoke", "lab", "west")
    assert one.processes["west"].wait(300) == 1
    assert "does not take our certificate" in one.log_text("west")
    before = one.log_text()
    one.wait_until(lambda: ", 2 parties" in one.log_text().removeprefix(before))


SEALED = """
wrap = [{{by = "stand-ins", share = 0.4}}]
[vault]
folder = "{folder}/vault"
key = "{folder}/key"
"""


def test_a_forgotten_party_has_no_proxy_and_leaves_no_row(
    lab: Callable[..., LocalDeployment], tmp_path: Path
) -> None:
    """North joins, leaves, is stood in for and is forgotten: what it has sealed is gone, and was never in the clear."""
    key = PrivateKey.new()
    key.write(tmp_path / "key")
    vault = Vault.create(tmp_path / "vault", key)
    one = lab(SILO_CASES["FedAvg"], 5000, SEALED.format(folder=tmp_path))
    (one.folder / "north.py").write_text(LEAKING_SILO_FILE.format(name="0") + 'policy = {"share": 0.5}\n')
    one.start("server", "server", "start", "lab", "--gather", "2", "--quorum", "2", "--deadline", "20")
    for name in SILO_NAMES:
        one.start_silo(name)
    held = lambda: {one.party: one for one in vault.parties()}["north"]  # noqa: E731
    one.wait_until(lambda: any(party.state == "sealed" for party in vault.parties()))
    assert held().state == "sealed"
    one.run_command("silo", "leave", "north.silo")
    assert one.processes["north"].wait(300) == 0
    one.wait_until(lambda: held().opened > 0)
    told = json.loads(one.run_command("silo", "forget", "north.silo", "--json"))
    assert "destroyed its sealed rows" in told["server"] and held().state == "forgotten"
    opened = held().opened
    before = one.log_text()
    one.wait_until(lambda: one.log_text().removeprefix(before).count("without north") >= 2)
    assert "north wishes to be forgotten: the vault has destroyed" in one.log_text()
    assert held().opened == opened and not list((tmp_path / "vault").rglob("coreset*"))
    found = json.loads(one.run_command("vault", "verify", "vault", "--key", "key", "--json"))
    assert found["coresets"] == 0 and found["with_key"]
    one.run_command("server", "audit", "lab", "--verify")
    kept = sorted(file.name for part in ("state", "keys") for file in (one.folder / "north.silo" / part).iterdir())
    assert kept == ["shared_rows.safetensors", "machine"]
    check_no_leaks(one)


def check_no_leaks(one: LocalDeployment) -> None:
    """No row of north is with anybody else, no key in what anybody prints, and the SuperLink has a log and no more."""
    invites = [json.loads((one.folder / f"{name}.invite").read_text()) for name in SILO_NAMES]
    ours = one.folder / "lab" / "keys"
    secrets = keys_in(*(held[name] for held in invites for name in ("key", "node_key")))
    secrets += keys_in((ours / "ca.key").read_text(), (ours / "server.key").read_text())
    secrets += [(ours / "driver.secret").read_bytes(), (one.folder / "key").read_bytes().strip()[-64:]]
    logs = b"\n".join(file.read_bytes() for file in one.folder.rglob("*.log"))
    others = [file for part in ("lab", "vault", "south.silo", "west.silo") for file in (one.folder / part).rglob("*")]
    held = logs + b"\n".join(file.read_bytes() for file in others if file.is_file())
    assert len(logs) > 1000 and not [secret for secret in secrets if secret in logs]
    assert len(held) > 100_000 and not [canary for canary in canary_bytes() if canary in held]
    link = one.child_process("server", "flower-superlink")
    files = [Path(file.path) for process in (link, *link.children(recursive=True)) for file in process.open_files()]
    assert files and {file.suffix for file in files} == {".log"}, files


def test_a_party_invited_during_training_takes_part_from_then_on(lab: Callable[..., LocalDeployment]) -> None:
    one = lab(SILO_CASES["FedAvg"], 5000)
    one.start_all()
    one.wait_for_round(1)
    one.invite("east", 3)
    one.start_silo("east")
    one.wait_until(lambda: "part of it from now on: east" in one.log_text() and ", 4 parties" in one.log_text())
    one.kill("server")
    before = one.log_text()
    one.start_server()
    one.wait_until(lambda: ", 4 parties" in one.log_text().removeprefix(before))
    told = json.loads(one.run_command("server", "status", "lab", "--json"))
    first = {party["name"]: party["first round"] for party in told["parties"]}
    assert {first[name] for name in SILO_NAMES} == {1} and 1 < first["east"] <= told["round"]


def test_the_driver_does_not_import_the_superlink_database() -> None:
    files = [Path(descant.__file__).parent / "engines" / f"{name}.py" for name in ("flower", "line", "parts", "steady")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    wanted = sorted(name for name in modules if name.startswith("flwr."))
    assert "flwr.supercore.runtime" in wanted
    code = f"import sys, {', '.join(wanted)}\nprint(*sorted({{'sqlalchemy', 'alembic'}} & sys.modules.keys()))"
    assert not subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
