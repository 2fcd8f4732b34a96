"""Differential privacy around any method for which it is sound; what is not, is refused with the reason.

McMahan et al. (2018), Learning differentially private recurrent language models; Kairouz et al. (2021), Practical and
private (deep) learning without sampling or shuffling, whose neighbours (a party counts, or counts as 0) are ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..aggregation.aggregators import Mean
from ..aggregation.penalties import HalfSquare
from ..algorithms.components import keep_global_model, sample_weights, take_sample_share, uniform_weights
from ..algorithms.fed_plus import PenaltyAggregator
from ..algorithms.fedavg import FedAvg
from ..core import seeds
from ..core.algorithm import Aggregate, Algorithm, Hyper, Participation, ParticipationContext
from ..core.settings import check_settings, setting
from ..errors import SettingError
from .gaussian_mechanism import NoiseSource, PrivacySettings

_PROXY_OBJECTION = "stand-ins are trained on rows of the parties' data, which leave them: no ε counts that."
_LOSSES_OBJECTION = "hyper-parameters that go by clients' losses tell these without noise. Use a validation set."
_WEIGHTS_OBJECTION = (
    "it weighs reports by what parties say of them, without noise and without a bound. Weigh uniformly."
)


def CentralDP(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    clip: float | None = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    budget: float | None = None,
    source: NoiseSource = "system",
) -> Algorithm:
    """Any method whose centre is the mean, with noise on it: (ε, δ)-differential privacy of a whole party.

    The driver is trusted: it sees every party's model, and so do those who read its records. Against everybody else,
    all other parties together included, what is released is the sequence of centres, and nothing of what a party keeps
    for itself (its own model in Fed+, private layers, Ditto's columns) leaves it but to the driver: so personalisation
    costs no privacy, and needs none.

    Every change w_k - w̃ is clipped to ‖·‖₂ ≤ ``clip``, their mean over the K parties that were asked has noise of
    deviation ``noise``·clip/K in every column. All parties count alike, whatever the base weighs by: with n_k one of
    them would move the mean by more than clip/K. Who does not answer, or is refused, counts as no change. Training ends
    before a round that would exceed the ``budget`` ε at ``delta``. By ``source`` noise comes from the operating system,
    or, to be repeated in simulations, from the run's seed, which hides nothing from those who know it.

    Not from a paper: clip, noise and delta, which go by the model and the number of parties.

    >>> CentralPrivacy(clip=0.5).name
    'FedAvg+DP'
    """
    return _with_privacy(
        base,
        PrivacySettings("server", clip, noise, delta=delta, budget=budget, source=source),
        "CentralDP",
        suffix="DP",
    )


def LocalDP(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    clip: float | None = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    budget: float | None = None,
    source: NoiseSource = "system",
) -> Algorithm:
    """Any method in which parties begin at the centre, each of them clipping and noising its change before it leaves.

    The driver is curious, but keeps to the protocol: it asks a party once a round, and looks at all that it hears. Then
    what it learns of one party in all rounds is (ε, δ)-differentially private, whatever data the party has.

    Noise of deviation ``noise``·clip is on every party's change, of which any two lie up to 2·clip apart: for one ε the
    mean of K parties has 2·√K times the noise that it has by `CentralPrivacy`. Losses and numbers of samples stay with
    the party, so that all count alike; a party refuses tasks beyond its ``budget``. With the system's randomness it has
    a secret of its own, kept with its memory: a task that comes again has the same answer, to the bit.

    Not from a paper: clip, noise and delta.

    >>> LocalPrivacy().privacy.at
    'party'
    """
    return _with_privacy(
        base, PrivacySettings("party", clip, noise, delta=delta, budget=budget, source=source), "LocalDP", suffix="LDP"
    )


def _with_privacy(base: Algorithm, privacy: PrivacySettings, owner: str, suffix: str) -> Algorithm:
    check_settings(privacy, owner)
    if base.privacy is not None:
        raise SettingError(f"{base.name} is private already. Wrap a method once.")
    if privacy.clip is None and privacy.noise:
        raise SettingError(f"{owner} without a 'clip' hides nothing, whatever the noise. Give both, or noise=0.")
    if privacy.budget is not None and not privacy.noise:
        raise SettingError(f"{owner} cannot keep a budget without noise. Give some, or leave 'budget' out.")
    compute_weights = uniform_weights if base.compute_weights is sample_weights else base.compute_weights
    wrapped = replace(base, name=f"{base.name}+{suffix}", compute_weights=compute_weights, privacy=privacy)
    check_private(wrapped, f"{owner} cannot wrap {base.name}")
    return wrapped


def check_private(algorithm: Algorithm, message: str = "") -> None:
    """Raise if an algorithm promises a privacy that it does not have; once more when all that wraps it is known."""
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
    """Raise if a server that goes on with a quorum would tell more than an algorithm promises.

    Without one each party is waited for by itself: who does not answer in time counts as no change, and nobody else.
    """
    if quorum is not None and algorithm.privacy is not None and algorithm.privacy.at == "server":
        raise SettingError(
            f"{algorithm.name} is not private with a quorum: the answer that makes it decides whether slower ones "
            "still count, so that one party can move the centre by more than clip/K. Leave --quorum out: each party is "
            "then waited for by itself, --limit seconds at most. LocalPrivacy and PrivateSgd go with a quorum."
        )


def check_sample_privacy(algorithm: Algorithm) -> None:
    """Raise if an algorithm tells more of samples than the model that a solver has hidden them in."""
    reasons = (
        [] if algorithm.privacy is None else ["it hides whole parties, and PrivateSgd samples. Choose one of them."]
    )
    if algorithm.coreset_proxy is not None:
        reasons.append(_PROXY_OBJECTION)
    if algorithm.loss_samples:
        reasons.append(_LOSSES_OBJECTION)
    if algorithm.compute_weights not in (sample_weights, uniform_weights):
        reasons.append(_WEIGHTS_OBJECTION)
    if reasons:
        raise SettingError(f"PrivateSgd cannot hide samples in {algorithm.name}: {reasons[0]}")


def _general_objections(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.server_update is keep_global_model:
        yield "it has no common model, and shares nothing that would have to be private."
    if algorithm.server_update is take_sample_share:
        yield 'normalize="total" moves the centre by numbers of samples, which are not noised. Use "selected".'
    if algorithm.compute_weights is not uniform_weights:
        yield _WEIGHTS_OBJECTION
    if algorithm.coreset_proxy is not None:
        yield _PROXY_OBJECTION
    if algorithm.loss_samples:
        yield _LOSSES_OBJECTION


def _central_objections(algorithm: Algorithm) -> Iterator[str]:
    """What only a sum of bounded changes, each in its round, can promise."""
    if not is_mean(algorithm.aggregate):
        aggregator = aggregator_name(algorithm.aggregate)
        yield (
            f"noise of clip/K hides a party in a mean, and one party can move {aggregator} by more. "
            "Use FedAvg, FedProx or FedAvgPlus, or LocalPrivacy, which fits any centre."
        )
    if algorithm.aggregate_over == "all":
        yield 'aggregate_over="all" counts the last models of the absent again in every round. Use "active".'
    if algorithm.quorum is not None or algorithm.max_staleness or algorithm.staleness_discount is not None:
        yield (
            "its centre does not wait for all, so that a report may count in another round than the one it was asked "
            "for, and how many there are is told by how fast parties are. Use a method that waits, such as FedAvg."
        )


def _local_objections(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.personalize is not None:
        yield (
            "its parties go on from models of their own as they reported them, which would be noise on noise. Use a "
            "method that begins at the centre, such as FedAvg, FedProx or Ditto."
        )


def is_mean(aggregate: Aggregate) -> bool:
    """Whether what reports add up to is their mean."""
    return isinstance(aggregate, Mean) or (
        isinstance(aggregate, PenaltyAggregator) and isinstance(aggregate.penalty, HalfSquare)
    )


def aggregator_name(aggregate: Aggregate) -> str:
    """What a centre is called in messages."""
    named = aggregate.penalty if isinstance(aggregate, PenaltyAggregator) else aggregate
    return f"the centre of {type(named).__name__}"


# ── who takes part, without anybody knowing ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PoissonSampling:
    """Every party comes with some probability, by a draw of its own that nobody knows: Poisson sampling.

    It is the one attendance by which ε is smaller (amplification by sampling) for `CentralPrivacy`: draws by the run's
    seed are known to whoever knows the recipe, so that with those every round counts in full. ``source="seed"`` is for
    simulations, and counts only where the noise comes from there, too.
    """

    probability: float = setting(0.5, "that a party comes", above=0, most=1)
    source: NoiseSource = setting("system", "where draws come from", one_of=("system", "seed"))

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        return {
            name: context.hyper for name in context.available_parties if self._draw(context, name) < self.probability
        }

    def _draw(self, context: ParticipationContext, name: str) -> float:
        if self.source == "seed":
            return float(seeds.stream(context.seed, context.round, name, "chance").random())
        return int.from_bytes(os.urandom(7), "little") / 2**56


def sampling_rate(privacy: PrivacySettings, participation: Participation) -> float:
    """With what probability a party is in a round, as far as nobody can know whether it is; else 1."""
    is_secret = isinstance(participation, PoissonSampling) and (
        participation.source == "system" or privacy.source == "seed"
    )
    return (
        participation.probability
        if isinstance(participation, PoissonSampling) and is_secret and privacy.at == "server"
        else 1.0
    )
