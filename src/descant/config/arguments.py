"""What a file gives to a function: its signature says which keywords there are and of what type. Nothing is said twice.

>>> def net(inputs: int, hidden: int = 32) -> None: ...
>>> keywords_for(net, {"inputs": 64, "hiden": 8}, "[model]")
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
    """No other reading of a value."""
    return value


def parse_keywords(
    factory: Callable[..., Any], values: Mapping[str, Any], location: str, convert: Converter = identity
) -> dict[str, Any]:
    """The keywords to call ``make`` with; one that it does not know, of a wrong type, or missing is an error.

    A value whose type is not the keyword's is tried once more as ``convert`` reads it: a list as a tuple, say.
    """
    parameters = inspect.signature(factory).parameters
    hints = parameter_types(factory)
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, parameter in parameters.items() if parameter.kind in NAMED_KINDS]
    found = {}
    for key, value in values.items():
        if key not in named and not accepts_any:
            raise unknown_name_error(f"key of {location}", key, named or ["none"])
        hint = hints.get(key, Any)
        found[key] = value if matches_type(value, hint) else convert(value)
        if not matches_type(found[key], hint):
            raise SettingError(f"The {key!r} of {location} must be {describe_type(hint)}. Got {value!r:.80}.")
    missing = [name for name in named if name not in values and parameters[name].default is inspect.Parameter.empty]
    if missing:
        raise SettingError(
            f"{location} lacks {', '.join(map(repr, missing))}, which must be {describe_type(hints[missing[0]])}."
        )
    return found


NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameter_types(factory: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's keywords, or of a class's."""
    if isinstance(factory, type) and not is_dataclass(factory):
        factory = factory.__init__  # type: ignore[misc]
    anything = dict.fromkeys(inspect.signature(factory).parameters, Any)
    try:
        return anything | get_type_hints(factory)
    except NameError:  # a module of the user's imports its types for type checkers only
        return anything


def matches_type(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as far as that can be said of it; a whole number is a number, true is not.

    >>> fits(1, float), fits(True, float), fits("a", int), fits(("a",), tuple[str, ...]), fits("a", Sequence[str])
    (True, False, False, True, False)
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
        return not isinstance(value, str | int | float | list | dict)  # a plain value is none of our records
    return isinstance(value, kind) and not (kind is Sequence and isinstance(value, str))


def describe_type(hint: Any) -> str:
    """A type in words.

    >>> told(int | None), told(Literal["keep", "drop"]), told(Sequence[int])
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
