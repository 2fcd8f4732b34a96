"""What coalitions of parties reach: each is a federation of its own, and its scores are kept in a plain file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..analysis.scores import Numbers, evaluate_parties
from ..analysis.shapley_values import Coalition
from ..core.algorithm import Hyper, Participation, ParticipationContext
from ..core.settings import setting
from ..engines import VirtualClock
from ..errors import DescantError, SettingError, StateError
from ..federation import Federation
from ..parties.fingerprints import tensor_fingerprint
from ..rounds.checkpoint import _check_identity, _identity
from ..storage import write_errors
from .result import from_json_numbers, to_json_numbers

CoalitionKey: TypeAlias = tuple[int, str, Coalition]
READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class FixedPopulation:
    """Who takes part, as among all parties: a timetable may name one that is not in the coalition."""

    participation: Participation = setting(help="who takes part", apart=True)
    all_parties: Sequence[str] = ()

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        return self.participation(replace(context, all_parties=self.all_parties))


def coalition_scores(
    full_federation: Federation, coalition: Coalition, rounds: int, settings: dict[str, Any]
) -> Numbers:
    """Every party's test score with what a coalition has learned: its own model, or the centre if it is not in it.

    Nobody learns nothing: all are judged by the first model. ``everybody`` has not run and stays so.
    """
    names = full_federation.population.names
    members = [name for name in names if name in coalition]
    non_members = [name for name in names if name not in coalition]
    found = dict[str, float]()
    state = full_federation.state
    if members:
        member_population = full_federation.population.subset(members)
        algorithm = full_federation.algorithm
        algorithm = replace(algorithm, participation=FixedPopulation(algorithm.participation, names))
        engine = full_federation.engine
        if isinstance(engine, VirtualClock):
            engine = replace(engine, speeds={name: v for name, v in engine.speeds.items() if name in coalition})
        federation = Federation(
            full_federation.model,
            member_population,
            algorithm,
            seed=full_federation.seed,
            **{**settings, "engine": engine},
        )
        for _ in federation.rounds(rounds, evaluate_local_in=()):
            pass
        state = federation.state
        found |= zip(members, federation.scores().personal.values.tolist(), strict=True)
    if non_members:
        evaluated = evaluate_parties(full_federation.plan_, full_federation.engine_, state, names=non_members)
        found |= zip(non_members, evaluated.global_model.values.tolist(), strict=True)
    values = np.array([found[name] for name in names])
    if np.isnan(values).all():
        raise SettingError("No party has a test set to be judged by. Give parties.from_arrays(..., test=0.2).")
    if np.isinf(values).any():
        member_names = ", ".join(map(repr, members)) or "nobody"
        raise DescantError(
            f"The model of {member_names} has no score: the training diverged. Try a smaller learning rate."
        )
    return values


@dataclass
class CoalitionScores:
    """Scores by coalition, in a file if there is one: a line of JSON on what was trained, then one a coalition."""

    file: Path | None
    _scores: dict[CoalitionKey, Numbers] = field(default_factory=dict)

    def load(self, full_federation: Federation, rounds: int) -> None:
        """Read what is there, if it is of the same training; another one is an error."""
        if self.file is None:
            return
        identity = {k: v for k, v in _identity(full_federation.plan_).items() if k != "seed"} | {"rounds": rounds}
        if not self.file.exists():
            with write_errors(self.file):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        whole, _, torn = self.file.read_bytes().rpartition(b"\n")
        try:
            head, *lines = map(json.loads, whole.splitlines())
            _check_identity(self.file, head, identity)
            for line in lines:
                key = (int(line["seed"]), str(line["first"]), frozenset(line["parties"]))
                self._scores[key] = from_json_numbers(line["scores"])
        except READ_ERRORS as error:
            raise StateError(
                f"{self.file} does not hold scores of coalitions ({type(error).__name__}: {error}). Give another file."
            ) from error
        if torn:  # by a kill: that coalition trains again
            with write_errors(self.file):
                self.file.write_bytes(whole + b"\n")

    def get_or_train(
        self, full_federation: Federation, coalition: Coalition, rounds: int, settings: dict[str, Any]
    ) -> Numbers:
        """The scores of a coalition: known, or trained now and noted at once."""
        key = (
            full_federation.seed,
            tensor_fingerprint(full_federation.state.initial_model),
            coalition,
        )  # a model may have been brought along
        if key in self._scores:
            return self._scores[key]
        scores = coalition_scores(full_federation, coalition, rounds, settings=settings)
        if self.file is not None:
            entry = {"seed": key[0], "first": key[1], "parties": sorted(coalition), "scores": to_json_numbers(scores)}
            with write_errors(self.file), self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
        return scores
