"""A run that is being recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from ..errors import SettingError, StateError
from ..storage import atomic, check_replaceable, clear_errors
from ..storage.event_log import Lines, Log, read
from ..storage.lock import Lock
from .metrics_db import Tables
from .run_folder import EVENTS, LOCK, METRICS, MODELS, OURS, RECIPE, snapshots
from .snapshot import check_reached, load_newest, manifest, settings_of

if TYPE_CHECKING:
    from ..analysis.scores import Scores
    from ..federation import Federation, ScoredRound
    from ..rounds.state import Round

Sync: TypeAlias = int | Literal["spaced", "always"]
"""When a snapshot is taken: every so many rounds, spaced by what they cost, or before each round is handed out."""

_SPACING = 40  # times as long as a snapshot took passes before the next one
_KEPT = 2  # snapshots


class Run:
    """A federation whose rounds go into a folder. Made by :meth:`start` or :meth:`resume`; it is its only writer."""

    def __init__(self, folder: Path, federation: Federation, sync: Sync, lock: Lock, log: Log, tables: Tables) -> None:
        self.folder, self.federation, self.sync = folder, federation, sync
        self._lock, self._log, self._tables = lock, log, tables
        self._open = True
        self._saved, self._saved_at, self._cost = self.round, time.perf_counter(), 0.0
        self._noted = self.round
        self._scored = 0  # the round whose scores were noted last

    @classmethod
    def start(cls, folder: str | Path, federation: Federation, recipe: str = "", sync: Sync = "spaced") -> Run:
        """Begin a run in a new or empty folder; the recipe is any text that says how it was made."""
        from ..parties.fingerprints import fingerprints

        place, sync = Path(folder), _sync_for(federation, sync)
        _check_sync(sync)
        if (place / EVENTS).exists():
            raise StateError(f"{place} holds a run already. Resume it (Run.resume, --resume), or give another folder.")
        left = OURS if (place / LOCK).exists() else (EVENTS,)  # the lock comes first: without it, nothing here is ours
        check_replaceable(place, left, in_place=True)
        with clear_errors(place), ExitStack() as undo:
            atomic.make(place)
            lock = Lock(place / LOCK)
            undo.callback(lock.release)
            atomic.replace(place / RECIPE, recipe.encode(), f"{RECIPE}.new")
            tables = Tables.create(place / METRICS, federation.people.samples)
            undo.callback(tables.close)
            run = cls(place, federation, sync, lock, Log(place / EVENTS), tables)
            run._forget(0)  # what is left of a start that was killed
            fingerprints(federation.people)  # read once, so that they are no part of what a snapshot costs
            began = time.perf_counter()
            run._save()
            run._cost = time.perf_counter() - began
            settings = settings_of(run._models(run.round), federation.people.note)
            run.log("begun", round=run.round, sync=sync, settings=settings)
            run._log.flush()  # the folder holds a run from here on
            undo.pop_all()
        return run

    @classmethod
    def resume(cls, folder: str | Path, federation: Federation, sync: Sync | None = None) -> Run:
        """Go on with a run where its last snapshot stands, with a federation made as the first one was."""
        place = Path(folder)
        if not (place / EVENTS).exists():
            raise StateError(f"{place} holds no run that could be resumed. Start one there.")
        with clear_errors(place), ExitStack() as undo:
            lock = Lock(place / LOCK)
            undo.callback(lock.release)
            held = read(place / EVENTS)
            kept: Sync = _sync_for(federation, held.events[0]["sync"] if sync is None else sync)
            _check_sync(kept)
            load_newest(place, federation, strict=held.events[0]["sync"] == "always")
            check_reached(place, held, federation.state.round)
            tables = Tables(place / METRICS)
            undo.callback(tables.close)
            if held.torn:
                atomic.cut(place / EVENTS, held.last.end)
            run = cls(place, federation, kept, lock, Log(place / EVENTS, held.last), tables)
            run._note_resumed(held)
            undo.pop_all()
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(StateError):  # the first error is the one to show
                self.close(f"{kind.__name__}: {error}")

    @property
    def round(self) -> int:
        """The round that the federation stands at."""
        return self.federation.state.round

    def rounds(self, n: int, score_every: int = 0) -> Iterator[ScoredRound]:
        """The federation's next n rounds, recorded; every so many of them, and the last of all, are scored.

        Where a privacy budget ends them before that, the round at which they end is. Scores that the loop's body asks
        for are recorded, too; a round whose scoring broke off is scored first.
        """
        from ..privacy.budget import drawn_once

        self._check_open()
        if score_every and (not n or self.round % score_every == 0):
            self._score_what_lacks()
        count = 0
        for count, scored in enumerate(self.federation.rounds(n), 1):
            self._note(scored)
            if drawn_once(self.federation.plan_):
                self.snapshot()  # parties are shown its centre when they judge it
            if score_every and (scored.index % score_every == 0 or count == n):
                scored.scores  # noqa: B018
            self._note_scores(scored.index, vars(scored).get("scores"))
            if self.sync == "always":
                self.snapshot()
            try:
                yield scored
            finally:
                self._note_scores(scored.index, vars(scored).get("scores"))
            if self._due():
                self.snapshot()
        if score_every and count < n:
            self.snapshot()
            self._score_what_lacks()

    def _score_what_lacks(self) -> None:
        if self._tables.lacks_scores(self.round):
            self._note_scores(self.round, self.federation._measure(self.round))
            self.snapshot()

    def log(self, event: str, **fields: Any) -> None:
        """Add an event; it is on the disk with the next snapshot."""
        self._check_open()
        self._log.add(event, **fields)

    def snapshot(self) -> None:
        """Put everything on the disk now: the numbers and events so far, then the models."""
        self._check_open()
        began = time.perf_counter()
        with clear_errors(self.folder):
            if self.round != self._noted:  # somebody went on without us: the log says where the snapshot stands
                self._log.add("round", round=self.round)
                self._noted = self.round
            self._tables.commit()
            self._log.flush()
            if self.round != self._saved:
                self._save()
        self._saved_at = time.perf_counter()
        self._cost = self._saved_at - began
        self._log.add("snapshot", round=self.round, seconds=round(self._cost, 4))

    def close(self, reason: str = "") -> None:
        """Put everything on the disk and let go of the folder; the reason says why it stopped, if an error did."""
        from ..rounds.checkpoint import models_digest  # torch, which nobody needs who only reads

        if not self._open:
            return
        try:
            self.snapshot()
            whole = manifest(self._models(self.round))["digest"]
            both = {"hash": models_digest(self.federation.state), "snapshot": whole}
            self._log.add("stopped" if reason else "ended", round=self.round, **both, reason=reason)
            with clear_errors(self.folder):
                self._log.flush()
        finally:
            self._open = False
            self._tables.close()
            self._lock.release()

    # ── what is noted ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, scored: ScoredRound) -> None:
        happened, numbers = scored.round, self.federation.history_[-1]
        numbers = {name: v for name, v in numbers.items() if name != "round" and isinstance(v, int | float)}
        came: dict[str, int] = {**dict.fromkeys(happened.present, 0), **dict.fromkeys(happened.stood_in, 2)}
        self._tables.add_round(happened.index, numbers, {**came, **dict.fromkeys(happened.accepted, 1)})
        self._log.add("round", round=happened.index, **numbers)
        self._noted = happened.index
        for refusal in happened.refusals:
            self._log.add("refused", round=happened.index, text=str(refusal))
        for note in filter(None, (happened.note, happened.tuned, _missing_prices(happened))):
            self._log.add("warning", round=happened.index, text=note)

    def _note_scores(self, round: int, scores: Scores | None) -> None:
        """Scores, once somebody has asked for them."""
        from ..analysis.scores import Column

        if scores is None or round == self._scored:
            return
        self._scored, self._saved = round, -1  # a snapshot of this round that is there knows nothing of them
        columns = {name: column for name, column in vars(scores).items() if isinstance(column, Column)}
        self._tables.add_scores(round, scores.names, {name: c.values for name, c in columns.items()})
        means = {name: column.mean for name, column in columns.items()}
        better = scores.own.higher_is_better
        self._log.add("scored", round=round, metric=scores.metric, higher_is_better=better, **means)

    def _note_resumed(self, held: Lines) -> None:
        """What lies beyond the snapshot comes again: it is taken out of the tables, and the log says so."""
        self._tables.add_parties(self.federation.people.samples)
        self._tables.cut(self.round)
        self._tables.commit()
        self._forget(_KEPT)
        self.log("resumed", round=self.round, torn=held.torn)
        self._log.flush()

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _due(self) -> bool:
        if isinstance(self.sync, int):
            return self.round % self.sync == 0
        return self.sync == "spaced" and time.perf_counter() - self._saved_at > _SPACING * self._cost

    def _save(self) -> None:
        self.federation.save(self._models(self.round))
        self._saved = self.round
        self._forget(_KEPT)

    def _models(self, round: int) -> Path:
        return self.folder / MODELS / f"{round:08d}"

    def _forget(self, keep: int) -> None:
        """Remove snapshots beyond the round, broken ones, and all but the last few; the manifest goes first."""
        kept = [place for place in snapshots(self.folder) if place <= self._models(self.round)][:keep]
        for place in (self.folder / MODELS).glob("[0-9]" * 8):
            if place not in kept:
                atomic.remove(place / "state.json")
                for file in (*place.glob("*.safetensors"), *place.glob("state-*.json")):
                    atomic.remove(file)
                if not any(place.iterdir()):  # what somebody else put there (a desktop's .DS_Store) keeps the folder
                    atomic.remove(place)

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(f"The run in {self.folder} was closed. Go on with Run.resume.")


def _missing_prices(round: Round) -> str:
    """Say which desks could not make up prices, and why; "" if all could."""
    if not round.real_only:
        return ""
    from ..portfolio.price_augmentation import lacking

    return lacking(round.real_only)


def _sync_for(federation: Federation, sync: Sync) -> Sync:
    """Noise that nobody can draw again is on the disk before anybody sees it, so that no round is let out twice."""
    from ..privacy.budget import drawn_once

    if sync == "always" or not drawn_once(federation.plan_):
        return sync
    if sync != "spaced":
        raise SettingError(
            f"{federation.algorithm.name} draws noise that cannot be drawn again: a run that goes on from an older "
            f"snapshot would give its rounds away twice. Its 'sync' must be 'always'. Got {sync!r}."
        )
    return "always"


def _check_sync(sync: object) -> None:
    number = isinstance(sync, int) and not isinstance(sync, bool) and sync >= 1
    if not number and sync not in ("spaced", "always"):
        raise SettingError(f"'sync' must be 'spaced', 'always' or a number of rounds >= 1. Got {sync!r}.")
