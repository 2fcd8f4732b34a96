"""A method's table as an algorithm: what it names, its keywords, what wraps it, and who takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..settings import check, unknown
from .keywords import fits, keywords_for, told
from .parts import ATTENDANCE, Attendance, chosen, record_of, tables

if TYPE_CHECKING:
    from ..core import Algorithm

ALONE = "Local"  # the name of training alone, whatever wraps every method


def method(
    given: Mapping[str, Any], where: str, work: Mapping[str, Any], wrap: Sequence[Mapping[str, Any]]
) -> Algorithm:
    """The algorithm of one table; ``work`` is [work], whose attendance it may depart from, and ``wrap`` [[wrap]]."""
    from ..algorithms import ALGORITHMS

    key = str(given.get("algorithm", ""))
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


def wrapped(made: Algorithm, wrap: Sequence[Mapping[str, Any]], where: str) -> Algorithm:
    """An algorithm with what wraps it, one table each, from the inside out."""
    from ..algorithms import WRAPPERS
    from ..core import Algorithm

    for table in wrap:
        make, given = chosen(table, where, "by", WRAPPERS)
        place = f"{where} {table['by']}"
        if "base" in given:
            raise SettingError(f"The 'base' of {place} is the method that it wraps, and cannot be given.")
        made = make(**keywords_for(make, {**given, "base": made}, place, record_of))
        if not isinstance(made, Algorithm):
            raise SettingError(f"{place} must return an Algorithm. Got {made!r:.80}.")
    return made
