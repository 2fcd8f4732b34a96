"""The bench itself: all contestants of a workload kept alive, and given turns, one at a time."""

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

Say: TypeAlias = Callable[[str], None]
Python: TypeAlias = Path | PeerUnavailableError  # that runs a contestant, or why there is none


@dataclass(frozen=True)
class PeerMeasurement:
    """What was seen of one contestant on one workload; with a reason, it came only so far."""

    name: str
    title: str
    seconds: tuple[float, ...] = ()  # a round, in each turn
    processor: tuple[float, ...] = ()  # seconds of all its processes, a round
    warmup: float | None = None  # start-up and first round, imports left out
    cold_seconds: float | None = None  # the first rounds from a cold start, warm-up included
    memory: float | None = None  # bytes, at the highest
    loss: float | None = None  # of the centre, on samples that no party has, after the cold rounds
    note: str = ""
    reason: str = ""


@dataclass(frozen=True)
class TurnSchedule:
    """How long everybody runs."""

    turns: int = 5
    rounds: int | None = None  # in a turn; None: as the workload says
    cold_rounds: int = 20  # rounds in the run from a cold start
    timeout: float = 600.0  # seconds for one answer


class _Contestant:
    """A contestant on its way: alive, or with a reason why not."""

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
    peers: Sequence[Peer], pythons: Mapping[str, Python], folder: Path, logs: Path, pace: TurnSchedule, say: Say
) -> list[PeerMeasurement]:
    """Measure the contestants, by name in ``pythons``, on the workload that was written into a folder."""
    work = open_shared(folder).work
    logs.mkdir(parents=True, exist_ok=True)
    entrants = [_Contestant(peer) for peer in peers]
    with ExitStack() as alive:
        for entrant in entrants:
            log = logs / f"{work.name}-{entrant.peer.name}.log"
            say(f"{work.name}: {entrant.peer.title} starts, and runs {pace.cold_rounds} rounds from cold")
            _attempt(entrant, say, partial(_begin, entrant, pythons[entrant.peer.name], folder, log, pace, alive))
        for turn in range(pace.turns):
            say(f"{work.name}: turn {turn + 1} of {pace.turns}")
            first = turn % max(1, len(entrants))  # another begins each time: nobody always follows the same one
            for entrant in entrants[first:] + entrants[:first]:
                _attempt(entrant, say, partial(_turn, entrant, work, pace))
        for entrant in entrants:
            if entrant.running is not None and not entrant.reason:
                entrant.running.sample_memory()
    return [entrant.measured() for entrant in entrants]


def _attempt(entrant: _Contestant, say: Say, step: Callable[[], None]) -> None:
    if entrant.reason:
        return
    try:
        step()
    except PeerUnavailableError as error:
        entrant.reason = str(error)
        say(f"{entrant.peer.title} is out: {error}")
        if entrant.running is not None:
            entrant.running.stop(timeout=0.0)


def _begin(entrant: _Contestant, python: Python, folder: Path, log: Path, pace: TurnSchedule, alive: ExitStack) -> None:
    if isinstance(python, PeerUnavailableError):
        raise python
    entrant.running = running = alive.enter_context(PeerProcess(entrant.peer, python, folder, log))
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
    """The loss of these weights on samples that no party has."""
    import torch
    from torch.nn import functional

    from peer_comparison.peers.models import build, load

    x, y = (torch.from_numpy(read(folder / f"probe_{name}.npy")) for name in ("x", "y"))
    with torch.no_grad():
        return float(functional.cross_entropy(load(build(open_shared(folder).work.model), weights)(x), y))


def initial_loss(folder: Path) -> float:
    """The loss before any learning."""
    return probe_loss(open_shared(folder).initial(), folder)
