"""The bench itself: all contestants of a workload kept alive, and given turns, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from peer_comparison.contestants import Peer
from peer_comparison.environments import CannotRun
from peer_comparison.peers.work import Array, Work, open_shared, read, read_named
from peer_comparison.process import Running

Say: TypeAlias = Callable[[str], None]
Python: TypeAlias = Path | CannotRun  # that runs a contestant, or why there is none


@dataclass(frozen=True)
class Measured:
    """What was seen of one contestant on one workload; with a reason, it came only so far."""

    name: str
    title: str
    seconds: tuple[float, ...] = ()  # a round, in each turn
    processor: tuple[float, ...] = ()  # seconds of all its processes, a round
    warmup: float | None = None  # start-up and first round, imports left out
    cold: float | None = None  # the first rounds from a cold start, warm-up included
    memory: float | None = None  # bytes, at the highest
    loss: float | None = None  # of the centre, on samples that no party has, after the cold rounds
    note: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Pace:
    """How long everybody runs."""

    turns: int = 5
    rounds: int | None = None  # in a turn; None: as the workload says
    cold: int = 20  # rounds in the run from a cold start
    patience: float = 600.0  # seconds for one answer


class _Entrant:
    """A contestant on its way: alive, or with a reason why not."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.running: Running | None = None
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.warmup: float | None = None
        self.cold: float | None = None
        self.loss: float | None = None
        self.reason = ""

    def measured(self) -> Measured:
        memory = self.running.peak if self.running is not None and self.running.peak else None
        times = {"seconds": tuple(self.seconds), "processor": tuple(self.processor)}
        return Measured(
            self.peer.name,
            self.peer.title,
            **times,
            warmup=self.warmup,
            cold=self.cold,
            memory=memory,
            loss=self.loss,
            note=self.peer.note,
            reason=self.reason,
        )


def race(
    peers: Sequence[Peer], pythons: Mapping[str, Python], folder: Path, logs: Path, pace: Pace, say: Say
) -> list[Measured]:
    """Measure the contestants, by name in ``pythons``, on the workload that was written into a folder."""
    work = open_shared(folder).work
    logs.mkdir(parents=True, exist_ok=True)
    entrants = [_Entrant(peer) for peer in peers]
    with ExitStack() as alive:
        for entrant in entrants:
            log = logs / f"{work.name}-{entrant.peer.name}.log"
            say(f"{work.name}: {entrant.peer.title} starts, and runs {pace.cold} rounds from cold")
            _attempt(entrant, say, partial(_begin, entrant, pythons[entrant.peer.name], folder, log, pace, alive))
        for turn in range(pace.turns):
            say(f"{work.name}: turn {turn + 1} of {pace.turns}")
            first = turn % max(1, len(entrants))  # another begins each time: nobody always follows the same one
            for entrant in entrants[first:] + entrants[:first]:
                _attempt(entrant, say, partial(_turn, entrant, work, pace))
        for entrant in entrants:
            if entrant.running is not None and not entrant.reason:
                entrant.running.look()
    return [entrant.measured() for entrant in entrants]


def _attempt(entrant: _Entrant, say: Say, step: Callable[[], None]) -> None:
    if entrant.reason:
        return
    try:
        step()
    except CannotRun as error:
        entrant.reason = str(error)
        say(f"{entrant.peer.title} is out: {error}")
        if entrant.running is not None:
            entrant.running.end(patience=0.0)


def _begin(entrant: _Entrant, python: Python, folder: Path, log: Path, pace: Pace, alive: ExitStack) -> None:
    if isinstance(python, CannotRun):
        raise python
    entrant.running = running = alive.enter_context(Running(entrant.peer, python, folder, log))
    with running.watched():
        entrant.warmup = float(running.hear(pace.patience)["warmup"])
        rest = running.ask(f"rounds {pace.cold - 1}", pace.patience)
    entrant.cold = entrant.warmup + float(rest["seconds"])
    weights = folder / f"{entrant.peer.name}.npz"
    running.ask(f"weights {weights}", pace.patience)
    try:
        entrant.loss = loss_of(read_named(weights), folder)
    except (RuntimeError, OSError, ValueError) as error:
        raise CannotRun(f"its weights do not fit the model: {' '.join(str(error).split())[:150]}") from error
    running.ask("settle", pace.patience)
    running.rest()


def _turn(entrant: _Entrant, work: Work, pace: Pace) -> None:
    running, rounds = entrant.running, pace.rounds or work.turn
    assert running is not None
    running.wake()
    before = running.processor_seconds()
    answer = running.ask(f"rounds {rounds}", pace.patience)
    entrant.processor.append((running.processor_seconds() - before) / rounds)
    entrant.seconds.append(float(answer["seconds"]) / rounds)
    running.rest()


def loss_of(weights: Mapping[str, Array], folder: Path) -> float:
    """The loss of these weights on samples that no party has."""
    import torch
    from torch.nn import functional

    from peer_comparison.peers.models import build, load

    x, y = (torch.from_numpy(read(folder / f"probe_{name}.npy")) for name in ("x", "y"))
    with torch.no_grad():
        return float(functional.cross_entropy(load(build(open_shared(folder).work.model), weights)(x), y))


def initial_loss(folder: Path) -> float:
    """The loss before any learning."""
    return loss_of(open_shared(folder).initial(), folder)
