"""The protocol of a contestant: JSON lines out; "rounds N", "weights FILE", "settle" and "stop" in."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .work import Array, SharedWorkload, open_shared


class Contestant(Protocol):
    """An object that trains round by round."""

    def rounds(self, n: int) -> None:
        """Run the next n rounds."""

    def weights(self) -> Mapping[str, Array]:
        """Return the global model, named and shaped as in torch modules."""


def parse_workload(arguments: list[str] | None = None) -> SharedWorkload:
    """Return the workload that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.threads == 1 and arguments is None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # JAX uses every visible core
    return open_shared(given.folder, given.threads)


def serve(
    start: Callable[[], Contestant], started: float | None = None, settle: Callable[[], None] | None = None
) -> None:
    """Start a contestant, time its first round, then run commands until "stop" or the end of input.

    ``started`` is the time when start-up began, if before this call. Imports are not counted for any contestant.
    ``settle`` waits for background start-up, so that later turns do not include it.
    """
    answers = private_output()
    started = time.perf_counter() if started is None else started
    contestant = start()
    contestant.rounds(1)
    send_message(answers, {"ready": True, "warmup": time.perf_counter() - started})
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "stop":
            break
        if word == "rounds":
            started = time.perf_counter()
            contestant.rounds(int(rest))
            send_message(answers, {"seconds": time.perf_counter() - started})
        elif word == "settle":
            if settle is not None:
                settle()
            send_message(answers, {"settled": True})
        elif word == "weights":
            np.savez(rest, **contestant.weights())  # type: ignore[arg-type]  # its stub allows names no arrays
            send_message(answers, {"written": rest})
        else:
            send_message(answers, {"error": f"no such command: {word!r}"})


def private_output() -> int:
    """Return the driver's pipe and redirect stdout to the log, because frameworks print to it."""
    answers = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    return answers


def send_message(answers: int, message: dict[str, Any]) -> None:
    os.write(answers, (json.dumps(message) + "\n").encode())
