"""Losses with explicit gradients along the outputs: reinforcement learning as a loss on batches (x, y).

Actions and their outcomes are columns of y. Agents therefore use the same kernels, loss terms and proximal steps as
parties with data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .kernels.layers import Array


class LossWithGradient(ABC):
    """A loss with an explicit gradient, because recording it would cost more than computing it."""

    @abstractmethod
    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss per sample of one party: output [n, outputs], y [n, columns]."""

    @abstractmethod
    def output_gradient(self, output: Array, y: Array) -> tuple[Array, Array]:
        """Return the gradient of the mean loss along outputs [..., n, outputs], and the mean loss [...]."""


@dataclass(frozen=True)
class TemporalDifference(LossWithGradient):
    """The Huber loss of Q(s, a) against its target; the columns of y are the action and the target."""

    delta: float = 1.0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        chosen = output.gather(1, y[:, :1].long()).squeeze(1)
        return functional.huber_loss(chosen, y[:, 1], reduction="none", delta=self.delta)

    def output_gradient(self, output: Array, y: Array) -> tuple[Array, Array]:
        action = y[..., :1].astype(np.int64)
        n = y.shape[-2]
        error = np.take_along_axis(output, action, -1) - y[..., 1:2]  # [..., n, 1]
        size = np.abs(error)
        losses = np.where(size < self.delta, 0.5 * error * error, self.delta * (size - 0.5 * self.delta))
        gradient = np.zeros_like(output)
        np.put_along_axis(gradient, action, np.clip(error, -self.delta, self.delta) / n, -1)
        return gradient, losses[..., 0].mean(-1)


@dataclass(frozen=True)
class ClippedSurrogate(LossWithGradient):
    """The clipped surrogate of Schulman et al. (2017) with an entropy bonus, plus a value estimate's squared error.

    The columns of y are the action, its advantage, its log-probability when it was taken, and the return. In the first
    step after acting the ratio is 1 and the gradient is that of REINFORCE. The value estimate is
    the output after those of the actions; without that output, its error is left out.
    """

    actions: int
    clip_ratio: float
    entropy_coefficient: float
    value_coefficient: float

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        log_probabilities = functional.log_softmax(output[:, : self.actions], 1)
        ratio = (log_probabilities.gather(1, y[:, :1].long()).squeeze(1) - y[:, 2]).exp()
        gain = torch.minimum(ratio * y[:, 1], ratio.clip(1 - self.clip_ratio, 1 + self.clip_ratio) * y[:, 1])
        loss = self.entropy_coefficient * (log_probabilities.exp() * log_probabilities).sum(1) - gain
        if output.shape[1] > self.actions:
            loss = loss + 0.5 * self.value_coefficient * (output[:, self.actions] - y[:, 3]) ** 2
        return loss

    def output_gradient(self, output: Array, y: Array) -> tuple[Array, Array]:
        n = y.shape[-2]
        action = y[..., :1].astype(np.int64)
        advantage = y[..., 1:2]
        log_probabilities = log_softmax(output[..., : self.actions])
        probabilities = np.exp(log_probabilities)
        ratio = np.exp(np.take_along_axis(log_probabilities, action, -1) - y[..., 2:3])
        plain_gain = ratio * advantage
        clipped_gain = np.clip(ratio, 1 - self.clip_ratio, 1 + self.clip_ratio) * advantage
        ratio_gradient = np.where(plain_gain <= clipped_gain, plain_gain, 0)  # no gain beyond the clip
        entropy = -(probabilities * log_probabilities).sum(-1, keepdims=True)
        gradient = np.zeros_like(output)
        action_gradient = gradient[..., : self.actions]
        np.multiply(
            probabilities,
            ratio_gradient + self.entropy_coefficient * (log_probabilities + entropy),
            out=action_gradient,
        )
        np.put_along_axis(action_gradient, action, np.take_along_axis(action_gradient, action, -1) - ratio_gradient, -1)
        losses = -np.minimum(plain_gain, clipped_gain) - self.entropy_coefficient * entropy
        if output.shape[-1] > self.actions:
            error = output[..., self.actions :] - y[..., 3:]
            gradient[..., self.actions :] = self.value_coefficient * error
            losses = losses + 0.5 * self.value_coefficient * error**2
        gradient /= n
        return gradient, losses[..., 0].mean(-1)


@dataclass(frozen=True)
class LogReturn(LossWithGradient):
    """Negative log growth of a portfolio per day, after fees: Fed+ v1 §9.2, v2 §8.2 (ERRATA 27, 28, 29).

    Samples are consecutive days. The softmax w_t of the outputs, cash first, earns the price relatives y_t from this
    day to the next, and drifts to w'_{t+1} = y_t⊙w_t / y_t·w_t. Rebalancing from there to w_{t+1} costs the share c of
    everything bought or sold. The first day of a batch is free, as in Jiang et al.
    """

    cost: float

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        weights = output.softmax(1)
        earned = weights * y
        growth = earned.sum(1)
        drifted = earned[:-1] / growth[:-1, None]
        fees = self.cost * (weights[1:, 1:] - drifted[:, 1:]).abs().sum(1)
        return -growth.log() - torch.cat([fees[:0].new_zeros(1), (1 - fees).log()])

    def output_gradient(self, output: Array, y: Array) -> tuple[Array, Array]:
        n = y.shape[-2]
        weights = np.exp(log_softmax(output))
        earned = weights * y
        growth = earned.sum(-1, keepdims=True)
        drifted = earned[..., :-1, :] / growth[..., :-1, :]
        traded = weights[..., 1:, :] - drifted
        traded[..., 0] = 0  # trading cash costs nothing
        kept_share = 1 - self.cost * np.abs(traded).sum(-1, keepdims=True)
        gradient = -y / growth
        fees = self.cost * np.sign(traded) / kept_share  # along w_t; along w'_t it is the opposite
        gradient[..., 1:, :] += fees
        mean = (fees * drifted).sum(-1, keepdims=True)
        gradient[..., :-1, :] -= y[..., :-1, :] / growth[..., :-1, :] * (fees - mean)
        gradient -= (gradient * weights).sum(-1, keepdims=True)
        gradient *= weights / n
        losses = -(np.log(growth).sum((-2, -1)) + np.log(kept_share).sum((-2, -1))) / n
        return gradient, losses


def log_softmax(logits: Array) -> Array:
    """Return log p of every action, ``[..., actions]``."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probabilities
