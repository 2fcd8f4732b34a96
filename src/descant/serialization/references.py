"""Functions, classes and dataclasses as JSON: code is sent as an address that the receiver imports.

An address is ``package.module:name``, or ``path/to/file.py:name`` for code in a script. Nothing is unpickled. So both
sides need the same code, and only names at the top level of a module can be sent.
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

_ADVICE = (
    "Define it at the top level of a module and give it as it is, as functools.partial(it, ...), or as 'module:name'."
)


def address_of(target: Any) -> str:
    """Return the address of a function or a class.

    >>> address_of(torch.nn.functional.cross_entropy)
    'torch.nn.functional:cross_entropy'
    """
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise SettingError(f"{target!r:.80} has no address by which another process can import it. {_ADVICE}")
    if module == "__main__" or module.startswith("descant_file_"):
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            raise SettingError(
                f"{name!r} was defined in an interactive session, which no other process can import. {_ADVICE}"
            )
        module = str(Path(file).resolve())
    address = f"{module}:{name}"
    if "<" in name or resolve(address) is not target:
        raise SettingError(f"{name!r} of {module} cannot be found by another process. {_ADVICE}")
    return address


def resolve(address: str) -> Any:
    """Return the object at an address; an error names the half that is wrong.

    >>> resolve("torch.nn:Linear")
    <class 'torch.nn.modules.linear.Linear'>
    """
    module_path, _, name = address.rpartition(":")
    if not module_path or not name:
        raise SettingError(f"An address looks like 'package.module:name' or 'file.py:name'. Got {address!r}.")
    target: Any = import_module_or_file(module_path)
    for part in name.split("."):
        if not hasattr(target, part):
            raise SettingError(f"There is no {name!r} in {module_path}.")
        target = getattr(target, part)
    return target


def import_module_or_file(path: str) -> ModuleType:
    """Return the module of this name or in this file, importing it at most once."""
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and path.startswith(error.name):
                raise SettingError(f"There is no module {path!r} on the path of this process.") from error
            raise
    file = Path(path).resolve()
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == file:
        return main
    name = f"descant_file_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise SettingError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingError(f"{path} is not a Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def encode(value: Any, arrays: dict[str, Tensor]) -> Any:
    """Return a value as JSON and put its tensors into `arrays`.

    It may hold plain values, dataclasses, functions, classes, partials, dtypes and tensors.

    >>> encode((1, functools.partial(torch.nn.Linear, 2)), {})
    {'tuple': [1, {'partial': 'torch.nn.modules.linear:Linear', 'of': [2], 'with': {}}]}
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    encode_part = functools.partial(encode, arrays=arrays)
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, Tensor):
        arrays[str(len(arrays))] = value.detach()
        return {"tensor": str(len(arrays) - 1)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encode_part(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_part(key), encode_part(part)] for key, part in value.items()]}
    if isinstance(value, functools.partial):
        keywords = {key: encode_part(part) for key, part in value.keywords.items()}
        return {"partial": address_of(value.func), "of": [encode_part(part) for part in value.args], "with": keywords}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode_part(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"record": address_of(type(value)), "with": fields}
    if isinstance(value, nn.Module):
        raise SettingError(
            f"A {type(value).__name__} object cannot be sent to another process: give a function that makes it. "
            f"{_ADVICE}"
        )
    return {"at": address_of(value)}


def decode(encoded: Any, arrays: Mapping[str, Tensor]) -> Any:
    """Return the value that was encoded.

    >>> decode(encode({"a": (1.5, math.inf)}, {}), {})
    {'a': (1.5, inf)}
    """
    if not isinstance(encoded, dict):
        return encoded
    decode_part = functools.partial(decode, arrays=arrays)
    kind, value = next(iter(encoded.items()))
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](map(decode_part, value))
    if kind == "dict":
        return {decode_part(key): decode_part(part) for key, part in value}
    if kind in ("partial", "record"):
        target = resolve(value)
        keywords = {key: decode_part(part) for key, part in encoded["with"].items()}
        if kind == "partial":
            return functools.partial(target, *map(decode_part, encoded["of"]), **keywords)
        if not (isinstance(target, type) and dataclasses.is_dataclass(target)):
            raise SettingError(f"{value} is not a dataclass.")
        return target(**keywords)
    simple = {"float": float, "tensor": arrays.__getitem__, "dtype": functools.partial(getattr, torch), "at": resolve}
    return simple[kind](value)  # type: ignore[operator]
