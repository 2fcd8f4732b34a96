"""A run that was recorded: read from its folder alone, also while it is still going on."""

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

from ..errors import StateError
from ..storage import event_log
from ..storage.lock import holder
from . import metrics_db
from .run_folder import EVENTS, LOCK, METRICS, RECIPE, reached, snapshots

T = TypeVar("T")
Status: TypeAlias = Literal["running", "ended", "broken", "damaged"]


@dataclass(frozen=True, eq=False, repr=False)
class Recorded:
    """What a run's folder says. The arrays in :attr:`numbers` are read when they are first asked for."""

    folder: Path
    state: Status
    round: int  # the last one on record
    reason: str  # who runs it, or why it is broken or damaged
    events: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        return f"<Recorded run in {self.folder}: {self.state} at round {self.round}>"

    @property
    def settings(self) -> dict[str, Any]:
        """What the federation was made of: seed, algorithm, solver, loss, versions."""
        return dict(self.events[0]["settings"]) if self.events else {}

    @property
    def begun(self) -> str:
        """When, in UTC."""
        return str(self.events[0]["at"]) if self.events else ""

    @property
    def warnings(self) -> list[str]:
        """Every warning, with its round where it has one."""
        found = [event for event in self.events if event["event"] == "warning"]
        return [f"Round {event['round']}: {event['text']}" if "round" in event else event["text"] for event in found]

    @property
    def metric(self) -> str:
        """What the scores measure, such as "accuracy"; "" if nothing was scored."""
        return str(self._scored.get("metric", ""))

    @property
    def higher_is_better(self) -> bool:
        return bool(self._scored.get("higher_is_better", True))

    @property
    def snapshot(self) -> Path | None:
        """The newest snapshot: a folder for `Federation.load`."""
        return next(iter(snapshots(self.folder)), None)

    @cached_property
    def recipe(self) -> str:
        """The recipe as it was given."""
        return _readable(self.folder / RECIPE, _text)

    @cached_property
    def numbers(self) -> metrics_db.Held:
        """Parties, rounds, attendance and scores as arrays."""
        return _readable(self.folder / METRICS, metrics_db.read)

    def records(self) -> Iterator[dict[str, Any]]:
        """One record a round (round, loss, ...), then one a party where it was scored (round, party, own, ...)."""
        held = self.numbers
        row = {round: s for s, round in enumerate(held.scored.tolist())}
        for r, round in enumerate(held.round.tolist()):
            yield {"round": round, **{name: _plain(values[r]) for name, values in held.metrics.items()}}
            if round in row:
                columns = {name: values[row[round]].tolist() for name, values in held.scores.items()}
                for k, party in enumerate(held.parties):
                    scores = {name: _plain(values[k]) for name, values in columns.items()}
                    if any(value is not None for value in scores.values()):
                        yield {"round": round, "party": party, **scores}

    def to_jsonl(self, file: str | Path) -> Path:
        """Write the records, one JSON object a line."""
        with Path(file).open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in self.records())
        return Path(file)

    def to_csv(self, file: str | Path) -> Path:
        """Write the records as one table; a round's own line has no party, and what is not known is empty."""
        names = ["round", "party", *self.numbers.metrics]
        names += [name for name in self.numbers.scores if name not in names]
        with Path(file).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, names, restval="")
            writer.writeheader()
            writer.writerows(self.records())
        return Path(file)

    @property
    def _scored(self) -> Mapping[str, Any]:
        return next((event for event in reversed(self.events) if event["event"] == "scored"), {})


def is_run(folder: str | Path) -> bool:
    """Whether there is a run to resume; a start that was killed half-way left none, and can be done again."""
    return (Path(folder) / EVENTS).is_file()


def read(folder: str | Path) -> Recorded:
    """The run in a folder; a log that was damaged is an error that names the line."""
    place = Path(folder)
    if not is_run(place):
        raise StateError(f"{place} holds no run: there is no {EVENTS} in it.")
    events = _readable(place / EVENTS, event_log.read).events
    at, last, running = reached(events), events[-1], holder(place / LOCK)
    if running:
        return Recorded(place, "running", at, running, events)
    if last["event"] == "ended":
        return Recorded(place, "ended", at, "", events)
    reason = last["reason"] if last["event"] == "stopped" else "it was killed, or could not write any more"
    return Recorded(place, "broken", at, reason, events)


def runs(folder: str | Path) -> list[Recorded]:
    """Every run in a folder and below it, the oldest first; a damaged one says so in its state."""
    found = []
    for file in sorted(Path(folder).rglob(EVENTS)):
        try:
            found.append(read(file.parent))
        except StateError as error:
            found.append(Recorded(file.parent, "damaged", 0, str(error), ()))
    return sorted(found, key=lambda run: run.begun)


def _readable(file: Path, reader: Callable[[Path], T]) -> T:
    try:
        return reader(file)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise StateError(f"{file} cannot be read: {error}. Restore it from a copy.") from error


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
