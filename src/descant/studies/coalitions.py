"""Scores of coalitions of parties: each coalition trains as a federation, and its scores are stored in a plain file."""

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
from .training_result import from_json_numbers, to_json_numbers

CoalitionKey: TypeAlias = tuple[int, str, Coalition]
READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class FixedPopulation:
    """A participation rule that sees all parties, because it may name parties outside the coalition."""

    participation: Participation = setting(help="The participation rule.", own_message=True)
    all_parties: Sequence[str] = ()

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        return self.participation(replace(context, all_parties=self.all_parties))


def coalition_scores(
    full_federation: Federation, coalition: Coalition, rounds: int, settings: dict[str, Any]
) -> Numbers:
    """Return every party's test score after a coalition has trained.

    Members are evaluated with their personal models, the others with the coalition's global model, and for the empty
    coalition all parties with the initial model. ``full_federation`` is not trained.
    """
    names = full_federation.population.names
    members = [name for name in names if name in coalition]
    non_members = [name for name in names if name not in coalition]
    scores = dict[str, float]()
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
        scores |= zip(members, federation.scores().personal.values.tolist(), strict=True)
    if non_members:
        evaluated = evaluate_parties(full_federation.plan_, full_federation.engine_, state, names=non_members)
        scores |= zip(non_members, evaluated.global_model.values.tolist(), strict=True)
    values = np.array([scores[name] for name in names])
    if np.isnan(values).all():
        raise SettingError("No party has a test set, so there are no scores. Give parties.from_arrays(..., test=0.2).")
    if np.isinf(values).any():
        member_names = ", ".join(map(repr, members)) or "the empty coalition"
        raise DescantError(
            f"The model of {member_names} has no score: the training diverged. Try a smaller learning rate."
        )
    return values


@dataclass
class CoalitionScores:
    """Scores by coalition, in an optional file of JSON lines: the identity of the training, then one per coalition."""

    file: Path | None
    _scores: dict[CoalitionKey, Numbers] = field(default_factory=dict)

    def load(self, full_federation: Federation, rounds: int) -> None:
        """Read the file if it belongs to the same training; raise if it belongs to another."""
        if self.file is None:
            return
        identity = {k: v for k, v in _identity(full_federation.plan_).items() if k != "seed"} | {"rounds": rounds}
        if not self.file.exists():
            with write_errors(self.file):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        complete, _, torn = self.file.read_bytes().rpartition(b"\n")
        try:
            head, *lines = map(json.loads, complete.splitlines())
            _check_identity(self.file, head, identity)
            for line in lines:
                key = (int(line["seed"]), str(line["first"]), frozenset(line["parties"]))
                self._scores[key] = from_json_numbers(line["scores"])
        except READ_ERRORS as error:
            raise StateError(
                f"{self.file} does not hold scores of coalitions ({type(error).__name__}: {error}). Give another file."
            ) from error
        if torn:  # the last line was cut by a kill: that coalition trains again
            with write_errors(self.file):
                self.file.write_bytes(complete + b"\n")

    def get_or_train(
        self, full_federation: Federation, coalition: Coalition, rounds: int, settings: dict[str, Any]
    ) -> Numbers:
        """Return the stored scores of a coalition, or train it and store them at once."""
        initial_model = tensor_fingerprint(full_federation.state.initial_model)  # the user may give a trained model
        key = (full_federation.seed, initial_model, coalition)
        if key in self._scores:
            return self._scores[key]
        scores = coalition_scores(full_federation, coalition, rounds, settings=settings)
        if self.file is not None:
            entry = {"seed": key[0], "first": key[1], "parties": sorted(coalition), "scores": to_json_numbers(scores)}
            with write_errors(self.file), self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
        return scores
