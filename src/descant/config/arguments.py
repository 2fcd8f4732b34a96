"""Keywords from a file for a function, checked against the names and types in its signature.

>>> def net(inputs: int, hidden: int = 32) -> None: ...
>>> parse_keywords(net, {"inputs": 64, "hiden": 8}, "[model]")
Traceback (most recent call last):
descant.errors.SettingError: There is no key of [model] 'hiden'. Did you mean 'hidden'? Allowed: hidden, inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.settings import unknown_name_error
from ..errors import SettingError

TYPE_PHRASES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    tuple: "a list",
    list: "a list",
    Sequence: "a list",
    dict: "a table",
    Callable: 'a table such as {is = "Decay", start = 0.1}',
}

PLURAL_PHRASES: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts in quotes"}

Converter = Callable[[Any], Any]


def identity(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def parse_keywords(
    factory: Callable[..., Any], values: Mapping[str, Any], location: str, convert: Converter = identity
) -> dict[str, Any]:
    """Return the keywords to call ``factory`` with; raise for one that is unknown, missing or of a wrong type.

    A value of another type is converted by ``convert`` first: a list to a tuple, for example.
    """
    parameters = inspect.signature(factory).parameters
    hints = parameter_types(factory)
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, parameter in parameters.items() if parameter.kind in NAMED_KINDS]
    parsed = {}
    for key, value in values.items():
        if key not in named and not accepts_any:
            raise unknown_name_error(f"key of {location}", key, named or ["none"])
        hint = hints.get(key, Any)
        parsed[key] = value if matches_type(value, hint) else convert(value)
        if not matches_type(parsed[key], hint):
            raise SettingError(f"The {key!r} of {location} must be {describe_type(hint)}. Got {value!r:.80}.")
    missing = [name for name in named if name not in values and parameters[name].default is inspect.Parameter.empty]
    if missing:
        raise SettingError(
            f"{location} lacks {', '.join(map(repr, missing))}, which must be {describe_type(hints[missing[0]])}."
        )
    return parsed


NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameter_types(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters of a function or class."""
    if isinstance(factory, type) and not is_dataclass(factory):
        factory = factory.__init__  # type: ignore[misc]
    anything = dict.fromkeys(inspect.signature(factory).parameters, Any)
    try:
        return anything | get_type_hints(factory)
    except NameError:  # a user's module may import types for type checkers only
        return anything


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a type, as far as that can be checked.

    An integer is a number; a bool is not.

    >>> matches_type(1, float), matches_type(True, float), matches_type("a", int)
    (True, False, False)
    >>> matches_type(("a",), tuple[str, ...]), matches_type("a", Sequence[str])
    (True, False)
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, UnionType):
        return any(matches_type(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is tuple and args:
        return isinstance(value, tuple) and all(matches_type(part, args[0]) for part in value)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if hint is Any:
        return True
    kind = origin or hint
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return not isinstance(value, str | int | float | list | dict)  # a plain value is not a record
    return isinstance(value, kind) and not (kind is Sequence and isinstance(value, str))


def describe_type(hint: Any) -> str:
    """Describe a type in words.

    >>> describe_type(int | None), describe_type(Literal["keep", "drop"]), describe_type(Sequence[int])
    ('a whole number', "'keep' or 'drop'", 'a list of whole numbers')
    """
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe_type(arg) for arg in get_args(hint) if arg is not NoneType))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    kind = get_origin(hint) or hint
    if kind in (tuple, Sequence) and get_args(hint) and get_args(hint)[0] in PLURAL_PHRASES:
        return f"a list of {PLURAL_PHRASES[get_args(hint)[0]]}"
    if kind in TYPE_PHRASES:
        return TYPE_PHRASES[kind]
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a table"
    return f"a table that names a {getattr(kind, '__name__', kind)}, such as {{is = ...}}"
