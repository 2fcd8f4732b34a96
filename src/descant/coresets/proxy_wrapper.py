"""Stand-ins for parties that are away: "Asynchronous collaborative learning across data silos".

Tuor, Lockhart, Magazzeni (2021). Eq. (4) counts only those present, and forgets the others; eq. (5) lets a small
coreset of a party's data, left with the trusted centre, be trained on in its place.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.algorithm import Algorithm, ProxySettings
from ..errors import SettingError
from .selection import Selection


def CoresetProxies(
    base: Algorithm, share: float | None = None, selection: Selection | None = None, work: int | None = None
) -> Algorithm:
    """Any method, with stand-ins for those who are away: eq. (5) with the proxy training of eq. (6).

    When a party comes for the first time, and when it returns, it leaves a coreset: a ``share`` of its rows (5 %), or
    as a ``selection`` says. While it is away a stand-in trains on it by the same solver and terms for τ′ = ``work``
    units (None: τ), and counts with |D_i| as the party last reported it; who never came counts for nothing (ERRATA 34).

    It begins each round where the party would: at the global model (ERRATA 33), or, in methods such as Fed+ in which
    parties go on from models of their own, at w_k as the party last reported it, drawn to R(w̃, w_k). From the global
    model it would only follow a centre that the others draw away. It has no other state: moments, private layers and
    private columns stay with the party, and what the party keeps is not touched while it is away.

    Methods with a quorum, which do not wait for all parties, cannot have stand-ins: they have no slot in which
    everybody is counted once.

    >>> from descant.algorithms import FedAvg
    >>> StandIns(FedAvg(), share=0.1).stand_in.selection.share
    0.1
    """
    if share is not None and selection is not None:
        raise SettingError("Give CoresetProxies a share, or a selection that has its own, not both.")
    if base.coreset_proxy is not None:
        raise SettingError(f"{base.name} has stand-ins already. Wrap a method once.")
    chosen = selection or Selection(share=0.05 if share is None else share)
    return replace(base, name=f"{base.name}+stand-ins", coreset_proxy=ProxySettings(chosen, work))
