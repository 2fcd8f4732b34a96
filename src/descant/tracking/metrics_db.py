"""The numbers of a run in one SQLite file: parties, rounds, participation, and scores by party.

    SELECT party, personal, global_model FROM scores JOIN parties USING (id) WHERE round = 50

It uses SQLite's rollback journal, not a write-ahead log. So between commits the file is complete by itself, and a run's
folder can be copied. Every commit is synced.
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

_PRIMARY_KEY = "round INTEGER, id INTEGER REFERENCES parties, PRIMARY KEY (round, id)"
_SCHEMA = (
    "CREATE TABLE parties (id INTEGER PRIMARY KEY, party TEXT UNIQUE, samples INTEGER)",
    "CREATE TABLE rounds (round INTEGER, metric TEXT, value REAL, PRIMARY KEY (round, metric)) WITHOUT ROWID",
    f"CREATE TABLE participation (accepted INTEGER, {_PRIMARY_KEY}) WITHOUT ROWID",  # 0: no, 1: yes, 2: by proxy
    f"CREATE TABLE scores (personal REAL, global_model REAL, majority REAL, {_PRIMARY_KEY}) WITHOUT ROWID",
)
_BUSY_TIMEOUT = 60.0  # seconds to wait for a reader


class MetricsDatabase:
    """Writer of a run's numbers: rows wait in memory for :meth:`commit`, and a repeated round replaces itself."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with _database_errors(file):
            self._connection = _connect(file)
            parties = self._connection.execute("SELECT party, id, samples FROM parties").fetchall()
            self._ids = {name: id for name, id, _ in parties}
            self._samples = {name: samples for name, _, samples in parties}
            self._columns = _columns(self._connection)
        self._pending: list[tuple[str, list[tuple[Any, ...]]]] = []

    @classmethod
    def create(cls, file: Path, samples: Mapping[str, int]) -> MetricsDatabase:
        """Create a database file, in place of one left by a killed start."""
        for leftover in (file.with_name(f"{file.name}-journal"), file):
            atomic.remove(leftover)
        with closing(_connect(file, "rwc")) as connection:
            connection.execute("BEGIN")
            for statement in _SCHEMA:
                connection.execute(statement)
            rows = [(id, name, count) for id, (name, count) in enumerate(samples.items())]
            connection.executemany("INSERT INTO parties VALUES (?, ?, ?)", rows)
            atomic.commit(connection)
        atomic.sync_folder(file.parent)
        return cls(file)

    def add_parties(self, samples: Mapping[str, int]) -> None:
        """Add parties that joined later, after the others, and update changed sample counts."""
        self._ids |= {name: id for id, name in enumerate(samples) if name not in self._ids}
        rows = [(self._ids[name], name, count) for name, count in samples.items() if self._samples.get(name) != count]
        self._samples = dict(samples)
        self._pending.append(("INSERT OR REPLACE INTO parties VALUES (?, ?, ?)", rows))

    def add_round(self, round: int, numbers: Mapping[str, float], participation: Mapping[str, int]) -> None:
        """Add a round's numbers and its participants: 0 not accepted, 1 accepted, 2 replaced by a proxy."""
        rows = [(round, metric, value) for metric, value in numbers.items()]
        self._pending.append(("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", rows))
        rows_by_party = [(round, self._ids[name], counts) for name, counts in participation.items()]
        self._pending.append(
            ("INSERT OR REPLACE INTO participation (round, id, accepted) VALUES (?, ?, ?)", rows_by_party)
        )

    def add_scores(self, round: int, names: Sequence[str], columns: Mapping[str, Numbers]) -> None:
        """Add one number per party and column; a new column is added to the table."""
        self._columns += [name for name in columns if name not in self._columns]
        column_list = ", ".join(map(_quoted, columns))
        placeholders = ", ".join("?" for _ in range(len(columns) + 2))
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rows = [(round, self._ids[name], *scores) for name, scores in zip(names, values, strict=True)]
        self._pending.append(
            (f"INSERT OR REPLACE INTO scores (round, id, {column_list}) VALUES ({placeholders})", rows)
        )

    def is_missing_scores(self, round: int) -> bool:
        """Return True if the round was recorded and its scores were not."""
        recorded, scored = (f"EXISTS (SELECT 1 FROM {table} WHERE round = :round)" for table in ("rounds", "scores"))
        return bool(self._connection.execute(f"SELECT {recorded} AND NOT {scored}", {"round": round}).fetchone()[0])

    def delete_after(self, round: int) -> None:
        """Delete later rounds: they will be repeated."""
        for table in ("rounds", "participation", "scores"):
            self._pending.append((f"DELETE FROM {table} WHERE round > ?", [(round,)]))

    def commit(self) -> None:
        """Write all pending rows to disk; if that fails, the next call writes them. It is idempotent."""
        if not self._pending:
            return
        with _database_errors(self._file):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                existing = _columns(self._connection)
                for name in self._columns:
                    if name not in existing:
                        self._connection.execute(f"ALTER TABLE scores ADD COLUMN {_quoted(name)} REAL")
                for statement, rows in self._pending:
                    self._connection.executemany(statement, rows)
                atomic.commit(self._connection)
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        self._pending = []

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, eq=False)
class RunMetrics:
    """The content of the tables as arrays: R rounds, S of them scored, K parties."""

    parties: tuple[str, ...]
    samples: NDArray[np.int64]  # [K]
    rounds: NDArray[np.int64]  # [R]
    metrics: Mapping[str, Numbers]  # name -> [R], nan where a round has none
    participated: NDArray[np.bool_]  # [R, K]
    accepted: NDArray[np.bool_]  # [R, K]
    proxied: NDArray[np.bool_]  # [R, K]
    scored_rounds: NDArray[np.int64]  # [S]
    scores: Mapping[str, Numbers]  # personal, global_model, majority, ... -> [S, K], nan for a party without a score


def read_metrics(file: Path) -> RunMetrics:
    """Read all tables in one transaction."""
    with closing(_connect(file)) as connection:
        connection.execute("BEGIN")
        parties = connection.execute("SELECT party, samples FROM parties ORDER BY id").fetchall()
        values = connection.execute("SELECT round, metric, value FROM rounds").fetchall()
        names = [name for name in _columns(connection) if name not in ("round", "id")]
        key = f"round * {len(parties)} + id"  # one number instead of two: there may be a million rows
        cells = connection.execute(f"SELECT ({key}) * 3 + accepted FROM participation")
        participation = np.fromiter(chain.from_iterable(cells), dtype=np.int64)
        column_list = ", ".join(map(_quoted, names))
        rows = connection.execute(f"SELECT {key}, {column_list} FROM scores").fetchall()
        scores = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(names))  # NULL becomes nan
    rounds = np.array(sorted({row[0] for row in values}), dtype=np.int64)
    row_of = {round: i for i, round in enumerate(rounds.tolist())}
    metrics = {metric: np.full(len(rounds), np.nan) for _, metric, _ in values}
    for round, metric, value in values:
        metrics[metric][row_of[round]] = np.nan if value is None else value
    status = np.full((len(rounds), len(parties)), -1)
    row_rounds, party = np.divmod(participation // 3, len(parties))
    status[np.searchsorted(rounds, row_rounds), party] = participation % 3
    row_rounds, party = np.divmod(scores[:, 0].astype(np.int64), len(parties))
    scored_rounds, row = np.unique(row_rounds, return_inverse=True)
    columns = {name: np.full((len(scored_rounds), len(parties)), np.nan) for name in names}
    for i, name in enumerate(names, 1):
        columns[name][row, party] = scores[:, i]
    samples = np.array([count for _, count in parties], dtype=np.int64)
    party_names = tuple(name for name, _ in parties)
    participated = (status >= 0) & (status < 2)
    return RunMetrics(
        party_names,
        samples,
        rounds,
        metrics=metrics,
        participated=participated,
        accepted=status == 1,
        proxied=status == 2,
        scored_rounds=scored_rounds,
        scores=columns,
    )


def _connect(file: Path, mode: str = "rw") -> sqlite3.Connection:
    """Open a file, which may be read-only; SQLite rolls back a transaction that was killed."""
    address = f"{file.resolve().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        address, uri=True, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _columns(connection: sqlite3.Connection) -> list[str]:
    return [row[1] for row in connection.execute("PRAGMA table_info(scores)")]


@contextmanager
def _database_errors(file: Path) -> Iterator[None]:
    """Turn errors of a damaged or missing file into StateError; other errors pass."""
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
