"""The gradient of the local objectives of a stack of parties.

There are four execution modes. Models of common layers use a kernel (see `kernels.traced_kernel`): small ones are
*stacked*, many parties at once; large ones *single*, one party after another. Other models use autograd: small ones are
*vectorized*, many at once by `torch.vmap`. Models that are large, draw random numbers or do not work with vmap (an
`nn.LSTM`, say) are *looped*, one party after another.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ModelError
from ..models.flat import Net
from .kernels.layers import Array, GradientTarget, Value
from .kernels.reproducible_elementwise import ReproducibleElementwise
from .kernels.traced_kernel import Stack, kernel_of
from .loss_terms import TermGradients
from .objective import Objective
from .rl_losses import LossWithGradient

STACKED = "stacked"
SINGLE = "single"
VECTORIZED = "vectorized"
LOOPED = "looped"
BATCHED_MODES = (STACKED, VECTORIZED)
# bytes of parameters from which a stack uses fused steps: measured by `python benchmarks/execution_modes.py`
LARGE_MODEL_BYTES = 2**17


def supports_fused_step(net: Net, mode: str) -> bool:
    """Return whether a :class:`StackGradient` without extra loss terms can take the step during the backward pass.

    A large model then passes through the cache once less. A stack of small models is faster with a separate gradient,
    which is one more operation on all of them.
    """
    kernel = kernel_of(net, int(mode == STACKED)) if mode in (STACKED, SINGLE) else ""
    if isinstance(kernel, str) or not kernel.supports_fused_step:
        return False
    return mode == SINGLE or (
        kernel.all_linear and net.layout.trainable_width * net.layout.dtype.itemsize >= LARGE_MODEL_BYTES
    )


class StackGradient:
    """The gradient of a stack's objectives: called with a batch, it writes the gradient and adds up the losses.

    With a ``step_size`` (if :func:`supports_fused_step`) it takes a step of descent instead, without a gradient in
    memory.
    """

    def __init__(
        self,
        objective: Objective,
        mode: str,
        stack: Stack,
        statistics: Tensor,  # [K, s]
        received: Tensor,  # [K, d]
        strengths: Tensor,  # [K, terms]
        step_size: float | None = None,
    ) -> None:
        self.objective = objective
        self.mode = mode
        self.stack = stack
        self._step_size = step_size
        self._pair: StackGradient | None = None
        if objective.points:  # the received model is computed, too: align its rows to cache lines
            received = Stack(stack.layout, [received]).columns
        self.statistics = statistics
        self.received = received
        self.strengths = strengths
        self.reset_losses()
        # of the last batch: an array or a tensor [K, batch, ...], or [batch, ...] of one party
        self.output: Value = None
        if mode in (STACKED, SINGLE):
            kernel = kernel_of(objective.net, stack.lead, objective.points)
            if isinstance(kernel, str):
                raise ModelError(f"{type(objective.net.module).__name__} cannot be stacked: {kernel}.")
            self._kernel = kernel.bind(
                stack.w, GradientTarget(stack.g) if step_size is None else GradientTarget(stack.w, -step_size)
            )
            self._term_gradients = (
                TermGradients(objective, kernel, stack, received=received, strengths=strengths, step_size=step_size)
                if objective.terms
                else None
            )
        fused_step = step_size is not None and (
            self._term_gradients is None or not self._term_gradients.autograd_objective.terms
        )
        needs_pair = mode in BATCHED_MODES and len(stack.columns) == 1 and not fused_step
        self._pair = self._subset([0, 0]) if needs_pair else None  # a stack of one rounds differently

    def reset_losses(self) -> None:
        """Set the sums of losses to 0."""
        self.losses = LossSum(self.stack.columns.new_zeros(len(self.stack.columns)))
        if self._pair is not None:
            self._pair.reset_losses()

    def _subset(self, rows: list[int]) -> StackGradient:
        """Return a gradient for some of the parties, on copies of their columns."""
        stack = Stack(self.stack.layout, [self.stack.columns[rows]], self.stack.lead)
        parts = (self.statistics[rows], self.received[rows], self.strengths[rows])
        return StackGradient(self.objective, self.mode, stack, *parts, self._step_size)

    def compute_rows(self, rows: list[int], x: Tensor, y: Tensor) -> None:
        """Compute the gradient of some of the parties alone."""
        subset = self._subset(rows)
        subset(x, y)
        self.stack.gradient[rows], self.statistics[rows] = subset.stack.gradient, subset.statistics
        self.losses.total[rows] += subset.losses.total

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Compute the gradient on a batch ``[K, batch, ...]``."""
        if self._pair is not None:
            self._compute_as_pair(self._pair, x, y)
        elif self.mode in (STACKED, SINGLE):
            self._by_kernel(x, y)
        else:
            with torch.enable_grad():
                self._by_autograd(x, y) if self.objective.terms or self.mode == VECTORIZED else self._by_module(x, y)

    def _compute_as_pair(self, pair: StackGradient, x: Tensor, y: Tensor) -> None:
        pair.stack.columns.copy_(self.stack.columns)
        pair(x.expand(2, *x.shape[1:]), y.expand(2, *y.shape[1:]))
        if self._step_size is None:
            self.stack.gradient.copy_(pair.stack.gradient[:1])
        else:
            self.stack.columns.copy_(pair.stack.columns[:1])
        self.statistics = pair.statistics[:1]
        self.losses.total.copy_(pair.losses.total[:1])
        self.output = pair.output[:1]

    def _by_module(self, x: Tensor, y: Tensor) -> None:
        """Compute the gradient of one party by the module itself, where the objective has no extra loss terms."""
        output, parameters = self.objective.net.run_in_place(self.stack.columns[0], self.statistics[0], x[0])
        loss = self.objective.loss(output, y[0]).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.stack.gradient[0])
        self.output = output.detach()
        self.losses.total.add_(loss.detach())

    def _by_autograd(self, x: Tensor, y: Tensor) -> None:
        leaf = self.stack.columns.detach().requires_grad_()
        parts = (leaf, self.statistics, self.received, self.strengths, x, y)
        if self.mode == VECTORIZED:
            with ReproducibleElementwise():
                totals, losses, after, output = torch.vmap(self.objective.party_objective)(*parts)
        else:
            outcome = self.objective.party_objective(*(part[0] for part in parts))
            totals, losses, after, output = (part.unsqueeze(0) for part in outcome)
        (gradient,) = torch.autograd.grad(totals.sum(), leaf)
        self.stack.gradient.copy_(gradient)
        self.statistics = after.detach()
        self.output = output.detach()
        self.losses.total.add_(losses.detach())

    def _by_kernel(self, x: Tensor, y: Tensor) -> None:
        """Compute the whole stack by its kernel, with the gradients of terms added in the backward pass."""
        inputs = x.numpy() if self.stack.lead else x[0]
        output = self._kernel.forward(inputs)
        self.output = output
        output_gradient = self._loss_gradient(output, y)
        if self._term_gradients is None:
            self._kernel.backward(output_gradient)
            return
        terms_gradient, point_gradients = self._term_gradients(self._kernel, inputs, output, x, y)
        self._kernel.backward(
            output_gradient if terms_gradient is None else output_gradient + terms_gradient, point_gradients
        )
        self._term_gradients.write()

    def _loss_gradient(self, output: Value, y: Tensor) -> Value:
        """Return the gradient of the loss along the outputs."""
        lead = self.stack.lead
        if self.objective.loss is functional.cross_entropy and output.ndim == 2 + lead and y.ndim == 2:
            if lead:
                return self.losses.cross_entropy_gradient(output, y.numpy())
            return torch.from_numpy(self.losses.cross_entropy_gradient(output.numpy(), y[0].numpy()))
        if isinstance(self.objective.loss, LossWithGradient):
            gradient, mean = self.objective.loss.output_gradient(
                output if lead else output.numpy(), (y if lead else y[0]).numpy()
            )
            self.losses.total.add_(torch.from_numpy(np.asarray(mean)))
            return gradient if lead else torch.from_numpy(gradient)
        leaf = (torch.from_numpy(output) if lead else output.unsqueeze(0)).detach().requires_grad_()
        with torch.enable_grad():
            losses = torch.vmap(self._mean_loss)(leaf, y) if lead else self._mean_loss(leaf[0], y[0]).unsqueeze(0)
            (loss_gradient,) = torch.autograd.grad(losses.sum(), leaf)
        self.losses.total.add_(losses.detach())
        return loss_gradient.numpy() if lead else loss_gradient[0]

    def _mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.objective.loss(output, y).mean()


@lru_cache(16)
def _row_offsets(size: int, classes: int) -> Array:
    """Return where each row begins in a flat array of ``size`` numbers, with ``classes`` numbers per row."""
    offsets = np.arange(0, size, classes)
    offsets.setflags(write=False)
    return offsets


class LossSum:
    """The sum of each party's losses over its batches; cross-entropies are computed many batches at a time."""

    def __init__(self, total: Tensor) -> None:
        self._total = total  # [K]
        self._pending: list[tuple[Array, Array, Array]] = []

    @property
    def total(self) -> Tensor:
        """The sum over all batches so far, ``[K]``."""
        if self._pending:
            sums, target_logits, targets = map(np.concatenate, zip(*self._pending, strict=True))
            if targets.max() >= self._classes:
                raise ModelError(f"Target {targets.max()} is out of bounds: the model knows {self._classes} classes")
            losses = (np.log(sums) - target_logits).reshape(len(self._pending), len(self._total), -1)
            # One by one: the number of pending batches depends on the other parties of the stack.
            self._total.copy_(torch.from_numpy(np.add.accumulate([self._total.numpy(), *losses.mean(2)])[-1]))
            self._pending = []
        return self._total

    def cross_entropy_gradient(self, output: Array, y: Array) -> Array:
        """Return the gradient of the mean cross-entropy, (softmax - one-hot) / batch, ``[..., batch, classes]``.

        ``y`` lacks the last axis. Losses stay pending while they are few and of one shape; a label out of bounds
        raises only when they are summed.
        """
        if self._pending and (y.shape != self._pending[0][2].shape or len(self._pending) >= 32):
            self.total  # noqa: B018  computes the pending losses
        self._classes = output.shape[-1]
        probabilities: Array = output - output.max(-1, keepdims=True)
        flat = probabilities.reshape(-1)
        target_indices = _row_offsets(probabilities.size, self._classes) + y.reshape(-1)
        np.minimum(target_indices, flat.size - 1, out=target_indices)
        target_logits = flat.take(target_indices)
        np.exp(probabilities, out=probabilities)
        sums = probabilities.sum(-1, keepdims=True)
        self._pending.append((sums.reshape(-1), target_logits, y))
        probabilities /= sums
        flat[target_indices] -= 1
        probabilities /= y.shape[-1]
        return probabilities
