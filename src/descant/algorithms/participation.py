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
from ..core.algorithm import Hyper, Participation, ParticipationContext
from ..core.settings import setting, unknown_name_error
from ..errors import SettingError

StragglerPolicy: TypeAlias = Literal["keep", "drop"]
_MAX_SHOWN_PARTIES = 20  # parties that a message lists


def all_parties(context: ParticipationContext) -> dict[str, Hyper]:
    """All who can be reached."""
    return dict.fromkeys(context.available_parties, context.hyper)


@dataclass(frozen=True)
class Sample:
    """Some parties, drawn anew each round with equal probability.

    >>> import numpy as np
    >>> len(Sample(2)(Attending(1, ["a", "b", "c"], Hyper(), np.random.default_rng(0))))
    2
    """

    count: int = setting(10, "parties a round", least=1, whole=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        names = context.available_parties
        chosen = context.rng.choice(len(names), size=min(self.count, len(names)), replace=False)
        return {names[i]: context.hyper for i in sorted(chosen.tolist())}


@dataclass(frozen=True)
class FirstParties:
    """Only the first so many parties ever take part; the others are judged all the same, by the centre (ERRATA 15)."""

    count: int = setting(10, "parties that ever take part", least=1, whole=True)
    participation: Participation = setting(all_parties, "who of them takes part", apart=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        first = set(islice(context.all_parties or context.available_parties, self.count))
        return self.participation(
            replace(context, available_parties=[name for name in context.available_parties if name in first])
        )


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
    participation: Participation = setting(all_parties, "who takes part", apart=True)
    policy: StragglerPolicy = setting("keep", "whether their work counts (ERRATA 26)", one_of=("keep", "drop"))

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        participants = self.participation(context)
        rng = context.rng
        slow = rng.permutation(list(participants))[: round(self.share * len(participants))].tolist()
        reduced_work = {name: int(rng.integers(1, max(2, participants[name].work))) for name in slow}
        if self.policy == "keep":
            return participants | {
                name: replace(participants[name], work=min(participants[name].work, work))
                for name, work in reduced_work.items()
            }
        if participants and len(slow) == len(participants):
            raise SettingError(
                f"All {len(participants)} parties of a round straggle at a share of {self.share:g}, and the policy 'drop' "
                "leaves nobody. Lower the share, let more parties attend, or keep their work."
            )
        return {name: full for name, full in participants.items() if name not in reduced_work}


# ── parties that come and go ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RandomAvailability:
    """Every party comes with some probability, by a stream of its own, and stays for ``stint`` rounds at a time."""

    probability: float = setting(0.5, "that a party comes", least=0, most=1)
    rounds_per_draw: int = setting(1, "rounds until it is drawn again whether it comes", least=1, whole=True)
    participation: Participation = setting(all_parties, "who of those that come takes part", apart=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        period = (context.round - 1) // self.rounds_per_draw
        draws = {name: seeds.stream(context.seed, period, name, "comes").random() for name in context.available_parties}
        return self.participation(
            replace(context, available_parties=[n for n, draw in draws.items() if draw < self.probability])
        )


@dataclass(frozen=True)
class PeriodicParticipation:
    """Parties that come every ``n``-th round, each from a first one on; those that are not named always come.

    >>> import numpy as np
    >>> weekly = Every(7, {"a": 1, "b": 3})
    >>> [list(weekly(Attending(round, ["a", "b"], Hyper(), np.random.default_rng(0)))) for round in (1, 2, 3, 8)]
    [['a'], [], ['b'], ['a']]
    """

    period: int = setting(7, "rounds from one time to the next", least=1, whole=True)
    first_rounds: Mapping[str, int] = field(default_factory=dict)  # by party: the round in which it comes first
    participation: Participation = setting(all_parties, "who of those that come takes part", apart=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        for name, first in self.first_rounds.items():
            _check_party_exists(name, context, "The 'first_rounds' of PeriodicParticipation")
            if not isinstance(first, int) or isinstance(first, bool) or first < 1:
                raise SettingError(f"The 'first' of Every must be rounds: whole numbers >= 1. Got {first!r:.40}.")
        rounds_since_first = {
            name: context.round - self.first_rounds.get(name, context.round) for name in context.available_parties
        }
        return self.participation(
            replace(
                context, available_parties=[n for n, s in rounds_since_first.items() if s >= 0 and s % self.period == 0]
            )
        )


@dataclass(frozen=True)
class PresenceSpan:
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

    spans: tuple[PresenceSpan, ...]
    participation: Participation = setting(all_parties, "who of those that are there takes part", apart=True)
    source: str = field(default="the schedule", repr=False, compare=False)  # what messages call it

    @classmethod
    def from_records(
        cls, rows: Iterable[Mapping[str, Any]], participation: Participation = all_parties, source: str = "the schedule"
    ) -> Timetable:
        """Of records such as ``{"party": "a", "from": 1, "to": 4}``; without "to" it stays, "to" 0: it never comes."""
        return cls(tuple(_parse_span(row, at, source) for at, row in enumerate(rows, 1)), participation, source)

    @classmethod
    def read(cls, file: str | Path, participation: Participation = all_parties) -> Timetable:
        """Of a CSV file: a line a span (``party,from,to``), or a line a party with 0 or 1 a round (``party,1,2,…``).

        After the last round of such a trace its parties are away. Messages count rows as the file does.
        """
        (_, head), *lines = _read_rows(file)
        head = [cell.strip() for cell in head]
        if head == ["party", "from", "to"]:
            return cls(
                tuple(_parse_span(_row_record(head, line, at, file=file), at, str(file)) for at, line in lines),
                participation,
                str(file),
            )
        if len(head) > 1 and head == ["party", *map(str, range(1, len(head)))]:
            _check_unique_parties(lines, file)
            spans = (span for at, line in lines for span in _trace_spans(line, len(head), at, source=str(file)))
            return cls(tuple(spans), participation, str(file))
        raise SettingError(
            f"The first line of {file} must be party,from,to or, for a trace, party,1,2,3 and so on. Got "
            f"{','.join(head)!r:.80}."
        )

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        self._check(context)
        listed = {span.party for span in self.spans}
        present = {span.party for span in self.spans if _covers(span, context.round)}
        return self.participation(
            replace(
                context, available_parties=[n for n in context.available_parties if n in present or n not in listed]
            )
        )

    def _check(self, context: ParticipationContext) -> None:
        """What is wrong with the spans themselves, by their row."""
        previous_spans: dict[str, PresenceSpan] = {}
        for span in sorted(self.spans, key=_span_start):
            _check_party_exists(span.party, context, f"Row {span.row} of {self.source}")
            if span.last and span.last < span.first:
                raise SettingError(
                    f"Row {span.row} of {self.source}: party {span.party!r} is there from round {span.first} to "
                    f"{span.last}, which comes before it. Exchange them."
                )
            previous = previous_spans.get(span.party)
            if previous is not None and (previous.last is None or span.first <= previous.last):
                raise SettingError(
                    f"Rows {previous.row} and {span.row} of {self.source} overlap: party {span.party!r} is there from "
                    f"round {previous.first} to {previous.last or 'the end'}, and from {span.first} on. Join them."
                )
            previous_spans[span.party] = span


def Dropouts(last_rounds: Mapping[str, int], participation: Participation = all_parties) -> Timetable:
    """Parties that leave for good: each is there up to its round, and no longer (Tuor et al. 2021, §7.5.2).

    >>> Drops({"a": 4}).spans
    (Span(party='a', first=1, last=4),)
    """
    spans = (PresenceSpan(party, 1, last, row=row) for row, (party, last) in enumerate(last_rounds.items(), 1))
    return Timetable(tuple(spans), participation, "the drops")


_NumberedRows: TypeAlias = list[tuple[int, list[str]]]  # by their numbers in a file


def _read_rows(file: str | Path) -> _NumberedRows:
    """The lines of a schedule that are not empty: the first, and at least one below it."""
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.reader(stream)
            rows_by_number = [(rows.line_num, row) for row in rows if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"The schedule {file} cannot be read: {reason}.") from error
    if len(rows_by_number) == 1:
        raise SettingError(f"The schedule {file} has no row below its first line. Add some, or leave it out.")
    return rows_by_number or [(1, [])]


def _row_record(head: Sequence[str], line: Sequence[str], row_number: int, file: str | Path) -> dict[str, str]:
    if len(line) > len(head):
        raise SettingError(
            f"Row {row_number} of {file} must be {','.join(head)}. Got {len(line)} cells: {','.join(line)!r:.80}."
        )
    return dict(zip(head, line, strict=False))  # without "to" a party stays


def _check_unique_parties(lines: _NumberedRows, file: str | Path) -> None:
    """A party has one line in a trace."""
    first_rows: dict[str, int] = {}
    for row_number, line in lines:
        first_row = first_rows.setdefault(line[0].strip(), row_number)
        if first_row != row_number:
            raise SettingError(
                f"Rows {first_row} and {row_number} of {file} are both of party {line[0].strip()!r}. Join them."
            )


def _span_start(span: PresenceSpan) -> int:
    return span.first


def _covers(span: PresenceSpan, round: int) -> bool:
    return span.first <= round and (span.last is None or round <= span.last)


def _check_party_exists(party: str, context: ParticipationContext, where: str) -> None:
    parties = context.all_parties or context.available_parties
    if party not in parties:
        raise SettingError(f"{where}: {unknown_name_error('party', party, list(parties)[:_MAX_SHOWN_PARTIES])}")


def _parse_span(row: Mapping[str, Any], row_number: int, source: str) -> PresenceSpan:
    """The span of one record, its numbers read; a party's name is a text, whatever it looks like."""
    where = f"Row {row_number} of {source}"
    for key in row:
        if key not in ("party", "from", "to"):
            raise SettingError(f"{where}: {unknown_name_error('key', str(key), ('party', 'from', 'to'))}")
    party = str(row.get("party", "")).strip()
    if not party:
        raise SettingError(f"{where} names no party.")
    first, last = (
        _parse_round(row.get(key, ""), f"The {key!r} in row {row_number} of {source}", least)
        for key, least in (("from", 1), ("to", 0))
    )
    return PresenceSpan(party, 1 if first is None else first, last, row=row_number)


def _parse_round(value: Any, label: str, minimum: int) -> int | None:
    text = str(value).strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < minimum:
        raise SettingError(f"{label} must be a round: a whole number >= {minimum}, or nothing. Got {text!r:.40}.")
    return int(text)


def _trace_spans(line: Sequence[str], width: int, row_number: int, source: str) -> Iterator[PresenceSpan]:
    """The spans of one line of a trace."""
    party, *cells = (cell.strip() for cell in line)
    if len(line) != width or not set(cells) <= {"0", "1"}:
        raise SettingError(
            f"Row {row_number} of {source} must be a party and {width - 1} times 0 or 1. Got {line!r:.80}."
        )
    present_rounds = {round for round, cell in enumerate(cells, 1) if cell == "1"}
    begins = sorted(round for round in present_rounds if round - 1 not in present_rounds)
    ends = sorted(round for round in present_rounds if round + 1 not in present_rounds)
    yield from (PresenceSpan(party, begin, end, row=row_number) for begin, end in zip(begins, ends, strict=True))
    if not present_rounds:
        yield PresenceSpan(party, 1, 0, row=row_number)  # or it would always be there
