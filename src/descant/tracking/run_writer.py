"""Recording of a federation's rounds in a run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from ..errors import SettingError, StateError
from ..storage import atomic, check_replaceable, write_errors
from ..storage.event_log import EventLog, LogContent, read_log
from ..storage.lock import FolderLock
from .metrics_db import MetricsDatabase
from .run_folder import EVENTS_FILE, LOCK_FILE, METRICS_FILE, MODELS_FOLDER, RECIPE_FILE, RUN_FILES, snapshots
from .snapshot import check_log_reaches, load_newest_snapshot, read_snapshot_manifest, run_settings

if TYPE_CHECKING:
    from ..analysis.scores import Scores
    from ..federation import Federation, ScoredRound
    from ..rounds.state import Round

SnapshotPolicy: TypeAlias = int | Literal["spaced", "always"]
"""Every n rounds, "spaced" by what snapshots cost, or "always": before each round is handed out."""

_SNAPSHOT_SPACING = 40  # the pause between snapshots, in durations of a snapshot
_KEPT_SNAPSHOTS = 2


class Run:
    """A federation whose rounds are recorded in a folder; made by :meth:`start` or :meth:`resume`.

    It is the only writer of that folder.
    """

    def __init__(
        self,
        folder: Path,
        federation: Federation,
        sync: SnapshotPolicy,
        lock: FolderLock,
        log: EventLog,
        metrics: MetricsDatabase,
    ) -> None:
        self.folder = folder
        self.federation = federation
        self.sync = sync
        self._lock = lock
        self._log = log
        self._metrics = metrics
        self._open = True
        self._snapshot_round = self.round
        self._snapshot_time = time.perf_counter()
        self._snapshot_seconds = 0.0
        self._logged_round = self.round
        self._scored_round = 0  # the round whose scores were recorded last

    @classmethod
    def start(
        cls, folder: str | Path, federation: Federation, recipe: str = "", sync: SnapshotPolicy = "spaced"
    ) -> Run:
        """Start a run in a new or empty folder; the recipe is any text that describes how it was made."""
        from ..parties.fingerprints import data_fingerprints

        target = Path(folder)
        sync = _resolve_policy(federation, sync)
        _check_policy(sync)
        if (target / EVENTS_FILE).exists():
            raise StateError(f"{target} already holds a run. Resume it (Run.resume, --resume), or give another folder.")
        # The lock is written first: without it, no file here is ours.
        leftover_files = RUN_FILES if (target / LOCK_FILE).exists() else (EVENTS_FILE,)
        check_replaceable(target, leftover_files, in_place=True)
        with write_errors(target), ExitStack() as undo:
            atomic.make_folder(target)
            lock = FolderLock(target / LOCK_FILE)
            undo.callback(lock.release)
            atomic.replace(target / RECIPE_FILE, recipe.encode(), f"{RECIPE_FILE}.new")
            metrics = MetricsDatabase.create(target / METRICS_FILE, federation.population.samples)
            undo.callback(metrics.close)
            run = cls(target, federation, sync, lock, EventLog(target / EVENTS_FILE), metrics)
            run._remove_snapshots(0)  # left by a killed start
            data_fingerprints(federation.population)  # computed once, so that they do not count as cost of a snapshot
            start_time = time.perf_counter()
            run._write_snapshot()
            run._snapshot_seconds = time.perf_counter() - start_time
            settings = run_settings(run._snapshot_folder(run.round), federation.population.note)
            run.log("started", round=run.round, sync=sync, settings=settings)
            run._log.flush()  # from here on the folder holds a run
            undo.pop_all()
        return run

    @classmethod
    def resume(cls, folder: str | Path, federation: Federation, sync: SnapshotPolicy | None = None) -> Run:
        """Resume a run at its last snapshot, with a federation made like the first one."""
        target = Path(folder)
        if not (target / EVENTS_FILE).exists():
            raise StateError(f"{target} holds no run to resume. Start one there.")
        with write_errors(target), ExitStack() as undo:
            lock = FolderLock(target / LOCK_FILE)
            undo.callback(lock.release)
            content = read_log(target / EVENTS_FILE)
            policy: SnapshotPolicy = _resolve_policy(federation, content.events[0]["sync"] if sync is None else sync)
            _check_policy(policy)
            load_newest_snapshot(target, federation, strict=content.events[0]["sync"] == "always")
            check_log_reaches(target, content, federation.state.round)
            metrics = MetricsDatabase(target / METRICS_FILE)
            undo.callback(metrics.close)
            if content.torn_bytes:
                atomic.truncate(target / EVENTS_FILE, content.last.end)
            run = cls(target, federation, policy, lock, EventLog(target / EVENTS_FILE, content.last), metrics)
            run._record_resume(content)
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
        """The federation's current round."""
        return self.federation.state.round

    def rounds(self, n: int, score_every: int = 0) -> Iterator[ScoredRound]:
        """Run and record the next n rounds; score every `score_every`-th of them and the last one.

        If a privacy budget ends them early, the round at which they end is scored. Scores that the loop's body asks
        for are recorded, too. A round whose scoring was interrupted is scored first.
        """
        from ..privacy.budget import has_unrepeatable_noise

        self._require_open()
        if score_every and (not n or self.round % score_every == 0):
            self._score_if_missing()
        count = 0
        for count, scored in enumerate(self.federation.rounds(n), 1):
            self._record_round(scored)
            if has_unrepeatable_noise(self.federation.plan_):
                self.snapshot()  # before parties receive its global model to evaluate it
            if score_every and (scored.index % score_every == 0 or count == n):
                scored.scores  # noqa: B018
            self._record_scores(scored.index, vars(scored).get("scores"))
            if self.sync == "always":
                self.snapshot()
            try:
                yield scored
            finally:
                self._record_scores(scored.index, vars(scored).get("scores"))
            if self._snapshot_due():
                self.snapshot()
        if score_every and count < n:
            self.snapshot()
            self._score_if_missing()

    def _score_if_missing(self) -> None:
        if self._metrics.is_missing_scores(self.round):
            self._record_scores(self.round, self.federation._compute_scores(self.round))
            self.snapshot()

    def log(self, event: str, **fields: Any) -> None:
        """Add an event; the next snapshot writes it to disk."""
        self._require_open()
        self._log.add(event, **fields)

    def snapshot(self) -> None:
        """Write everything to disk now: first numbers and events, then the models."""
        self._require_open()
        start_time = time.perf_counter()
        with write_errors(self.folder):
            if (
                self.round != self._logged_round
            ):  # rounds were run outside of this recorder: log where the snapshot stands
                self._log.add("round", round=self.round)
                self._logged_round = self.round
            self._metrics.commit()
            self._log.flush()
            if self.round != self._snapshot_round:
                self._write_snapshot()
        self._snapshot_time = time.perf_counter()
        self._snapshot_seconds = self._snapshot_time - start_time
        self._log.add("snapshot", round=self.round, seconds=round(self._snapshot_seconds, 4))

    def close(self, reason: str = "") -> None:
        """Write everything to disk and release the folder; a reason marks the run as failed."""
        from ..rounds.checkpoint import digest_of_models  # imports torch, which reading does not need

        if not self._open:
            return
        try:
            self.snapshot()
            snapshot_digest = read_snapshot_manifest(self._snapshot_folder(self.round))["digest"]
            digests = {"hash": digest_of_models(self.federation.state), "snapshot": snapshot_digest}
            self._log.add("failed" if reason else "finished", round=self.round, **digests, reason=reason)
            with write_errors(self.folder):
                self._log.flush()
        finally:
            self._open = False
            self._metrics.close()
            self._lock.release()

    def _record_round(self, scored: ScoredRound) -> None:
        finished_round = scored.round
        numbers = self.federation.history_[-1]
        numbers = {name: v for name, v in numbers.items() if name != "round" and isinstance(v, int | float)}
        participation: dict[str, int] = {
            **dict.fromkeys(finished_round.participants, 0),
            **dict.fromkeys(finished_round.proxied, 2),
        }
        self._metrics.add_round(
            finished_round.index, numbers, {**participation, **dict.fromkeys(finished_round.accepted, 1)}
        )
        self._log.add("round", round=finished_round.index, **numbers)
        self._logged_round = finished_round.index
        for rejection in finished_round.rejections:
            self._log.add("rejected", round=finished_round.index, text=str(rejection))
        for note in filter(None, (finished_round.note, finished_round.tuner_note, _missing_prices(finished_round))):
            self._log.add("warning", round=finished_round.index, text=note)

    def _record_scores(self, round: int, scores: Scores | None) -> None:
        """Record a round's scores once, if they were computed."""
        from ..analysis.scores import ScoreColumn

        if scores is None or round == self._scored_round:
            return
        self._scored_round = round
        self._snapshot_round = -1  # an existing snapshot of this round lacks them
        columns = {name: column for name, column in vars(scores).items() if isinstance(column, ScoreColumn)}
        self._metrics.add_scores(round, scores.names, {name: c.values for name, c in columns.items()})
        means = {name: column.mean for name, column in columns.items()}
        better = scores.personal.higher_is_better
        self._log.add("scored", round=round, metric=scores.metric, higher_is_better=better, **means)

    def _record_resume(self, content: LogContent) -> None:
        """Delete the rounds after the snapshot, which will be repeated, and log the resumption."""
        self._metrics.add_parties(self.federation.population.samples)
        self._metrics.delete_after(self.round)
        self._metrics.commit()
        self._remove_snapshots(_KEPT_SNAPSHOTS)
        self.log("resumed", round=self.round, torn=content.torn_bytes)
        self._log.flush()

    def _snapshot_due(self) -> bool:
        if isinstance(self.sync, int):
            return self.round % self.sync == 0
        return (
            self.sync == "spaced"
            and time.perf_counter() - self._snapshot_time > _SNAPSHOT_SPACING * self._snapshot_seconds
        )

    def _write_snapshot(self) -> None:
        self.federation.save(self._snapshot_folder(self.round))
        self._snapshot_round = self.round
        self._remove_snapshots(_KEPT_SNAPSHOTS)

    def _snapshot_folder(self, round: int) -> Path:
        return self.folder / MODELS_FOLDER / f"{round:08d}"

    def _remove_snapshots(self, keep: int) -> None:
        """Remove later and incomplete snapshots, and all but the last few; the manifest goes first."""
        newest = self._snapshot_folder(self.round)
        retained = [snapshot for snapshot in snapshots(self.folder) if snapshot <= newest][:keep]
        for place in (self.folder / MODELS_FOLDER).glob("[0-9]" * 8):
            if place not in retained:
                atomic.remove(place / "state.json")
                for file in (*place.glob("*.safetensors"), *place.glob("state-*.json")):
                    atomic.remove(file)
                if not any(place.iterdir()):  # files of other programs (.DS_Store) keep the folder
                    atomic.remove(place)

    def _require_open(self) -> None:
        if not self._open:
            raise StateError(f"The run in {self.folder} is closed. Continue it with Run.resume.")


def _missing_prices(round: Round) -> str:
    """Return which desks could not generate prices, and why; "" if all could."""
    if not round.real_only:
        return ""
    from ..portfolio.price_augmentation import real_only_message

    return real_only_message(round.real_only)


def _resolve_policy(federation: Federation, sync: SnapshotPolicy) -> SnapshotPolicy:
    """Return the snapshot policy; unrepeatable noise needs "always", so that no round is released twice."""
    from ..privacy.budget import has_unrepeatable_noise

    if sync == "always" or not has_unrepeatable_noise(federation.plan_):
        return sync
    if sync != "spaced":
        raise SettingError(
            f"{federation.algorithm.name} draws noise that cannot be drawn again: a run that is resumed from an older "
            f"snapshot would release its rounds twice. Its 'sync' must be 'always'. Got {sync!r}."
        )
    return "always"


def _check_policy(sync: object) -> None:
    valid_interval = isinstance(sync, int) and not isinstance(sync, bool) and sync >= 1
    if not valid_interval and sync not in ("spaced", "always"):
        raise SettingError(f"'sync' must be 'spaced', 'always' or a number of rounds >= 1. Got {sync!r}.")
