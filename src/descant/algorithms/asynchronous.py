"""Asynchronous methods, which do not wait for slow parties: FedAsync and FedBuff.

Xie, Koyejo, Gupta (2019), Asynchronous federated optimization; Nguyen et al. (2022), Federated learning with buffered
asynchronous aggregation. A round is a new version of the global model. The staleness of a reply is the number of
versions since its party received the model. A party that has replied waits for the next version, so no version gets two
replies from one party.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..core.algorithm import Algorithm, StalenessDiscount
from ..core.settings import Schedule, check_settings, document_parameters, setting
from .components import ServerStep, uniform_weights
from .fedavg_and_baselines import FedAvg, FedProx


@dataclass(frozen=True)
class Polynomial:
    """The polynomial staleness discount s(d) = (1+d)^-a.

    >>> Polynomial(0.5)(3)
    0.5
    """

    a: float = setting(0.5, "a: how quickly a late reply loses weight", least=0)

    def __call__(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.a)


@dataclass(frozen=True)
class Hinge:
    """The hinge staleness discount: s(d) = 1 up to a staleness of b, then 1/(a·(d-b)+1).

    >>> Hinge(10.0, 4)(4), Hinge(10.0, 4)(5)
    (1.0, 0.09090909090909091)
    """

    a: float = setting(10.0, "a: how quickly a reply later than b loses weight", least=0)
    b: int = setting(4, "b: the staleness up to which a reply keeps its full weight", least=0, whole=True)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1 / (self.a * (staleness - self.b) + 1)


_STALENESS_DISCOUNTS: Mapping[str, StalenessDiscount | None] = {
    "constant": None,
    "polynomial": Polynomial(),
    "hinge": Hinge(),
}


@dataclass(frozen=True)
class _StalenessSetting:
    staleness: str = setting(
        "polynomial", "how the weight of a late reply is reduced", one_of=tuple(_STALENESS_DISCOUNTS)
    )


@document_parameters(
    mixing="α: the share of an up-to-date model in the new global model",
    staleness="how the weight of a late reply is reduced",
    rho="ρ: the weight of the proximal term",
    max_staleness="the largest age of a reply in versions",
)
def FedAsync(
    mixing: float = 0.6,
    staleness: Literal["constant", "polynomial", "hinge"] | StalenessDiscount = "polynomial",
    rho: Schedule = 0.005,
    max_staleness: int = 16,
) -> Algorithm:
    """Update the global model with every reply: w̃ ← (1-α_t)·w̃ + α_t·w_k with α_t = ``mixing``·s(staleness).

    Parties add ρ/2·‖w - w̃‖² to their loss. A reply more than ``max_staleness`` versions late is rejected. Without a
    clock (`engines.VirtualClock`) no party is late, and replies that arrive together are averaged first.

    >>> FedAsync().staleness_discount(3)
    0.5
    """
    discount = staleness if callable(staleness) else None
    if not callable(staleness):
        check_settings(_StalenessSetting(staleness), "FedAsync")
        discount = _STALENESS_DISCOUNTS[staleness]
    return replace(
        FedProx(rho, weights="uniform"),
        name="FedAsync",
        server_update=ServerStep(mixing),
        staleness_discount=discount,
        quorum=1,
        max_staleness=max_staleness,
    )


@document_parameters(
    buffer_size="K: updates per step of the global model",
    server_step="η_g: the step size of the server",
    a="a: how quickly a late reply loses weight",
    max_staleness="the largest age of a reply in versions",
)
def FedBuff(buffer_size: int = 10, server_step: float = 1.0, a: float = 0.5, max_staleness: int = 100) -> Algorithm:
    """Update the global model every ``buffer_size`` updates: w̃ ← w̃ + η_g·mean of s(staleness)·Δ_k, s(d) = 1/√(1+d).

    Δ_k is the change of the party's model since the version it received. Not from the paper: ``max_staleness``. A
    buffer larger than the number of working parties waits for all of them, which is FedAvg with a plain mean.

    >>> FedBuff(3).quorum, FedBuff(3).reply_content
    (3, 'update')
    """
    return replace(
        FedAvg(),
        name="FedBuff",
        reply_content="update",
        compute_weights=uniform_weights,
        server_update=ServerStep(server_step),
        staleness_discount=Polynomial(a),
        quorum=buffer_size,
        max_staleness=max_staleness,
    )
