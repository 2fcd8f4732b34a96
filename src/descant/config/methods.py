"""A method's table as an algorithm: what it names, its keywords, what wraps it, and who takes part."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.settings import check, unknown
from ..errors import DescantWarning, SettingError
from .arguments import fits, keywords_for, told
from .sections import ATTENDANCE, Attendance, chosen, record_of, tables

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm

ALONE = "Local"  # the name of training alone, whatever wraps every method


def method(
    given: Mapping[str, Any], where: str, work: Mapping[str, Any], wrap: Sequence[Mapping[str, Any]]
) -> Algorithm:
    """The algorithm of one table; ``work`` is [work], whose attendance it may depart from, and ``wrap`` [[wrap]]."""
    from ..algorithms import ALGORITHMS

    if "algorithm" not in given:
        raise SettingError(f'{where} must have a key algorithm, such as algorithm = "fedavg+". Got {_keys(given)}.')
    key = str(given["algorithm"])
    place = f"{where} {key}"
    attendance = {name: value for name, value in work.items() if name in ATTENDANCE}
    own = {name: value for name, value in given.items() if name in ATTENDANCE}
    for table, of in ((attendance, "[work]"), (own, place)):
        check(Attendance(**keywords_for(Attendance, table, of)), of)
    if key not in ALGORITHMS:
        raise unknown("algorithm", key, ALGORITHMS)
    apart = ("algorithm", "name", "wrap", *ATTENDANCE)
    rest = {name: value for name, value in given.items() if name not in apart}
    made = ALGORITHMS[key](**keywords_for(ALGORITHMS[key], rest, place, record_of))
    name = ALONE if made.name == ALONE else None  # what wraps all of them makes it no other method
    made = wrapped(made, wrap, "[[wrap]]")
    made = made if name is None else replace(made, name=name)
    made = wrapped(made, tables(given.get("wrap", []), f"The 'wrap' of {place}"), f"the wrap of {place}")
    name = given.get("name", made.name)
    if not fits(name, str):
        raise SettingError(f"The 'name' of {place} must be {told(str)}. Got {name!r}.")
    if name == ALONE != made.name:
        raise SettingError(f"{ALONE!r} is the name of training alone, which every table has. Give {place} another one.")
    return replace(made, name=name, attend=Attendance(**{**attendance, **own}).answer())


def _keys(table: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, table)) or "no key"


def wrapped(made: Algorithm, wrap: Sequence[Mapping[str, Any]], where: str) -> Algorithm:
    """An algorithm with what wraps it, one table each, from the inside out."""
    from ..algorithms import WRAPPERS
    from ..core.algorithm import Algorithm

    for table in wrap:
        make, given = chosen(table, where, "by", WRAPPERS)
        place = f"{where} {table['by']}"
        if "base" in given:
            raise SettingError(f"The 'base' of {place} is the method that it wraps, and cannot be given.")
        made = make(**keywords_for(make, {**given, "base": made}, place, record_of))
        if not isinstance(made, Algorithm):
            raise SettingError(f"{place} must return an Algorithm. Got {made!r:.80}.")
    return made


def rounds_of(total: int, work: int, methods: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds a total of work makes: the same for all methods, whose periods may be their own."""
    from ..algorithms import FedRL, Period

    if total < work:
        raise SettingError(
            f"The 'total' of [run], {total}, is less than the work of one round, {work}: parties would never merge. "
            "Give a larger total, or less work a round."
        )
    found = set[int]()
    for one in methods:
        if "period" not in one:
            found.add(-(-total // max(1, work)))
            continue
        tune = FedRL(**{key: value for key, value in one.items() if key in ("period", "factor")}, total=total).tune
        found.add(len(tune.lengths()) if isinstance(tune, Period) else 0)
    if len(found) > 1:
        told = ", ".join(map(str, sorted(found)))
        raise SettingError(
            f"The 'total' of [run], {total}, are {told} rounds, by the periods of its methods. Give 'rounds' instead."
        )
    return found.pop() if found else -(-total // max(1, work))


def ending(given: Mapping[str, Any], total: int | None) -> Mapping[str, Any]:
    """The table of a method whose period ends where the run does."""
    if total is None or "period" not in given:
        return given
    if given.get("total", total) != total:
        raise SettingError(
            f"The 'total' of FedRL, {given['total']}, and that of [run], {total}, must be the same. Leave one out."
        )
    return {**given, "total": total}


def warn_beyond(total: int | None, work: int, methods: Sequence[Mapping[str, Any]], rounds: int) -> None:
    """Say so if whole rounds are more than the total of work."""
    if total is not None and rounds * work > total and any("period" not in one for one in methods):
        warnings.warn(
            f"{rounds} rounds of {work} are {rounds * work}, more than the 'total' of {total} in [run]. Give a total "
            "that is a multiple of a round's work, to have just that.",
            DescantWarning,
            stacklevel=3,
        )
