"""The tables of a recipe as records, and the objects that a table may name: populations, networks, penalties."""

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
    """[run]: length, seeds and engine."""

    rounds: int = setting(100, "rounds of training", least=1, whole=True)
    total: int | None = setting(
        None,
        "the total work of a party in steps or epochs, instead of rounds",
        least=1,
        whole=True,
    )
    seeds: int = setting(1, "repetitions with other initial models and draws", least=1, whole=True)
    seed: int = setting(0, "the first seed; the others follow", least=0, whole=True)
    points: int = setting(10, "the number of rounds in which parties are evaluated", least=1, whole=True)
    engine: str = setting("in-process", "the engine that runs local training", one_of=ENGINES)
    address: str | None = setting(None, "for ray: host:port of a running cluster; without it, a local one is started")
    workers: int | None = setting(
        None, "for processes and ray: the number of workers; by default the number of cores", least=1, whole=True
    )
    speeds: dict[str, float] | None = setting(
        None, "a virtual clock for asynchronous methods: units of work a second by party; 1 if not named"
    )


EXECUTION_KEYS = ("engine", "address", "workers")
"""The keys of [run] that do not change results."""


def make_engine(settings: RunSettings) -> EngineFactory:
    """Return the engine of [run]."""
    from ..engines import InProcess, Processes, Ray, VirtualClock

    if settings.address is not None and settings.engine != "ray":
        raise SettingError(f"An 'address' in [run] is for the engine 'ray'. Got {settings.engine!r}.")
    if settings.workers is not None and settings.engine == "in-process":
        raise SettingError("'workers' in [run] is for the engines 'processes' and 'ray'. Got 'in-process'.")
    engine: EngineFactory = InProcess
    if settings.engine != "in-process":
        workers = settings.workers
        engine = Processes(workers) if settings.engine == "processes" else Ray(workers, address=settings.address)
    return engine if settings.speeds is None else VirtualClock(settings.speeds, engine=engine)


@dataclass(frozen=True)
class ParticipationSettings:
    """Participation in a round: keys of [training], and of a method that overrides them."""

    participation: int | None = setting(None, "parties per round, drawn each time; by default all", least=1, whole=True)
    eligible_parties: int | None = setting(
        None, "the number of parties, from the first, that ever train; all are evaluated", least=1, whole=True
    )
    stragglers: float = setting(
        0.0, "the share of participants that do only 1 to E-1 units of their work", least=0, most=1
    )
    straggler_policy: str = setting(
        "keep", "keep or drop the updates of stragglers (ERRATA 26)", one_of=("keep", "drop")
    )
    participation_probability: float | None = setting(
        None, "the probability that a party participates in a round", least=0, most=1
    )
    redraw_every: int | None = setting(
        None,
        "with participation_probability: rounds between two draws; by default 1",
        least=1,
        whole=True,
    )
    participation_interval: int | None = setting(
        None, "rounds between two participations of the parties in first_rounds", least=1, whole=True
    )
    first_rounds: dict[str, int] | None = setting(None, "by party: its first round; other parties always participate")
    last_rounds: dict[str, int] | None = setting(None, "by party: its last round")
    schedule: str | list[Any] | None = setting(
        None, "presence of parties: a CSV file (party,from,to), or a list of {party, from, to}"
    )

    def to_participation(self) -> Participation:
        """Return the participation function of an algorithm."""
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
                "Give participation_interval and first_rounds together: the interval, and by party its first round."
            )
        if self.redraw_every is not None and self.participation_probability is None:
            raise SettingError("'redraw_every' is for random participation: give 'participation_probability', too.")
        participation: Participation = all_parties if self.participation is None else Sample(self.participation)
        if self.participation_probability is not None:
            participation = RandomAvailability(self.participation_probability, self.redraw_every or 1, participation)
        if self.participation_interval is not None and self.first_rounds is not None:
            participation = PeriodicParticipation(self.participation_interval, self.first_rounds, participation)
        if self.last_rounds is not None:
            participation = Dropouts(self.last_rounds, participation)
        if isinstance(self.schedule, str):
            participation = Timetable.read(self.schedule, participation)
        elif self.schedule is not None:
            participation = Timetable.from_records(self.schedule, participation)
        if self.eligible_parties is not None:
            participation = FirstParties(self.eligible_parties, participation)
        if self.stragglers:
            participation = Stragglers(self.stragglers, participation, self.straggler_policy)  # type: ignore[arg-type]
        return participation


PARTICIPATION_KEYS = tuple(each.name for each in fields(ParticipationSettings))


@dataclass(frozen=True)
class PaperFigure:
    """[[paper]]: a number that the paper prints; ours is the mean over ``methods``, minus that over ``minus``."""

    description: str = setting(help="what the number is")
    source: str = setting(help="its source: table, figure or section")
    value: float = setting(help="the number")
    methods: tuple[str, ...] = setting(help="our methods, by their names")
    minus: tuple[str, ...] = setting((), "methods whose mean is subtracted")
    at: Mapping[str, Any] = field(default_factory=dict)  # the point of a sweep


def vault_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the location of the vault and the limit of coresets as arguments of a federation."""
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
    """Return the value; raise unless it is a list of tables."""
    if not (isinstance(value, list) and all(isinstance(one, Mapping) for one in value)):
        raise SettingError(f"{location} must be tables. Got {value!r:.80}.")
    return value


def resolve_choice(
    table: Mapping[str, Any], location: str, key: str, registry: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function that a table names, from a registry or by its address, and the other keywords."""
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
    """Return the function or class at an address."""
    from ..serialization.references import resolve

    found = resolve(address) if isinstance(address, str) else None
    if not callable(found):
        raise SettingError(
            f'{location} must be "module:function", the address of a function or a class. Got {address!r}.'
        )
    return found  # type: ignore[no-any-return]


def parse_record(value: Any) -> Any:
    """Convert a list to a tuple, and a table to the record it names, {is = "GeometricMedian"}, or to a decay.

    "none" becomes None, which TOML does not have.
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
