"""The gradient of what parties minimise, for a stack of them at once.

There are four ways. Models of common layers go by a kernel (see `stacked`): small ones *stacked*, many parties at once,
large ones *single*, one party after another. Others go by autograd: small ones *vectorised*, many at once by
`torch.vmap`, and *looped*, one after another, what is large, draws random numbers, or is refused by vmap (an `nn.LSTM`,
say).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ModelError
from ..models.flat import Net
from .kernels.layers import Array, Into, Value
from .kernels.reproducible_elementwise import Evenly
from .kernels.traced_kernel import Stack, kernel_of
from .loss_terms import Added
from .objective import Objective
from .rl_losses import Sloped

STACKED, SINGLE, VECTORISED, LOOPED = "stacked", "single", "vectorised", "looped"
TOGETHER = (STACKED, VECTORISED)
LARGE = 2**17  # bytes of parameters from which a stack steps at once: measured by `python benchmarks/ways.py`


def steps_at_once(net: Net, way: str) -> bool:
    """Whether a :class:`Descent` without terms can step by itself: a large model then goes through the cache once less.

    A stack of small models does better with a gradient, which is one more operation on all of them.
    """
    kernel = kernel_of(net, int(way == STACKED)) if way in (STACKED, SINGLE) else ""
    if isinstance(kernel, str) or not kernel.steps_at_once:
        return False
    return way == SINGLE or (kernel.all_linear and net.layout.size * net.layout.dtype.itemsize >= LARGE)


class Descent:
    """Called with a batch, it puts the gradient of what is minimised into its stack; statistics and losses add up.

    With a ``rate`` (where :func:`steps_at_once`), it is a step of descent, and the gradient is nowhere.
    """

    def __init__(
        self,
        objective: Objective,
        way: str,
        stack: Stack,
        statistics: Tensor,  # [K, s]
        received: Tensor,  # [K, d]
        strengths: Tensor,  # [K, terms]
        rate: float | None = None,
    ) -> None:
        self.objective, self.way, self.stack, self._rate = objective, way, stack, rate
        self._two: Descent | None = None
        if objective.points:  # the received model computes, too: its rows begin at cache lines
            received = Stack(stack.layout, [received]).columns
        self.statistics, self.received, self.strengths = statistics, received, strengths
        self.begin()
        self.output: Value = (
            None  # of the last batch: an array or a tensor [K, batch, ...], or [batch, ...] of one party
        )
        if way in (STACKED, SINGLE):
            kernel = kernel_of(objective.net, stack.lead, objective.points)
            if isinstance(kernel, str):
                raise ModelError(f"{type(objective.net.module).__name__} cannot be stacked: {kernel}.")
            self._kernel = kernel.bind(stack.w, Into(stack.g) if rate is None else Into(stack.w, -rate))
            self._added = Added(objective, kernel, stack, received, strengths, rate) if objective.terms else None
        steps = rate is not None and (self._added is None or not self._added.by_autograd.terms)
        alone = way in TOGETHER and len(stack.columns) == 1 and not steps
        self._two = self._some([0, 0]) if alone else None  # one party rounds otherwise than many

    def begin(self) -> None:
        """No losses have been added up yet."""
        self.losses = Losses(self.stack.columns.new_zeros(len(self.stack.columns)))
        if self._two is not None:
            self._two.begin()

    def _some(self, rows: list[int]) -> Descent:
        """The same for some of the parties, with numbers of their own."""
        stack = Stack(self.stack.layout, [self.stack.columns[rows]], self.stack.lead)
        parts = (self.statistics[rows], self.received[rows], self.strengths[rows])
        return Descent(self.objective, self.way, stack, *parts, self._rate)

    def of(self, rows: list[int], x: Tensor, y: Tensor) -> None:
        """The gradient of some of the parties alone."""
        some = self._some(rows)
        some(x, y)
        self.stack.gradient[rows], self.statistics[rows] = some.stack.gradient, some.statistics
        self.losses.total[rows] += some.losses.total

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """The gradient on a batch ``[K, batch, ...]``."""
        if self._two is not None:
            self._as_two(self._two, x, y)
        elif self.way in (STACKED, SINGLE):
            self._by_kernel(x, y)
        else:
            with torch.enable_grad():
                self._by_autograd(x, y) if self.objective.terms or self.way == VECTORISED else self._by_module(x, y)

    def _as_two(self, two: Descent, x: Tensor, y: Tensor) -> None:
        two.stack.columns.copy_(self.stack.columns)
        two(x.expand(2, *x.shape[1:]), y.expand(2, *y.shape[1:]))
        if self._rate is None:
            self.stack.gradient.copy_(two.stack.gradient[:1])
        else:
            self.stack.columns.copy_(two.stack.columns[:1])
        self.statistics = two.statistics[:1]
        self.losses.total.copy_(two.losses.total[:1])
        self.output = two.output[:1]

    def _by_module(self, x: Tensor, y: Tensor) -> None:
        """One party without terms: the module runs as it is."""
        output, parameters = self.objective.net.run(self.stack.columns[0], self.statistics[0], x[0])
        loss = self.objective.loss(output, y[0]).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.stack.gradient[0])
        self.output = output.detach()
        self.losses.total.add_(loss.detach())

    def _by_autograd(self, x: Tensor, y: Tensor) -> None:
        leaf = self.stack.columns.detach().requires_grad_()
        parts = (leaf, self.statistics, self.received, self.strengths, x, y)
        if self.way == VECTORISED:
            with Evenly():
                totals, losses, after, output = torch.vmap(self.objective.one)(*parts)
        else:
            found = self.objective.one(*(part[0] for part in parts))
            totals, losses, after, output = (part.unsqueeze(0) for part in found)
        (gradient,) = torch.autograd.grad(totals.sum(), leaf)
        self.stack.gradient.copy_(gradient)
        self.statistics, self.output = after.detach(), output.detach()
        self.losses.total.add_(losses.detach())

    def _by_kernel(self, x: Tensor, y: Tensor) -> None:
        """The whole stack by its kernel, with what the terms add along the way back."""
        given = x.numpy() if self.stack.lead else x[0]
        output = self._kernel.forward(given)
        self.output = output
        slope = self._slope(output, y)
        if self._added is None:
            self._kernel.backward(slope)
            return
        top, along = self._added(self._kernel, given, output, x, y)
        self._kernel.backward(slope if top is None else slope + top, along)
        self._added.put()

    def _slope(self, output: Value, y: Tensor) -> Value:
        """The gradient of the loss along the outputs."""
        lead = self.stack.lead
        if self.objective.loss is functional.cross_entropy and output.ndim == 2 + lead and y.ndim == 2:
            if lead:
                return self.losses.slope(output, y.numpy())
            return torch.from_numpy(self.losses.slope(output.numpy(), y[0].numpy()))
        if isinstance(self.objective.loss, Sloped):
            found, mean = self.objective.loss.slope(output if lead else output.numpy(), (y if lead else y[0]).numpy())
            self.losses.total.add_(torch.from_numpy(np.asarray(mean)))
            return found if lead else torch.from_numpy(found)
        leaf = (torch.from_numpy(output) if lead else output.unsqueeze(0)).detach().requires_grad_()
        with torch.enable_grad():
            each = torch.vmap(self._mean_loss)(leaf, y) if lead else self._mean_loss(leaf[0], y[0]).unsqueeze(0)
            (slope,) = torch.autograd.grad(each.sum(), leaf)
        self.losses.total.add_(each.detach())
        return slope.numpy() if lead else slope[0]

    def _mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.objective.loss(output, y).mean()


@lru_cache(16)
def _first_places(size: int, classes: int) -> Array:
    """Where the rows of ``classes`` numbers begin."""
    places = np.arange(0, size, classes)
    places.setflags(write=False)
    return places


class Losses:
    """The sum of each party's losses over its batches; cross-entropies are reckoned many batches at a time."""

    def __init__(self, total: Tensor) -> None:
        self._total = total  # [K]
        self._waiting: list[tuple[Array, Array, Array]] = []

    @property
    def total(self) -> Tensor:
        """The sum so far, ``[K]``."""
        if self._waiting:
            sums, chosen, targets = map(np.concatenate, zip(*self._waiting, strict=True))
            if targets.max() >= self._classes:
                raise ModelError(f"Target {targets.max()} is out of bounds: the model knows {self._classes} classes")
            each = (np.log(sums) - chosen).reshape(len(self._waiting), len(self._total), -1)
            # One by one: how many waited together depends on who else is in the stack.
            self._total.copy_(torch.from_numpy(np.add.accumulate([self._total.numpy(), *each.mean(2)])[-1]))
            self._waiting = []
        return self._total

    def slope(self, output: Array, y: Array) -> Array:
        """The gradient of the mean cross-entropy, (softmax - one-hot) / batch; ``[..., batch, classes]``, y without
        the last. Losses wait as long as they are few and of one shape, and with them what a label out of bounds does.
        """
        if self._waiting and (y.shape != self._waiting[0][2].shape or len(self._waiting) >= 32):
            self.total  # noqa: B018  it reckons what waits
        self._classes = output.shape[-1]
        chances: Array = output - output.max(-1, keepdims=True)
        flat, places = chances.reshape(-1), _first_places(chances.size, self._classes) + y.reshape(-1)
        np.minimum(places, flat.size - 1, out=places)
        chosen = flat.take(places)
        np.exp(chances, out=chances)
        sums = chances.sum(-1, keepdims=True)
        self._waiting.append((sums.reshape(-1), chosen, y))
        chances /= sums
        flat[places] -= 1
        chances /= y.shape[-1]
        return chances
