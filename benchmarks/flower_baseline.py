"""Time of a tiny round with three silos, compared with plain Flower, in one run and in turns.

    python benchmarks/flower_baseline.py [--rounds 6] [--turns 2]

The baseline is a Flower ServerApp that sends a few numbers to three SuperNodes and waits for their replies, without
TLS, on this machine; it starts a process for every message. Descant runs nginx, a SuperLink with TLS and three silos
that train, and writes every round to disk. It needs nginx and an environment that has Flower.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from descant.deployment.child_process import ChildProcess
from descant.deployment.flower.flower_connection import FLOWER_ENVIRONMENT
from descant.deployment.server.serve import free_port
from silo_resources import measure_rounds

SILOS = 3
PROJECT = """
[project]
name = "baseline"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "descant"
[tool.flwr.app.components]
serverapp = "baseline.app:server"
clientapp = "baseline.app:client"
[tool.flwr.app.config]
rounds = 3
out = "times"
"""
APP = """
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Array, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    return Message(RecordDict({"w": message.content["w"]}), reply_to=message)


@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.1)
    for _ in range(int(context.run_config["rounds"])):
        began = time.monotonic()
        content = RecordDict({"w": ArrayRecord({"w": Array(np.zeros(20, np.float32))})})
        out = set(grid.push_messages([Message(content, node, "train") for node in grid.get_node_ids()]))
        while out:
            for reply in grid.pull_messages(list(out)):
                assert reply.has_content(), reply.error
                out.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.1)
        with Path(context.run_config["out"]).open("a") as times:
            print(time.monotonic() - began, file=times, flush=True)
"""


def find_program(name: str) -> str:
    """Return the path of a Flower command in this Python's environment."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise SystemExit(f"There is no {name} in this Python's environment: pip install 'descant[flower]'")
    return path


def flower_round_seconds(rounds: int) -> list[float]:
    """Return the seconds of every Flower round but the first."""
    with tempfile.TemporaryDirectory() as temporary_folder, ExitStack() as processes:
        folder = Path(temporary_folder)
        port = free_port()
        (folder / "app" / "baseline").mkdir(parents=True)
        (folder / "app" / "pyproject.toml").write_text(PROJECT)
        (folder / "app" / "baseline" / "__init__.py").touch()
        (folder / "app" / "baseline" / "app.py").write_text(APP)
        config_text = f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (folder / "config.toml").write_text(config_text)
        environment = {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": temporary_folder, "OMP_NUM_THREADS": "1"}
        # Flower starts its other programs by name
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])

        def start(name: str, *arguments: str) -> None:
            command = [find_program(name), "--insecure", "--host", "127.0.0.1", *arguments]
            processes.enter_context(
                ChildProcess(command, folder / f"{name}{len(arguments)}.log", folder, env=environment)
            )

        start("flower-superlink", "--port", str(port), "--disable-runtime-dependency-installation")
        time.sleep(10)
        for _ in range(SILOS):
            start("flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
        run_config = f'rounds={rounds} out="{folder / "times"}"'
        flwr_command = [find_program("flwr"), "run", str(folder / "app"), "lab", "--run-config", run_config]
        done = subprocess.run(flwr_command, env=environment, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        times = folder / "times"
        end = time.monotonic() + 120 * rounds
        while not times.exists() or len(times.read_text().splitlines()) < rounds:
            if time.monotonic() > end:
                raise SystemExit("\n".join(log.read_text()[-2000:] for log in folder.glob("*.log")))
            time.sleep(0.2)
        return [float(line) for line in times.read_text().splitlines()][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    baseline = list[float]()
    ours = list[float]()
    for turn in range(given.turns):
        baseline += flower_round_seconds(given.rounds)
        ours += measure_rounds(SILOS, 0.001, given.rounds, "fedavg")[0][1:]
        medians = f"Flower alone {np.median(baseline):.2f} s per round, Descant {np.median(ours):.2f} s"
        print(f"turn {turn + 1}: {medians}", flush=True)
    ratio = np.median(ours) / np.median(baseline)
    load = os.getloadavg()[1]
    print(f"A tiny round of Descant takes {ratio:.2f} times one of Flower alone (load {load:.1f}).")


if __name__ == "__main__":
    main()
