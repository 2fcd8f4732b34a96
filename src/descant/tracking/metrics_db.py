"""The numbers of a run in one SQLite file, for everybody's tools: parties, rounds, who took part, scores by party.

    SELECT party, own, center FROM scores JOIN parties USING (id) WHERE round = 50

The journal is SQLite's own rollback journal, not a write-ahead log: between commits the file is whole by itself, so
that a run's folder can be copied. Every commit is synced.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from ..storage import atomic

Numbers = NDArray[np.float64]

_KEY = "round INTEGER, id INTEGER REFERENCES parties, PRIMARY KEY (round, id)"
_SCHEMA = (
    "CREATE TABLE parties (id INTEGER PRIMARY KEY, party TEXT UNIQUE, samples INTEGER)",
    "CREATE TABLE rounds (round INTEGER, metric TEXT, value REAL, PRIMARY KEY (round, metric)) WITHOUT ROWID",
    f"CREATE TABLE attendance (accepted INTEGER, {_KEY}) WITHOUT ROWID",  # 0: no, 1: yes, 2: stood in for
    f"CREATE TABLE scores (own REAL, center REAL, majority REAL, {_KEY}) WITHOUT ROWID",
)
_PATIENCE = 60.0  # seconds to wait for a reader


class Tables:
    """What is added waits in memory for :meth:`commit`; a round that comes again replaces itself."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with _damage_named(file):
            self._connection = _connect(file)
            held = self._connection.execute("SELECT party, id, samples FROM parties").fetchall()
            self._ids = {name: id for name, id, _ in held}
            self._samples = {name: samples for name, _, samples in held}
            self._columns = _columns(self._connection)
        self._waiting: list[tuple[str, list[tuple[Any, ...]]]] = []

    @classmethod
    def create(cls, file: Path, samples: Mapping[str, int]) -> Tables:
        """A new file, in place of one that was left over."""
        for left in (file.with_name(f"{file.name}-journal"), file):
            atomic.remove(left)
        with closing(_connect(file, "rwc")) as connection:
            connection.execute("BEGIN")
            for statement in _SCHEMA:
                connection.execute(statement)
            rows = [(id, name, count) for id, (name, count) in enumerate(samples.items())]
            connection.executemany("INSERT INTO parties VALUES (?, ?, ?)", rows)
            atomic.commit(connection)
        atomic.settle(file.parent)
        return cls(file)

    def add_parties(self, samples: Mapping[str, int]) -> None:
        """Parties that have come since, behind the others, and those of whom more is known now."""
        self._ids |= {name: id for id, name in enumerate(samples) if name not in self._ids}
        rows = [(self._ids[name], name, count) for name, count in samples.items() if self._samples.get(name) != count]
        self._samples = dict(samples)
        self._waiting.append(("INSERT OR REPLACE INTO parties VALUES (?, ?, ?)", rows))

    def add_round(self, round: int, numbers: Mapping[str, float], accepted: Mapping[str, int]) -> None:
        """The numbers of a round, and everybody who took part with whether the report was accepted, or stood in for."""
        rows = [(round, metric, value) for metric, value in numbers.items()]
        self._waiting.append(("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", rows))
        present = [(round, self._ids[name], counts) for name, counts in accepted.items()]
        self._waiting.append(("INSERT OR REPLACE INTO attendance (round, id, accepted) VALUES (?, ?, ?)", present))

    def add_scores(self, round: int, names: Sequence[str], columns: Mapping[str, Numbers]) -> None:
        """A number a party in every column; one that is new becomes a column of the table."""
        self._columns += [name for name in columns if name not in self._columns]
        into = ", ".join(map(_quoted, columns))
        marks = ", ".join("?" for _ in range(len(columns) + 2))
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rows = [(round, self._ids[name], *found) for name, found in zip(names, values, strict=True)]
        self._waiting.append((f"INSERT OR REPLACE INTO scores (round, id, {into}) VALUES ({marks})", rows))

    def lacks_scores(self, round: int) -> bool:
        """Whether a round is on record, and its scores are not."""
        noted, scored = (f"EXISTS (SELECT 1 FROM {of} WHERE round = :round)" for of in ("rounds", "scores"))
        return bool(self._connection.execute(f"SELECT {noted} AND NOT {scored}", {"round": round}).fetchone()[0])

    def cut(self, round: int) -> None:
        """Forget what lies beyond a round: it comes again."""
        for table in ("rounds", "attendance", "scores"):
            self._waiting.append((f"DELETE FROM {table} WHERE round > ?", [(round,)]))

    def commit(self) -> None:
        """All that was added is on the disk; if that fails it waits for the next time. Done twice, it is the same."""
        if not self._waiting:
            return
        with _damage_named(self._file):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                there = _columns(self._connection)
                for name in self._columns:
                    if name not in there:
                        self._connection.execute(f"ALTER TABLE scores ADD COLUMN {_quoted(name)} REAL")
                for statement, rows in self._waiting:
                    self._connection.executemany(statement, rows)
                atomic.commit(self._connection)
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        self._waiting = []

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, eq=False)
class Held:
    """What the tables hold, as arrays: R rounds, S of them scored, K parties."""

    parties: tuple[str, ...]
    samples: NDArray[np.int64]  # [K]
    round: NDArray[np.int64]  # [R]
    metrics: Mapping[str, Numbers]  # name -> [R], nan where a round has none
    present: NDArray[np.bool_]  # [R, K]
    accepted: NDArray[np.bool_]  # [R, K]
    stood_in: NDArray[np.bool_]  # [R, K]
    scored: NDArray[np.int64]  # [S]
    scores: Mapping[str, Numbers]  # own, center, majority, ... -> [S, K], nan for a party without a score


def read(file: Path) -> Held:
    """Everything in the tables, at one moment."""
    with closing(_connect(file)) as connection:
        connection.execute("BEGIN")
        parties = connection.execute("SELECT party, samples FROM parties ORDER BY id").fetchall()
        values = connection.execute("SELECT round, metric, value FROM rounds").fetchall()
        names = [name for name in _columns(connection) if name not in ("round", "id")]
        key = f"round * {len(parties)} + id"  # one number in place of two: there may be a million rows
        cells = connection.execute(f"SELECT ({key}) * 3 + accepted FROM attendance")
        attendance = np.fromiter(chain.from_iterable(cells), dtype=np.int64)
        wanted = ", ".join(map(_quoted, names))
        rows = connection.execute(f"SELECT {key}, {wanted} FROM scores").fetchall()
        scores = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(names))  # NULL becomes nan
    rounds = np.array(sorted({row[0] for row in values}), dtype=np.int64)
    place = {round: i for i, round in enumerate(rounds.tolist())}
    metrics = {metric: np.full(len(rounds), np.nan) for _, metric, _ in values}
    for round, metric, value in values:
        metrics[metric][place[round]] = np.nan if value is None else value
    came = np.full((len(rounds), len(parties)), -1)
    at, party = np.divmod(attendance // 3, len(parties))
    came[np.searchsorted(rounds, at), party] = attendance % 3
    at, party = np.divmod(scores[:, 0].astype(np.int64), len(parties))
    scored, row = np.unique(at, return_inverse=True)
    found = {name: np.full((len(scored), len(parties)), np.nan) for name in names}
    for i, name in enumerate(names, 1):
        found[name][row, party] = scores[:, i]
    samples = np.array([count for _, count in parties], dtype=np.int64)
    whole, there = tuple(name for name, _ in parties), (came >= 0) & (came < 2)
    return Held(whole, samples, rounds, metrics, there, came == 1, came == 2, scored, found)


def _connect(file: Path, mode: str = "rw") -> sqlite3.Connection:
    """A file that may be read-only; a transaction that was killed is rolled back by SQLite."""
    address = f"{file.resolve().as_uri()}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _columns(connection: sqlite3.Connection) -> list[str]:
    return [row[1] for row in connection.execute("PRAGMA table_info(scores)")]


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """A file that is damaged or gone is told from one that cannot be written."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        damaged = type(error) is sqlite3.DatabaseError or "no such table" in str(error)
        if not damaged and file.exists():
            raise
        raise StateError(
            f"{file} is {f'damaged: {error}' if file.exists() else 'missing'}. Restore it from a copy; "
            f"the snapshots beside it can still be read by Federation.load."
        ) from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
