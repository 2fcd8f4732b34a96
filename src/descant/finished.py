"""Trainings that have finished, each kept in a file: a comparison that was broken off goes on behind them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import __version__
from .algorithms.pieces import Replay
from .checkpoint import _identity
from .errors import StateError
from .federation import Federation
from .parties.fingerprint import fingerprint
from .results import Result
from .settings import describe
from .store import clear_errors, disk

_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Finished:
    """A folder with a file of JSON a training; without one, nothing is kept."""

    folder: Path | None

    def of(self, federation: Federation, rounds: int, points: int, train: Callable[[], Result]) -> Result:
        """What came of a federation that has not run yet: known, or trained now and kept at once."""
        if self.folder is None:
            return train()
        file = self.folder / f"{_key(federation, rounds, points)}.json"
        if file.exists():
            with _clear_of(file):
                return Result.from_json(json.loads(file.read_bytes())["result"])
        began = time.perf_counter()
        result = train()
        head = {"descant": __version__, "seconds": time.perf_counter() - began}
        text = json.dumps({**head, "result": result.to_json()}, allow_nan=False)
        with clear_errors(self.folder):
            disk.make(self.folder)
            disk.replace(file, text.encode(), f"{file.name}.new")
        return result

    @property
    def files(self) -> list[Path]:
        """One a training."""
        return [] if self.folder is None else sorted(self.folder.glob("*.json"))

    @property
    def seconds(self) -> float:
        """How long they took."""
        total = 0.0
        for file in self.files:
            with _clear_of(file):
                total += float(json.loads(file.read_bytes())["seconds"])
        return total

    def clear(self) -> None:
        """Remove what was kept, when the whole is safe elsewhere."""
        if self.folder is not None and self.folder.is_dir():
            with clear_errors(self.folder):
                for file in [*self.files, *self.folder.glob("*.json.new")]:
                    file.unlink()
                if not any(self.folder.iterdir()):
                    self.folder.rmdir()


def _key(federation: Federation, rounds: int, points: int) -> str:
    """A digest of all that decides what comes of it, the parties' data included."""
    tune = federation.algorithm.tune
    decides: Mapping[str, Any] = {
        **_identity(federation._plan),
        "net": repr(federation._plan.net.module),
        "first": fingerprint(federation.state.initial),  # a model may have been brought along
        "engine": describe(federation.engine),
        "tuned": repr(tune.hypers) if isinstance(tune, Replay) else "",  # too long for a description
        "rounds": rounds,
        "points": points,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _clear_of(file: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise StateError(
            f"{file} does not hold a finished training ({type(error).__name__}: {error}). Remove it to train again."
        ) from error
