"""The tables of a recipe as records, and what a table may name: populations, nets, penalties, centres, schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..core.settings import check, setting, unknown
from ..errors import SettingError
from .arguments import keywords_for

if TYPE_CHECKING:
    from ..core.algorithm import Attend
    from ..federation import MakeEngine

ENGINES = ("in-process", "processes", "ray")


@dataclass(frozen=True)
class Length:
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


CARRIED = ("engine", "address", "workers")
"""The keys of [run] that decide who does the work, and so nothing of what comes of it."""


def engine_of(length: Length) -> MakeEngine:
    """Who does the parties' work."""
    from ..engines import Clocked, InProcess, Processes, Ray

    if length.address is not None and length.engine != "ray":
        raise SettingError(f"An 'address' in [run] is for the engine 'ray'. Got {length.engine!r}.")
    if length.workers is not None and length.engine == "in-process":
        raise SettingError("'workers' in [run] are of the engines 'processes' and 'ray'. Got 'in-process'.")
    made: MakeEngine = InProcess
    if length.engine != "in-process":
        workers = length.workers
        made = Processes(workers) if length.engine == "processes" else Ray(workers, address=length.address)
    return made if length.speeds is None else Clocked(length.speeds, engine=made)


@dataclass(frozen=True)
class Attendance:
    """Who takes part in a round, and how: keys of [work], and of a method that departs from it."""

    attend: int | None = setting(
        None, "parties a round, drawn anew each time; all, if it is not given", least=1, whole=True
    )
    among: int | None = setting(
        None, "only the first so many parties ever take part; all are judged", least=1, whole=True
    )
    stragglers: float = setting(
        0.0, "the share of those who take part that does only 1 to E-1 units of its work", least=0, most=1
    )
    straggler_policy: str = setting("keep", "whether their work counts (ERRATA 26)", one_of=("keep", "drop"))
    comes: float | None = setting(None, "the probability that a party comes in a round", least=0, most=1)
    stint: int | None = setting(
        None,
        "with comes: rounds until it is drawn again whether a party comes; 1, if it is not given",
        least=1,
        whole=True,
    )
    comes_every: int | None = setting(
        None, "rounds from one time to the next of the parties in comes_first", least=1, whole=True
    )
    comes_first: dict[str, int] | None = setting(
        None, "by party: the round in which it comes first; others always come"
    )
    drops: dict[str, int] | None = setting(None, "by party: the last round in which it is there")
    schedule: str | list[Any] | None = setting(
        None, "who is there when: a CSV file (party,from,to), or a list of {party, from, to}"
    )

    def answer(self) -> Attend:
        """The same as an algorithm's answer."""
        from ..algorithms.participation import Among, Comes, Drops, Every, Sample, Stragglers, Timetable, everyone

        if (self.comes_every is None) != (self.comes_first is None):
            raise SettingError(
                "Give comes_every and comes_first together: how often, and by party from which round on."
            )
        if self.stint is not None and self.comes is None:
            raise SettingError("A 'stint' is for parties that come by chance: give 'comes', too.")
        found: Attend = everyone if self.attend is None else Sample(self.attend)
        if self.comes is not None:
            found = Comes(self.comes, self.stint or 1, found)
        if self.comes_every is not None and self.comes_first is not None:
            found = Every(self.comes_every, self.comes_first, found)
        if self.drops is not None:
            found = Drops(self.drops, found)
        if isinstance(self.schedule, str):
            found = Timetable.read(self.schedule, found)
        elif self.schedule is not None:
            found = Timetable.of(self.schedule, found)
        if self.among is not None:
            found = Among(self.among, found)
        if self.stragglers:
            found = Stragglers(self.stragglers, found, self.straggler_policy)  # type: ignore[arg-type]
        return found


ATTENDANCE = tuple(each.name for each in fields(Attendance))


@dataclass(frozen=True)
class Figure:
    """[[paper]]: a number that the paper prints, and which of ours stands beside it: a mean over methods' means."""

    says: str = setting(help="what the number is, in words")
    where: str = setting(help="where it stands: table, figure or section")
    value: float = setting(help="the number")
    methods: tuple[str, ...] = setting(help="our methods, by their names in the table")
    against: tuple[str, ...] = setting((), "methods whose mean is taken off")
    at: Mapping[str, Any] = field(default_factory=dict)  # the point of a sweep that it belongs to


def sealing(given: Mapping[str, Any]) -> dict[str, Any]:
    """[vault] as settings of a federation: where the vault is, and how much of its data a party lets go."""
    from ..storage.vault.coreset_rows import Agreed
    from ..storage.vault.vault_location import VaultAt

    records: dict[str, type[Any]] = {"vault": VaultAt, "agreed": Agreed}
    keys = {name: [each.name for each in fields(record)] for name, record in records.items()}
    for key in given:
        if key not in [*keys["vault"], *keys["agreed"]]:
            raise unknown("key of [vault]", key, [*keys["vault"], *keys["agreed"]])
    found = {}
    for name, record in records.items():
        own = {key: value for key, value in given.items() if key in keys[name]}
        if own:
            own = {"share": None, **own} if record is Agreed else own  # a count alone is the only limit
            found[name] = record(**keywords_for(record, own, "[vault]"))
            check(found[name], "[vault]")
    return found


def tables(value: Any, what: str) -> list[Mapping[str, Any]]:
    """The same, if it is a list of tables."""
    if not (isinstance(value, list) and all(isinstance(one, Mapping) for one in value)):
        raise SettingError(f"{what} must be tables. Got {value!r:.80}.")
    return value


def chosen(
    table: Mapping[str, Any], where: str, key: str, registry: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What a table names, out of a registry or by its address, and the keywords that it gives."""
    named = table.get(key)
    if not isinstance(named, str):
        known = ", ".join(sorted(registry))
        raise SettingError(f'{where} must have {key} = one of {known}, or "module:function".')
    rest = {other: value for other, value in table.items() if other != key}
    if ":" in named:
        return at_address(named, f"The {key!r} of {where}"), rest
    if named not in registry:
        error = unknown("wrapper" if key == "by" else key, named, registry)
        raise SettingError(f'{error} One of your own is "file.py:function" or "module:function".')
    return registry[named], rest


def at_address(address: Any, what: str) -> Callable[..., Any]:
    """The function or class that stands at an address."""
    from ..serialization.references import find

    found = find(address) if isinstance(address, str) else None
    if not callable(found):
        raise SettingError(f'{what} must be "module:function", the address of a function or a class. Got {address!r}.')
    return found  # type: ignore[no-any-return]


def record_of(value: Any) -> Any:
    """A list as a tuple; a table as the record that it names, {is = "GeometricMedian"}, or as a decay.

    "none" where no text is wanted is None, for which TOML has no word.
    """
    if value == "none":
        return None
    if isinstance(value, list):
        return tuple(record_of(part) for part in value)
    if not isinstance(value, dict):
        return value
    from ..aggregation import aggregators, penalties
    from ..core.settings import Decay
    from ..coresets.selection import Selection

    penalty = ("HalfSquare", "Norm1", "Norm2", "NormP", "Zero", "Indicator")
    center = ("Mean", "GeometricMedian", "CoordinateMedian", "SmoothedCoordinateMedian", "TrimmedMean")
    records = {name: getattr(penalties, name) for name in penalty} | {
        name: getattr(aggregators, name) for name in center
    }
    records |= {"Decay": Decay, "Selection": Selection}
    kind = str(value.get("is", "Decay"))
    if kind not in records:
        raise unknown("part", kind, records)
    rest = {key: part for key, part in value.items() if key != "is"}
    return records[kind](**keywords_for(records[kind], rest, kind, record_of))
