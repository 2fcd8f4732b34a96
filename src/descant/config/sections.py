"""The tables of a recipe as records, and what a table may name: populations, nets, penalties, centres, schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..core.settings import check_settings, setting, unknown_name_error
from ..errors import SettingError
from .arguments import parse_keywords

if TYPE_CHECKING:
    from ..core.algorithm import Participation
    from ..federation import EngineFactory

ENGINES = ("in-process", "processes", "ray")


@dataclass(frozen=True)
class RunSettings:
    """[run]: how long, how often, and by whom."""

    rounds: int = setting(100, "rounds of training", least=1, whole=True)
    total: int | None = setting(
        None,
        "a party's work in all, in steps or epochs, instead of rounds: so many rounds as it takes",
        least=1,
        whole=True,
    )
    seeds: int = setting(1, "how often all is repeated, with other first models and draws", least=1, whole=True)
    seed: int = setting(0, "the first seed; the others follow it", least=0, whole=True)
    points: int = setting(10, "how often scores are taken on the way", least=1, whole=True)
    engine: str = setting("in-process", "who does the parties' work", one_of=ENGINES)
    address: str | None = setting(None, "of Ray: host:port of a cluster that runs; without it, one is started here")
    workers: int | None = setting(
        None, "of the engines 'processes' and 'ray': how many; as many as there are cores", least=1, whole=True
    )
    speeds: dict[str, float] | None = setting(
        None, "a virtual clock, for methods that do not wait: by party, units of work a second; 1 for who is not named"
    )


EXECUTION_KEYS = ("engine", "address", "workers")
"""The keys of [run] that decide who does the work, and so nothing of what comes of it."""


def make_engine(settings: RunSettings) -> EngineFactory:
    """Who does the parties' work."""
    from ..engines import InProcess, Processes, Ray, VirtualClock

    if settings.address is not None and settings.engine != "ray":
        raise SettingError(f"An 'address' in [run] is for the engine 'ray'. Got {settings.engine!r}.")
    if settings.workers is not None and settings.engine == "in-process":
        raise SettingError("'workers' in [run] are of the engines 'processes' and 'ray'. Got 'in-process'.")
    engine: EngineFactory = InProcess
    if settings.engine != "in-process":
        workers = settings.workers
        engine = Processes(workers) if settings.engine == "processes" else Ray(workers, address=settings.address)
    return engine if settings.speeds is None else VirtualClock(settings.speeds, engine=engine)


@dataclass(frozen=True)
class ParticipationSettings:
    """Who takes part in a round, and how: keys of [work], and of a method that departs from it."""

    participation: int | None = setting(
        None, "parties a round, drawn anew each time; all, if it is not given", least=1, whole=True
    )
    eligible_parties: int | None = setting(
        None, "only the first so many parties ever take part; all are judged", least=1, whole=True
    )
    stragglers: float = setting(
        0.0, "the share of those who take part that does only 1 to E-1 units of its work", least=0, most=1
    )
    straggler_policy: str = setting("keep", "whether their work counts (ERRATA 26)", one_of=("keep", "drop"))
    participation_probability: float | None = setting(
        None, "the probability that a party comes in a round", least=0, most=1
    )
    redraw_every: int | None = setting(
        None,
        "with comes: rounds until it is drawn again whether a party comes; 1, if it is not given",
        least=1,
        whole=True,
    )
    participation_interval: int | None = setting(
        None, "rounds from one time to the next of the parties in comes_first", least=1, whole=True
    )
    first_rounds: dict[str, int] | None = setting(
        None, "by party: the round in which it comes first; others always come"
    )
    last_rounds: dict[str, int] | None = setting(None, "by party: the last round in which it is there")
    schedule: str | list[Any] | None = setting(
        None, "who is there when: a CSV file (party,from,to), or a list of {party, from, to}"
    )

    def to_participation(self) -> Participation:
        """The same as an algorithm's answer."""
        from ..algorithms.participation import (
            Dropouts,
            FirstParties,
            PeriodicParticipation,
            RandomAvailability,
            Sample,
            Stragglers,
            Timetable,
            all_parties,
        )

        if (self.participation_interval is None) != (self.first_rounds is None):
            raise SettingError(
                "Give comes_every and comes_first together: how often, and by party from which round on."
            )
        if self.redraw_every is not None and self.participation_probability is None:
            raise SettingError("A 'stint' is for parties that come by chance: give 'comes', too.")
        found: Participation = all_parties if self.participation is None else Sample(self.participation)
        if self.participation_probability is not None:
            found = RandomAvailability(self.participation_probability, self.redraw_every or 1, found)
        if self.participation_interval is not None and self.first_rounds is not None:
            found = PeriodicParticipation(self.participation_interval, self.first_rounds, found)
        if self.last_rounds is not None:
            found = Dropouts(self.last_rounds, found)
        if isinstance(self.schedule, str):
            found = Timetable.read(self.schedule, found)
        elif self.schedule is not None:
            found = Timetable.from_records(self.schedule, found)
        if self.eligible_parties is not None:
            found = FirstParties(self.eligible_parties, found)
        if self.stragglers:
            found = Stragglers(self.stragglers, found, self.straggler_policy)  # type: ignore[arg-type]
        return found


PARTICIPATION_KEYS = tuple(each.name for each in fields(ParticipationSettings))


@dataclass(frozen=True)
class PaperFigure:
    """[[paper]]: a number that the paper prints, and which of ours stands beside it: a mean over methods' means."""

    description: str = setting(help="what the number is, in words")
    source: str = setting(help="where it stands: table, figure or section")
    value: float = setting(help="the number")
    methods: tuple[str, ...] = setting(help="our methods, by their names in the table")
    minus: tuple[str, ...] = setting((), "methods whose mean is taken off")
    at: Mapping[str, Any] = field(default_factory=dict)  # the point of a sweep that it belongs to


def vault_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """[vault] as settings of a federation: where the vault is, and how much of its data a party lets go."""
    from ..storage.vault.coreset_rows import CoresetLimit
    from ..storage.vault.vault_location import VaultLocation

    records: dict[str, type[Any]] = {"vault": VaultLocation, "coreset_limit": CoresetLimit}
    keys = {name: [each.name for each in fields(record)] for name, record in records.items()}
    for key in table:
        if key not in [*keys["vault"], *keys["coreset_limit"]]:
            raise unknown_name_error("key of [vault]", key, [*keys["vault"], *keys["coreset_limit"]])
    found = {}
    for name, record in records.items():
        values = {key: value for key, value in table.items() if key in keys[name]}
        if values:
            values = {"share": None, **values} if record is CoresetLimit else values  # a count alone is the only limit
            found[name] = record(**parse_keywords(record, values, "[vault]"))
            check_settings(found[name], "[vault]")
    return found


def check_tables(value: Any, location: str) -> list[Mapping[str, Any]]:
    """The same, if it is a list of tables."""
    if not (isinstance(value, list) and all(isinstance(one, Mapping) for one in value)):
        raise SettingError(f"{location} must be tables. Got {value!r:.80}.")
    return value


def resolve_choice(
    table: Mapping[str, Any], location: str, key: str, registry: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What a table names, out of a registry or by its address, and the keywords that it gives."""
    name = table.get(key)
    if not isinstance(name, str):
        known = ", ".join(sorted(registry))
        raise SettingError(f'{location} must have {key} = one of {known}, or "module:function".')
    rest = {other: value for other, value in table.items() if other != key}
    if ":" in name:
        return resolve_address(name, f"The {key!r} of {location}"), rest
    if name not in registry:
        error = unknown_name_error("wrapper" if key == "wrapper" else key, name, registry)
        raise SettingError(f'{error} One of your own is "file.py:function" or "module:function".')
    return registry[name], rest


def resolve_address(address: Any, location: str) -> Callable[..., Any]:
    """The function or class that stands at an address."""
    from ..serialization.references import resolve

    found = resolve(address) if isinstance(address, str) else None
    if not callable(found):
        raise SettingError(
            f'{location} must be "module:function", the address of a function or a class. Got {address!r}.'
        )
    return found  # type: ignore[no-any-return]


def parse_record(value: Any) -> Any:
    """A list as a tuple; a table as the record that it names, {is = "GeometricMedian"}, or as a decay.

    "none" where no text is wanted is None, for which TOML has no word.
    """
    if value == "none":
        return None
    if isinstance(value, list):
        return tuple(parse_record(part) for part in value)
    if not isinstance(value, dict):
        return value
    from ..aggregation import aggregators, penalties
    from ..core.settings import ExponentialDecay
    from ..coresets.selection import Selection

    penalty_names = ("HalfSquare", "Norm1", "Norm2", "NormP", "Zero", "Indicator")
    aggregator_names = ("Mean", "GeometricMedian", "CoordinateMedian", "SmoothedCoordinateMedian", "TrimmedMean")
    records = {name: getattr(penalties, name) for name in penalty_names} | {
        name: getattr(aggregators, name) for name in aggregator_names
    }
    records |= {"Decay": ExponentialDecay, "Selection": Selection}
    class_name = str(value.get("is", "Decay"))
    if class_name not in records:
        raise unknown_name_error("part", class_name, records)
    rest = {key: part for key, part in value.items() if key != "is"}
    return records[class_name](**parse_keywords(records[class_name], rest, class_name, convert=parse_record))
