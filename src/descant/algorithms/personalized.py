"""Personalised baselines that people ask for: Ditto, APFL, pFedMe, FedPer, FedRep.

Li et al. (2021), Ditto; Deng et al. (2020), Adaptive personalized federated learning; T. Dinh et al. (2020),
Personalized federated learning with Moreau envelopes; Arivazhagan et al. (2019), Federated learning with
personalization layers; Collins et al. (2021), Exploiting shared representations for personalized federated learning.
Their defaults here are not from the Fed+ papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..aggregation.penalties import HalfSquare
from ..core.algorithm import Algorithm, Sight, Term
from ..core.settings import setting
from ..models.flat import Net, Unbound, bind
from .components import Step, keep_own, uniformly
from .fedavg import FedAvg, FedProx


def begin_at_received(received: Tensor, rng: np.random.Generator) -> Tensor:
    """A private model begins as a copy of the model that came from the centre."""
    return received.clone()


@dataclass(frozen=True)
class DittoTerm:
    """f_k(v) + λ/2·‖v - w̃‖² for the private model v: its gradient does not touch w, nor w's gradient v."""

    lam: float = setting(0.1, "λ: how strongly the private model is held to the centre", least=0)

    def __call__(self, sight: Sight) -> Tensor:
        loss = sight.loss(sight.apply(sight.own, sight.x), sight.y).mean()
        return loss + self.lam * HalfSquare().value(sight.own - sight.received)


@dataclass(frozen=True)
class PrivateModel:
    """The party's own model is in a term's private columns: all of it, or a ``share`` mixed with the centre.

    Running statistics are those of the party's last local work.
    """

    term: str
    share: float = setting(1.0, "of the private model", least=0, most=1)

    def __call__(self, row: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        own = memory.get(f"private.{self.term}")
        if own is None:  # it never trained
            return row
        mixed = torch.lerp(row[: len(own)], own, self.share)
        return torch.cat([mixed, memory.get("statistics", row[len(own) :])])


def Ditto(lam: float = 0.1) -> Algorithm:
    """FedAvg, and beside it a private model of each party, held to the centre by λ/2·‖v - w̃‖²."""
    term = Term("ditto", DittoTerm(lam), begin=begin_at_received)
    return replace(FedAvg(), name="Ditto", terms=(term,), personal=PrivateModel("ditto"))


@dataclass(frozen=True)
class MixtureTerm:
    """f_k(a·v + (1-a)·w) for the private model v, w held fixed."""

    share: float = setting(0.5, "a: the share of the private model in the mixture", least=0, most=1)

    def __call__(self, sight: Sight) -> Tensor:
        mixture = torch.lerp(sight.w.detach(), sight.own, self.share)
        return sight.loss(sight.apply(mixture, sight.x), sight.y).mean()


def APFL(share: float = 0.5) -> Algorithm:
    """FedAvg, and a private model of each party that is trained and used mixed with it; a is fixed, not adapted."""
    term = Term("mixture", MixtureTerm(share), begin=begin_at_received)
    return replace(FedAvg(), name="APFL", terms=(term,), personal=PrivateModel("mixture", share))


def pFedMe(lam: float = 1.0, server_step: float = 0.5) -> Algorithm:
    """Parties solve min f_k(θ) + λ/2·‖θ - w̃‖² and keep θ; the centre steps towards their mean. One local round (R=1).

    With R=1 the local step w ← w̃ - ηλ(w̃ - θ) and the server's averaging are one step of size ``server_step`` = βηλ.
    """
    return replace(FedProx(mu=lam), name="pFedMe", weigh=uniformly, advance=Step(server_step), keep=keep_own)


@dataclass(frozen=True)
class LastLayer(Unbound):
    """The parameters of the last submodule that has any."""

    def bind(self, net: Net) -> tuple[str, ...]:
        layers = net.layout.layers
        owner = layers[-1].rpartition(".")[0]
        return tuple(name for name in layers if name.rpartition(".")[0] == owner)


def FedPer(layers: tuple[str, ...] | Unbound = LastLayer()) -> Algorithm:  # noqa: B008  a frozen value
    """FedAvg in which the tensors whose names match ``layers`` never leave their party: by default the last layer.

    With the names of normalisation layers, statistics included, it is FedBN: ``FedPer(("*norm*",))``.
    """
    return replace(FedAvg(), name="FedPer", private=layers)


@dataclass(frozen=True)
class HeadFirst:
    """The private layers learn first, the others standing still; then the others, the private ones standing still."""

    head: tuple[tuple[int, int], ...]  # columns of the private layers
    share: float = setting(0.5, "of the local steps that train the private layers", least=0, most=1)

    def moving(self, step: int, steps: Sequence[int], d: int) -> Tensor:
        head = torch.zeros(d, dtype=torch.bool)
        for begin, end in self.head:
            head[begin:end] = True
        first = torch.tensor([step < round(self.share * most) for most in steps])
        single = torch.tensor([most == 1 and 0 < self.share < 1 for most in steps])  # one step has no halves
        return torch.where(first.unsqueeze(1), head, ~head) | single.unsqueeze(1)


@dataclass(frozen=True)
class HeadFirstBy(Unbound):
    """`HeadFirst`, its layers not yet columns."""

    layers: tuple[str, ...] | Unbound
    share: float

    def bind(self, net: Net) -> HeadFirst:
        layout = net.layout
        names = layout.matching(bind(self.layers, net))
        ranges = tuple(layout.range_of(name) for name in names if name in layout.layers)
        return HeadFirst(ranges, self.share)


def FedRep(layers: tuple[str, ...] | Unbound = LastLayer(), share: float = 0.5) -> Algorithm:  # noqa: B008
    """FedPer that trains its private layers first and then, with these held still, the common ones: by turns.

    Not from the paper: ``share`` = 0.5 of a round's steps for the private layers.
    """
    return replace(FedPer(layers), name="FedRep", hold=HeadFirstBy(layers, share))
