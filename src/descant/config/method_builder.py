"""Build an algorithm from a method's table: its keywords, its wrappers and its participation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..algorithms.method_aliases import canonical_method_name
from ..core.settings import check_settings, unknown_name_error
from ..errors import DescantWarning, SettingError
from .arguments import describe_type, matches_type, parse_keywords
from .sections import PARTICIPATION_KEYS, ParticipationSettings, check_tables, parse_record, resolve_choice

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm

LOCAL = "Local"  # the name of local training, whatever wraps it


def make_method(
    method_table: Mapping[str, Any], location: str, training: Mapping[str, Any], wrap: Sequence[Mapping[str, Any]]
) -> Algorithm:
    """Return the algorithm of one table; its participation keys override those of [training]."""
    from ..algorithms import ALGORITHMS

    if "algorithm" not in method_table:
        raise SettingError(
            f'{location} must have a key algorithm, such as algorithm = "fedavg+". Got {key_list(method_table)}.'
        )
    key = str(method_table["algorithm"])
    method_location = f"{location} {key}"
    default_participation = {name: value for name, value in training.items() if name in PARTICIPATION_KEYS}
    method_participation = {name: value for name, value in method_table.items() if name in PARTICIPATION_KEYS}
    for table, of in ((default_participation, "[training]"), (method_participation, method_location)):
        check_settings(ParticipationSettings(**parse_keywords(ParticipationSettings, table, of)), of)
    if key not in ALGORITHMS:
        raise unknown_name_error("algorithm", key, ALGORITHMS)
    reserved_keys = ("algorithm", "name", "wrap", *PARTICIPATION_KEYS)
    rest = {name: value for name, value in method_table.items() if name not in reserved_keys}
    algorithm = ALGORITHMS[key](**parse_keywords(ALGORITHMS[key], rest, method_location, convert=parse_record))
    name = LOCAL if algorithm.name == LOCAL else None  # common wrappers do not make it another method
    algorithm = apply_wrappers(algorithm, wrap, "[[wrap]]")
    algorithm = algorithm if name is None else replace(algorithm, name=name)
    algorithm = apply_wrappers(
        algorithm,
        check_tables(method_table.get("wrap", []), f"The 'wrap' of {method_location}"),
        f"the wrap of {method_location}",
    )
    name = method_table.get("name", algorithm.name)
    if not matches_type(name, str):
        raise SettingError(f"The 'name' of {method_location} must be {describe_type(str)}. Got {name!r}.")
    if name == LOCAL != algorithm.name:
        raise SettingError(
            f"{LOCAL!r} is the name of local training, which every table has. Give {method_location} another one."
        )
    return replace(
        algorithm,
        name=name,
        participation=ParticipationSettings(**{**default_participation, **method_participation}).to_participation(),
    )


def with_canonical_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe with every method under its canonical name, which is what is stored and digested.

    >>> with_canonical_names({"method": {"algorithm": "FedAvgPlus"}})
    {'method': {'algorithm': 'fedavg+'}}
    """
    return {key: _canonical(value, key) for key, value in tables.items()}


def _canonical(value: Any, key: str) -> Any:
    if key in ("method", "methods", "quick", "sweep") and isinstance(value, Mapping):
        return {name: _canonical(part, "methods" if name.isdecimal() else name) for name, part in value.items()}
    if key == "methods" and isinstance(value, list):
        return [_canonical(part, key) for part in value]
    if key == "algorithm" and isinstance(value, list):
        return [_canonical(part, key) for part in value]
    return canonical_method_name(value) if key == "algorithm" and isinstance(value, str) else value


def key_list(table: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, table)) or "no key"


def apply_wrappers(algorithm: Algorithm, wrap: Sequence[Mapping[str, Any]], location: str) -> Algorithm:
    """Wrap an algorithm, one table a wrapper, from the inside out."""
    from ..algorithms import WRAPPERS
    from ..core.algorithm import Algorithm

    for table in wrap:
        factory, keywords = resolve_choice(table, location, "wrapper", registry=WRAPPERS)
        wrapper_location = f"{location} {table['wrapper']}"
        if "base" in keywords:
            raise SettingError(f"The 'base' of {wrapper_location} is the method that it wraps, and cannot be given.")
        algorithm = factory(
            **parse_keywords(factory, {**keywords, "base": algorithm}, wrapper_location, convert=parse_record)
        )
        if not isinstance(algorithm, Algorithm):
            raise SettingError(f"{wrapper_location} must return an Algorithm. Got {algorithm!r:.80}.")
    return algorithm


def rounds_from_total(total: int, work_per_round: int, methods: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of rounds in a total of work; it must be the same for all methods."""
    from ..algorithms import FedRL, Period

    if total < work_per_round:
        raise SettingError(
            f"The 'total' of [run], {total}, is less than the work of one round, {work_per_round}: no round would end. "
            "Give a larger total, or less work a round."
        )
    counts = set[int]()
    for one in methods:
        if "period" not in one:
            counts.add(-(-total // max(1, work_per_round)))
            continue
        tune = FedRL(**{key: value for key, value in one.items() if key in ("period", "factor")}, total=total).tune
        counts.add(len(tune.lengths()) if isinstance(tune, Period) else 0)
    if len(counts) > 1:
        listed = ", ".join(map(str, sorted(counts)))
        raise SettingError(
            f"The 'total' of [run], {total}, are {listed} rounds, by the periods of its methods. Give 'rounds' instead."
        )
    return counts.pop() if counts else -(-total // max(1, work_per_round))


def align_total(table: Mapping[str, Any], total: int | None) -> Mapping[str, Any]:
    """Return the table of a method with the run's total, if the method has a period."""
    if total is None or "period" not in table:
        return table
    if table.get("total", total) != total:
        raise SettingError(
            f"The 'total' of FedRL, {table['total']}, and that of [run], {total}, must be the same. Leave one out."
        )
    return {**table, "total": total}


def warn_if_exceeding_total(
    total: int | None, work_per_round: int, methods: Sequence[Mapping[str, Any]], rounds: int
) -> None:
    """Warn if whole rounds exceed the total of work."""
    if total is not None and rounds * work_per_round > total and any("period" not in one for one in methods):
        warnings.warn(
            f"{rounds} rounds of {work_per_round} are {rounds * work_per_round}, more than the 'total' of {total} "
            "in [run]. "
            "Give a total that is a multiple of a round's work to avoid this.",
            DescantWarning,
            stacklevel=3,
        )
