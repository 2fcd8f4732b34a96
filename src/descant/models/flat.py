"""Conversion of any `torch.nn.Module` to a row of numbers, and back.

A row is ``[parameters | statistics]``. Its first columns are the trainable parameters, one range of columns per tensor,
in the order of ``named_parameters``. Its last columns are the running statistics of normalization layers. The rule for
tensors that are not trainable parameters:

- **running statistics** (buffers named ``running_mean`` or ``running_var``) are sent with the row. Proximal steps and
  penalties skip them. They are aggregated by the weighted mean, or by the coordinate median in robust methods;
- **every other buffer** (integers, masks, counters, constants) and every parameter with ``requires_grad=False`` keeps
  its value from the user's module: it is equal at every party and never sent. A module that changes such a buffer
  during training is rejected with the buffer's name, because the change would be lost.
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
"""Lock held while modules run: torch's random state, warnings and a module's tensors are process-wide."""

Allocator: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""A function (shape, dtype) -> uninitialized tensor, in memory or on disk (see `storage.spill`)."""

_STATISTICS_NAMES = ("running_mean", "running_var")
_COUNTER_NAME = "num_batches_tracked"


@dataclass(frozen=True)
class Layout:
    """The columns of a row that belong to each tensor.

    >>> Layout.from_module(nn.Linear(3, 2)).names
    ('weight', 'bias')
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameter_count: int  # the number of leading names that are trainable parameters
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
                "their sizes, or let the model's factory call it once on a batch like yours."
            )
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            dtype_names = {name: str(tensor.dtype) for name, tensor in tensors.items()}
            raise ModelError(
                f"All parameters must have one floating dtype; found {dtype_names}. Use module.to(torch.float32)."
            )
        return cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()), len(trainable), dtypes.pop())

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def width(self) -> int:
        """The number of columns of a row."""
        return sum(self.sizes)

    @cached_property
    def trainable_width(self) -> int:
        """d: the number of columns that are trainable parameters; the rest are statistics."""
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
        """A fingerprint of the model's tensor names, shapes and dtype, equal for equal models."""
        return hashlib.blake2b(repr((self.names, self.shapes, str(self.dtype))).encode(), digest_size=8).hexdigest()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the trainable parameters."""
        return self.names[: self.parameter_count]

    def column_range(self, name: str) -> tuple[int, int]:
        """Return the first column of a tensor and the one after its last."""
        return self._ranges[name]

    def matching_names(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the tensor names that match one of the patterns; raise if a pattern matches none."""
        for pattern in patterns:
            if not fnmatch.filter(self.names, pattern):
                raise ModelError(f"No layer matches {pattern!r}. The model's layers: {', '.join(self.names)}.")
        return tuple(name for name in self.names if any(fnmatch.fnmatchcase(name, p) for p in patterns))

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return named views of ``rows [..., width]``, or of parameters alone, ``[..., trainable_width]``."""
        sizes = self.sizes if rows.shape[-1] == self.width else self.sizes[: self.parameter_count]
        # one split, not many slices: its gradient is one concatenation
        parts = torch.split_with_sizes(rows, sizes, dim=-1)
        shapes = self.shapes[: len(sizes)]
        lead = rows.shape[:-1]
        return {n: part.reshape(lead + shape) for n, part, shape in zip(self.names, parts, shapes, strict=False)}

    def join(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Return one row from named tensors, the inverse of :meth:`split`; written to ``out`` if given."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names], out=out)


def allocate_in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in memory."""
    return torch.empty(shape, dtype=dtype)


class Unbound(ABC):
    """A setting that names layers or points of a model, to be resolved to columns or shapes by `bind`."""

    @abstractmethod
    def bind(self, net: Net) -> Any:
        """Return the setting resolved for this model: a record of plain values that other processes can use."""


def bind(record: Any, net: Net) -> Any:
    """Return a record of settings with every `Unbound` part resolved for this model."""
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
    """A copy of a user's module as a function of rows: outputs = f(row, batch)."""

    def __init__(self, module: nn.Module, allocate: Allocator = allocate_in_memory) -> None:
        self.layout = Layout.from_module(module)
        self.allocate = allocate  # makes row-sized tensors that are rarely used
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        first = allocate((self.layout.width,), self.layout.dtype)
        self._initial_row = self.layout.join({name: tensors[name].detach() for name in self.layout.names}, first)
        self.module = module = _copy_module(module, self.layout, self._initial_row)
        self.solver_cache: dict[object, Any] = {}  # a cache of solvers; results never depend on it
        everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        # computed once, so that torch need not search on each call
        self._has_tied_weights = len(everything) > len({id(tensor) for _, tensor in everything})
        parameters = dict(module.named_parameters())
        self._tensors: dict[str, Tensor] = {**parameters, **dict(module.named_buffers())}
        self._trainable = [parameters[name] for name in self.layout.parameter_names]
        self.restore_views()
        counted = (name for name in self._tensors if name.rsplit(".", 1)[-1] == _COUNTER_NAME)
        self._counters = {name: self._tensors[name].clone() for name in counted}
        for name, part in module.named_modules():
            if getattr(part, _COUNTER_NAME, None) is not None and getattr(part, "momentum", 0.1) is None:
                raise ModelError(f"{name!r} averages its statistics by a counter (momentum=None). Give it a momentum.")

    @classmethod
    @torch.inference_mode(False)
    def from_model(
        cls, model: nn.Module | Callable[[], nn.Module], seed: int, allocate: Allocator = allocate_in_memory
    ) -> Net:
        """Return the net of a module, a class or a factory."""
        if isinstance(model, nn.Module):
            return cls(model, allocate)
        with MODULE_LOCK, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = model()
        if not isinstance(module, nn.Module):
            raise ModelError(f"The model must be an nn.Module or make one when called; it made {module!r}.")
        return cls(module, allocate)

    def restore_views(self) -> None:
        """Make the module's parameters views of the initial row again, so that they hold no other memory."""
        for name, parameter in zip(self.layout.parameter_names, self._trainable, strict=True):
            begin, end = self.layout.column_range(name)
            if parameter.is_contiguous():
                parameter.data = self._initial_row[begin:end].view(parameter.shape)

    @property
    def initial_row(self) -> Tensor:
        """The initial values of the module, ``[width]``; its parameters are views of it, so never write to it."""
        return self._initial_row

    def copy_initial_row(self) -> Tensor:
        """Return a copy of the initial row, for callers that run the module, which may write to its parameters."""
        return self.allocate((self.layout.width,), self.layout.dtype).copy_(self._initial_row)

    @cached_property
    def constants_digest(self) -> str:
        """A fingerprint of the tensors outside the row: frozen parameters, masks, other buffers."""
        sha = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(self._tensors.items()):
            if name not in self.layout.names and name not in self._counters:
                sha.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def module_from_row(self, row: Tensor) -> nn.Module:
        """Return a copy of the user's module with the values of a row, in evaluation mode."""
        module = copy.deepcopy(self.module)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, values in {**self.layout.split(row), **self._counters}.items():
                tensors[name].copy_(values)
        return module.eval()

    def apply(self, parameters: Tensor, statistics: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for a batch, and the new statistics ``[width - trainable_width]``."""
        output, after = self._call(self.module, "", parameters, statistics, x)
        return output, after

    def apply_with_points(
        self, parameters: Tensor, statistics: Tensor, x: Tensor, points: tuple[str, ...]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the result of :meth:`apply`, and the values at some points of the module (see `tracing`)."""
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
        """The module's graph, or the reason why it has none."""
        return trace_module(self.module)

    @property
    def graph(self) -> TracedModule:
        """The module's graph; raises if there is none."""
        if isinstance(self.trace_result, str):
            parts = ", ".join(name for name, _ in self.module.named_modules() if name)
            raise ModelError(
                f"The points of {type(self.module).__name__} cannot be found: {self.trace_result}. "
                f"Its submodules: {parts}. "
                "Write its forward without conditions and loops on values, and let it return one tensor."
            )
        return self.trace_result

    def run_in_place(self, parameters: Tensor, statistics: Tensor, x: Tensor) -> tuple[Tensor, list[nn.Parameter]]:
        """Run the module itself on views of these numbers; return its output, and its parameters for autograd.

        As fast as plain torch, while :meth:`apply` spends time on swapping tensors. Statistics are updated in place.
        """
        tensors = {**self.layout.split(parameters), **self._statistics_views(statistics)}
        for name, view in tensors.items():
            self._tensors[name].data = view
        for name, value in self._counters.items():
            self._tensors[name].data = value.clone()
        output: Tensor = self.module(x)
        return output, self._trainable

    def _copy_statistics(self, statistics: Tensor) -> dict[str, Tensor]:
        """Return copies of the statistics, because vmap would lose what a module writes into a view."""
        return {name: view.clone() for name, view in self._statistics_views(statistics).items()}

    def _statistics_views(self, statistics: Tensor) -> dict[str, Tensor]:
        first = self.layout.parameter_count
        layout = self.layout
        if first == len(layout.names):
            return {}
        parts = zip(torch.split_with_sizes(statistics, layout.sizes[first:]), layout.shapes[first:], strict=True)
        return dict(zip(layout.names[first:], (part.view(shape) for part, shape in parts), strict=True))


def _copy_module(module: nn.Module, layout: Layout, row: Tensor) -> nn.Module:
    """Return a copy of a module whose parameters are views of a row that has their values already.

    The module itself stays untouched: a factory may return a module that other code uses, too.
    """
    views = layout.split(row)
    trained = (pair for pair in module.named_parameters() if pair[1].requires_grad)
    replaceable = {name: one for name, one in trained if type(one) is nn.Parameter and one.is_contiguous()}
    return copy.deepcopy(module, {id(one): nn.Parameter(views[name]) for name, one in replaceable.items()})
