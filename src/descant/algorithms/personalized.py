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
from ..core.algorithm import Algorithm, LossContext, LossTerm
from ..core.settings import setting
from ..models.flat import Net, Unbound, bind
from .components import ServerStep, keep_trained_models, uniform_weights
from .fedavg import FedAvg, FedProx


def copy_received(received: Tensor, rng: np.random.Generator) -> Tensor:
    """A private model begins as a copy of the model that came from the centre."""
    return received.clone()


@dataclass(frozen=True)
class DittoTerm:
    """f_k(v) + λ/2·‖v - w̃‖² for the private model v: its gradient does not touch w, nor w's gradient v."""

    lam: float = setting(0.1, "λ: how strongly the private model is held to the centre", least=0)

    def __call__(self, context: LossContext) -> Tensor:
        loss = context.loss(context.apply(context.private_params, context.x), context.y).mean()
        return loss + self.lam * HalfSquare().value(context.private_params - context.received)


@dataclass(frozen=True)
class PrivateModel:
    """The party's own model is in a term's private columns: all of it, or a ``share`` mixed with the centre.

    Running statistics are those of the party's last local work.
    """

    term: str
    share: float = setting(1.0, "of the private model", least=0, most=1)

    def __call__(self, row: Tensor, party_state: Mapping[str, Tensor]) -> Tensor:
        private = party_state.get(f"private.{self.term}")
        if private is None:  # it never trained
            return row
        mixed = torch.lerp(row[: len(private)], private, self.share)
        return torch.cat([mixed, party_state.get("statistics", row[len(private) :])])


def Ditto(lam: float = 0.1) -> Algorithm:
    """FedAvg, and beside it a private model of each party, held to the centre by λ/2·‖v - w̃‖²."""
    term = LossTerm("ditto", DittoTerm(lam), initial_values=copy_received)
    return replace(FedAvg(), name="Ditto", terms=(term,), personal_model=PrivateModel("ditto"))


@dataclass(frozen=True)
class MixtureTerm:
    """f_k(a·v + (1-a)·w) for the private model v, w held fixed."""

    share: float = setting(0.5, "a: the share of the private model in the mixture", least=0, most=1)

    def __call__(self, context: LossContext) -> Tensor:
        mixture = torch.lerp(context.w.detach(), context.private_params, self.share)
        return context.loss(context.apply(mixture, context.x), context.y).mean()


def APFL(share: float = 0.5) -> Algorithm:
    """FedAvg, and a private model of each party that is trained and used mixed with it; a is fixed, not adapted."""
    term = LossTerm("mixture", MixtureTerm(share), initial_values=copy_received)
    return replace(FedAvg(), name="APFL", terms=(term,), personal_model=PrivateModel("mixture", share))


def pFedMe(lam: float = 1.0, server_step: float = 0.5) -> Algorithm:
    """Parties solve min f_k(θ) + λ/2·‖θ - w̃‖² and keep θ; the centre steps towards their mean. One local round (R=1).

    With R=1 the local step w ← w̃ - ηλ(w̃ - θ) and the server's averaging are one step of size ``server_step`` = βηλ.
    """
    return replace(
        FedProx(mu=lam),
        name="pFedMe",
        compute_weights=uniform_weights,
        server_update=ServerStep(server_step),
        personalize=keep_trained_models,
    )


@dataclass(frozen=True)
class LastLayer(Unbound):
    """The parameters of the last submodule that has any."""

    def bind(self, net: Net) -> tuple[str, ...]:
        layers = net.layout.parameter_names
        owner = layers[-1].rpartition(".")[0]
        return tuple(name for name in layers if name.rpartition(".")[0] == owner)


def FedPer(layers: tuple[str, ...] | Unbound = LastLayer()) -> Algorithm:  # noqa: B008  a frozen value
    """FedAvg in which the tensors whose names match ``layers`` never leave their party: by default the last layer.

    With the names of normalisation layers, statistics included, it is FedBN: ``FedPer(("*norm*",))``.
    """
    return replace(FedAvg(), name="FedPer", private_layers=layers)


@dataclass(frozen=True)
class HeadFirstSchedule:
    """The private layers learn first, the others standing still; then the others, the private ones standing still."""

    head_columns: tuple[tuple[int, int], ...]  # columns of the private layers
    head_share: float = setting(0.5, "of the local steps that train the private layers", least=0, most=1)

    def trainable_mask(self, step: int, steps: Sequence[int], d: int) -> Tensor:
        head = torch.zeros(d, dtype=torch.bool)
        for begin, end in self.head_columns:
            head[begin:end] = True
        first = torch.tensor([step < round(self.head_share * most) for most in steps])
        single = torch.tensor([most == 1 and 0 < self.head_share < 1 for most in steps])  # one step has no halves
        return torch.where(first.unsqueeze(1), head, ~head) | single.unsqueeze(1)


@dataclass(frozen=True)
class UnboundHeadFirst(Unbound):
    """`HeadFirst`, its layers not yet columns."""

    layers: tuple[str, ...] | Unbound
    head_share: float

    def bind(self, net: Net) -> HeadFirstSchedule:
        layout = net.layout
        names = layout.matching_names(bind(self.layers, net))
        ranges = tuple(layout.column_range(name) for name in names if name in layout.parameter_names)
        return HeadFirstSchedule(ranges, self.head_share)


def FedRep(layers: tuple[str, ...] | Unbound = LastLayer(), head_share: float = 0.5) -> Algorithm:  # noqa: B008
    """FedPer that trains its private layers first and then, with these held still, the common ones: by turns.

    Not from the paper: ``share`` = 0.5 of a round's steps for the private layers.
    """
    return replace(FedPer(layers), name="FedRep", freeze=UnboundHeadFirst(layers, head_share))
