"""Trainings that have finished, each kept in a file: a comparison that was broken off goes on behind them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import secrets
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..core.settings import describe
from ..errors import DescantWarning, SettingError, StateError
from ..federation import Federation
from ..parties.fingerprints import fingerprint
from ..rounds.checkpoint import _identity
from ..serialization.references import spell
from ..storage import atomic, clear_errors
from .result import Result

_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Finished:
    """A folder with a file of JSON a training; without one, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and folder.exists() and not folder.is_dir():
            raise StateError(f"{folder} is a file, and finished trainings are to be kept in a folder of that name.")
        self.folder = folder
        self.used: set[Path] = set()  # the files of this comparison
        self.spared = 0.0  # seconds that those took which need not be done again

    @classmethod
    def at(cls, kept: str | Path | Finished | None) -> Finished:
        """A folder by its name, if it is not one already."""
        return kept if isinstance(kept, Finished) else cls(None if kept is None else Path(kept))

    def of(self, federation: Federation, rounds: int, points: int, train: Callable[[], Result]) -> Result:
        """What came of a federation that has not run yet: known, or trained now and kept at once."""
        if self.folder is None:
            return train()
        try:
            file = self.folder / f"{_key(federation, rounds, points)}.json"
        except SettingError as error:  # it could be taken for another one
            warnings.warn(f"These trainings are not kept on the way. {error}", DescantWarning, stacklevel=2)
            return train()
        if file.exists():
            held = _read(file)
            self.spared += held["seconds"]
        else:
            began = time.perf_counter()
            held = {"result": train().to_json(), "seconds": time.perf_counter() - began}
            self._keep(file, held)
        self.used.add(file)
        return Result.from_json(held["result"])  # as it will be read again

    def _keep(self, file: Path, held: dict[str, Any]) -> None:
        text = json.dumps({"descant": __version__, "digest": _digest(held), **held}, allow_nan=False)
        try:
            with clear_errors(file.parent):
                atomic.make(file.parent)
                atomic.replace(file, text.encode(), f"{file.name}.{secrets.token_hex(4)}")
        except StateError as error:
            warnings.warn(f"A finished training cannot be kept: {error}", DescantWarning, stacklevel=3)

    def clear(self) -> None:
        """Remove what this comparison has kept, when the whole is safe elsewhere."""
        if self.folder is not None and self.folder.is_dir():
            with clear_errors(self.folder):
                for file in self.used:
                    file.unlink(missing_ok=True)
                if not any(self.folder.iterdir()):
                    self.folder.rmdir()


def _key(federation: Federation, rounds: int, points: int) -> str:
    """A digest of all that decides what comes of it: settings, the parties' data, and the code that is the user's.

    What another process could not find by its address (a lambda, a live module) is an error: it says too little.
    """
    plan, arrays = federation.plan_, dict[str, torch.Tensor]()
    parts = {
        "model": federation.model,
        "algorithm": federation.algorithm,
        **{name: getattr(plan, name) for name in ("solver", "loss", "metric", "agreed")},
    }
    spelled = {name: spell(part, arrays) for name, part in parts.items()}
    if isinstance(federation.model, str):
        spelled["model"] = {"at": federation.model}
    decides = {
        **{name: part for name, part in _identity(plan).items() if name not in parts},
        **spelled,
        "arrays": [fingerprint(array) for array in arrays.values()],
        "code": {place: _code(place) for place in sorted(set(_places(spelled)))},
        "engine": describe(federation.engine),
        "first": fingerprint(federation.state.initial),
        "rounds": rounds,
        "points": points,
        "versions": [__version__, torch.__version__],
    }
    return _digest(decides)[:32]


def _places(spelled: Any) -> Iterator[str]:
    """The modules and files of what was spelled."""
    if isinstance(spelled, list):
        for part in spelled:
            yield from _places(part)
    elif isinstance(spelled, dict):
        for key, part in spelled.items():
            if key in ("at", "partial", "record") and isinstance(part, str):
                yield part.rpartition(":")[0]
            else:
                yield from _places(part)


def _code(place: str) -> str:
    """A digest of a file of the user's own; "" of what is installed, which has a version."""
    spec = None if place.endswith(".py") else importlib.util.find_spec(place)
    file = Path(place if spec is None else spec.origin or "").resolve()
    paths = sysconfig.get_paths()
    installed = [Path(__file__).parent, *(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))]
    if not file.is_file() or any(file.is_relative_to(folder.resolve()) for folder in installed):
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read(file: Path) -> dict[str, Any]:
    try:
        held = json.loads(file.read_bytes())
        if held["digest"] != _digest({name: held[name] for name in ("result", "seconds")}):
            raise ValueError("it does not have the digest that it was written with")
        found: dict[str, Any] = held
        return found
    except _DAMAGED as error:
        raise StateError(
            f"{file} does not hold a finished training ({type(error).__name__}: {error}). Remove it to train again."
        ) from error


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
