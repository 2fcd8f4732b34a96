"""Any `torch.nn.Module` as a row of numbers, and back.

A row is ``[parameters | statistics]``. Its first columns are the trainable parameters, one range of columns a tensor,
in the order of ``named_parameters``; its last are the running statistics of normalisation layers. The rule for what is
not a trainable parameter:

- **running statistics** (buffers named ``running_mean`` or ``running_var``) travel with the row, are never pulled or
  penalised, and add up by the weighted mean, or by the coordinate median where the method is a robust one;
- **every other buffer** (integers, masks, counters, constants) and every parameter with ``requires_grad=False`` stays
  what the user's module made it: it is the same at every party and never travels. A module that changes such a buffer
  while it trains is refused with its name, because the change would be lost.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from ..errors import ModelError
from .tracing import TracedModule, trace_module

MODULE_LOCK = threading.RLock()
"""Held while modules run: torch's own random numbers, warnings and a module's tensors belong to the whole process."""

Allocator: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor to be filled, of a shape and a kind: in memory, or where there is more of it (see `store.room`)."""

_STATISTICS_NAMES = ("running_mean", "running_var")
_COUNTER_NAME = "num_batches_tracked"


@dataclass(frozen=True)
class Layout:
    """Which columns of a row belong to which tensor.

    >>> Layout.of(nn.Linear(3, 2)).names
    ('weight', 'bias')
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameter_count: int  # how many of the names, counted from the first, are trainable parameters
    dtype: torch.dtype

    @classmethod
    def from_module(cls, module: nn.Module) -> Layout:
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        statistics = {name: b for name, b in module.named_buffers() if name.rsplit(".", 1)[-1] in _STATISTICS_NAMES}
        if not trainable:
            raise ModelError(f"{type(module).__name__} has no trainable parameter: there is nothing to federate.")
        tensors = {**trainable, **statistics}
        for name in (name for name, tensor in tensors.items() if is_lazy(tensor)):
            raise ModelError(
                f"{name!r} of {type(module).__name__} has no shape before it is first used (a lazy layer). Give layers "
                "their sizes, or let what makes the model call it once on rows as yours are."
            )
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            found = {name: str(tensor.dtype) for name, tensor in tensors.items()}
            raise ModelError(
                f"All parameters must have one floating dtype; found {found}. Use module.to(torch.float32)."
            )
        return cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()), len(trainable), dtypes.pop())

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def width(self) -> int:
        """How many columns a row has."""
        return sum(self.sizes)

    @cached_property
    def trainable_width(self) -> int:
        """d: how many of the columns are trainable parameters; the rest are statistics."""
        return sum(self.sizes[: self.parameter_count])

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        ranges = {}
        begin = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            ranges[name] = (begin, begin + size)
            begin += size
        return ranges

    @cached_property
    def digest(self) -> str:
        """A fingerprint that two parties with the same model share."""
        return hashlib.blake2b(repr((self.names, self.shapes, str(self.dtype))).encode(), digest_size=8).hexdigest()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the trainable parameters."""
        return self.names[: self.parameter_count]

    def column_range(self, name: str) -> tuple[int, int]:
        """The first column of a tensor and the one after its last."""
        return self._ranges[name]

    def matching_names(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """The tensors whose name matches one of the patterns; a pattern without a match is an error."""
        for pattern in patterns:
            if not fnmatch.filter(self.names, pattern):
                raise ModelError(f"No layer matches {pattern!r}. The model's layers: {', '.join(self.names)}.")
        return tuple(name for name in self.names if any(fnmatch.fnmatchcase(name, p) for p in patterns))

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Named views of ``rows [..., width]``, or of its parameters alone when it is ``[..., size]``."""
        sizes = self.sizes if rows.shape[-1] == self.width else self.sizes[: self.parameter_count]
        # one split, not many slices: its gradient is one concatenation
        parts = torch.split_with_sizes(rows, sizes, dim=-1)
        shapes = self.shapes[: len(sizes)]
        lead = rows.shape[:-1]
        return {n: part.reshape(lead + shape) for n, part, shape in zip(self.names, parts, shapes, strict=False)}

    def join(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """One row from named tensors, the inverse of :meth:`split`; put into a row that is there, if one is given."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names], out=out)


def allocate_in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room as torch has it."""
    return torch.empty(shape, dtype=dtype)


class Unbound(ABC):
    """Something that names layers or points of a model, and becomes columns or shapes once the model is known."""

    @abstractmethod
    def bind(self, net: Net) -> Any:
        """The same thing for this model; a record of plain values, which can go to other processes."""


def bind(record: Any, net: Net) -> Any:
    """A record of settings in which all that is unbound has become what it is for this model."""
    if isinstance(record, Unbound):
        return record.bind(net)
    if isinstance(record, tuple):
        parts = tuple(bind(part, net) for part in record)
        return parts if any(new is not old for new, old in zip(parts, record, strict=True)) else record
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        old = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        new = {name: bind(part, net) for name, part in old.items()}
        return dataclasses.replace(record, **new) if any(new[n] is not old[n] for n in old) else record
    return record


class Net:
    """A copy of a user's module without its numbers: rows go in, outputs come out."""

    def __init__(self, module: nn.Module, allocate: Allocator = allocate_in_memory) -> None:
        self.layout = Layout.from_module(module)
        self.allocate = allocate  # room for what is as large as a row, and seldom used
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        first = allocate((self.layout.width,), self.layout.dtype)
        self._initial_row = self.layout.join({name: tensors[name].detach() for name in self.layout.names}, first)
        self.module = module = _copy_module(module, self.layout, self._initial_row)
        self.solver_cache: dict[object, Any] = {}  # what a solver need not make anew each time; nothing depends on it
        everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._has_tied_weights = len(everything) > len(
            {id(tensor) for _, tensor in everything}
        )  # torch need not look each time
        parameters = dict(module.named_parameters())
        self._tensors: dict[str, Tensor] = {**parameters, **dict(module.named_buffers())}
        self._trainable = [parameters[name] for name in self.layout.parameter_names]
        self.restore_views()
        counted = (name for name in self._tensors if name.rsplit(".", 1)[-1] == _COUNTER_NAME)
        self._counters = {name: self._tensors[name].clone() for name in counted}
        for name, part in module.named_modules():
            if getattr(part, _COUNTER_NAME, None) is not None and getattr(part, "momentum", 0.1) is None:
                raise ModelError(f"{name!r} averages its statistics by a counter (momentum=None); give it a momentum.")

    @classmethod
    @torch.inference_mode(False)
    def from_model(
        cls, model: nn.Module | Callable[[], nn.Module], seed: int, allocate: Allocator = allocate_in_memory
    ) -> Net:
        """A net of a module, a class or a factory."""
        if isinstance(model, nn.Module):
            return cls(model, allocate)
        with MODULE_LOCK, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = model()
        if not isinstance(module, nn.Module):
            raise ModelError(f"The model must be an nn.Module or make one when called; it made {module!r}.")
        return cls(module, allocate)

    def restore_views(self) -> None:
        """Let the module's parameters be views of its first numbers: it has no memory of its own, nor anybody's."""
        for name, parameter in zip(self.layout.parameter_names, self._trainable, strict=True):
            begin, end = self.layout.column_range(name)
            if parameter.is_contiguous():
                parameter.data = self._initial_row[begin:end].view(parameter.shape)

    @property
    def initial_row(self) -> Tensor:
        """The numbers that the module came with, ``[width]``: they are its own memory, and not to be written to."""
        return self._initial_row

    def copy_initial_row(self) -> Tensor:
        """The same, as a copy: for whoever lets the module run, which may write into its own parameters."""
        return self.allocate((self.layout.width,), self.layout.dtype).copy_(self._initial_row)

    @cached_property
    def constants_digest(self) -> str:
        """A fingerprint of what the module holds beside its row: frozen parameters, masks, other buffers."""
        sha = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(self._tensors.items()):
            if name not in self.layout.names and name not in self._counters:
                sha.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def module_from_row(self, row: Tensor) -> nn.Module:
        """A module of the user's own kind that holds the numbers of a row, ready to be used."""
        module = copy.deepcopy(self.module)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, values in {**self.layout.split(row), **self._counters}.items():
                tensors[name].copy_(values)
        return module.eval()

    def apply(self, parameters: Tensor, statistics: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output for a batch, and the statistics ``[width - size]`` afterwards: in training mode they move."""
        output, after = self._call(self.module, "", parameters, statistics, x)
        return output, after

    def apply_with_points(
        self, parameters: Tensor, statistics: Tensor, x: Tensor, points: tuple[str, ...]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same as :meth:`apply`, with the values at some points of the module (see `traced`)."""
        key = ("tapped", points)
        if key not in self.solver_cache:
            self.solver_cache[key] = self.graph.with_point_outputs(points)
        (output, point_values), after = self._call(self.solver_cache[key], "0.", parameters, statistics, x)
        return output, after, point_values

    def _call(
        self, module: nn.Module, prefix: str, parameters: Tensor, statistics: Tensor, x: Tensor
    ) -> tuple[Any, Tensor]:
        statistics_copies = self._copy_statistics(statistics)
        counters = {name: value.clone() for name, value in self._counters.items()}
        tensors = {
            prefix + name: t for name, t in {**self.layout.split(parameters), **statistics_copies, **counters}.items()
        }
        output = functional_call(module, tensors, (x,), tie_weights=self._has_tied_weights)
        after = torch.cat([part.flatten() for part in statistics_copies.values()]) if statistics_copies else statistics
        return output, after

    @cached_property
    def trace_result(self) -> TracedModule | str:
        """The module's graph, or why there is none."""
        return trace_module(self.module)

    @property
    def graph(self) -> TracedModule:
        """The module's graph; an error if there is none."""
        if isinstance(self.trace_result, str):
            parts = ", ".join(name for name, _ in self.module.named_modules() if name)
            raise ModelError(
                f"The points of {type(self.module).__name__} cannot be found: {self.trace_result}. Its submodules: {parts}. "
                "Write its forward without conditions and loops on values, and let it return one tensor."
            )
        return self.trace_result

    def run_in_place(self, parameters: Tensor, statistics: Tensor, x: Tensor) -> tuple[Tensor, list[nn.Parameter]]:
        """The output of the module itself, its tensors made views of these; with its parameters, to take gradients by.

        As fast as plain torch, where :meth:`apply` spends time on putting tensors in and out; statistics move in place.
        """
        tensors = {**self.layout.split(parameters), **self._statistics_views(statistics)}
        for name, view in tensors.items():
            self._tensors[name].data = view
        for name, value in self._counters.items():
            self._tensors[name].data = value.clone()
        output: Tensor = self.module(x)
        return output, self._trainable

    def _copy_statistics(self, statistics: Tensor) -> dict[str, Tensor]:
        """Tensors of their own for the statistics: vmap would lose what a module writes into a view."""
        return {name: view.clone() for name, view in self._statistics_views(statistics).items()}

    def _statistics_views(self, statistics: Tensor) -> dict[str, Tensor]:
        first = self.layout.parameter_count
        layout = self.layout
        if first == len(layout.names):
            return {}
        parts = zip(torch.split_with_sizes(statistics, layout.sizes[first:]), layout.shapes[first:], strict=True)
        return dict(zip(layout.names[first:], (part.view(shape) for part, shape in parts), strict=True))


def _copy_module(module: nn.Module, layout: Layout, row: Tensor) -> nn.Module:
    """A copy of a module, whose parameters are views of a row that has their numbers already.

    The module itself stays untouched: a factory may hand out one that somebody else has, too.
    """
    views = layout.split(row)
    trained = (pair for pair in module.named_parameters() if pair[1].requires_grad)
    replaceable = {name: one for name, one in trained if type(one) is nn.Parameter and one.is_contiguous()}
    return copy.deepcopy(module, {id(one): nn.Parameter(views[name]) for name, one in replaceable.items()})
