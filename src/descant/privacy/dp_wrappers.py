"""Wrappers for differential privacy, which reject methods for which it is not sound.

McMahan et al. (2018), Learning differentially private recurrent language models; Kairouz et al. (2021), Practical and
private (deep) learning without sampling or shuffling. We use the latter's neighboring relation: two federations are
neighbors if the change of one party is replaced by zero in one of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..aggregation.aggregators import Mean
from ..aggregation.penalties import HalfSquare
from ..algorithms.components import keep_global_model, sample_weights, take_sample_share, uniform_weights
from ..algorithms.fed_plus import PenaltyAggregator
from ..algorithms.fedavg_and_baselines import FedAvg
from ..core import seeds
from ..core.algorithm import Aggregate, Algorithm, Hyper, Participation, ParticipationContext
from ..core.settings import check_settings, document_parameters, setting
from ..errors import SettingError
from .gaussian_mechanism import NoiseSource, PrivacySettings

_PROXY_OBJECTION = "proxies are trained on rows that leave the parties, which no ε covers."
_LOSSES_OBJECTION = "hyper-parameters tuned by clients' losses reveal them without noise. Use a validation set."
_WEIGHTS_OBJECTION = (
    "it weights updates by what parties report of them, without noise and without a bound. Use uniform weights."
)


@document_parameters(PrivacySettings, base="the method to wrap")
def CentralDP(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    clip: float | None = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    budget: float | None = None,
    source: NoiseSource = "system",
) -> Algorithm:
    """Wrap a method that averages: noise on its mean gives (ε, δ)-differential privacy of a whole party.

    The server is trusted: it sees every party's model, and so do readers of its records. To anyone else, even to all
    other parties together, only the sequence of global models is released. What a party keeps for itself (its personal
    model in Fed+, private layers, Ditto's columns) goes to the server at most. So personalization costs no privacy.

    Every change w_k - w̃ is clipped to ‖·‖₂ ≤ ``clip``. The mean over the K parties that were asked gets noise of
    standard deviation ``noise``·clip/K in every column. All parties have equal weights, whatever the base uses: with
    n_k one of them could move the mean by more than clip/K. A party that does not reply, or is rejected, counts as no
    change. Training ends before a round that would exceed the ``budget`` ε at ``delta``. ``source`` selects where noise
    comes from: the operating system, or the run's seed for repeatable simulations, which hides nothing from anybody who
    knows the seed.

    Not from a paper: clip, noise and delta, which depend on the model and the number of parties.

    >>> CentralDP(clip=0.5).name
    'FedAvg+DP'
    """
    return _with_privacy(
        base,
        PrivacySettings("server", clip, noise, delta=delta, budget=budget, source=source),
        "CentralDP",
        suffix="DP",
    )


@document_parameters(PrivacySettings, base="the method to wrap")
def LocalDP(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    clip: float | None = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    budget: float | None = None,
    source: NoiseSource = "system",
) -> Algorithm:
    """Wrap a method whose parties start at the global model: each clips and noises its change before it leaves.

    The server is curious, but follows the protocol: it asks a party once per round, and reads all replies. What it
    learns of one party in all rounds is then (ε, δ)-differentially private, whatever data the party has.

    Noise of standard deviation ``noise``·clip is on every party's change, of which any two lie up to 2·clip apart. For
    the same ε the mean of K parties has 2·√K times the noise of `CentralDP`. Losses and sample counts stay with the
    party, so all have equal weights. A party declines tasks beyond its ``budget``. With the system's randomness it has
    a secret of its own in its party state, so a repeated task gets the same reply, bit for bit.

    Not from a paper: clip, noise and delta.

    >>> LocalDP().privacy.at
    'party'
    """
    return _with_privacy(
        base, PrivacySettings("party", clip, noise, delta=delta, budget=budget, source=source), "LocalDP", suffix="LDP"
    )


def _with_privacy(base: Algorithm, privacy: PrivacySettings, owner: str, suffix: str) -> Algorithm:
    check_settings(privacy, owner)
    if base.privacy is not None:
        raise SettingError(f"{base.name} is already private. Wrap a method once.")
    if privacy.clip is None and privacy.noise:
        raise SettingError(f"{owner} without a 'clip' hides nothing, whatever the noise. Give both, or noise=0.")
    if privacy.budget is not None and not privacy.noise:
        raise SettingError(f"{owner} cannot keep a budget without noise. Add noise, or leave 'budget' out.")
    compute_weights = uniform_weights if base.compute_weights is sample_weights else base.compute_weights
    wrapped = replace(base, name=f"{base.name}+{suffix}", compute_weights=compute_weights, privacy=privacy)
    check_private(wrapped, f"{owner} cannot wrap {base.name}")
    return wrapped


def check_private(algorithm: Algorithm, message: str = "") -> None:
    """Raise if an algorithm's privacy does not hold; called again once all its wrappers are known."""
    privacy = algorithm.privacy
    if privacy is None:
        return
    reasons = (
        *(_central_objections(algorithm) if privacy.at == "server" else _local_objections(algorithm)),
        *_general_objections(algorithm),
    )
    if reasons:
        raise SettingError(f"{message or f'{algorithm.name} is not private'}: {reasons[0]}")


def check_quorum_is_private(algorithm: Algorithm, quorum: int | None) -> None:
    """Raise if a server that continues at a quorum would break an algorithm's privacy.

    Without a quorum the server waits for each party by itself: a late party counts as no change and affects no other.
    """
    if quorum is not None and algorithm.privacy is not None and algorithm.privacy.at == "server":
        raise SettingError(
            f"{algorithm.name} is not private with a quorum: the reply that completes it decides whether slower ones "
            "still count, so one party can move the aggregate by more than clip/K. Leave --quorum out: the server then "
            "waits for each party by itself, --timeout seconds at most. LocalDP and DpSgd work with a quorum."
        )


def check_sample_privacy(algorithm: Algorithm) -> None:
    """Raise if an algorithm reveals more about samples than the models of `DpSgd`, such as losses or coresets."""
    reasons = [] if algorithm.privacy is None else ["it hides whole parties, and DpSgd hides samples. Use one of them."]
    if algorithm.coreset_proxy is not None:
        reasons.append(_PROXY_OBJECTION)
    if algorithm.loss_samples:
        reasons.append(_LOSSES_OBJECTION)
    if algorithm.compute_weights not in (sample_weights, uniform_weights):
        reasons.append(_WEIGHTS_OBJECTION)
    if reasons:
        raise SettingError(f"DpSgd cannot hide samples in {algorithm.name}: {reasons[0]}")


def _general_objections(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.server_update is keep_global_model:
        yield "it has no global model, and shares nothing that needs privacy."
    if algorithm.server_update is take_sample_share:
        yield 'normalize="total" moves the global model by sample counts, which are not noised. Use "selected".'
    if algorithm.compute_weights is not uniform_weights:
        yield _WEIGHTS_OBJECTION
    if algorithm.coreset_proxy is not None:
        yield _PROXY_OBJECTION
    if algorithm.loss_samples:
        yield _LOSSES_OBJECTION


def _central_objections(algorithm: Algorithm) -> Iterator[str]:
    """Yield objections to central noise, which needs a sum of bounded changes, each in its own round."""
    if not is_mean(algorithm.aggregate):
        aggregator = aggregator_name(algorithm.aggregate)
        yield (
            f"noise of clip/K hides a party in a mean, and one party can move {aggregator} by more. "
            "Use FedAvg, FedProx or FedAvgPlus, or LocalDP, which works with any aggregator."
        )
    if algorithm.aggregate_over == "all":
        yield 'aggregate_over="all" counts the last models of the absent again in every round. Use "active".'
    if algorithm.quorum is not None or algorithm.max_staleness or algorithm.staleness_discount is not None:
        yield (
            "it does not wait for all parties, so an update may count in another round than the one it was asked for, "
            "and the number of updates reveals how fast parties are. Use a method that waits, such as FedAvg."
        )


def _local_objections(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.personalize is not None:
        yield (
            "its parties continue from the personal models that they reported, which would be noise on noise. Use a "
            "method that starts at the global model, such as FedAvg, FedProx or Ditto."
        )


def is_mean(aggregate: Aggregate) -> bool:
    """Return True if the aggregate is the mean."""
    return isinstance(aggregate, Mean) or (
        isinstance(aggregate, PenaltyAggregator) and isinstance(aggregate.penalty, HalfSquare)
    )


def aggregator_name(aggregate: Aggregate) -> str:
    """Return the name of an aggregator for messages."""
    named = aggregate.penalty if isinstance(aggregate, PenaltyAggregator) else aggregate
    return f"the aggregate of {type(named).__name__}"


@dataclass(frozen=True)
class PoissonSampling:
    """Participation of each party with some probability, by its own secret draw (Poisson sampling).

    Only this participation lowers ε for `CentralDP` (amplification by sampling). Draws by the run's seed are known to
    anybody with the recipe, so with those every round counts in full. ``source="seed"`` is for simulations, and lowers
    ε only if the noise comes from the seed, too.
    """

    probability: float = setting(0.5, "probability that a party takes part", above=0, most=1)
    source: NoiseSource = setting(
        "system", "source of the draws: the operating system, or the run's seed", one_of=("system", "seed")
    )

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        return {
            name: context.hyper for name in context.available_parties if self._draw(context, name) < self.probability
        }

    def _draw(self, context: ParticipationContext, name: str) -> float:
        if self.source == "seed":
            return float(seeds.stream(context.seed, context.round, name, "chance").random())
        return int.from_bytes(os.urandom(7), "little") / 2**56


def sampling_rate(privacy: PrivacySettings, participation: Participation) -> float:
    """Return the probability that a party is in a round if its draw is secret; else 1."""
    is_secret = isinstance(participation, PoissonSampling) and (
        participation.source == "system" or privacy.source == "seed"
    )
    if isinstance(participation, PoissonSampling) and is_secret and privacy.at == "server":
        return participation.probability
    return 1.0
