"""What coalitions of parties reach: each is a federation of its own, and its scores are kept in a plain file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..analysis.scores import Numbers, score
from ..analysis.shapley_values import Coalition
from ..core.algorithm import Attend, Attending, Hyper
from ..core.settings import setting
from ..engines import Clocked
from ..errors import DescantError, SettingError, StateError
from ..federation import Federation
from ..parties.fingerprints import fingerprint
from ..rounds.checkpoint import _check_identity, _identity
from ..storage import clear_errors
from .result import numbers, plain

_Key: TypeAlias = tuple[int, str, Coalition]
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Known:
    """Who takes part, as among all parties: a timetable may name one that is not in the coalition."""

    attend: Attend = setting(help="who takes part", apart=True)
    everybody: Sequence[str] = ()

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        return self.attend(replace(attending, everybody=self.everybody))


def scores_of(everybody: Federation, coalition: Coalition, rounds: int, settings: dict[str, Any]) -> Numbers:
    """Every party's test score with what a coalition has learned: its own model, or the centre if it is not in it.

    Nobody learns nothing: all are judged by the first model. ``everybody`` has not run and stays so.
    """
    names = everybody.people.names
    inside = [name for name in names if name in coalition]
    outside = [name for name in names if name not in coalition]
    found, state = dict[str, float](), everybody.state
    if inside:
        some, algorithm = everybody.people.subset(inside), everybody.algorithm
        algorithm = replace(algorithm, attend=Known(algorithm.attend, names))
        engine = everybody.engine
        if isinstance(engine, Clocked):
            engine = replace(engine, speeds={name: v for name, v in engine.speeds.items() if name in coalition})
        federation = Federation(everybody.model, some, algorithm, seed=everybody.seed, **{**settings, "engine": engine})
        for _ in federation.rounds(rounds, judge=()):
            pass
        state = federation.state
        found |= zip(inside, federation.scores().own.values.tolist(), strict=True)
    if outside:
        judged = score(everybody.plan_, everybody.engine_, state, outside)
        found |= zip(outside, judged.center.values.tolist(), strict=True)
    values = np.array([found[name] for name in names])
    if np.isnan(values).all():
        raise SettingError("No party has a test set to be judged by. Give parties.from_arrays(..., test=0.2).")
    if np.isinf(values).any():
        who = ", ".join(map(repr, inside)) or "nobody"
        raise DescantError(f"The model of {who} has no score: the training diverged. Try a smaller learning rate.")
    return values


@dataclass
class Values:
    """Scores by coalition, in a file if there is one: a line of JSON on what was trained, then one a coalition."""

    file: Path | None
    _known: dict[_Key, Numbers] = field(default_factory=dict)

    def begin(self, everybody: Federation, rounds: int) -> None:
        """Read what is there, if it is of the same training; another one is an error."""
        if self.file is None:
            return
        identity = {k: v for k, v in _identity(everybody.plan_).items() if k != "seed"} | {"rounds": rounds}
        if not self.file.exists():
            with clear_errors(self.file):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        whole, _, torn = self.file.read_bytes().rpartition(b"\n")
        try:
            head, *lines = map(json.loads, whole.splitlines())
            _check_identity(self.file, head, identity)
            for line in lines:
                key = (int(line["seed"]), str(line["first"]), frozenset(line["parties"]))
                self._known[key] = numbers(line["scores"])
        except _DAMAGED as error:
            raise StateError(
                f"{self.file} does not hold scores of coalitions ({type(error).__name__}: {error}). Give another file."
            ) from error
        if torn:  # by a kill: that coalition trains again
            with clear_errors(self.file):
                self.file.write_bytes(whole + b"\n")

    def of(self, everybody: Federation, coalition: Coalition, rounds: int, settings: dict[str, Any]) -> Numbers:
        """The scores of a coalition: known, or trained now and noted at once."""
        key = (everybody.seed, fingerprint(everybody.state.initial), coalition)  # a model may have been brought along
        if key in self._known:
            return self._known[key]
        scores = scores_of(everybody, coalition, rounds, settings)
        if self.file is not None:
            entry = {"seed": key[0], "first": key[1], "parties": sorted(coalition), "scores": plain(scores)}
            with clear_errors(self.file), self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
        return scores
