"""The bench: all contestants of a workload stay alive and take turns, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from peer_comparison.contestants import Peer
from peer_comparison.environments import PeerUnavailableError
from peer_comparison.peers.work import Array, Workload, open_shared, read, read_named
from peer_comparison.process import PeerProcess

Log: TypeAlias = Callable[[str], None]
Python: TypeAlias = Path | PeerUnavailableError  # the interpreter of a contestant, or the reason for its absence


@dataclass(frozen=True)
class PeerMeasurement:
    """The measurements of one contestant on one workload; ``reason`` says why it failed."""

    name: str
    title: str
    seconds: tuple[float, ...] = ()  # seconds per round, by turn
    processor: tuple[float, ...] = ()  # processor seconds of all its processes per round, by turn
    warmup: float | None = None  # seconds of start-up and first round, without imports
    cold_seconds: float | None = None  # seconds of the first rounds, warm-up included
    memory: float | None = None  # peak in bytes
    loss: float | None = None  # loss of the global model on held-out samples after the cold rounds
    note: str = ""
    reason: str = ""


@dataclass(frozen=True)
class TurnSchedule:
    """The length of all runs."""

    turns: int = 5
    rounds: int | None = None  # in a turn; None: the workload's default
    cold_rounds: int = 20  # rounds from a cold start
    timeout: float = 600.0  # seconds per answer


class _Contestant:
    """The state of a contestant: running, or with the reason of its failure."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.running: PeerProcess | None = None
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.warmup: float | None = None
        self.cold: float | None = None
        self.loss: float | None = None
        self.reason = ""

    def measured(self) -> PeerMeasurement:
        memory = self.running.peak if self.running is not None and self.running.peak else None
        times = {"seconds": tuple(self.seconds), "processor": tuple(self.processor)}
        return PeerMeasurement(
            self.peer.name,
            self.peer.title,
            **times,
            warmup=self.warmup,
            cold_seconds=self.cold,
            memory=memory,
            loss=self.loss,
            note=self.peer.note,
            reason=self.reason,
        )


def run_turns(
    peers: Sequence[Peer], pythons: Mapping[str, Python], folder: Path, logs: Path, pace: TurnSchedule, log: Log
) -> list[PeerMeasurement]:
    """Measure the contestants on the workload in a folder; ``pythons`` maps names to interpreters."""
    work = open_shared(folder).work
    logs.mkdir(parents=True, exist_ok=True)
    entrants = [_Contestant(peer) for peer in peers]
    with ExitStack() as alive:
        for entrant in entrants:
            log_file = logs / f"{work.name}-{entrant.peer.name}.log"
            log(f"{work.name}: {entrant.peer.title} starts and runs {pace.cold_rounds} rounds from cold")
            begin = partial(
                _begin, entrant, pythons[entrant.peer.name], folder, log_file=log_file, pace=pace, alive=alive
            )
            _attempt(entrant, log, begin)
        for turn in range(pace.turns):
            log(f"{work.name}: turn {turn + 1} of {pace.turns}")
            first = turn % max(1, len(entrants))  # the order rotates, so that no contestant always follows the same one
            for entrant in entrants[first:] + entrants[:first]:
                _attempt(entrant, log, partial(_turn, entrant, work, pace))
        for entrant in entrants:
            if entrant.running is not None and not entrant.reason:
                entrant.running.sample_memory()
    return [entrant.measured() for entrant in entrants]


def _attempt(entrant: _Contestant, log: Log, step: Callable[[], None]) -> None:
    if entrant.reason:
        return
    try:
        step()
    except PeerUnavailableError as error:
        entrant.reason = str(error)
        log(f"{entrant.peer.title} is out: {error}")
        if entrant.running is not None:
            entrant.running.stop(timeout=0.0)


def _begin(
    entrant: _Contestant, python: Python, folder: Path, log_file: Path, pace: TurnSchedule, alive: ExitStack
) -> None:
    if isinstance(python, PeerUnavailableError):
        raise python
    entrant.running = running = alive.enter_context(PeerProcess(entrant.peer, python, folder, log_file))
    with running.sampling_memory():
        entrant.warmup = float(running.read_answer(pace.timeout)["warmup"])
        rest = running.send_command(f"rounds {pace.cold_rounds - 1}", pace.timeout)
    entrant.cold = entrant.warmup + float(rest["seconds"])
    weights = folder / f"{entrant.peer.name}.npz"
    running.send_command(f"weights {weights}", pace.timeout)
    try:
        entrant.loss = probe_loss(read_named(weights), folder)
    except (RuntimeError, OSError, ValueError) as error:
        raise PeerUnavailableError(f"its weights do not fit the model: {' '.join(str(error).split())[:150]}") from error
    running.send_command("settle", pace.timeout)
    running.suspend()


def _turn(entrant: _Contestant, work: Workload, pace: TurnSchedule) -> None:
    running = entrant.running
    rounds = pace.rounds or work.rounds_per_turn
    assert running is not None
    running.resume()
    before = running.processor_seconds()
    answer = running.send_command(f"rounds {rounds}", pace.timeout)
    entrant.processor.append((running.processor_seconds() - before) / rounds)
    entrant.seconds.append(float(answer["seconds"]) / rounds)
    running.suspend()


def probe_loss(weights: Mapping[str, Array], folder: Path) -> float:
    """Return the loss of these weights on held-out samples."""
    import torch
    from torch.nn import functional

    from peer_comparison.peers.models import build, load

    x, y = (torch.from_numpy(read(folder / f"probe_{name}.npy")) for name in ("x", "y"))
    with torch.no_grad():
        return float(functional.cross_entropy(load(build(open_shared(folder).work.model), weights)(x), y))


def initial_loss(folder: Path) -> float:
    """Return the loss of the initial weights."""
    return probe_loss(open_shared(folder).initial(), folder)
