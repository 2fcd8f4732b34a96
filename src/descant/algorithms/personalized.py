"""Personalized baselines: Ditto, APFL, pFedMe, FedPer, FedRep.

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
from ..core.settings import document_parameters, setting
from ..models.flat import Net, Unbound, bind
from .components import ServerStep, keep_trained_models, uniform_weights
from .fedavg_and_baselines import FedAvg, FedProx


def copy_received(received: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a copy of the received model as the initial private model."""
    return received.clone()


@dataclass(frozen=True)
class DittoTerm:
    """The loss f_k(v) + λ/2·‖v - w̃‖² of the private model v; the gradients of v and w do not mix."""

    lam: float = setting(0.1, "λ: how strongly the private model is pulled toward the global model", least=0)

    def __call__(self, context: LossContext) -> Tensor:
        loss = context.loss(context.apply(context.private_params, context.x), context.y).mean()
        return loss + self.lam * HalfSquare().value(context.private_params - context.received)


@dataclass(frozen=True)
class PrivateModel:
    """The personal model in a term's private columns: that model, or a ``share`` of it mixed with the global model.

    Running statistics are those of the party's last local training.
    """

    term: str
    share: float = setting(1.0, "the share of the private model", least=0, most=1)

    def __call__(self, row: Tensor, party_state: Mapping[str, Tensor]) -> Tensor:
        private = party_state.get(f"private.{self.term}")
        if private is None:  # it never trained
            return row
        mixed = torch.lerp(row[: len(private)], private, self.share)
        return torch.cat([mixed, party_state.get("statistics", row[len(private) :])])


@document_parameters(lam="λ: how strongly the private model is pulled toward the global model")
def Ditto(lam: float = 0.1) -> Algorithm:
    """FedAvg with a private model for each party, pulled toward the global model by λ/2·‖v - w̃‖²."""
    term = LossTerm("ditto", DittoTerm(lam), initial_values=copy_received)
    return replace(FedAvg(), name="Ditto", terms=(term,), personal_model=PrivateModel("ditto"))


@dataclass(frozen=True)
class MixtureTerm:
    """The loss f_k(a·v + (1-a)·w) of the private model v, with w fixed."""

    share: float = setting(0.5, "a: the share of the private model in the mixture", least=0, most=1)

    def __call__(self, context: LossContext) -> Tensor:
        mixture = torch.lerp(context.w.detach(), context.private_params, self.share)
        return context.loss(context.apply(mixture, context.x), context.y).mean()


@document_parameters(share="a: the share of the private model in the mixture")
def APFL(share: float = 0.5) -> Algorithm:
    """FedAvg with a private model for each party, trained and used in a mixture with w; a is fixed, not adapted."""
    term = LossTerm("mixture", MixtureTerm(share), initial_values=copy_received)
    return replace(FedAvg(), name="APFL", terms=(term,), personal_model=PrivateModel("mixture", share))


@document_parameters(
    lam="λ: how strongly the personal model is pulled toward the global model",
    server_step="βηλ: the step of the global model toward the mean",
)
def pFedMe(lam: float = 1.0, server_step: float = 0.5) -> Algorithm:
    """Moreau-envelope personalization: parties keep argmin f_k(θ) + λ/2·‖θ - w̃‖², with one local round (R=1).

    The global model moves toward the mean of the θ.
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


@document_parameters(layers="name patterns of the private layers; by default the last layer")
def FedPer(layers: tuple[str, ...] | Unbound = LastLayer()) -> Algorithm:  # noqa: B008  a frozen value
    """FedAvg that keeps the tensors whose names match ``layers`` at their party: by default the last layer.

    With the names of normalization layers, statistics included, it is FedBN: ``FedPer(("*norm*",))``.
    """
    return replace(FedAvg(), name="FedPer", private_layers=layers)


@dataclass(frozen=True)
class HeadFirstSchedule:
    """A schedule that trains the private layers first, then the others, with the rest frozen."""

    head_columns: tuple[tuple[int, int], ...]  # columns of the private layers
    head_share: float = setting(0.5, "the share of the local steps that train the private layers", least=0, most=1)

    def trainable_mask(self, step: int, steps: Sequence[int], d: int) -> Tensor:
        head = torch.zeros(d, dtype=torch.bool)
        for begin, end in self.head_columns:
            head[begin:end] = True
        first = torch.tensor([step < round(self.head_share * most) for most in steps])
        single = torch.tensor([most == 1 and 0 < self.head_share < 1 for most in steps])  # one step has no halves
        return torch.where(first.unsqueeze(1), head, ~head) | single.unsqueeze(1)


@dataclass(frozen=True)
class UnboundHeadFirst(Unbound):
    """A `HeadFirstSchedule` whose layers are not yet resolved to columns."""

    layers: tuple[str, ...] | Unbound
    head_share: float

    def bind(self, net: Net) -> HeadFirstSchedule:
        layout = net.layout
        names = layout.matching_names(bind(self.layers, net))
        ranges = tuple(layout.column_range(name) for name in names if name in layout.parameter_names)
        return HeadFirstSchedule(ranges, self.head_share)


@document_parameters(
    layers="name patterns of the private layers; by default the last layer",
    head_share="the share of the local steps that train the private layers",
)
def FedRep(layers: tuple[str, ...] | Unbound = LastLayer(), head_share: float = 0.5) -> Algorithm:  # noqa: B008
    """FedPer that trains its private layers first, then, with these frozen, the shared layers.

    Not from the paper: ``head_share`` = 0.5 of a round's steps for the private layers.
    """
    return replace(FedPer(layers), name="FedRep", freeze=UnboundHeadFirst(layers, head_share))
