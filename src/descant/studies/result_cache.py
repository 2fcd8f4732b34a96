"""A cache of finished trainings, one file each, from which an interrupted comparison continues."""

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
from ..core.settings import to_json_values
from ..errors import DescantWarning, SettingError, StateError
from ..federation import Federation
from ..parties.fingerprints import tensor_fingerprint
from ..rounds.checkpoint import _identity
from ..serialization.references import encode
from ..storage import atomic, write_errors
from .training_result import TrainingResult

READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class ResultCache:
    """A folder with one JSON file per finished training; without a folder, nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and folder.exists() and not folder.is_dir():
            raise StateError(f"{folder} is a file. Finished trainings are kept in a folder: give another name.")
        self.folder = folder
        self.used_files: set[Path] = set()  # files of this comparison
        self.saved_seconds = 0.0  # training time of the results that were read

    @classmethod
    def from_path(cls, cache: str | Path | ResultCache | None) -> ResultCache:
        """Return the cache in a folder; a given cache is returned as it is, and None gives one that stores nothing."""
        return cache if isinstance(cache, ResultCache) else cls(None if cache is None else Path(cache))

    def get_or_train(
        self, federation: Federation, rounds: int, points: int, train: Callable[[], TrainingResult]
    ) -> TrainingResult:
        """Return the stored result of a federation that has not run yet, or train it and store the result."""
        if self.folder is None:
            return train()
        try:
            file = self.folder / f"{cache_key(federation, rounds, points)}.json"
        except SettingError as error:  # its cache key could equal that of another training
            warnings.warn(f"These trainings are not kept for a restart. {error}", DescantWarning, stacklevel=2)
            return train()
        if file.exists():
            record = read_record(file)
            self.saved_seconds += record["seconds"]
        else:
            started = time.perf_counter()
            record = {"result": train().to_json(), "seconds": time.perf_counter() - started}
            self._store(file, record)
        self.used_files.add(file)
        return TrainingResult.from_json(record["result"])  # the same values whether trained or read

    def _store(self, file: Path, record: dict[str, Any]) -> None:
        text = json.dumps({"descant": __version__, "digest": _digest(record), **record}, allow_nan=False)
        try:
            with write_errors(file.parent):
                atomic.make_folder(file.parent)
                atomic.replace(file, text.encode(), f"{file.name}.{secrets.token_hex(4)}")
        except StateError as error:
            warnings.warn(f"A finished training cannot be kept: {error}", DescantWarning, stacklevel=3)

    def clear(self) -> None:
        """Remove the files of this comparison, once its study has been saved."""
        if self.folder is not None and self.folder.is_dir():
            with write_errors(self.folder):
                for file in self.used_files:
                    file.unlink(missing_ok=True)
                if not any(self.folder.iterdir()):
                    self.folder.rmdir()


def cache_key(federation: Federation, rounds: int, points: int) -> str:
    """Return a digest of everything that determines a result: settings, the parties' data, the user's code.

    Objects that cannot be imported by name (a lambda, a live module) raise: they cannot be identified.
    """
    plan = federation.plan_
    arrays = dict[str, torch.Tensor]()
    parts = {
        "model": federation.model,
        "algorithm": federation.algorithm,
        **{name: getattr(plan, name) for name in ("solver", "loss", "metric", "coreset_limit")},
    }
    serialized_parts = {name: encode(part, arrays) for name, part in parts.items()}
    if isinstance(federation.model, str):
        serialized_parts["model"] = {"at": federation.model}
    key_fields = {
        **{name: part for name, part in _identity(plan).items() if name not in parts},
        **serialized_parts,
        "arrays": [tensor_fingerprint(array) for array in arrays.values()],
        "code": {place: source_digest(place) for place in sorted(set(referenced_modules(serialized_parts)))},
        "engine": to_json_values(federation.engine),
        "first": tensor_fingerprint(federation.state.initial_model),
        "rounds": rounds,
        "points": points,
        "versions": [__version__, torch.__version__],
    }
    return _digest(key_fields)[:32]


def referenced_modules(serialized: Any) -> Iterator[str]:
    """Yield the modules and files that serialized parts refer to."""
    if isinstance(serialized, list):
        for part in serialized:
            yield from referenced_modules(part)
    elif isinstance(serialized, dict):
        for key, part in serialized.items():
            if key in ("at", "partial", "record") and isinstance(part, str):
                yield part.rpartition(":")[0]
            else:
                yield from referenced_modules(part)


def source_digest(module: str) -> str:
    """Return a digest of a user's source file; "" for installed modules, which have a version."""
    spec = None if module.endswith(".py") else importlib.util.find_spec(module)
    file = Path(module if spec is None else spec.origin or "").resolve()
    paths = sysconfig.get_paths()
    installed = [Path(__file__).parent, *(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))]
    if not file.is_file() or any(file.is_relative_to(folder.resolve()) for folder in installed):
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_bytes())
        if record["digest"] != _digest({name: record[name] for name in ("result", "seconds")}):
            raise ValueError("its digest is wrong")
        checked: dict[str, Any] = record
        return checked
    except READ_ERRORS as error:
        raise StateError(
            f"{file} does not hold a finished training ({type(error).__name__}: {error}). Remove it to train again."
        ) from error


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
