"""Reader of recorded runs: needs only the folder, also while the run is still running."""

from __future__ import annotations

import csv
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from ..core.formats import RUN_FORMAT, earlier_format_error
from ..errors import StateError
from ..storage import event_log
from ..storage.lock import lock_holder
from . import metrics_db
from .run_folder import EVENTS_FILE, LOCK_FILE, METRICS_FILE, RECIPE_FILE, last_round, snapshots

T = TypeVar("T")
RunStatus: TypeAlias = Literal["running", "finished", "interrupted", "damaged"]


@dataclass(frozen=True, eq=False, repr=False)
class RecordedRun:
    """A run as its folder describes it; the arrays in :attr:`numbers` are read on first use."""

    folder: Path
    state: RunStatus
    round: int  # the last one recorded
    reason: str  # the process that runs it, or why it was interrupted or is damaged
    events: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        return f"<Recorded run in {self.folder}: {self.state} at round {self.round}>"

    @property
    def settings(self) -> dict[str, Any]:
        """The federation's settings: seed, algorithm, solver, loss, versions."""
        return dict(self.events[0]["settings"]) if self.events else {}

    @property
    def started_at(self) -> str:
        """The time of the start, in UTC."""
        return str(self.events[0]["at"]) if self.events else ""

    @property
    def warnings(self) -> list[str]:
        """All warnings, with their round if they have one."""
        events = [event for event in self.events if event["event"] == "warning"]
        return [f"Round {event['round']}: {event['text']}" if "round" in event else event["text"] for event in events]

    @property
    def metric(self) -> str:
        """The name of the scores' metric, such as "accuracy"; "" if nothing was scored."""
        return str(self._scored_event.get("metric", ""))

    @property
    def higher_is_better(self) -> bool:
        return bool(self._scored_event.get("higher_is_better", True))

    @property
    def snapshot(self) -> Path | None:
        """The newest snapshot: a folder for `Federation.load`."""
        return next(iter(snapshots(self.folder)), None)

    @cached_property
    def recipe(self) -> str:
        """The recipe as given."""
        return _read_or_raise(self.folder / RECIPE_FILE, _text)

    @cached_property
    def numbers(self) -> metrics_db.RunMetrics:
        """Parties, rounds, participation and scores as arrays."""
        return _read_or_raise(self.folder / METRICS_FILE, metrics_db.read_metrics)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record per round, and after a scored round one per party (round, party, personal, ...)."""
        tables = self.numbers
        row = {round: s for s, round in enumerate(tables.scored_rounds.tolist())}
        for r, round in enumerate(tables.rounds.tolist()):
            yield {"round": round, **{name: _finite_or_none(values[r]) for name, values in tables.metrics.items()}}
            if round in row:
                columns = {name: values[row[round]].tolist() for name, values in tables.scores.items()}
                for k, party in enumerate(tables.parties):
                    scores = {name: _finite_or_none(values[k]) for name, values in columns.items()}
                    if any(value is not None for value in scores.values()):
                        yield {"round": round, "party": party, **scores}

    def to_jsonl(self, file: str | Path) -> Path:
        """Write the records as JSON lines."""
        with Path(file).open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in self.records())
        return Path(file)

    def to_csv(self, file: str | Path) -> Path:
        """Write the records as one table; the line of a round has no party, and unknown values are empty."""
        names = ["round", "party", *self.numbers.metrics]
        names += [name for name in self.numbers.scores if name not in names]
        with Path(file).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, names, restval="")
            writer.writeheader()
            writer.writerows(self.records())
        return Path(file)

    @property
    def _scored_event(self) -> Mapping[str, Any]:
        return next((event for event in reversed(self.events) if event["event"] == "scored"), {})


def is_run(folder: str | Path) -> bool:
    """Return True if there is a run to resume; a killed start leaves none and can be repeated."""
    return (Path(folder) / EVENTS_FILE).is_file()


def read_run(folder: str | Path) -> RecordedRun:
    """Read the run in a folder; a damaged log is an error that names the line."""
    target = Path(folder)
    if not is_run(target):
        raise StateError(f"{target} holds no run: there is no {EVENTS_FILE} in it.")
    events = _read_or_raise(target / EVENTS_FILE, event_log.read_log).events
    if events[0].get("settings", {}).get("version", RUN_FORMAT) in range(RUN_FORMAT):
        raise earlier_format_error(target)
    at = last_round(events)
    last = events[-1]
    running = lock_holder(target / LOCK_FILE)
    if running:
        return RecordedRun(target, "running", at, reason=running, events=events)
    if last["event"] == "finished":
        return RecordedRun(target, "finished", at, reason="", events=events)
    reason = last["reason"] if last["event"] == "failed" else "it was killed, or could not write to disk"
    return RecordedRun(target, "interrupted", at, reason=reason, events=events)


def find_runs(folder: str | Path) -> list[RecordedRun]:
    """Read every run in a folder and below it, the oldest first; a damaged one has the state "damaged"."""
    runs = []
    for file in sorted(Path(folder).rglob(EVENTS_FILE)):
        try:
            runs.append(read_run(file.parent))
        except StateError as error:
            runs.append(RecordedRun(file.parent, "damaged", 0, reason=str(error), events=()))
    return sorted(runs, key=lambda run: run.started_at)


def _read_or_raise(file: Path, reader: Callable[[Path], T]) -> T:
    try:
        return reader(file)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise StateError(f"{file} cannot be read: {error}. Restore it from a copy.") from error


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
