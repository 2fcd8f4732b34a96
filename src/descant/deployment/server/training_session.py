"""The training of a federation of silos over any transport; all its state is in a folder.

    folder/party_descriptions.json    the parties of the training, and the description of each one's data
    folder/training/                  the run (see `tracking`)
    folder/global_model.safetensors   the final global model, by the names of its state_dict
    folder/notified_parties.json      the parties notified of the end of the training

A party that was invited before the training began is part of it from the first round and may connect late; until then
it counts with one sample. A party that is invited later joins before the round in which it is first connected. In both
cases the run closes after a round and continues with the new descriptions. A private run keeps its first parties and
descriptions, because its guarantee was computed for them; one sample is the least that a party has.

After the last round every party is notified and receives its models. The server waits for absent parties for a while.
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
MEMORY_BUDGET = 2**23  # bytes in memory of a model, a stack or the party states; larger ones are in files
_DESCRIPTIONS_FILE = "party_descriptions.json"
_NOTIFIED_FILE = "notified_parties.json"
_POLL_INTERVAL = 0.1  # seconds
_MIN_EVALUATION_TIMEOUT = 10.0  # least seconds that a party has to receive and evaluate its models
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
    excluded: Callable[[], Mapping[str, str]] = dict  # parties out for good, with the reason
    vault_settings: Mapping[str, Any] = field(default_factory=dict)  # settings of Federation for encrypted coresets

    def run_to_completion(self, invited: Callable[[], Sequence[str]]) -> dict[str, Any]:
        """Run the remaining rounds of the recipe and notify the parties; return a summary of the run."""
        descriptions = read_descriptions(self.folder) or self._initial_descriptions(invited)
        federation = self._build_federation(descriptions)
        self.transport.common_form = common_fields(next(iter(descriptions.values())))
        while newcomers := self._run_rounds(federation, descriptions):
            new = [name for name in newcomers if name not in descriptions]
            descriptions = {**descriptions, **newcomers}
            federation = self._build_federation(descriptions)
            if new:
                self.log(f"Invited after the training began and part of it from now on: {', '.join(new)}.")
        file = self.folder / GLOBAL_MODEL_FILE
        state = federation.state
        write_model(file, federation.plan_.net.layout, state.global_model, metadata={"round": state.round})
        self._finish(federation, descriptions)
        return {
            "folder": str(self._run_folder),
            "rounds": state.round,
            "hash": digest_of_models(state),
            "global_model": str(file),
        }

    def _run_rounds(self, federation: Federation, descriptions: PartyDescriptions) -> PartyDescriptions:
        """Run rounds until all are done or a party with a new description connects; return the new ones."""
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
        """Wait for a quorum and describe all invited parties, the absent ones with one sample."""
        connected = self.transport.wait_for_quorum(
            self.limits.min_parties, lambda: len(set(invited()) - self._unavailable().keys())
        )
        unknown = {**placeholder_description(next(iter(connected.values()))), DESCRIBED_AFTER: None}
        return {name: connected.get(name, unknown) for name in invited()}

    def _finish(self, federation: Federation, descriptions: PartyDescriptions) -> None:
        """Send every party its models and a goodbye; wait for absent parties until the grace time is over."""
        rounds = federation.state.round
        evaluated = _evaluated_parties(federation)
        is_logged = False
        stop_at = time.monotonic() + self.limits.grace
        while True:
            late = (
                time.monotonic() >= stop_at
            )  # read before the connections, so that a party that connects by then is in time
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
                names = ", ".join(missing)
                self.log(f"The training is over. Waiting {self.limits.grace:g} s for {names} to fetch their models.")
                is_logged = True
            time.sleep(_POLL_INTERVAL)
        self.transport.shutdown(rounds)

    def _record_notified(self) -> set[str]:
        """Record and return the parties that were notified; they are not waited for again."""
        file = self.folder / _NOTIFIED_FILE
        previous = read_notified(self.folder)
        notified = previous | self.transport.notified
        if notified != previous:
            with write_errors(self.folder):
                atomic.replace(
                    file, json.dumps(sorted(notified)).encode(), f".{_NOTIFIED_FILE}", mode=atomic.PRIVATE_MODE
                )
        return notified

    def _newcomers(self, descriptions: PartyDescriptions, round: int) -> PartyDescriptions:
        """Return descriptions of connected parties that are new or had no description yet."""
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
            """Let new parties in while a round waits to begin."""
            new = {
                name: description
                for name, description in self._newcomers(descriptions, federation.state.round).items()
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
        federation.state  # noqa: B018  raises for a party that does not fit, before it is recorded
        self.transport.net = federation.plan_.net  # frees the transport's own copy of the model
        with write_errors(self.folder):
            atomic.replace(
                self.folder / _DESCRIPTIONS_FILE,
                json.dumps(descriptions).encode(),
                f".{_DESCRIPTIONS_FILE}",
                mode=atomic.PRIVATE_MODE,
            )
        return federation


class _NewPartyConnected(Exception):
    """Parties that were invited later have connected while a round could not begin."""

    def __init__(self, parties: PartyDescriptions) -> None:
        super().__init__(", ".join(parties))
        self.parties = parties


def _evaluated_parties(federation: Federation) -> set[str]:
    """Return the parties that have evaluated the current models, and so have them; it needs a test set."""
    scores = federation.cached_scores
    if scores is None:
        return set()
    return {name for name, score in zip(scores.names, scores.global_model.values, strict=True) if not math.isnan(score)}


def _is_described(descriptions: PartyDescriptions, name: str) -> bool:
    """Return whether a party is part of the training and has described its data."""
    return name in descriptions and descriptions[name].get(DESCRIBED_AFTER, 0) is not None


def read_descriptions(folder: Path) -> PartyDescriptions:
    """Read the parties of the training in a folder; empty before it has begun."""
    return _read_json(folder / _DESCRIPTIONS_FILE, dict)


def read_notified(folder: Path) -> set[str]:
    """Read which parties were notified of the end of the training in a folder."""
    return set(_read_json(folder / _NOTIFIED_FILE, list))


def _read_json(file: Path, kind: type[JsonContainer]) -> JsonContainer:
    """Read a JSON file; return an empty container if it does not exist."""
    try:
        content = json.loads(file.read_text()) if file.exists() else kind()
    except (OSError, ValueError) as error:
        raise StateError(f"{file} is not as Descant wrote it: {error}. Restore it from a backup.") from error
    if not isinstance(content, kind):
        raise StateError(f"{file} is not as Descant wrote it. Restore it from a backup.")
    return content


def completed_rounds(folder: Path) -> int:
    """Return the number of completed rounds of the training in a folder."""
    return read_run(folder / TRAINING).round if is_run(folder / TRAINING) else 0


def first_rounds(folder: Path) -> dict[str, int]:
    """Return by party the first round in which it could take part."""
    return {name: description.get(JOINED_AFTER, 0) + 1 for name, description in read_descriptions(folder).items()}


def round_summary(round: Round, privacy: PrivacySettings | None = None) -> str:
    """Return the log line of a round: its parties, coreset proxies, privacy spent, and rejections with reasons."""
    proxied = f", and coreset proxies of {', '.join(round.proxied)}" if round.proxied else ""
    privacy_spent = ""
    if privacy is not None:
        spent = privacy_message(round.tuning.get(EPSILON_METRIC), privacy.budget, privacy.delta)
        privacy_spent = f", {spent}"
    rejected = "".join(f"; {_rejection_summary(one, round.accepted)}" for one in round.rejections)
    return (
        f"Round {round.index}: {round.summary}, {count_parties(len(round.accepted))}{proxied}{privacy_spent}{rejected}"
    )


def _rejection_summary(rejection: Rejection, accepted: Collection[str]) -> str:
    """Return the party and the reason; if its update was accepted, something beside it was rejected."""
    subject = rejection.party if rejection.party in accepted else f"without {rejection.party}"
    return f"{subject}: {rejection.reason.rstrip('.')}"


def count_parties(parties: int) -> str:
    """Return a number of parties with the right plural.

    >>> count_parties(1), count_parties(2)
    ('1 party', '2 parties')
    """
    return f"{parties} part{'y' if parties == 1 else 'ies'}"
