"""Rules of participation: the parties of a round and their work, drawn, by rule or from a timetable.

Every rule chooses among the available parties only. Each may pass them on to another rule (``participation``).
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
    """Return all available parties."""
    return dict.fromkeys(context.available_parties, context.hyper)


@dataclass(frozen=True)
class Sample:
    """A number of parties, drawn each round with equal probability.

    >>> import numpy as np
    >>> len(Sample(2)(ParticipationContext(1, ["a", "b", "c"], Hyper(), np.random.default_rng(0))))
    2
    """

    count: int = setting(10, "parties per round", least=1, whole=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        names = context.available_parties
        chosen = context.rng.choice(len(names), size=min(self.count, len(names)), replace=False)
        return {names[i]: context.hyper for i in sorted(chosen.tolist())}


@dataclass(frozen=True)
class FirstParties:
    """Only the first ``count`` parties ever take part; the others are evaluated on the global model (ERRATA 15)."""

    count: int = setting(10, "parties that ever take part", least=1, whole=True)
    participation: Participation = setting(all_parties, "which of these take part", own_message=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        first = set(islice(context.all_parties or context.available_parties, self.count))
        return self.participation(
            replace(context, available_parties=[name for name in context.available_parties if name in first])
        )


@dataclass(frozen=True)
class Stragglers:
    """A share of the participants does only 1 to E-1 units of its work (FedProx's protocol).

    Their work counts, or is dropped as if they were absent (``policy``, ERRATA 26). The draws do not depend on the
    policy: with one seed the same parties straggle in every method.

    >>> import numpy as np
    >>> context = ParticipationContext(1, ["a", "b", "c", "d"], Hyper(work=20), np.random.default_rng(0))
    >>> [hyper.work for hyper in Stragglers(0.5, policy="drop")(context).values()]
    [20, 20]
    """

    share: float = setting(0.9, "the share of the participants that straggle", least=0, most=1)
    participation: Participation = setting(all_parties, "which parties take part", own_message=True)
    policy: StragglerPolicy = setting(
        "keep", "keep or drop the work of stragglers (ERRATA 26)", one_of=("keep", "drop")
    )

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
                f"All {len(participants)} parties of a round straggle at a share of {self.share:g}, and the policy "
                "'drop' leaves none. Lower the share, let more parties take part, or keep their work."
            )
        return {name: full for name, full in participants.items() if name not in reduced_work}


@dataclass(frozen=True)
class RandomAvailability:
    """Each party is available at random, by its own stream; the draw holds for ``rounds_per_draw`` rounds."""

    probability: float = setting(0.5, "the probability that a party is available", least=0, most=1)
    rounds_per_draw: int = setting(1, "rounds between draws of availability", least=1, whole=True)
    participation: Participation = setting(all_parties, "which of the available parties take part", own_message=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        period = (context.round - 1) // self.rounds_per_draw
        draws = {name: seeds.stream(context.seed, period, name, "comes").random() for name in context.available_parties}
        return self.participation(
            replace(context, available_parties=[n for n, draw in draws.items() if draw < self.probability])
        )


@dataclass(frozen=True)
class PeriodicParticipation:
    """Each named party takes part every ``period`` rounds, from its first round on; others are always available.

    >>> import numpy as np
    >>> weekly = PeriodicParticipation(7, {"a": 1, "b": 3})
    >>> def participants(round):
    ...     return list(weekly(ParticipationContext(round, ["a", "b"], Hyper(), np.random.default_rng(0))))
    >>> [participants(round) for round in (1, 2, 3, 8)]
    [['a'], [], ['b'], ['a']]
    """

    period: int = setting(7, "rounds from one participation to the next", least=1, whole=True)
    first_rounds: Mapping[str, int] = field(default_factory=dict)  # by party: the first round in which it takes part
    participation: Participation = setting(all_parties, "which of the available parties take part", own_message=True)

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        for name, first in self.first_rounds.items():
            _check_party_exists(name, context, "The 'first_rounds' of PeriodicParticipation")
            if not isinstance(first, int) or isinstance(first, bool) or first < 1:
                raise SettingError(
                    "The 'first_rounds' of PeriodicParticipation must be rounds: whole numbers >= 1. "
                    f"Got {first!r:.40}."
                )
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
    """A span of rounds in which a party is present, both ends included."""

    party: str
    first: int = setting(1, "the first round of the span", least=1, whole=True)
    last: int | None = setting(
        None, "the last round of the span; None: it stays; 0: it never takes part", least=0, whole=True
    )
    row: int = field(default=0, repr=False, compare=False)  # its row in the source, for messages


@dataclass(frozen=True)
class Timetable:
    """A schedule of presence by spans of rounds: parties join late, leave and return.

    A party without a span is always present. Without coreset proxies only present parties count: Tuor et al. (2021),
    eq. (4).

    >>> import numpy as np
    >>> table = Timetable.from_records([{"party": "a", "from": 1, "to": 4}, {"party": "a", "from": 7}])
    >>> def participants(round):
    ...     return list(table(ParticipationContext(round, ["a", "b"], Hyper(), np.random.default_rng(0))))
    >>> [participants(round) for round in (4, 5, 7)]
    [['a', 'b'], ['b'], ['a', 'b']]
    """

    spans: tuple[PresenceSpan, ...]
    participation: Participation = setting(all_parties, "which of the present parties take part", own_message=True)
    source: str = field(default="the schedule", repr=False, compare=False)  # its name in messages

    @classmethod
    def from_records(
        cls, rows: Iterable[Mapping[str, Any]], participation: Participation = all_parties, source: str = "the schedule"
    ) -> Timetable:
        """Return the timetable of records such as ``{"party": "a", "from": 1, "to": 4}``.

        Without "to" the party stays; with "to" 0 it never takes part.
        """
        return cls(tuple(_parse_span(row, at, source) for at, row in enumerate(rows, 1)), participation, source)

    @classmethod
    def read(cls, file: str | Path, participation: Participation = all_parties) -> Timetable:
        """Read a CSV file of spans (``party,from,to``) or a trace with 0 or 1 per round (``party,1,2,…``).

        After the last round of a trace its parties are absent. Messages count rows as the file does.
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
        """Raise if a span is invalid or two overlap, and name their rows."""
        previous_spans: dict[str, PresenceSpan] = {}
        for span in sorted(self.spans, key=_span_start):
            _check_party_exists(span.party, context, f"Row {span.row} of {self.source}")
            if span.last and span.last < span.first:
                raise SettingError(
                    f"Row {span.row} of {self.source}: party {span.party!r} is present from round {span.first} to "
                    f"{span.last}, which is before it. Exchange them."
                )
            previous = previous_spans.get(span.party)
            if previous is not None and (previous.last is None or span.first <= previous.last):
                raise SettingError(
                    f"Rows {previous.row} and {span.row} of {self.source} overlap: party {span.party!r} is present "
                    f"from round {previous.first} to {previous.last or 'the end'}, and from {span.first} on. Join them."
                )
            previous_spans[span.party] = span


def Dropouts(last_rounds: Mapping[str, int], participation: Participation = all_parties) -> Timetable:
    """Return the timetable of parties that leave for good after their last round (Tuor et al. 2021, §7.5.2).

    >>> Dropouts({"a": 4}).spans
    (PresenceSpan(party='a', first=1, last=4),)
    """
    spans = (PresenceSpan(party, 1, last, row=row) for row, (party, last) in enumerate(last_rounds.items(), 1))
    return Timetable(tuple(spans), participation, "the dropouts")


_NumberedRows: TypeAlias = list[tuple[int, list[str]]]  # by their numbers in a file


def _read_rows(file: str | Path) -> _NumberedRows:
    """Return the non-empty lines of a schedule: the header and at least one row."""
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.reader(stream)
            rows_by_number = [(rows.line_num, row) for row in rows if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"The schedule {file} cannot be read: {reason}.") from error
    if len(rows_by_number) == 1:
        raise SettingError(f"The schedule {file} has no row below its first line. Add rows, or leave the schedule out.")
    return rows_by_number or [(1, [])]


def _row_record(head: Sequence[str], line: Sequence[str], row_number: int, file: str | Path) -> dict[str, str]:
    if len(line) > len(head):
        raise SettingError(
            f"Row {row_number} of {file} must be {','.join(head)}. Got {len(line)} cells: {','.join(line)!r:.80}."
        )
    return dict(zip(head, line, strict=False))  # without "to" a party stays


def _check_unique_parties(lines: _NumberedRows, file: str | Path) -> None:
    """Raise if a party has more than one line in a trace."""
    first_rows: dict[str, int] = {}
    for row_number, line in lines:
        first_row = first_rows.setdefault(line[0].strip(), row_number)
        if first_row != row_number:
            raise SettingError(
                f"Rows {first_row} and {row_number} of {file} both name party {line[0].strip()!r}. Join them."
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
    """Return the span of one record; a party's name is text even if it looks like a number."""
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
    """Yield the spans of one line of a trace."""
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
        yield PresenceSpan(party, 1, 0, row=row_number)  # without a span it would always be present
