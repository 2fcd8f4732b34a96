"""Settings with help texts and bounds, defined once; records are checked once, before the first round.

Parts of an algorithm are frozen dataclasses. A constructor only stores; :func:`check_settings` checks the record
recursively and raises in one form: ``The 'rho' of FedGeoMedPlus must be > 0. Got -1.0.``
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from ..errors import SettingError

Documented = TypeVar("Documented", bound=Callable[..., Any])
Schedule: TypeAlias = float | Callable[[int, str], float]
"""A number, or a function of (round, party): v1's α of party n in round k."""


@dataclass(frozen=True)
class ExponentialDecay:
    """start · factor^(round - 1): v1's decaying α (its §8: start 0.001, factor 0.99).

    >>> ExponentialDecay(0.001, 0.99)(2, "any party")
    0.00099
    """

    start: float
    factor: float = 0.99

    def __call__(self, round: int, party: str) -> float:
        return self.start * self.factor ** (round - 1)


@dataclass(frozen=True)
class PerParty:
    """A value for each named party, and a default for the others."""

    values: Mapping[str, Schedule]
    default: Schedule = 0.0

    def __call__(self, round: int, party: str) -> float:
        return value_at(self.values.get(party, self.default), round, party)


def value_at(schedule: Schedule, round: int, party: str) -> float:
    """Return the value of a schedule for one party in one round."""
    return schedule(round, party) if callable(schedule) else schedule


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def setting(default: Any = dataclasses.MISSING, help: str = "", **rules: Any) -> Any:
    """Return a dataclass field with help and bounds: ``above``, ``least``, ``below``, ``most``, ``one_of``, ``whole``.

    ``name_field`` is the field with the name for messages; with ``own_message`` a record in it names itself.
    """
    signs = {"above": ">", "least": ">=", "below": "<", "most": "<="}
    limits = tuple((signs[name], bound) for name, bound in rules.items() if name in signs)
    others = {name: rule for name, rule in rules.items() if name not in signs}
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits, **others})


def document_parameters(*records: type, **meanings: str) -> Callable[[Documented], Documented]:
    """Decorate a function or a record of settings: append a "Parameters" section to its docstring, for `help()`.

    A meaning is the help of a field of that name, of the record itself or of one of ``records``, or a keyword here.

    >>> @document_parameters(rho="the radius")
    ... def ball(rho: float = 1.0) -> float:
    ...     "Return the volume of a ball."
    >>> print(ball.__doc__)
    Return the volume of a ball.
    <BLANKLINE>
    Parameters
    ----------
    rho:
        the radius
    """

    def decorate(target: Documented) -> Documented:
        sources = [record for record in (*records, target) if dataclasses.is_dataclass(record)]
        helps = [(field.name, field.metadata.get("help")) for record in sources for field in dataclasses.fields(record)]
        known = {name: text for name, text in helps if text} | meanings
        lines = [f"{name}:\n    {known[name]}" for name in inspect.signature(target).parameters if name in known]
        target.__doc__ = "\n".join([inspect.cleandoc(target.__doc__ or ""), "", "Parameters", "----------", *lines])
        return target

    return decorate


def check_settings(record: Any, owner: str | None = None) -> None:
    """Raise :class:`SettingError` if a value anywhere in a record of settings is out of its bounds.

    >>> @dataclass(frozen=True)
    ... class Ball:
    ...     rho: float = setting(1.0, "radius", above=0)
    >>> check_settings(Ball(-1.0))
    Traceback (most recent call last):
    descant.errors.SettingError: The 'rho' of Ball must be > 0. Got -1.0.
    """
    if isinstance(record, tuple | list):
        for part in record:
            check_settings(part, owner)
        return
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return
    owner = owner or type(record).__name__
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        name = getattr(record, field.metadata.get("name_field", ""), field.name)
        if value is not None or "None" not in str(field.type):
            _check_value(f"The {name!r} of {owner}", value, field.metadata)
        check_settings(value, None if field.metadata.get("own_message") else owner)


def _check_value(label: str, value: Any, metadata: Mapping[str, Any]) -> None:
    limits = metadata.get("limits", ())
    allowed = metadata.get("one_of")
    if allowed is not None and value not in allowed:
        raise SettingError(f"{label} must be one of {', '.join(map(repr, allowed))}. Got {value!r}.")
    if isinstance(value, ExponentialDecay):
        value = value.start
    if isinstance(value, PerParty):
        for one in (*value.values.values(), value.default):
            _check_value(label, one, metadata)
        return
    if not limits or callable(value) or dataclasses.is_dataclass(value):
        return
    whole = metadata.get("whole", False)
    rule = ("a whole number " if whole else "") + " and ".join(f"{sign} {bound}" for sign, bound in limits)
    for one in _flatten(value):
        number = isinstance(one, int if whole else int | float) and not isinstance(one, bool) and math.isfinite(one)
        if not number or not all(_COMPARE[sign](one, bound) for sign, bound in limits):
            raise SettingError(f"{label} must be {rule}. Got {one!r}.")


def _flatten(value: Any) -> Iterator[Any]:
    """Yield the numbers of lists and arrays with their types: True in a list stays a bool."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flatten(part)
        return
    from numpy import ravel  # here, because `descant --help` must not load it

    yield from ravel(value).tolist()


def unknown_name_error(kind: str, name: str, allowed: Iterable[str]) -> SettingError:
    """Return the error for an unknown name, with the closest known one.

    >>> unknown_name_error("algorithm", "fedavgg", ["fedavg", "local"]).args[0]
    "There is no algorithm 'fedavgg'. Did you mean 'fedavg'? Allowed: fedavg, local."
    """
    names: Collection[str] = sorted(allowed)
    by_spelling = {_normalize_spelling(each): each for each in names}
    closest = difflib.get_close_matches(_normalize_spelling(name), by_spelling, n=1)
    hint = f" Did you mean {by_spelling[closest[0]]!r}?" if closest else ""
    return SettingError(f"There is no {kind} {name!r}.{hint} Allowed: {', '.join(names)}.")


def _normalize_spelling(name: str) -> str:
    """Normalize case and plus signs: FedAvgPlus and fedavg+ are equal."""
    return name.casefold().replace("+", "plus")


def to_json_values(record: Any) -> Any:
    """Return a record of settings as JSON values, for a run's manifest; functions become their names."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = {f.name: to_json_values(getattr(record, f.name)) for f in dataclasses.fields(record) if f.repr}
        return {"is": type(record).__name__, **fields}
    if isinstance(record, Mapping):
        return {str(key): to_json_values(value) for key, value in record.items()}
    if isinstance(record, tuple | list):
        return [to_json_values(part) for part in record]
    if isinstance(record, float) and not math.isfinite(record):
        return repr(record)  # JSON has no infinity
    if record is None or isinstance(record, bool | int | float | str):
        return record
    if isinstance(record, SupportsNumpy):
        numbers = record.numpy()
        return {"is": "numbers", "shape": list(numbers.shape), "digest": blake2b(numbers.tobytes()).hexdigest()[:16]}
    return getattr(record, "__qualname__", None) or type(record).__qualname__


@runtime_checkable
class SupportsNumpy(Protocol):
    """A tensor, recognized without importing torch."""

    def numpy(self) -> Any: ...
