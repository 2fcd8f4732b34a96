"""The wrapper for secure aggregation, which rejects methods that need more than a sum.

Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine learning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...algorithms.components import keep_global_model, sample_weights, uniform_weights
from ...algorithms.fedavg_and_baselines import FedAvg
from ...core.algorithm import Algorithm, SecureSettings
from ...core.settings import check_settings, document_parameters
from ...errors import SettingError
from ..dp_wrappers import aggregator_name, is_mean


@document_parameters(SecureSettings, base="the method to wrap")
def SecureAggregation(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    min_parties: int = 3,
) -> Algorithm:
    """Wrap a method that averages and needs no single model: the server sees only the parties' sum.

    Before training in a round every party sends a key of that round. Then it sends its share of the mean, p_k·(w_k -
    w̃), with masks that cancel in the sum: without all of them it is noise (see `pairwise_masks`). So a round in which
    one party fails is void, and the next one continues with the parties present. A party accepts cohorts of at least
    ``min_parties``.

    It hides single models from a server that follows the protocol. It does not hide what the mean reveals (differential
    privacy does: combine it with `LocalDP` or `DpSgd`), nor losses and sample counts.

    Not from the paper: min_parties.

    >>> SecureAggregation().name
    'FedAvg+SecAgg'
    """
    secure = SecureSettings(min_parties)
    check_settings(secure, "SecureAggregation")
    if base.secure_aggregation is not None:
        raise SettingError(f"{base.name} already has secure aggregation. Wrap a method once.")
    wrapped = replace(base, name=f"{base.name}+SecAgg", secure_aggregation=secure)
    check_summable(wrapped, f"SecureAggregation cannot wrap {base.name}")
    return wrapped


def check_summable(algorithm: Algorithm, message: str = "") -> None:
    """Raise if a method needs more than the sum; called again once all its wrappers are known."""
    reason = next(_objections(algorithm), "") if algorithm.secure_aggregation is not None else ""
    if reason:
        raise SettingError(f"{message or f'{algorithm.name} cannot use secure aggregation'}: {reason}")


def _objections(algorithm: Algorithm) -> Iterator[str]:
    yield from _single_model_objections(algorithm)
    if algorithm.server_update is keep_global_model:
        yield "it has no global model, and computes no sum."
    if algorithm.quorum is not None or algorithm.max_staleness or algorithm.staleness_discount is not None:
        yield "it does not wait for all parties, and masks cancel only with all of a round. Use FedAvg."
    if algorithm.compute_weights not in (sample_weights, uniform_weights):
        yield "its weights are known only after training, and the sum contains them. Use uniform weights."
    if algorithm.loss_samples:
        yield "hyper-parameters tuned by clients' losses need each of them. Use a validation set."


def _single_model_objections(algorithm: Algorithm) -> Iterator[str]:
    """Yield objections to methods for which the server needs single models."""
    for aggregate in (algorithm.aggregate, algorithm.aggregate_statistics):
        if not is_mean(aggregate):
            name = aggregator_name(aggregate)
            yield f"{name} needs every single model, and only a mean is a sum. Use FedAvg or FedProx."
    if algorithm.aggregate_over == "all":
        yield 'aggregate_over="all" counts models of absent parties, which the server must not know. Use "active".'
    if algorithm.coreset_proxy is not None:
        yield "a proxy trains where the server sees it, and deposited coresets are not hidden in a sum."
    if algorithm.personalize is not None:
        yield (
            "the server stores its personal models. Use a method whose parties keep them, such as Ditto, APFL, FedPer "
            "or FedRep."
        )
    if algorithm.privacy is not None and algorithm.privacy.at == "server":
        yield "CentralDP clips every single change at the server. Use LocalDP or DpSgd."
