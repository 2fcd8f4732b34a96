"""Secure aggregation around any method that adds up; what does not, is refused with the reason.

Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine learning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...algorithms.components import keep_global_model, sample_weights, uniform_weights
from ...algorithms.fedavg import FedAvg
from ...core.algorithm import Algorithm, SecureSettings
from ...core.settings import check_settings
from ...errors import SettingError
from ..dp_wrappers import aggregator_name, is_mean


def SecureAggregation(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    min_parties: int = 3,
) -> Algorithm:
    """Any method whose centre is the mean and who has no models of single parties: the driver sees their sum alone.

    Before the work of a round every party gives a key of that round. What it sends is its share of the mean, p_k·(w_k -
    w̃), under masks that cancel in the sum of all: noise to whoever has not all of it (see `masks`). So a round in which
    one of them fails is void, and the next goes on with whoever is there. A party adds up with ``least`` at least.

    It hides single models from a driver that keeps to the protocol. It does not hide what the mean tells (differential
    privacy does: `LocalPrivacy` and `PrivateSgd` go with it), nor losses and numbers of samples.

    Not from the paper: least.

    >>> SecureAggregation().name
    'FedAvg+SecAgg'
    """
    secure = SecureSettings(min_parties)
    check_settings(secure, "SecureAggregation")
    if base.secure_aggregation is not None:
        raise SettingError(f"{base.name} adds up unseen already. Wrap a method once.")
    wrapped = replace(base, name=f"{base.name}+SecAgg", secure_aggregation=secure)
    check_summable(wrapped, f"SecureAggregation cannot wrap {base.name}")
    return wrapped


def check_summable(algorithm: Algorithm, message: str = "") -> None:
    """Raise if a method needs more than the sum; once more when all that wraps it is known."""
    reason = next(_objections(algorithm), "") if algorithm.secure_aggregation is not None else ""
    if reason:
        raise SettingError(f"{message or f'{algorithm.name} does not add up unseen'}: {reason}")


def _objections(algorithm: Algorithm) -> Iterator[str]:
    yield from _single_model_objections(algorithm)
    if algorithm.server_update is keep_global_model:
        yield "it has no common model, and adds nothing up."
    if algorithm.quorum is not None or algorithm.max_staleness or algorithm.staleness_discount is not None:
        yield "it does not wait for all, and masks cancel only when all of a round are there. Use FedAvg."
    if algorithm.compute_weights not in (sample_weights, uniform_weights):
        yield "it weighs work by what is known only afterwards, and shares are part of the sum. Weigh uniformly."
    if algorithm.loss_samples:
        yield "hyper-parameters that go by clients' losses need these one by one. Use a validation set."


def _single_model_objections(algorithm: Algorithm) -> Iterator[str]:
    """What the driver would have to do with each of them."""
    for aggregate in (algorithm.aggregate, algorithm.aggregate_statistics):
        if not is_mean(aggregate):
            yield f"{aggregator_name(aggregate)} needs every single model, and only a mean is a sum. Use FedAvg or FedProx."
    if algorithm.aggregate_over == "all":
        yield 'aggregate_over="all" counts the last models of the absent, which the driver would have to know. Use "active".'
    if algorithm.coreset_proxy is not None:
        yield "a stand-in works where the driver sees it, and what parties leave is not hidden in a sum."
    if algorithm.personalize is not None:
        yield (
            "its parties' own models lie with the driver. Use a method whose parties keep them to themselves, such as "
            "Ditto, APFL, FedPer or FedRep."
        )
    if algorithm.privacy is not None and algorithm.privacy.at == "server":
        yield "CentralDP clips every single change at the driver. Use LocalDP, or PrivateSgd."
