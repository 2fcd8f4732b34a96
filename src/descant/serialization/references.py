"""Code goes by its address, never as an object: functions, classes and records written as JSON, and found again.

An address is ``package.module:name``, or ``path/to/file.py:name`` for what a script defines. What is read back is
imported, never unpickled; so both sides must have the same code, and only what stands at the top level of a module can
travel.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SettingError

_HOW = (
    "Define it at the top level of a module and give it as it is, as functools.partial(it, ...), or as 'module:name'."
)


def address_of(thing: Any) -> str:
    """Where a function or a class is found.

    >>> address_of(torch.nn.functional.cross_entropy)
    'torch.nn.functional:cross_entropy'
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise SettingError(f"{thing!r:.80} has no address that another process could find it by. {_HOW}")
    if module == "__main__" or module.startswith("descant_file_"):
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            raise SettingError(f"{name!r} was defined in an interactive session, which no other process sees. {_HOW}")
        module = str(Path(file).resolve())
    address = f"{module}:{name}"
    if "<" in name or find(address) is not thing:
        raise SettingError(f"{name!r} of {module} cannot be found by another process. {_HOW}")
    return address


def find(address: str) -> Any:
    """What stands at an address; an error says which half of it is wrong.

    >>> find("torch.nn:Linear")
    <class 'torch.nn.modules.linear.Linear'>
    """
    place, _, name = address.rpartition(":")
    if not place or not name:
        raise SettingError(f"An address looks like 'package.module:name' or 'file.py:name'. Got {address!r}.")
    found: Any = module_at(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise SettingError(f"There is no {name!r} in {place}.")
        found = getattr(found, part)
    return found


def module_at(place: str) -> ModuleType:
    """The module of this name, or that a file makes, imported once."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and place.startswith(error.name):
                raise SettingError(f"There is no module {place!r} on the path of this process.") from error
            raise
    file = Path(place).resolve()
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == file:
        return main
    name = f"descant_file_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise SettingError(f"There is no file {place}.")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingError(f"{place} is not a Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def spell(value: Any, arrays: dict[str, Tensor]) -> Any:
    """A value as JSON, its tensors apart: plain values, records (dataclasses), functions, classes, partials, dtypes.

    >>> spell((1, functools.partial(torch.nn.Linear, 2)), {})
    {'tuple': [1, {'partial': 'torch.nn.modules.linear:Linear', 'of': [2], 'with': {}}]}
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    again = functools.partial(spell, arrays=arrays)
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, Tensor):
        arrays[str(len(arrays))] = value.detach()
        return {"tensor": str(len(arrays) - 1)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [again(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[again(key), again(part)] for key, part in value.items()]}
    if isinstance(value, functools.partial):
        keywords = {key: again(part) for key, part in value.keywords.items()}
        return {"partial": address_of(value.func), "of": [again(part) for part in value.args], "with": keywords}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: again(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"record": address_of(type(value)), "with": fields}
    if isinstance(value, nn.Module):
        raise SettingError(f"A live {type(value).__name__} cannot go to another process; give what makes it. {_HOW}")
    return {"at": address_of(value)}


def read(text: Any, arrays: Mapping[str, Tensor]) -> Any:
    """The value that was spelled.

    >>> read(spell({"a": (1.5, math.inf)}, {}), {})
    {'a': (1.5, inf)}
    """
    if not isinstance(text, dict):
        return text
    again = functools.partial(read, arrays=arrays)
    kind, value = next(iter(text.items()))
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](map(again, value))
    if kind == "dict":
        return {again(key): again(part) for key, part in value}
    if kind in ("partial", "record"):
        made, keywords = find(value), {key: again(part) for key, part in text["with"].items()}
        if kind == "partial":
            return functools.partial(made, *map(again, text["of"]), **keywords)
        if not (isinstance(made, type) and dataclasses.is_dataclass(made)):
            raise SettingError(f"{value} is not a record.")
        return made(**keywords)
    simple = {"float": float, "tensor": arrays.__getitem__, "dtype": functools.partial(getattr, torch), "at": find}
    return simple[kind](value)  # type: ignore[operator]
