"""Gradients of loss terms for a stack of models computed by a kernel.

Representation matching has an explicit gradient (see `kernels.matching_gradient`). Any other term is written for one
party and differentiated by autograd: for many parties at once by `torch.vmap` where all trainable layers are linear,
and one party after another otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..models.matching_layers import MatchingLoss
from .kernels.layers import Value
from .kernels.matching_gradient import BoundMatching
from .kernels.traced_kernel import BoundKernel, Kernel, Stack
from .objective import Objective


class TermGradients:
    """Gradients of the objective's loss terms: a call returns those of output and points, `write` adds the weights'."""

    def __init__(
        self,
        objective: Objective,
        kernel: Kernel,
        stack: Stack,
        received: Tensor,  # [K, d]
        strengths: Tensor,  # [K, terms]
        step_size: float | None,
    ) -> None:
        self._stack = stack
        self._received = received
        self._strengths = strengths
        self._step_size = step_size
        self._by_vmap = stack.lead == 1 and kernel.all_linear
        self._received_kernel: BoundKernel | None = None
        if objective.points:
            self._received_kernel = kernel.bind(stack.layout.split(received if stack.lead else received[0]), None)
        self._matching_terms: list[tuple[int, BoundMatching]] = []
        self._autograd_terms = list[int]()
        self._ranges = [slice(0, stack.layout.trainable_width)]
        end = stack.layout.trainable_width
        into, scale = (stack.gradient, 1.0) if step_size is None else (stack.columns, -step_size)
        for i, (term, width) in enumerate(zip(objective.terms, objective.widths, strict=True)):
            at = slice(end, end + width)
            end = end + width
            if isinstance(term.value, MatchingLoss):
                parts = (stack.columns[:, at], into[:, at], scale, stack.lead)
                self._matching_terms.append((i, BoundMatching(term.value, *parts)))
            else:
                self._autograd_terms.append(i)
                self._ranges.append(at)
        terms = tuple(objective.terms[i] for i in self._autograd_terms)
        self.autograd_objective = replace(
            objective, terms=terms, widths=tuple(objective.widths[i] for i in self._autograd_terms)
        )

    def __call__(
        self, kernel: BoundKernel, inputs: Value, output: Value, x: Tensor, y: Tensor
    ) -> tuple[Value | None, dict[str, Value]]:
        """Return the gradient of the terms along the output and along the points."""
        if self._received_kernel is not None:
            self._received_kernel.forward(inputs)
        point_gradients: dict[str, Value] = {}
        for i, matching in self._matching_terms:
            received_features = {} if self._received_kernel is None else self._received_kernel.features
            _add_into(point_gradients, matching(kernel.features, received_features, self._strengths[:, i]))
        self._gradients: Sequence[Tensor | None] = [None] * len(self._ranges)
        if not self._autograd_terms:
            return None, point_gradients
        output_gradient, more_point_gradients = self._autograd_gradients(kernel, output, x, y)
        _add_into(point_gradients, more_point_gradients)
        return output_gradient, point_gradients

    def write(self) -> None:
        """Write the terms' gradient by the weights, or take its step; the kernel must have written its own before."""
        for at, gradient in zip(self._ranges, self._gradients, strict=True):
            if gradient is not None and self._step_size is not None:
                self._stack.columns[:, at].add_(gradient, alpha=-self._step_size)
            elif self._step_size is None and at.start:  # private columns, which the kernel does not write
                self._stack.gradient[:, at] = 0 if gradient is None else gradient
            elif gradient is not None:
                self._stack.gradient[:, at] += gradient

    def _autograd_gradients(
        self, kernel: BoundKernel, output: Value, x: Tensor, y: Tensor
    ) -> tuple[Value | None, dict[str, Value]]:
        lead = self._stack.lead
        points = self.autograd_objective.points
        received_values = (
            [] if self._received_kernel is None else [self._received_kernel.features[name] for name in points]
        )
        values = (output, *(kernel.features[name] for name in points), *received_values)
        stacked = [torch.from_numpy(value) if lead else value.unsqueeze(0) for value in values]
        columns = [self._stack.columns[:, at] for at in self._ranges]
        first = 1 + len(points)
        last = 1 + len(points) + len(columns)
        leaves = [_leaf(part) for part in (*stacked[:first], *columns)]

        def party_terms(*parts: Tensor) -> Tensor:
            features, received_features = (
                dict(zip(points, values, strict=True)) for values in (parts[1:first], parts[last:-4])
            )
            received, strengths, x, y = parts[-4:]
            return self.autograd_objective.weighted_terms(
                parts[first:last], received, strengths, x, y, parts[0], features, received_features
            )

        strengths = self._strengths[:, self._autograd_terms]
        arguments = (*leaves, *stacked[first:], self._received, strengths, x, y)
        with torch.enable_grad():
            if self._by_vmap:
                total = torch.vmap(party_terms)(*arguments).sum()
            else:  # other layers are large enough by themselves: see `autograd_layers.PartyByParty`
                total = torch.stack(
                    [party_terms(*parts) for parts in zip(*map(_party_slices, arguments), strict=True)]
                ).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        self._gradients = gradients[first:]
        output_gradient, *point_gradients = (
            None if g is None else g.numpy() if lead else g[0] for g in gradients[:first]
        )
        return output_gradient, {name: g for name, g in zip(points, point_gradients, strict=True) if g is not None}


def _add_into(totals: dict[str, Value], more: dict[str, Value]) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _party_slices(stack: Tensor) -> Sequence[Tensor]:
    """Return the slices of the parties; a lone one without a copy in the backward pass."""
    return [stack.squeeze(0)] if len(stack) == 1 else stack.unbind()
