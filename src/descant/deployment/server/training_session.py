"""The rounds of a federation whose parties come and go, by whatever post: all that it knows is in its folder.

    folder/parties.json         who is part of the training, and what each of them said of its data
    folder/training/            the run (see `record`)
    folder/center.safetensors   the common model by the names of its state_dict, when the training is over
    folder/parted.json          who was told then that it is over

Who was invited when the training began is part of it from the beginning, and may come late: until then it is taken to
have one sample. Who was invited later is part of it from the round on before which it has come. Both times the run is
closed behind a round, and goes on with what is known now. But what a private run promises is reckoned for those with
whom it began and what was known of them then, so that it stays with that: one sample is the least that a party has.

When all rounds are done every party hears it and has its models. Who is away is waited for a while.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ...analysis.scores import evaluate_parties
from ...config import Recipe
from ...core.timeouts import WaitLimits
from ...engines.remote import Silos
from ...errors import StateError
from ...federation import Federation
from ...parties.remote_parties import (
    DESCRIBED_AFTER,
    JOINED_AFTER,
    common_fields,
    placeholder_description,
    remote_population,
)
from ...privacy.budget import EPSILON_METRIC, privacy_message, privacy_settings
from ...privacy.gaussian_mechanism import PrivacySettings
from ...rounds.checkpoint import digest_of_models
from ...rounds.state import Round
from ...rounds.validation import Rejection
from ...storage import atomic, write_errors
from ...tracking import Run, is_run, read_run
from ..silo.result_files import GLOBAL_MODEL_FILE, write_model
from .handshakes import HandshakeTransport

TRAINING = "training"
MEMORY_BUDGET = (
    2**23
)  # bytes of a model, of a stack or of what parties keep that are in memory; what is larger is in files
_DESCRIPTIONS_FILE = "party_descriptions.json"
_NOTIFIED_FILE = "notified_parties.json"
_POLL_INTERVAL = 0.1  # seconds
_MIN_EVALUATION_TIMEOUT = 10.0  # seconds that a party has at least to be shown its models
PartyDescriptions = Mapping[str, Mapping[str, Any]]
JsonContainer = TypeVar("JsonContainer", dict[str, Any], list[str])


@dataclass(frozen=True)
class TrainingSession:
    """One training, from its folder."""

    folder: Path
    recipe: Recipe
    transport: HandshakeTransport
    limits: WaitLimits
    log: Callable[[str], None] = print
    excluded: Callable[[], Mapping[str, str]] = dict  # whom nobody waits or stands in for any more, and why
    vault_settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # settings of the federation by which parties seal rows

    def run_to_completion(self, invited: Callable[[], Sequence[str]]) -> dict[str, Any]:
        """Do the rounds of the recipe, as far as they are not done."""
        descriptions = read_descriptions(self.folder) or self._initial_descriptions(invited)
        federation = self._build_federation(descriptions)
        self.transport.common_form = common_fields(next(iter(descriptions.values())))
        while newcomers := self._run_rounds(federation, descriptions):
            new = [name for name in newcomers if name not in descriptions]
            descriptions = {**descriptions, **newcomers}
            federation = self._build_federation(descriptions)
            if new:
                self.log(f"Invited after the training began, and part of it from now on: {', '.join(new)}.")
        file = self.folder / GLOBAL_MODEL_FILE
        state = federation.state
        write_model(file, federation.plan_.net.layout, state.global_model, metadata={"round": state.round})
        self._finish(federation, descriptions)
        found = {"folder": str(self._run_folder), "rounds": state.round, "hash": digest_of_models(state)}
        return {**found, "global_model": str(file)}

    def _run_rounds(self, federation: Federation, descriptions: PartyDescriptions) -> PartyDescriptions:
        """Rounds until all are done, or somebody has come who is not part of them, or not known: who that is."""
        rounds = self.recipe.length.rounds
        private = privacy_settings(federation.plan_)
        with self._open_run(federation) as run:
            try:
                for round in run.rounds(max(0, rounds - run.round), max(1, rounds // self.recipe.length.points)):
                    self.log(round_summary(round.round, private))
                    newcomers = {} if private else self._newcomers(descriptions, round.index)
                    if newcomers and round.index < rounds:
                        return newcomers
            except _NewPartyConnected as new:
                return new.parties
        return {}

    def _initial_descriptions(self, invited: Callable[[], Sequence[str]]) -> PartyDescriptions:
        """Everybody who is invited by then; who has not come yet counts with one sample."""
        connected = self.transport.wait_for_quorum(
            self.limits.min_parties, lambda: len(set(invited()) - self._unavailable().keys())
        )
        unknown = {**placeholder_description(next(iter(connected.values()))), DESCRIBED_AFTER: None}
        return {name: connected.get(name, unknown) for name in invited()}

    def _finish(self, federation: Federation, descriptions: PartyDescriptions) -> None:
        """Who is there hears that it is over; who is not is waited for, and shown the models before it hears it."""
        rounds = federation.state.round
        evaluated = _evaluated_parties(federation)
        is_logged = False
        stop_at = time.monotonic() + self.limits.grace
        while True:
            late = time.monotonic() >= stop_at  # before one looks: whoever has come by then is in time
            connected = self.transport.connected_parties().keys() - self.transport.notified
            if pending := sorted((connected & descriptions.keys()) - evaluated):
                seconds = max(_MIN_EVALUATION_TIMEOUT, stop_at - time.monotonic())
                evaluate_parties(
                    replace(federation.plan_, deadline=seconds), federation.engine_, federation.state, names=pending
                )
            self.transport.send_goodbyes(connected, rounds)
            notified = self._record_notified()
            departed = notified | self._unavailable().keys()
            missing = [name for name in descriptions if _is_described(descriptions, name) and name not in departed]
            if not missing or late:
                break
            if not is_logged:
                message = f"{self.limits.grace:g} s for {', '.join(missing)}"
                self.log(f"The training is over. Waiting {message} to come for their models.")
                is_logged = True
            time.sleep(_POLL_INTERVAL)
        self.transport.shutdown(rounds)

    def _record_notified(self) -> set[str]:
        """Who was ever told that it is over, and so has its models: it is told again, and not waited for again."""
        file = self.folder / _NOTIFIED_FILE
        previous = read_notified(self.folder)
        notified = previous | self.transport.notified
        if notified != previous:
            with write_errors(self.folder):
                atomic.replace(file, json.dumps(sorted(notified)).encode(), f".{_NOTIFIED_FILE}", atomic.PRIVATE_MODE)
        return notified

    def _newcomers(self, descriptions: PartyDescriptions, round: int) -> PartyDescriptions:
        """Who has come and is not part of the training yet, or was not known."""
        newcomers = {
            name: JOINED_AFTER if name not in descriptions else DESCRIBED_AFTER
            for name in self.transport.connected_parties()
            if not _is_described(descriptions, name)
        }
        return {name: {**self.transport.data_descriptions[name], key: round} for name, key in newcomers.items()}

    def _open_run(self, federation: Federation) -> Run:
        if is_run(self._run_folder):
            return Run.resume(self._run_folder, federation)
        return Run.start(self._run_folder, federation, self.recipe.text, "always")

    @property
    def _run_folder(self) -> Path:
        return self.folder / TRAINING

    def _unavailable(self) -> dict[str, str]:
        return {**self.excluded(), **self.transport.forgotten}

    def _build_federation(self, descriptions: PartyDescriptions) -> Federation:
        settings = {key: value for key, value in self.recipe.settings().items() if key != "engine"}

        def check_newcomers() -> None:
            """Whoever is not part of it yet need not wait for the end of a round that cannot begin."""
            new = {
                name: said
                for name, said in self._newcomers(descriptions, federation.state.round).items()
                if name not in descriptions
            }
            if new and privacy_settings(federation.plan_) is None:
                raise _NewPartyConnected(new)

        federation = Federation(
            self.recipe.model(),
            remote_population(descriptions),
            self.recipe.algorithm(),
            seed=self.recipe.length.seed,
            engine=Silos(self.transport, self.limits, self.log, excluded=self._unavailable, on_wait=check_newcomers),
            deadline=self.limits.timeout,
            memory_budget=MEMORY_BUDGET,
            **settings,
            **self.vault_settings,
        )
        federation.state  # noqa: B018  whoever does not fit is found before it is noted as one who does
        self.transport.net = federation.plan_.net  # the same once more would be one model more in memory
        with write_errors(self.folder):
            atomic.replace(
                self.folder / _DESCRIPTIONS_FILE,
                json.dumps(descriptions).encode(),
                f".{_DESCRIPTIONS_FILE}",
                atomic.PRIVATE_MODE,
            )
        return federation


class _NewPartyConnected(Exception):
    """Somebody who was invited later has come while a round could not begin."""

    def __init__(self, parties: PartyDescriptions) -> None:
        super().__init__(", ".join(parties))
        self.parties = parties


def _evaluated_parties(federation: Federation) -> set[str]:
    """Who has judged the models as they are now, and so has them. Who has no test set is not known by that."""
    scores = federation.cached_scores
    if scores is None:
        return set()
    return {name for name, score in zip(scores.names, scores.global_model.values, strict=True) if not math.isnan(score)}


def _is_described(descriptions: PartyDescriptions, name: str) -> bool:
    """Whether a party is part of a training, and has said what data it has."""
    return name in descriptions and descriptions[name].get(DESCRIBED_AFTER, 0) is not None


def read_descriptions(folder: Path) -> PartyDescriptions:
    """Who is part of the training in a folder; nobody before it has begun."""
    return _read_json(folder / _DESCRIPTIONS_FILE, dict)


def read_notified(folder: Path) -> set[str]:
    """Who was told that the training in a folder is over."""
    return set(_read_json(folder / _NOTIFIED_FILE, list))


def _read_json(file: Path, kind: type[JsonContainer]) -> JsonContainer:
    """What was written into a file, of which there is nothing before it is there."""
    try:
        found = json.loads(file.read_text()) if file.exists() else kind()
    except (OSError, ValueError) as error:
        raise StateError(f"{file} is not as Descant wrote it: {error}. Restore it from a copy.") from error
    if not isinstance(found, kind):
        raise StateError(f"{file} is not as Descant wrote it. Restore it from a copy.")
    return found


def completed_rounds(folder: Path) -> int:
    """How many rounds of the training in a folder are done."""
    return read_run(folder / TRAINING).round if is_run(folder / TRAINING) else 0


def first_rounds(folder: Path) -> dict[str, int]:
    """The first round that each party of the training in a folder could take part in."""
    return {name: said.get(JOINED_AFTER, 0) + 1 for name, said in read_descriptions(folder).items()}


def round_summary(round: Round, privacy: PrivacySettings | None = None) -> str:
    """A round as the organiser reads it: who counted, who was stood in for, and what did not count of whom, and why."""
    proxied = f", and stand-ins for {', '.join(round.proxied)}" if round.proxied else ""
    privacy_spent = (
        ""
        if privacy is None
        else f", {privacy_message(round.tuning.get(EPSILON_METRIC), privacy.budget, privacy.delta)}"
    )
    rejected = "".join(f"; {_rejection_summary(one, round.accepted)}" for one in round.rejections)
    return (
        f"Round {round.index}: {round.summary}, {count_parties(len(round.accepted))}{proxied}{privacy_spent}{rejected}"
    )


def _rejection_summary(rejection: Rejection, accepted: Collection[str]) -> str:
    """Of who counted all the same it is what it left beside its model."""
    subject = rejection.party if rejection.party in accepted else f"without {rejection.party}"
    return f"{subject}: {rejection.reason.rstrip('.')}"


def count_parties(parties: int) -> str:
    """So many parties.

    >>> counted(1), counted(2)
    ('1 party', '2 parties')
    """
    return f"{parties} part{'y' if parties == 1 else 'ies'}"
