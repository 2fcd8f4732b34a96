"""Who takes part in a round, and with how much work: drawn, by rule, or from a timetable of who comes and goes.

All of them only choose among the parties that can be reached; each may hand on to another (``attend``).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core import seeds
from ..core.algorithm import Attend, Attending, Hyper
from ..core.settings import setting, unknown
from ..errors import SettingError

Policy: TypeAlias = Literal["keep", "drop"]
_SHOWN = 20  # parties that a message lists


def everyone(attending: Attending) -> dict[str, Hyper]:
    """All who can be reached."""
    return dict.fromkeys(attending.names, attending.hyper)


@dataclass(frozen=True)
class Sample:
    """Some parties, drawn anew each round with equal probability.

    >>> import numpy as np
    >>> len(Sample(2)(Attending(1, ["a", "b", "c"], Hyper(), np.random.default_rng(0))))
    2
    """

    count: int = setting(10, "parties a round", least=1, whole=True)

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        names = attending.names
        chosen = attending.rng.choice(len(names), size=min(self.count, len(names)), replace=False)
        return {names[i]: attending.hyper for i in sorted(chosen.tolist())}


@dataclass(frozen=True)
class Among:
    """Only the first so many parties ever take part; the others are judged all the same, by the centre (ERRATA 15)."""

    first: int = setting(10, "parties that ever take part", least=1, whole=True)
    attend: Attend = setting(everyone, "who of them takes part", apart=True)

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        first = set(islice(attending.everybody or attending.names, self.first))
        return self.attend(replace(attending, names=[name for name in attending.names if name in first]))


@dataclass(frozen=True)
class Stragglers:
    """A share of those who take part does only 1 to E-1 units of its work (FedProx's protocol).

    Their work counts, or is dropped as if they had not come (``policy``, ERRATA 26). The draws do not depend on the
    policy: with one seed the same parties straggle in every method.

    >>> import numpy as np
    >>> attending = Attending(1, ["a", "b", "c", "d"], Hyper(work=20), np.random.default_rng(0))
    >>> [hyper.work for hyper in Stragglers(0.5, policy="drop")(attending).values()]
    [20, 20]
    """

    share: float = setting(0.9, "of those who take part, how many straggle", least=0, most=1)
    attend: Attend = setting(everyone, "who takes part", apart=True)
    policy: Policy = setting("keep", "whether their work counts (ERRATA 26)", one_of=("keep", "drop"))

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        present, rng = self.attend(attending), attending.rng
        slow = rng.permutation(list(present))[: round(self.share * len(present))].tolist()
        less = {name: int(rng.integers(1, max(2, present[name].work))) for name in slow}
        if self.policy == "keep":
            return present | {
                name: replace(present[name], work=min(present[name].work, work)) for name, work in less.items()
            }
        if present and len(slow) == len(present):
            raise SettingError(
                f"All {len(present)} parties of a round straggle at a share of {self.share:g}, and the policy 'drop' "
                "leaves nobody. Lower the share, let more parties attend, or keep their work."
            )
        return {name: full for name, full in present.items() if name not in less}


# ── parties that come and go ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Comes:
    """Every party comes with some probability, by a stream of its own, and stays for ``stint`` rounds at a time."""

    probability: float = setting(0.5, "that a party comes", least=0, most=1)
    stint: int = setting(1, "rounds until it is drawn again whether it comes", least=1, whole=True)
    attend: Attend = setting(everyone, "who of those that come takes part", apart=True)

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        stint = (attending.round - 1) // self.stint
        draws = {name: seeds.stream(attending.seed, stint, name, "comes").random() for name in attending.names}
        return self.attend(replace(attending, names=[n for n, draw in draws.items() if draw < self.probability]))


@dataclass(frozen=True)
class Every:
    """Parties that come every ``n``-th round, each from a first one on; those that are not named always come.

    >>> import numpy as np
    >>> weekly = Every(7, {"a": 1, "b": 3})
    >>> [list(weekly(Attending(round, ["a", "b"], Hyper(), np.random.default_rng(0)))) for round in (1, 2, 3, 8)]
    [['a'], [], ['b'], ['a']]
    """

    n: int = setting(7, "rounds from one time to the next", least=1, whole=True)
    first: Mapping[str, int] = field(default_factory=dict)  # by party: the round in which it comes first
    attend: Attend = setting(everyone, "who of those that come takes part", apart=True)

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        for name, first in self.first.items():
            _check_known(name, attending, "The 'first' of Every")
            if not isinstance(first, int) or isinstance(first, bool) or first < 1:
                raise SettingError(f"The 'first' of Every must be rounds: whole numbers >= 1. Got {first!r:.40}.")
        since = {name: attending.round - self.first.get(name, attending.round) for name in attending.names}
        return self.attend(replace(attending, names=[n for n, s in since.items() if s >= 0 and s % self.n == 0]))


@dataclass(frozen=True)
class Span:
    """A party is there from one round to another, both included."""

    party: str
    first: int = setting(1, "the first round", least=1, whole=True)
    last: int | None = setting(None, "the last round; None: it stays; 0: it never comes", least=0, whole=True)
    row: int = field(default=0, repr=False, compare=False)  # where it was read, for messages


@dataclass(frozen=True)
class Timetable:
    """Who is there when, by spans of rounds: parties join late, leave and return. Who has no span is always there.

    Without stand-ins only those present count: Tuor et al. (2021), eq. (4).

    >>> import numpy as np
    >>> table = Timetable.of([{"party": "a", "from": 1, "to": 4}, {"party": "a", "from": 7}])
    >>> [len(table(Attending(round, ["a", "b"], Hyper(), np.random.default_rng(0)))) for round in (4, 5, 7)]
    [2, 1, 2]
    """

    spans: tuple[Span, ...]
    attend: Attend = setting(everyone, "who of those that are there takes part", apart=True)
    source: str = field(default="the schedule", repr=False, compare=False)  # what messages call it

    @classmethod
    def of(
        cls, rows: Iterable[Mapping[str, Any]], attend: Attend = everyone, source: str = "the schedule"
    ) -> Timetable:
        """Of records such as ``{"party": "a", "from": 1, "to": 4}``; without "to" it stays, "to" 0: it never comes."""
        return cls(tuple(_span(row, at, source) for at, row in enumerate(rows, 1)), attend, source)

    @classmethod
    def read(cls, file: str | Path, attend: Attend = everyone) -> Timetable:
        """Of a CSV file: a line a span (``party,from,to``), or a line a party with 0 or 1 a round (``party,1,2,…``).

        After the last round of such a trace its parties are away. Messages count rows as the file does.
        """
        (_, head), *lines = _lines(file)
        head = [cell.strip() for cell in head]
        if head == ["party", "from", "to"]:
            return cls(
                tuple(_span(_record(head, line, at, file), at, str(file)) for at, line in lines), attend, str(file)
            )
        if len(head) > 1 and head == ["party", *map(str, range(1, len(head)))]:
            _check_once(lines, file)
            spans = (span for at, line in lines for span in _runs(line, len(head), at, str(file)))
            return cls(tuple(spans), attend, str(file))
        raise SettingError(
            f"The first line of {file} must be party,from,to or, for a trace, party,1,2,3 and so on. Got "
            f"{','.join(head)!r:.80}."
        )

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        self._check(attending)
        listed = {span.party for span in self.spans}
        there = {span.party for span in self.spans if _covers(span, attending.round)}
        return self.attend(replace(attending, names=[n for n in attending.names if n in there or n not in listed]))

    def _check(self, attending: Attending) -> None:
        """What is wrong with the spans themselves, by their row."""
        before: dict[str, Span] = {}
        for span in sorted(self.spans, key=_first):
            _check_known(span.party, attending, f"Row {span.row} of {self.source}")
            if span.last and span.last < span.first:
                raise SettingError(
                    f"Row {span.row} of {self.source}: party {span.party!r} is there from round {span.first} to "
                    f"{span.last}, which comes before it. Exchange them."
                )
            other = before.get(span.party)
            if other is not None and (other.last is None or span.first <= other.last):
                raise SettingError(
                    f"Rows {other.row} and {span.row} of {self.source} overlap: party {span.party!r} is there from "
                    f"round {other.first} to {other.last or 'the end'}, and from {span.first} on. Join them."
                )
            before[span.party] = span


def Drops(after: Mapping[str, int], attend: Attend = everyone) -> Timetable:
    """Parties that leave for good: each is there up to its round, and no longer (Tuor et al. 2021, §7.5.2).

    >>> Drops({"a": 4}).spans
    (Span(party='a', first=1, last=4),)
    """
    spans = (Span(party, 1, last, row) for row, (party, last) in enumerate(after.items(), 1))
    return Timetable(tuple(spans), attend, "the drops")


_Lines: TypeAlias = list[tuple[int, list[str]]]  # by their numbers in a file


def _lines(file: str | Path) -> _Lines:
    """The lines of a schedule that are not empty: the first, and at least one below it."""
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.reader(stream)
            found = [(rows.line_num, row) for row in rows if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"The schedule {file} cannot be read: {reason}.") from error
    if len(found) == 1:
        raise SettingError(f"The schedule {file} has no row below its first line. Add some, or leave it out.")
    return found or [(1, [])]


def _record(head: Sequence[str], line: Sequence[str], at: int, file: str | Path) -> dict[str, str]:
    if len(line) > len(head):
        raise SettingError(
            f"Row {at} of {file} must be {','.join(head)}. Got {len(line)} cells: {','.join(line)!r:.80}."
        )
    return dict(zip(head, line, strict=False))  # without "to" a party stays


def _check_once(lines: _Lines, file: str | Path) -> None:
    """A party has one line in a trace."""
    known: dict[str, int] = {}
    for at, line in lines:
        before = known.setdefault(line[0].strip(), at)
        if before != at:
            raise SettingError(f"Rows {before} and {at} of {file} are both of party {line[0].strip()!r}. Join them.")


def _first(span: Span) -> int:
    return span.first


def _covers(span: Span, round: int) -> bool:
    return span.first <= round and (span.last is None or round <= span.last)


def _check_known(party: str, attending: Attending, where: str) -> None:
    everybody = attending.everybody or attending.names
    if party not in everybody:
        raise SettingError(f"{where}: {unknown('party', party, list(everybody)[:_SHOWN])}")


def _span(row: Mapping[str, Any], at: int, source: str) -> Span:
    """The span of one record, its numbers read; a party's name is a text, whatever it looks like."""
    where = f"Row {at} of {source}"
    for key in row:
        if key not in ("party", "from", "to"):
            raise SettingError(f"{where}: {unknown('key', str(key), ('party', 'from', 'to'))}")
    party = str(row.get("party", "")).strip()
    if not party:
        raise SettingError(f"{where} names no party.")
    first, last = (
        _whole(row.get(key, ""), f"The {key!r} in row {at} of {source}", least)
        for key, least in (("from", 1), ("to", 0))
    )
    return Span(party, 1 if first is None else first, last, at)


def _whole(value: Any, what: str, least: int) -> int | None:
    text = str(value).strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise SettingError(f"{what} must be a round: a whole number >= {least}, or nothing. Got {text!r:.40}.")
    return int(text)


def _runs(line: Sequence[str], width: int, at: int, source: str) -> Iterator[Span]:
    """The spans of one line of a trace."""
    party, *cells = (cell.strip() for cell in line)
    if len(line) != width or not set(cells) <= {"0", "1"}:
        raise SettingError(f"Row {at} of {source} must be a party and {width - 1} times 0 or 1. Got {line!r:.80}.")
    there = {round for round, cell in enumerate(cells, 1) if cell == "1"}
    begins = sorted(round for round in there if round - 1 not in there)
    ends = sorted(round for round in there if round + 1 not in there)
    yield from (Span(party, begin, end, at) for begin, end in zip(begins, ends, strict=True))
    if not there:
        yield Span(party, 1, 0, at)  # or it would always be there
