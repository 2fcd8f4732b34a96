"""A real federation on this machine: nginx, a SuperLink and three silos, each in its own process, whoever dies.

`bash scripts/engines` runs this, in an environment that has Flower.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from flwr.supercore.inflatable import inflatable_utils
from flwr.supernode import node_auth_http_interceptor as interceptor
from safetensors.torch import load_file

from descant import Federation
from descant.config import read
from descant.engines import flower
from descant.engines.flower import Hub, TurnedAway
from descant.engines.silos import Lost, Patience
from descant.engines.spoke import Spoke
from descant.errors import EngineError
from descant.parties import from_arrays
from descant.server.serving import Serving, free_port
from descant.server.superlink import Papers, superlink
from descant.trust.proxy import Proxy, find_nginx
from descant.trust.roster import Roster
from problems import classes, network
from teams import LEARNING, TALKATIVE, TEAM, canaries

try:
    find_nginx()
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

NAMES = ("north", "south", "west")
ROUNDS = 4
PATIENCE = 900.0  # seconds: a machine may be busy
RECIPE = """
[run]
rounds = {rounds}
seed = 5
points = 1
"""
RECIPE += LEARNING + "{more}\n"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
}


class Lab:
    """A federation in a folder, and its processes."""

    def __init__(self, folder: Path, method: str, more: str = "", rounds: int = ROUNDS) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        (folder / "recipe.toml").write_text(RECIPE.format(method=method, more=more, rounds=rounds))
        self.call("server", "init", "lab", "recipe.toml", "--port", str(free_port()))
        for at, name in enumerate(NAMES):
            self.invite(name, at)

    def invite(self, name: str, at: int) -> None:
        self.call("server", "invite", "lab", name)
        (self.folder / f"{name}.py").write_text(TEAM.format(name=str(at)))

    def call(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "descant", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "descant", *arguments]
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, env=ENVIRONMENT, stdout=log, stderr=log)

    def serve(self) -> None:
        self.start("server", "server", "start", "lab", "--gather", "3")

    def join(self, name: str) -> None:
        self.start(name, "silo", "join", f"{name}.invite", f"{name}.py")

    def begin(self) -> None:
        self.serve()
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
        self.until(lambda: f"Round {round}:" in self.said())

    def done(self) -> torch.Tensor:
        """The centre after the last round."""
        self.until(lambda: self.processes["server"].poll() is not None)
        assert self.processes["server"].returncode == 0, self.said()
        [file] = (self.folder / "lab" / "run" / "training" / "models" / f"{ROUNDS:08}").glob("center*")
        return load_file(file)["center"]

    def child(self, name: str, word: str) -> psutil.Process:
        """A process that another one has started."""
        found = psutil.Process(self.processes[name].pid).children(recursive=True)
        return next(one for one in found if any(word in part for part in one.cmdline()))

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

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


def simulated(folder: Path) -> torch.Tensor:
    recipe = read(folder / "recipe.toml")
    data = {name: classes(5)[str(at)] for at, name in enumerate(NAMES)}
    people = from_arrays({name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in data.items()})
    fed = Federation(network, people, recipe.algorithm(), solver=recipe.solver(), seed=5)
    return fed.fit(ROUNDS, progress=False).state.center


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", ""),
        ("fedgeomed+", ""),
        ("rfa", ""),
        ("fedavg+", 'wrap = [{by = "matching"}]'),
        ("fedavg", 'wrap = [{by = "secure"}]'),
    ],
    ids=["mean", "own models", "median", "private columns", "added up unseen"],
)
def test_deployment_is_the_simulation(lab: Callable[..., Lab], tmp_path: Path, method: str, more: str) -> None:
    one = lab(method, more)
    one.begin()
    assert torch.equal(one.done(), simulated(tmp_path))
    told = json.loads(one.call("server", "status", "lab", "--json"))
    assert told["round"] == ROUNDS and [party["state"] for party in told["parties"]] == ["joined"] * 3


def test_whoever_is_killed_the_same_commands_go_on_to_the_same_model(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """One kill of each kind of process, in one run."""
    one = lab("fedgeomed+")
    one.begin()
    one.reached(1)
    one.child("server", "flower-superlink").kill()
    one.until(lambda: "started anew" in one.said())
    one.child("north", "descant.silo.worker").kill()
    one.kill("south")
    one.join("south")
    one.reached(2)
    one.kill("server")
    time.sleep(1)
    one.serve()
    assert torch.equal(one.done(), simulated(tmp_path))


def test_an_invite_on_a_second_machine_ends_with_the_reason(lab: Callable[..., Lab]) -> None:
    one = lab("fedavg")
    one.begin()
    one.reached(1)
    one.call("silo", "leave", "north.silo")
    assert one.processes["north"].wait(300) == 0
    one.start("second", "silo", "join", "north.invite", "north.py", "--folder", "second.silo")
    assert one.processes["second"].wait(300) == 1
    assert "another machine" in one.said("second") and "used in two places" in one.said()
    assert (one.folder / "north.silo" / "state" / "machine").read_text() not in one.said("second")


def keys_in(*texts: str) -> list[bytes]:
    """The lines of private keys, without the first, which says of what kind they are."""
    lines = [line for text in texts for line in text.splitlines()[2:]]
    return [line.encode() for line in lines if len(line) > 40 and "-----" not in line]


def test_no_row_no_key_and_nothing_that_a_team_s_code_says_is_found_elsewhere(lab: Callable[..., Lab]) -> None:
    """Each has its own keys in its own folder, nobody has any in what it prints, and north's rows are with north."""
    one = lab("fedavg")
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
    port, papers = free_port(), Serving(roster.folder, Patience())._papers(roster)
    with (
        closing(spoke(roster, tmp_path, "north", port)) as north,
        closing(spoke(roster, tmp_path, "south", port)) as south,
        superlink(papers, port, roster.run),
        closing(hub_of(roster, papers, port)) as hub,
        north.joined(),
        south.joined(),
    ):
        assert hub.here().keys() == {"north", "south"}
        late = hub.send("south", b"nobody fetches it", 1.0)
        time.sleep(2)
        assert isinstance(hub.fetch([late])[late], Lost)  # what has run out is said, so that it can go out again
        first, second = (hub.send(name, b"a letter", 60.0) for name in ("north", "south"))
        with monkeypatch.context() as without:
            without.setattr(inflatable_utils, "push_objects", lambda *_, **__: None)
            answered(north, b"never uploaded")
        answered(south, b"an answer")
        began = time.monotonic()
        assert hub.fetch([first, second]) == {second: b"an answer"}
        assert hub.fetch([first]) == {} and time.monotonic() - began < 10


def hub_of(roster: Roster, papers: Papers, port: int) -> Hub:
    keys = {entry.name: entry.node_key.encode() for entry in roster.parties()}
    return Hub(f"127.0.0.1:{port}", papers.ca.read_bytes(), papers.secret.read_bytes(), keys)


def answered(one: Spoke, answer: bytes) -> None:
    while (got := one.pull()) is None:
        time.sleep(0.1)
    to, letter = got
    assert letter == b"a letter"
    one.push(to, answer)


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
                wrong.setattr(flower, "time", SimpleNamespace(time=lambda by=hours: time.time() + 3600 * by))
                with pytest.raises(TurnedAway, match=rf"clock of this machine is 3\d+ s {off}. Set"), north.joined():
                    pass


def test_a_party_that_is_revoked_is_not_heard_any_more(lab: Callable[..., Lab]) -> None:
    one = lab("fedavg")
    one.call("server", "revoke", "lab", "west")
    one.begin()
    one.until(lambda: "certificate" in one.said("west"))
    assert one.processes["west"].wait(300) == 1


def test_who_is_invited_while_the_training_runs_is_part_of_it_from_then_on(lab: Callable[..., Lab]) -> None:
    one = lab("fedavg", "", 5000)
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
