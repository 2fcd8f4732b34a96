"""Forward passes of a stack of models without gradients, and uniform numbers indexed by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..core import seeds
from ..models.flat import Net
from .kernels.layers import Array, GradientTarget
from .kernels.traced_kernel import Kernel, Stack, kernel_of
from .stacked_gradient import SINGLE, STACKED


class StackedForward:
    """Outputs of K models, each on its own batch; the columns of the stack may change between calls."""

    def __init__(self, net: Net, mode: str, stack: Stack) -> None:
        self._net = net
        self._stack = stack
        kernel = kernel_of(net, stack.lead) if mode in (STACKED, SINGLE) else ""
        # only its forward pass is used
        self._bound = kernel.bind(stack.w, GradientTarget(stack.w)) if isinstance(kernel, Kernel) else None

    @torch.no_grad()
    def __call__(self, x: Array) -> Array:
        """Return the outputs ``[K, n, outputs]`` for ``x [K, n, ...]``."""
        if self._bound is None:
            size = self._stack.layout.trainable_width
            rows = zip(self._stack.columns, torch.from_numpy(x), strict=True)
            return torch.stack([self._net.apply(row[:size], row[:0], party_x)[0] for row, party_x in rows]).numpy()
        if self._stack.lead:
            stacked: Array = self._bound.forward(x)
            return stacked
        single: Array = self._bound.forward(torch.from_numpy(x[0])).unsqueeze(0).numpy()
        return single


class KeyedUniform:
    """Uniform numbers in [0, 1) for each agent; the n-th draw never depends on when or where it is made.

    An agent therefore acts the same in ten rounds of a hundred steps as in one round of a thousand.
    """

    def __init__(self, seed: int, names: Sequence[str], purpose: str, shape: tuple[int, ...], window: int = 64) -> None:
        self._key = (seed, purpose)
        self._names = names
        self._shape = shape
        self._window_size = window
        self._window = -1
        self._numbers = np.empty(0)

    def __getitem__(self, n: int) -> Array:
        window, offset = divmod(n, self._window_size)
        if window != self._window:
            seed, purpose = self._key
            streams = (seeds.stream(seed, window, name, purpose) for name in self._names)
            self._numbers = np.stack([stream.random((self._window_size, *self._shape)) for stream in streams], 1)
            self._window = window
        numbers: Array = self._numbers[offset]  # [K, *shape]
        return numbers
