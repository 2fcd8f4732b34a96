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
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from descant import Federation
from descant.config import read
from descant.errors import EngineError
from descant.parties import from_arrays
from descant.server.serving import free_port
from descant.trust.proxy import find_nginx
from problems import classes, network
from teams import LEARNING, TEAM

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
            self.call("server", "invite", "lab", name)
            (folder / f"{name}.py").write_text(TEAM.format(name=str(at)))

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

    def make(*arguments: str) -> Lab:
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
    ],
    ids=["mean", "own models", "median", "private columns"],
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


def test_a_party_that_is_revoked_is_not_heard_any_more(lab: Callable[..., Lab]) -> None:
    one = lab("fedavg")
    one.call("server", "revoke", "lab", "west")
    one.begin()
    one.until(lambda: "certificate" in one.said("west"))
    assert one.processes["west"].wait(30) == 1
