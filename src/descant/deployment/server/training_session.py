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

from ...analysis.scores import score
from ...config import Recipe
from ...core.timeouts import Patience
from ...engines.remote import Silos
from ...errors import StateError
from ...federation import Federation
from ...parties.remote_parties import KNOWN, SINCE, elsewhere, in_common, not_yet_known
from ...privacy.budget import EPSILON, promised, told
from ...privacy.gaussian_mechanism import Privacy
from ...rounds.checkpoint import models_digest
from ...rounds.state import Round
from ...rounds.validation import Refusal
from ...storage import atomic, clear_errors
from ...tracking import Run, is_run, read
from ..silo.result_files import CENTER, write_model
from .handshakes import Meeting

TRAINING = "training"
BUDGET = 2**23  # bytes of a model, of a stack or of what parties keep that are in memory; what is larger is in files
_MET, _PARTED = "parties.json", "parted.json"
_PAUSE = 0.1  # seconds
_SHOWING = 10.0  # seconds that a party has at least to be shown its models
Met = Mapping[str, Mapping[str, Any]]
Noted = TypeVar("Noted", dict[str, Any], list[str])


@dataclass(frozen=True)
class Training:
    """One training, from its folder."""

    folder: Path
    recipe: Recipe
    meeting: Meeting
    patience: Patience
    say: Callable[[str], None] = print
    barred: Callable[[], Mapping[str, str]] = dict  # whom nobody waits or stands in for any more, and why
    sealed: Mapping[str, Any] = field(default_factory=dict)  # settings of the federation by which parties seal rows

    def until_done(self, invited: Callable[[], Sequence[str]]) -> dict[str, Any]:
        """Do the rounds of the recipe, as far as they are not done."""
        met = met_in(self.folder) or self._gathered(invited)
        federation = self._federation(met)
        self.meeting.form = in_common(next(iter(met.values())))
        while came := self._rounds(federation, met):
            new, met = [name for name in came if name not in met], {**met, **came}
            federation = self._federation(met)
            if new:
                self.say(f"Invited after the training began, and part of it from now on: {', '.join(new)}.")
        file, state = self.folder / CENTER, federation.state
        write_model(file, federation.plan_.net.layout, state.center, {"round": state.round})
        self._part(federation, met)
        found = {"folder": str(self._place), "rounds": state.round, "hash": models_digest(state)}
        return {**found, "center": str(file)}

    def _rounds(self, federation: Federation, met: Met) -> Met:
        """Rounds until all are done, or somebody has come who is not part of them, or not known: who that is."""
        rounds, private = self.recipe.length.rounds, promised(federation.plan_)
        with self._run(federation) as run:
            try:
                for round in run.rounds(max(0, rounds - run.round), max(1, rounds // self.recipe.length.points)):
                    self.say(in_words(round.round, private))
                    came = {} if private else self._newcomers(met, round.index)
                    if came and round.index < rounds:
                        return came
            except _Came as new:
                return new.parties
        return {}

    def _gathered(self, invited: Callable[[], Sequence[str]]) -> Met:
        """Everybody who is invited by then; who has not come yet counts with one sample."""
        came = self.meeting.gather(self.patience.gather, lambda: len(set(invited()) - self._gone().keys()))
        unknown = {**not_yet_known(next(iter(came.values()))), KNOWN: None}
        return {name: came.get(name, unknown) for name in invited()}

    def _part(self, federation: Federation, met: Met) -> None:
        """Who is there hears that it is over; who is not is waited for, and shown the models before it hears it."""
        rounds, shown, told = federation.state.round, _judged(federation), False
        end = time.monotonic() + self.patience.farewell
        while True:
            late = time.monotonic() >= end  # before one looks: whoever has come by then is in time
            here = self.meeting.here().keys() - self.meeting.parted
            if owed := sorted((here & met.keys()) - shown):
                seconds = max(_SHOWING, end - time.monotonic())
                score(replace(federation.plan_, deadline=seconds), federation.engine_, federation.state, owed)
            self.meeting.part(here, rounds)
            parted = self._note_parted()
            gone = parted | self._gone().keys()
            missing = [name for name in met if _is_known(met, name) and name not in gone]
            if not missing or late:
                break
            if not told:
                waits = f"{self.patience.farewell:g} s for {', '.join(missing)}"
                self.say(f"The training is over. Waiting {waits} to come for their models.")
                told = True
            time.sleep(_PAUSE)
        self.meeting.end(rounds)

    def _note_parted(self) -> set[str]:
        """Who was ever told that it is over, and so has its models: it is told again, and not waited for again."""
        file, before = self.folder / _PARTED, parted_in(self.folder)
        parted = before | self.meeting.parted
        if parted != before:
            with clear_errors(self.folder):
                atomic.replace(file, json.dumps(sorted(parted)).encode(), f".{_PARTED}", atomic.PRIVATE)
        return parted

    def _newcomers(self, met: Met, round: int) -> Met:
        """Who has come and is not part of the training yet, or was not known."""
        came = {name: SINCE if name not in met else KNOWN for name in self.meeting.here() if not _is_known(met, name)}
        return {name: {**self.meeting.described[name], mark: round} for name, mark in came.items()}

    def _run(self, federation: Federation) -> Run:
        if is_run(self._place):
            return Run.resume(self._place, federation)
        return Run.start(self._place, federation, self.recipe.text, "always")

    @property
    def _place(self) -> Path:
        return self.folder / TRAINING

    def _gone(self) -> dict[str, str]:
        return {**self.barred(), **self.meeting.forgotten}

    def _federation(self, met: Met) -> Federation:
        settings = {key: value for key, value in self.recipe.settings().items() if key != "engine"}

        def look() -> None:
            """Whoever is not part of it yet need not wait for the end of a round that cannot begin."""
            new = {name: said for name, said in self._newcomers(met, federation.state.round).items() if name not in met}
            if new and promised(federation.plan_) is None:
                raise _Came(new)

        federation = Federation(
            self.recipe.model(),
            elsewhere(met),
            self.recipe.algorithm(),
            seed=self.recipe.length.seed,
            engine=Silos(self.meeting, self.patience, self.say, self._gone, look),
            deadline=self.patience.limit,
            budget=BUDGET,
            **settings,
            **self.sealed,
        )
        federation.state  # noqa: B018  whoever does not fit is found before it is noted as one who does
        self.meeting.net = federation.plan_.net  # the same once more would be one model more in memory
        with clear_errors(self.folder):
            atomic.replace(self.folder / _MET, json.dumps(met).encode(), f".{_MET}", atomic.PRIVATE)
        return federation


class _Came(Exception):
    """Somebody who was invited later has come while a round could not begin."""

    def __init__(self, parties: Met) -> None:
        super().__init__(", ".join(parties))
        self.parties = parties


def _judged(federation: Federation) -> set[str]:
    """Who has judged the models as they are now, and so has them. Who has no test set is not known by that."""
    scores = federation.scores_now
    if scores is None:
        return set()
    return {name for name, score in zip(scores.names, scores.center.values, strict=True) if not math.isnan(score)}


def _is_known(met: Met, name: str) -> bool:
    """Whether a party is part of a training, and has said what data it has."""
    return name in met and met[name].get(KNOWN, 0) is not None


def met_in(folder: Path) -> Met:
    """Who is part of the training in a folder; nobody before it has begun."""
    return _noted(folder / _MET, dict)


def parted_in(folder: Path) -> set[str]:
    """Who was told that the training in a folder is over."""
    return set(_noted(folder / _PARTED, list))


def _noted(file: Path, kind: type[Noted]) -> Noted:
    """What was written into a file, of which there is nothing before it is there."""
    try:
        found = json.loads(file.read_text()) if file.exists() else kind()
    except (OSError, ValueError) as error:
        raise StateError(f"{file} is not as Descant wrote it: {error}. Restore it from a copy.") from error
    if not isinstance(found, kind):
        raise StateError(f"{file} is not as Descant wrote it. Restore it from a copy.")
    return found


def rounds_in(folder: Path) -> int:
    """How many rounds of the training in a folder are done."""
    return read(folder / TRAINING).round if is_run(folder / TRAINING) else 0


def first_rounds(folder: Path) -> dict[str, int]:
    """The first round that each party of the training in a folder could take part in."""
    return {name: said.get(SINCE, 0) + 1 for name, said in met_in(folder).items()}


def in_words(round: Round, privacy: Privacy | None = None) -> str:
    """A round as the organiser reads it: who counted, who was stood in for, and what did not count of whom, and why."""
    stood_in = f", and stand-ins for {', '.join(round.stood_in)}" if round.stood_in else ""
    spent = "" if privacy is None else f", {told(round.tuning.get(EPSILON), privacy.budget, privacy.delta)}"
    refused = "".join(f"; {_refused(one, round.accepted)}" for one in round.refusals)
    return f"Round {round.index}: {round.told}, {counted(len(round.accepted))}{stood_in}{spent}{refused}"


def _refused(refusal: Refusal, accepted: Collection[str]) -> str:
    """Of who counted all the same it is what it left beside its model."""
    whom = refusal.party if refusal.party in accepted else f"without {refusal.party}"
    return f"{whom}: {refusal.reason.rstrip('.')}"


def counted(parties: int) -> str:
    """So many parties.

    >>> counted(1), counted(2)
    ('1 party', '2 parties')
    """
    return f"{parties} part{'y' if parties == 1 else 'ies'}"
