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
from ..algorithms.components import by_samples, stay, take_share, uniformly
from ..algorithms.fed_plus import Central
from ..algorithms.fedavg import FedAvg
from ..core import seeds
from ..core.algorithm import Aggregate, Algorithm, Attend, Attending, Hyper
from ..core.settings import check, setting
from ..errors import SettingError
from .gaussian_mechanism import Privacy, Source

_ROWS = "stand-ins are trained on rows of the parties' data, which leave them: no ε counts that."
_LOSSES = "hyper-parameters that go by clients' losses tell these without noise. Use a validation set."
_WEIGHED = "it weighs reports by what parties say of them, without noise and without a bound. Weigh uniformly."


def CentralPrivacy(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    clip: float | None = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    budget: float | None = None,
    source: Source = "system",
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
    return _private(base, Privacy("center", clip, noise, delta, budget, source), "CentralPrivacy", "DP")


def LocalPrivacy(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    clip: float | None = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    budget: float | None = None,
    source: Source = "system",
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
    return _private(base, Privacy("party", clip, noise, delta, budget, source), "LocalPrivacy", "LDP")


def _private(base: Algorithm, privacy: Privacy, owner: str, suffix: str) -> Algorithm:
    check(privacy, owner)
    if base.privacy is not None:
        raise SettingError(f"{base.name} is private already. Wrap a method once.")
    if privacy.clip is None and privacy.noise:
        raise SettingError(f"{owner} without a 'clip' hides nothing, whatever the noise. Give both, or noise=0.")
    if privacy.budget is not None and not privacy.noise:
        raise SettingError(f"{owner} cannot keep a budget without noise. Give some, or leave 'budget' out.")
    weigh = uniformly if base.weigh is by_samples else base.weigh
    made = replace(base, name=f"{base.name}+{suffix}", weigh=weigh, privacy=privacy)
    check_sound(made, f"{owner} cannot wrap {base.name}")
    return made


def check_sound(algorithm: Algorithm, told: str = "") -> None:
    """Raise if an algorithm promises a privacy that it does not have; once more when all that wraps it is known."""
    privacy = algorithm.privacy
    if privacy is None:
        return
    reasons = (*(_of_the_mean(algorithm) if privacy.at == "center" else _of_parties(algorithm)), *_of_all(algorithm))
    if reasons:
        raise SettingError(f"{told or f'{algorithm.name} is not private'}: {reasons[0]}")


def check_waits_for_all(algorithm: Algorithm, quorum: int | None) -> None:
    """Raise if a server that goes on with a quorum would tell more than an algorithm promises.

    Without one each party is waited for by itself: who does not answer in time counts as no change, and nobody else.
    """
    if quorum is not None and algorithm.privacy is not None and algorithm.privacy.at == "center":
        raise SettingError(
            f"{algorithm.name} is not private with a quorum: the answer that makes it decides whether slower ones "
            "still count, so that one party can move the centre by more than clip/K. Leave --quorum out: each party is "
            "then waited for by itself, --limit seconds at most. LocalPrivacy and PrivateSgd go with a quorum."
        )


def check_samples_hidden(algorithm: Algorithm) -> None:
    """Raise if an algorithm tells more of samples than the model that a solver has hidden them in."""
    reasons = (
        [] if algorithm.privacy is None else ["it hides whole parties, and PrivateSgd samples. Choose one of them."]
    )
    if algorithm.stand_in is not None:
        reasons.append(_ROWS)
    if algorithm.measure:
        reasons.append(_LOSSES)
    if algorithm.weigh not in (by_samples, uniformly):
        reasons.append(_WEIGHED)
    if reasons:
        raise SettingError(f"PrivateSgd cannot hide samples in {algorithm.name}: {reasons[0]}")


def _of_all(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.advance is stay:
        yield "it has no common model, and shares nothing that would have to be private."
    if algorithm.advance is take_share:
        yield 'normalise="total" moves the centre by numbers of samples, which are not noised. Use "selected".'
    if algorithm.weigh is not uniformly:
        yield _WEIGHED
    if algorithm.stand_in is not None:
        yield _ROWS
    if algorithm.measure:
        yield _LOSSES


def _of_the_mean(algorithm: Algorithm) -> Iterator[str]:
    """What only a sum of bounded changes, each in its round, can promise."""
    if not is_mean(algorithm.aggregate):
        center = center_name(algorithm.aggregate)
        yield (
            f"noise of clip/K hides a party in a mean, and one party can move {center} by more. "
            "Use FedAvg, FedProx or FedAvgPlus, or LocalPrivacy, which fits any centre."
        )
    if algorithm.over == "all":
        yield 'over="all" counts the last models of the absent again in every round. Use "active".'
    if algorithm.quorum is not None or algorithm.max_staleness or algorithm.discount is not None:
        yield (
            "its centre does not wait for all, so that a report may count in another round than the one it was asked "
            "for, and how many there are is told by how fast parties are. Use a method that waits, such as FedAvg."
        )


def _of_parties(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.keep is not None:
        yield (
            "its parties go on from models of their own as they reported them, which would be noise on noise. Use a "
            "method that begins at the centre, such as FedAvg, FedProx or Ditto."
        )


def is_mean(aggregate: Aggregate) -> bool:
    """Whether what reports add up to is their mean."""
    return isinstance(aggregate, Mean) or (isinstance(aggregate, Central) and isinstance(aggregate.penalty, HalfSquare))


def center_name(aggregate: Aggregate) -> str:
    """What a centre is called in messages."""
    of = aggregate.penalty if isinstance(aggregate, Central) else aggregate
    return f"the centre of {type(of).__name__}"


# ── who takes part, without anybody knowing ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Chance:
    """Every party comes with some probability, by a draw of its own that nobody knows: Poisson sampling.

    It is the one attendance by which ε is smaller (amplification by sampling) for `CentralPrivacy`: draws by the run's
    seed are known to whoever knows the recipe, so that with those every round counts in full. ``source="seed"`` is for
    simulations, and counts only where the noise comes from there, too.
    """

    probability: float = setting(0.5, "that a party comes", above=0, most=1)
    source: Source = setting("system", "where draws come from", one_of=("system", "seed"))

    def __call__(self, attending: Attending) -> dict[str, Hyper]:
        return {name: attending.hyper for name in attending.names if self._draw(attending, name) < self.probability}

    def _draw(self, attending: Attending, name: str) -> float:
        if self.source == "seed":
            return float(seeds.stream(attending.seed, attending.round, name, "chance").random())
        return int.from_bytes(os.urandom(7), "little") / 2**56


def rate_of(privacy: Privacy, attend: Attend) -> float:
    """With what probability a party is in a round, as far as nobody can know whether it is; else 1."""
    hidden = isinstance(attend, Chance) and (attend.source == "system" or privacy.source == "seed")
    return attend.probability if isinstance(attend, Chance) and hidden and privacy.at == "center" else 1.0
