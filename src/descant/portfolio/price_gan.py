"""Synthetic returns by a generative adversarial network (Goodfellow et al., 2014), as in v1 §9.3 of Fed+.

The paper specifies a generator of dense layers, a discriminator of convolutions followed by dense layers that gives one
probability, and the minimax game. All sizes, rates and numbers of steps are ours, and so are these choices:

1. A sample is a path of some weeks in standardized returns; a year is a sequence of independent paths.
2. The final generator is a running mean of its weights over the last steps, which reduces the noise of single batches.
3. Its last layer is rescaled so that the return of every asset on every day of a path has mean 0 and deviation 1. So
   assets drift and vary as in the training prices, and no day of a path is better than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.settings import setting
from .market import Array
from .price_augmentation import daily_returns

_NOISE_WIDTH = 32  # of z
_CHANNELS = 32  # of the convolutions
_DENSE_WIDTH = 64  # of the discriminator's dense layer
_RATES = (5e-4, 2e-3)  # Adam's, of the generator and of the discriminator
_BETAS = (0.5, 0.99)  # Adam's, of both
_AVERAGE_DECAY = 0.99  # of the running mean, per step
_LEAKY_SLOPE = 0.2  # of the rectifiers below 0
_RESCALE_PATHS = 8192  # paths from which the last layer's rescaling is computed


@dataclass(frozen=True)
class Gan:
    """A generative adversarial network for return paths of all assets at once: v1 §9.3."""

    path_days: int = setting(21, "days in a path", least=5, whole=True)
    steps: int = setting(600, "training steps of generator and discriminator", least=0, whole=True)
    batch: int = setting(64, "real paths per step, and the same number of generated ones", least=1, whole=True)
    hidden: int = setting(128, "width of the generator's two hidden layers", least=1, whole=True)

    def fit(self, prices: Array, rng: np.random.Generator) -> Array:
        """Return the means and deviations of the returns, ``[m]`` each, and the generator's weights."""
        returns = daily_returns(prices, self.path_days + 2, "Gan")
        means = returns.mean(axis=0)
        deviations = returns.std(axis=0)
        standard = (returns - means) / np.where(deviations > 0, deviations, 1)
        with _one_thread():
            weights = _normalize_outputs(self._train(torch.from_numpy(standard.astype(np.float32)), rng), rng)
        numbers = [means, deviations, *(weight.numpy().ravel() for weight in weights)]
        return np.concatenate(numbers).astype(np.float32)

    def draw(self, fitted: Array, prices: Array, days: int, rng: np.random.Generator) -> Array:
        m = prices.shape[1]
        means, deviations = fitted[: 2 * m].reshape(2, m).astype(np.float64)
        sizes = [(outputs, inputs) for inputs, outputs in pairwise(self._widths(m))]
        shapes = [shape for size in sizes for shape in (size, size[:1])]
        parts = np.split(fitted[2 * m :], np.cumsum([np.prod(shape) for shape in shapes])[:-1])
        weights = [torch.tensor(part).view(shape) for part, shape in zip(parts, shapes, strict=True)]
        with _one_thread():
            standard_returns = (
                generate(weights, _draw_noise(rng, -(-days // self.path_days))).numpy().reshape(-1, m)[:days]
            )
        with np.errstate(over="ignore", invalid="ignore"):  # `unusable_reason` finds overflows
            synthetic: Array = prices[-1] * np.cumprod(1 + means + deviations * standard_returns, axis=0)
        return synthetic

    def _widths(self, m: int) -> tuple[int, ...]:
        return (_NOISE_WIDTH, self.hidden, self.hidden, self.path_days * m)

    def _train(self, standard: Tensor, rng: np.random.Generator) -> list[Tensor]:
        """Return the generator trained by min_G max_D E[log D(x)] + E[log(1 - D(G(z)))]."""
        m = standard.shape[1]
        generator = [w for inputs, outputs in pairwise(self._widths(m)) for w in _make_layer(rng, outputs, inputs)]
        discriminator = _make_discriminator(rng, m, self.path_days)
        averaged = [weight.clone() for weight in generator]
        for weight in (*generator, *discriminator):
            weight.requires_grad_()
        optimizers = [
            torch.optim.Adam(weights, rate, _BETAS)
            for weights, rate in zip((generator, discriminator), _RATES, strict=True)
        ]
        with torch.enable_grad():
            for _ in range(self.steps):
                first = rng.integers(0, len(standard) - self.path_days + 1, self.batch)
                real = standard[torch.from_numpy(first[:, None] + np.arange(self.path_days))].flatten(1)
                fake = generate(generator, _draw_noise(rng, self.batch))
                losses = -F.logsigmoid(discriminate(discriminator, real, m)) - F.logsigmoid(
                    -discriminate(discriminator, fake.detach(), m)
                )
                _step(optimizers[1], discriminator, losses.mean())
                _step(optimizers[0], generator, F.logsigmoid(-discriminate(discriminator, fake, m)).mean())
                for mean, weight in zip(averaged, generator, strict=True):
                    mean.lerp_(weight.detach(), 1 - _AVERAGE_DECAY)
        return averaged


def generate(weights: Sequence[Tensor], noise: Tensor) -> Tensor:
    """Return G(z; θ_g) of v1 §9.3: dense layers from noise ``[B, z]`` to paths ``[B, path * m]``."""
    x = noise
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        x = F.leaky_relu(F.linear(x, weight, bias), _LEAKY_SLOPE)
    return F.linear(x, weights[-2], weights[-1])


def discriminate(weights: Sequence[Tensor], paths: Tensor, m: int) -> Tensor:
    """Return the log-odds of D(x; θ_d) of v1 §9.3, ``[B]``, for paths ``[B, path * m]``.

    Convolutions along the days come first, then dense layers.
    """
    x = paths.view(len(paths), -1, m).transpose(1, 2)  # [B, m, path]
    x = F.leaky_relu(F.conv1d(x, weights[0], weights[1]), _LEAKY_SLOPE)
    x = F.leaky_relu(F.conv1d(x, weights[2], weights[3], stride=2), _LEAKY_SLOPE)
    x = F.leaky_relu(F.linear(x.flatten(1), weights[4], weights[5]), _LEAKY_SLOPE)
    return F.linear(x, weights[6], weights[7])[:, 0]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run with one thread: sums are then the same on any number of cores, and small layers run faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make_discriminator(rng: np.random.Generator, m: int, path_days: int) -> list[Tensor]:
    days = (path_days - 5) // 2 + 1  # left by the two convolutions
    shapes = [(_CHANNELS, m, 3), (_CHANNELS, _CHANNELS, 3), (_DENSE_WIDTH, _CHANNELS * days), (1, _DENSE_WIDTH)]
    return [weight for shape in shapes for weight in _make_layer(rng, *shape)]


def _make_layer(rng: np.random.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Return random weights that preserve the variance of their inputs, and biases of 0."""
    drawn = rng.standard_normal(shape, dtype=np.float32) * np.float32(np.sqrt(2 / np.prod(shape[1:])))
    return torch.from_numpy(drawn), torch.zeros(shape[0], dtype=torch.float32)


def _draw_noise(rng: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((count, _NOISE_WIDTH), dtype=np.float32))


def _step(adam: torch.optim.Adam, weights: Sequence[Tensor], loss: Tensor) -> None:
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    adam.step()


def _normalize_outputs(weights: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
    """Return the generator rescaled so that every output has mean 0 and deviation 1."""
    *hidden, weight, bias = weights
    outputs = generate(weights, _draw_noise(rng, _RESCALE_PATHS)).double()
    mean = outputs.mean(dim=0)
    deviation = outputs.std(dim=0).clamp_min(1e-6)
    return [*hidden, (weight / deviation[:, None]).float(), ((bias - mean) / deviation).float()]
