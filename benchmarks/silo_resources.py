"""Cost of silos: seconds per round, memory of every process, and memory growth over time.

    python benchmarks/silo_resources.py real --silos 8 --megabytes 40 --rounds 3
    python benchmarks/silo_resources.py driver --parties 50 --megabytes 40
    python benchmarks/silo_resources.py soak --seconds 3600

`real` runs nginx, a SuperLink and silos on this machine. `driver` runs the driver alone, and one process sends all
replies. `soak` runs tiny rounds and reports the growth of memory.

`real` and `soak` need nginx and an environment that has Flower; all need Linux. Memory is reported by the kernel:
anonymous RSS, and resident memory, which includes mapped files (libraries, models on disk).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection  # only its bytes are used: nothing is unpickled
from pathlib import Path

import numpy as np
import psutil
import torch

from descant import Federation, Sgd, algorithms, models
from descant.core.messages import Reply, Task
from descant.deployment.server.serve import free_port
from descant.deployment.server.training_session import MEMORY_BUDGET
from descant.engines.remote import Silos, UndeliveredError
from descant.models.flat import Layout
from descant.parties.remote_parties import remote_population
from descant.serialization.wire import MessageBytes, pack, unpack
from descant.storage.party_store import release_memory_eagerly
from descant.storage.spill import SpillFile
from descant.tracking import Run

METHODS = {
    "mean": algorithms.FedAvg,
    "coordinate median": algorithms.CoordinateMedian,
    "geometric median": algorithms.RFA,
    "geometric median, personal models": partial(algorithms.FedGeoMedPlus, alpha=0.1, rho=0.1),
}
RECIPE = """
[run]
rounds = {rounds}
points = 1
[model]
net = "mlp"
inputs = {width}
outputs = 10
hidden = [{width}, {width}, {width}, {width}]
[training]
lr = 0.01
steps = 1
batch = 2
[method]
algorithm = "{method}"
"""
SILO_FILE = """
from functools import partial
from itertools import pairwise
import torch
from descant import models

model = partial(models.mlp, {width}, 10, ({width},) * 4)

def data():
    generator = torch.Generator().manual_seed({seed})
    return torch.randn(8, {width}, generator=generator), torch.randint(10, (8,), generator=generator)
"""
MEMORY_FIELDS = ("RssAnon", "VmRSS")
SAMPLE_SECONDS = 0.02  # seconds between two memory samples
CHUNK_BYTES = 5 * 2**20  # bytes of a reply per chunk, as in Flower


def width_of(megabytes: float) -> int:
    """Return the width of four square layers with this total size."""
    return max(2, round(math.sqrt(megabytes * 1e6 / 16)))


def process_memory(pids: Collection[int]) -> np.ndarray:
    """Return the anonymous and resident memory of running processes together, in MB."""
    total = np.zeros(len(MEMORY_FIELDS))
    for pid in pids:
        with suppress(OSError):
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            total += [int(lines.get(name, "0 kB").split()[0]) / 1000 for name in MEMORY_FIELDS]
    return total


class PeakMemory:
    """Samples the memory of named groups of processes and keeps the peaks."""

    def __init__(self, groups: Callable[[], Mapping[str, Collection[int]]]) -> None:
        self._groups = groups
        self.peaks = dict[str, np.ndarray]()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def current(self) -> dict[str, np.ndarray]:
        return {name: process_memory(pids) for name, pids in self._groups().items()}

    def _watch(self) -> None:
        while not self._stop_event.wait(SAMPLE_SECONDS):
            peaks = self.peaks
            for name, memory in self.current().items():
                peaks[name] = np.maximum(peaks.get(name, memory), memory)

    def reset(self) -> dict[str, np.ndarray]:
        """Return the peaks so far, and start new ones."""
        previous = self.peaks
        self.peaks = {}
        return previous

    def stop(self) -> dict[str, np.ndarray]:
        self._stop_event.set()
        self._thread.join()
        return self.peaks


def format_memory(name: str, memory: np.ndarray) -> str:
    return f"{name:<28}{memory[0]:8.0f} MB anonymous{memory[1]:8.0f} MB resident"


class PipeTransport:
    """A transport whose parties are all in the process at the other end of a pipe."""

    def __init__(self, connection: Connection, names: Collection[str]) -> None:
        self._connection = connection
        self._names = names
        self._out = deque[str]()

    def connected_parties(self) -> dict[str, str]:
        return dict.fromkeys(self._names, "first")

    def departed_parties(self) -> Collection[str]:
        return ()

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        self._connection.send_bytes(payload if isinstance(payload, bytes) else payload.memory_map())
        self._out.append(f"{len(self._out)} {party} {time.monotonic()}")
        return self._out[-1]

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        if not self._out:
            return {}
        self._connection.send_bytes(b"next")
        file = SpillFile()
        while part := self._connection.recv_bytes():
            file.append(part)
        return {self._out.popleft(): file}

    def discard(self, message_ids: Collection[str]) -> None:
        pass


def drive_rounds(given: argparse.Namespace) -> None:
    """Run rounds as `descant server start` does, with a pipe in place of Flower."""
    release_memory_eagerly()
    connection = Connection(given.file_descriptor)
    width = width_of(given.megabytes)
    names = [f"{i:04}" for i in range(given.parties)]
    description = {"x": [width], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 8, "test_count": 0}
    fed = Federation(
        partial(models.mlp, width, 10, (width,) * 4),
        remote_population(dict.fromkeys(names, description)),
        METHODS[given.method](),
        solver=Sgd(lr=0.01, steps=1, batch=2),
        engine=Silos(PipeTransport(connection, names), log=lambda text: None),
        memory_budget=MEMORY_BUDGET,
    )
    connection.send_bytes(b"empty")
    with tempfile.TemporaryDirectory() as folder, Run.start(Path(folder) / "run", fed, "", "always") as run:
        for round in run.rounds(given.rounds):
            connection.send_bytes(f"done {round.round.seconds} {round.round.gap}".encode())


def make_reply(message: bytes, layout: Layout) -> bytes:
    """Return a plausible train reply: the model in the task plus a little noise."""
    task = unpack(message, Task)
    generator = torch.Generator().manual_seed(int(task.party) + 1000 * task.round)
    row = task.arrays.get("personal", task.arrays["global_model"])
    arrays = layout.split(row + 0.01 * torch.randn(len(row), generator=generator))
    return pack(Reply(task.party, task.round, "train", arrays=arrays, metrics={"samples": 8, "loss": 1.0}))


def measure_driver(given: argparse.Namespace) -> None:
    """Measure the memory that the driver needs for the replies of many parties."""
    width = width_of(given.megabytes)
    layout = Layout.from_module(models.mlp(width, 10, (width,) * 4))
    for method in METHODS if given.method == "all" else [given.method]:
        parent_socket, child_socket = socket.socketpair()
        options = [f"--{name}={getattr(given, name)}" for name in ("parties", "megabytes", "rounds")]
        command = [
            sys.executable,
            __file__,
            "driver-process",
            f"--file-descriptor={child_socket.fileno()}",
            f"--method={method}",
            *options,
        ]
        process = subprocess.Popen(command, pass_fds=[child_socket.fileno()])
        child_socket.close()
        peaks = PeakMemory(lambda pid=process.pid: {"driver": [pid]})  # type: ignore[misc]
        empty = np.zeros(2)
        first = np.zeros(2)
        seconds = list[float]()
        pending_messages = deque[bytes]()
        connection = Connection(parent_socket.detach())
        with suppress(EOFError):
            while True:
                received = connection.recv_bytes()
                if received == b"empty":
                    empty = process_memory([process.pid])
                elif received == b"next":
                    reply = make_reply(pending_messages.popleft(), layout)
                    for begin in range(0, len(reply), CHUNK_BYTES):
                        connection.send_bytes(reply, begin, min(CHUNK_BYTES, len(reply) - begin))
                    connection.send_bytes(b"")
                elif received.startswith(b"done "):
                    seconds.append(float(received.split()[1]))
                else:
                    first = first if first.any() else peaks.reset()["driver"]
                    pending_messages.append(received)
        if process.wait():
            raise SystemExit(f"The driver exited with status {process.returncode}.")
        in_rounds = peaks.stop()["driver"]
        print(f"{method}, {given.parties} parties x {given.megabytes:g} MB: {np.median(seconds):.1f} s per round")
        for name, memory in {"without a model": empty, "until the first task": first, "in rounds": in_rounds}.items():
            print(format_memory(f"  {name}", memory))
        print(f"  in rounds, beyond the first line: {(in_rounds - empty)[0] / given.megabytes:.1f} x the model")


class LocalDeployment:
    """A deployment in a folder: a server and silos, with all their processes."""

    def __init__(self, folder: Path, silos: int, width: int, rounds: int, method: str) -> None:
        self.folder = folder
        self.names = [f"silo{i}" for i in range(silos)]
        self._processes = dict[str, subprocess.Popen[bytes]]()
        (folder / "recipe.toml").write_text(RECIPE.format(rounds=rounds, width=width, method=method))
        self._call("server", "init", "lab", "recipe.toml", "--port", str(free_port()))
        for seed, name in enumerate(self.names):
            self._call("server", "invite", "lab", name)
            (folder / f"{name}.py").write_text(SILO_FILE.format(width=width, seed=seed))
        self._start("driver", "server", "start", "lab", "--min-parties", str(silos))
        for name in self.names:
            self._start(name, "silo", "join", f"{name}.invite", f"{name}.py")

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "descant", *arguments]

    def _call(self, *arguments: str) -> None:
        subprocess.run(self._command(*arguments), cwd=self.folder, check=True, capture_output=True)

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = self._command(*arguments)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self._processes[name] = process

    @property
    def alive(self) -> bool:
        return self._processes["driver"].poll() is None

    def rounds_done(self) -> int:
        """Return the number of completed rounds."""
        return (self.folder / "driver.log").read_text().count("\nRound ")

    def groups(self) -> dict[str, list[int]]:
        """Return process ids by role; a silo includes its message client and its worker."""
        pids: dict[str, list[int]] = {"driver": [], "SuperLink": [], "nginx": []}
        for name, process in self._processes.items():
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
                if name != "driver":
                    pids[name] = [process.pid, *(child.pid for child in children)]
                    continue
                pids["driver"] = [process.pid]
                for child in children:
                    is_superlink = "flower-superlink" in " ".join(child.cmdline())
                    pids["SuperLink" if is_superlink else "nginx"].append(child.pid)
        return pids

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def local_deployment(silos: int, megabytes: float, rounds: int, method: str) -> Iterator[LocalDeployment]:
    with tempfile.TemporaryDirectory() as folder:
        deployment = LocalDeployment(Path(folder), silos, width_of(megabytes), rounds, method)
        try:
            yield deployment
        finally:
            deployment.stop()


PeakByProcess = dict[str, np.ndarray]


def measure_rounds(
    silos: int, megabytes: float, rounds: int, method: str
) -> tuple[list[float], PeakByProcess, PeakByProcess]:
    """Return seconds of every round, and peak memory by role until the first round is done and after it."""
    with local_deployment(silos, megabytes, rounds, method) as deployment:
        peaks = PeakMemory(deployment.groups)
        ends = [time.monotonic()]
        first = dict[str, np.ndarray]()
        while deployment.alive:
            if deployment.rounds_done() >= len(ends):
                ends.append(time.monotonic())
                first = peaks.reset() if len(ends) == 2 else first
            time.sleep(SAMPLE_SECONDS)
        after = peaks.stop()
        done = deployment.rounds_done()
        if done < rounds:
            raise SystemExit((deployment.folder / "driver.log").read_text())
    return [end - begin for begin, end in pairwise(ends)], first, after


def measure_deployment(given: argparse.Namespace) -> None:
    """Measure rounds of real silos: their time, and the peak memory by role of the process."""
    _, *tiny_peaks = measure_rounds(2, 0.001, 2, given.method)
    empty = max(memory["driver"][0] for memory in tiny_peaks)
    spans, *peaks = measure_rounds(given.silos, given.megabytes, given.rounds, given.method)
    print(f"{given.method}, {given.silos} silos x {given.megabytes:g} MB, {given.rounds} rounds")
    print(f"  until the first round is done {spans[0]:.1f} s; a later round {np.median(spans[1:]):.1f} s")
    for period, by_role in zip(("until the first round is done", "after it"), peaks, strict=True):
        silos = [by_role.pop(name) for name in [*by_role] if name.startswith("silo")]
        print(f"  {period}:")
        for name, memory in {**by_role, "the largest silo": np.max(silos, axis=0)}.items():
            print(format_memory(f"    {name}", memory))
        excess = by_role["driver"][0] - empty
        print(f"    the driver minus one with a tiny model ({empty:.0f} MB): {excess:.0f} MB anonymous,")
        print(f"    {excess / given.megabytes:.1f} x the model (3 x plus 200 MB is {3 * given.megabytes + 200:g})")


def measure_growth(given: argparse.Namespace) -> None:
    """Run tiny rounds for some time: memory at intervals, and its growth in the second half."""
    with local_deployment(given.silos, given.megabytes, 10**6, given.method) as deployment:
        peaks = PeakMemory(deployment.groups)
        began = time.monotonic()
        while deployment.alive and not deployment.rounds_done():
            time.sleep(SAMPLE_SECONDS)
        samples: list[tuple[float, int, dict[str, np.ndarray]]] = []
        while deployment.alive and time.monotonic() - began < given.seconds:
            samples.append((time.monotonic() - began, deployment.rounds_done(), peaks.current()))
            shown = {name: round(float(memory[0]), 1) for name, memory in samples[-1][2].items()}
            print(
                json.dumps({"seconds": round(samples[-1][0]), "rounds": samples[-1][1], "anonymous MB": shown}),
                flush=True,
            )
            time.sleep(given.every)
        if not deployment.alive:
            raise SystemExit((deployment.folder / "driver.log").read_text()[-4000:])
        peaks.stop()
    second_half = samples[len(samples) // 2 :]
    for name in second_half[0][2]:
        times = [at for at, _, _ in second_half]
        sizes = [memory[name] for _, _, memory in second_half]
        slopes = np.polyfit(times, sizes, 1)[0]
        print(f"{name:<12} grows by {3600 * slopes[0]:+.1f} MB anonymous, {3600 * slopes[1]:+.1f} MB resident per hour")
    spent, rounds = (second_half[-1][i] - second_half[0][i] for i in (0, 1))
    print(f"{rounds} rounds in the second half, {spent / max(1, rounds):.2f} s per round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subcommands = parser.add_subparsers(required=True, metavar="real | driver | soak")
    for name, function in (
        ("real", measure_deployment),
        ("driver", measure_driver),
        ("soak", measure_growth),
        ("driver-process", drive_rounds),
    ):
        subcommand = subcommands.add_parser(name, help=function.__doc__)
        subcommand.set_defaults(function=function)
        if name in ("driver", "driver-process"):
            subcommand.add_argument("--parties", type=int, default=50)
            subcommand.add_argument("--method", choices=[*METHODS, "all"], default="all")
        else:
            subcommand.add_argument("--silos", type=int, default=3 if name == "soak" else 8)
            subcommand.add_argument("--method", default="fedavg", help="name of the method in a recipe")
        subcommand.add_argument(
            "--megabytes", type=float, default=0.01 if name == "soak" else 40, help="size of the model"
        )
        if name == "soak":
            subcommand.add_argument("--seconds", type=float, default=3600)
            subcommand.add_argument("--every", type=float, default=60, help="seconds between two output lines")
        else:
            subcommand.add_argument("--rounds", type=int, default=3)
    subcommands.choices["driver-process"].add_argument("--file-descriptor", type=int)
    given = parser.parse_args()
    given.function(given)


if __name__ == "__main__":
    main()
