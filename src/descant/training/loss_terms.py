"""What terms add to the gradient of a stack whose models go by a kernel.

Representation matching has its gradient written out (see `matched`); any other term, written for one party, goes by
autograd: many parties at once by `torch.vmap` where all that learns is linear, and by turns otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..models.matching_layers import Matching
from .kernels.layers import Value
from .kernels.matching_gradient import BoundMatching
from .kernels.traced_kernel import BoundKernel, Kernel, Stack
from .objective import Objective


class Added:
    """The terms of an objective at work: called with a batch, and then asked to put what belongs to the columns."""

    def __init__(
        self,
        objective: Objective,
        kernel: Kernel,
        stack: Stack,
        received: Tensor,  # [K, d]
        strengths: Tensor,  # [K, terms]
        rate: float | None,
    ) -> None:
        self._stack, self._received, self._strengths, self._rate = stack, received, strengths, rate
        self._by_vmap = stack.lead == 1 and kernel.all_linear
        self._frozen: BoundKernel | None = None
        if objective.points:
            self._frozen = kernel.bind(stack.layout.split(received if stack.lead else received[0]), None)
        self._matched: list[tuple[int, BoundMatching]] = []
        self._chosen, self._ranges, end = list[int](), [slice(0, stack.layout.size)], stack.layout.size
        into, scale = (stack.gradient, 1.0) if rate is None else (stack.columns, -rate)
        for i, (term, width) in enumerate(zip(objective.terms, objective.widths, strict=True)):
            at, end = slice(end, end + width), end + width
            if isinstance(term.value, Matching):
                parts = (stack.columns[:, at], into[:, at], scale, stack.lead)
                self._matched.append((i, BoundMatching(term.value, *parts)))
            else:
                self._chosen.append(i)
                self._ranges.append(at)
        terms = tuple(objective.terms[i] for i in self._chosen)
        self.by_autograd = replace(objective, terms=terms, widths=tuple(objective.widths[i] for i in self._chosen))

    def __call__(
        self, kernel: BoundKernel, given: Value, output: Value, x: Tensor, y: Tensor
    ) -> tuple[Value | None, dict[str, Value]]:
        """The gradient of the terms along the output, and along the points."""
        if self._frozen is not None:
            self._frozen.forward(given)
        along: dict[str, Value] = {}
        for i, matching in self._matched:
            seen = {} if self._frozen is None else self._frozen.seen
            _merge(along, matching(kernel.seen, seen, self._strengths[:, i]))
        self._found: Sequence[Tensor | None] = [None] * len(self._ranges)
        if not self._chosen:
            return None, along
        top, others = self._by_autograd(kernel, output, x, y)
        _merge(along, others)
        return top, along

    def put(self) -> None:
        """Put the gradient along columns where it goes: after the kernel's own, which is in its place by now."""
        for at, gradient in zip(self._ranges, self._found, strict=True):
            if gradient is not None and self._rate is not None:
                self._stack.columns[:, at].add_(gradient, alpha=-self._rate)
            elif self._rate is None and at.start:  # private columns, which the kernel knows nothing of
                self._stack.gradient[:, at] = 0 if gradient is None else gradient
            elif gradient is not None:
                self._stack.gradient[:, at] += gradient

    def _by_autograd(
        self, kernel: BoundKernel, output: Value, x: Tensor, y: Tensor
    ) -> tuple[Value | None, dict[str, Value]]:
        lead, points = self._stack.lead, self.by_autograd.points
        frozen = [] if self._frozen is None else [self._frozen.seen[name] for name in points]
        values = (output, *(kernel.seen[name] for name in points), *frozen)
        stacked = [torch.from_numpy(value) if lead else value.unsqueeze(0) for value in values]
        columns = [self._stack.columns[:, at] for at in self._ranges]
        first, last = 1 + len(points), 1 + len(points) + len(columns)
        leaves = [_leaf(part) for part in (*stacked[:first], *columns)]

        def one(*parts: Tensor) -> Tensor:
            seen, aims = (dict(zip(points, some, strict=True)) for some in (parts[1:first], parts[last:-4]))
            received, strengths, x, y = parts[-4:]
            return self.by_autograd.added(parts[first:last], received, strengths, x, y, parts[0], seen, aims)

        strengths = self._strengths[:, self._chosen]
        everything = (*leaves, *stacked[first:], self._received, strengths, x, y)
        with torch.enable_grad():
            if self._by_vmap:
                total = torch.vmap(one)(*everything).sum()
            else:  # what is not linear is large enough by itself: see `recorded.PartyByParty`
                total = torch.stack([one(*parts) for parts in zip(*map(_by_turns, everything), strict=True)]).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        self._found = found[first:]
        top, *rest = (None if g is None else g.numpy() if lead else g[0] for g in found[:first])
        return top, {name: g for name, g in zip(points, rest, strict=True) if g is not None}


def _merge(into: dict[str, Value], more: dict[str, Value]) -> None:
    for name, value in more.items():
        into[name] = into[name] + value if name in into else value


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _by_turns(stack: Tensor) -> Sequence[Tensor]:
    """One party after another; a lone one without a copy on the way back."""
    return [stack.squeeze(0)] if len(stack) == 1 else stack.unbind()
