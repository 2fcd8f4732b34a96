"""The EIIE portfolio network: one small evaluator scores every asset, and the scores become weights.

Jiang, Xu, Liang (2017), A deep reinforcement learning framework for the financial portfolio management problem: the
ensemble of identical independent evaluators (EIIE). Fed+ v1 §9.3 and v2 §8.2 train it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.settings import check_settings, setting

if TYPE_CHECKING:
    from ..training.kernels.layers import Operation

# the sizes of Jiang's convolutions
DAY_FILTERS = 3
DENSE_UNITS = 10


@dataclass(frozen=True)
class _Sizes:
    kind: Literal["cnn", "rnn", "lstm"] = setting("cnn", "the type of evaluator", one_of=("cnn", "rnn", "lstm"))
    window: int = setting(30, "l: closing prices per evaluator input", least=2, whole=True)
    hidden: int = setting(20, "units of a recurrent evaluator", least=1, whole=True)


def eiie(kind: Literal["cnn", "rnn", "lstm"] = "cnn", window: int = 30, hidden: int = 20) -> nn.Module:
    """Return an EIIE network: one evaluator scores each asset from its prices and held weight; cash has a bias.

    Inputs are ``[n, assets, window + 1]``: prices relative to the last one, then the held weight. Outputs are
    ``[n, 1 + assets]``, cash first; their softmax is the portfolio. The number of assets is free. Jiang's weight decay
    (1e-8) is omitted.

    >>> [sum(p.numel() for p in eiie(kind).parameters()) for kind in ("cnn", "rnn", "lstm")]
    [902, 463, 1783]
    >>> eiie("rnn")(torch.ones(5, 9, 31)).shape
    torch.Size([5, 10])
    """
    check_settings(_Sizes(kind, window, hidden), "eiie")
    return Eiie(ConvEvaluator(window) if kind == "cnn" else (RnnEvaluator if kind == "rnn" else LstmEvaluator)(hidden))


class Evaluator(nn.Module):
    """An evaluator of asset prices, ``[n, window]`` -> ``[n, width]``."""

    width: int


class ConvEvaluator(Evaluator):
    """A convolution over two days, then one over the whole window; each with ReLU."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.width = DENSE_UNITS
        self.days = nn.Parameter(_scaled_uniform(DAY_FILTERS, 2, fan_in=2))  # [filters, 2]
        self.days_bias = nn.Parameter(torch.zeros(DAY_FILTERS))
        self.all = nn.Parameter(
            _scaled_uniform(DENSE_UNITS, DAY_FILTERS * (window - 1), fan_in=DAY_FILTERS * (window - 1))
        )
        self.all_bias = nn.Parameter(torch.zeros(DENSE_UNITS))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.relu(functional.conv1d(x.unsqueeze(1), self.days.unsqueeze(1), self.days_bias))
        return torch.relu(functional.linear(pairs.flatten(1), self.all, self.all_bias))


class RnnEvaluator(Evaluator):
    """A recurrent evaluator: h ← tanh(U·[h, price, 1]); its output is the last h."""

    gates = 1

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.width = hidden
        # [gates·h, h + 2]
        self.step = nn.Parameter(_scaled_uniform(self.gates * hidden, hidden + 2, fan_in=hidden + 1))
        with torch.no_grad():
            self.step[:, -1] = 0

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.width)
        for price in x.unsqueeze(-1).unbind(1):
            h = torch.tanh(functional.linear(torch.cat([h, price], 1), self.step[:, :-1], self.step[:, -1]))
        return h


class LstmEvaluator(RnnEvaluator):
    """An LSTM evaluator: c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c); forget gates start open."""

    gates = 4

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        with torch.no_grad():
            self.step[hidden : 2 * hidden, -1] = 1

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.width)
        for price in x.unsqueeze(-1).unbind(1):
            gate_inputs = functional.linear(torch.cat([h, price], 1), self.step[:, :-1], self.step[:, -1])
            i, f, g, o = gate_inputs.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class Eiie(nn.Module):
    """The full network: an evaluator, a linear vote on its features and the held weight, and a cash bias."""

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        self.evaluator = evaluator
        # weights of the features, of the held weight, and a bias
        self.vote = nn.Parameter(_scaled_uniform(evaluator.width + 2, fan_in=evaluator.width + 1))
        with torch.no_grad():
            self.vote[-1] = 0
        self.cash = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        n, assets, _ = x.shape
        features = self.evaluator(x[..., :-1].flatten(0, 1)).view(n, assets, -1)
        votes = features @ self.vote[:-2] + x[..., -1] * self.vote[-2] + self.vote[-1]
        return torch.cat([self.cash.expand(n, 1), votes], 1)

    def operation(self, prefix: str, lead: int) -> Operation:
        """Return the operation that computes this network for a stack of parties."""
        from ..training.kernels.eiie_layers import EiieOperation

        return EiieOperation(type(self.evaluator).__name__, prefix, lead)


def _scaled_uniform(*shape: int, fan_in: int) -> Tensor:
    return torch.empty(*shape).uniform_(-sqrt(3 / fan_in), sqrt(3 / fan_in))
