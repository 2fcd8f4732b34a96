"""Coreset proxies for absent parties: "Asynchronous collaborative learning across data silos".

Tuor, Lockhart, Magazzeni (2021). Eq. (4) counts only the parties present and forgets the others. In eq. (5) the trusted
server trains on a small coreset of an absent party's data in its place.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.algorithm import Algorithm, ProxySettings
from ..core.settings import document_parameters
from ..errors import SettingError
from .selection import Selection


@document_parameters(
    Selection, ProxySettings, base="the method to wrap", selection="the selection of the rows, instead of share"
)
def CoresetProxies(
    base: Algorithm, share: float | None = None, selection: Selection | None = None, work: int | None = None
) -> Algorithm:
    """Wrap a method with coreset proxies for absent parties: eq. (5) with the proxy training of eq. (6).

    A party deposits a coreset when it comes for the first time and when it returns: a ``share`` of its rows (5 %), or
    as a ``selection`` says. While the party is away a proxy trains on it with the same solver and terms for τ′ =
    ``work`` units (None: τ), and counts with |D_i| as the party last reported it. A party that never came does not
    count (ERRATA 34).

    A proxy starts each round where its party would: at the global model (ERRATA 33), or, in methods such as Fed+ whose
    parties continue from personal models, at w_k as last reported, pulled to R(w̃, w_k). From the global model it would
    only follow the other parties. It has no other state: optimizer moments, private layers and private columns stay
    with the party, and the party's own state is not touched while it is away.

    Methods with a quorum, which do not wait for all parties, cannot have proxies: they have no round in which every
    party counts once.

    >>> from descant.algorithms import FedAvg
    >>> CoresetProxies(FedAvg(), share=0.1).coreset_proxy.selection.share
    0.1
    """
    if share is not None and selection is not None:
        raise SettingError("Give CoresetProxies a share, or a selection with its own, not both.")
    if base.coreset_proxy is not None:
        raise SettingError(f"{base.name} already has coreset proxies. Wrap a method once.")
    chosen = selection or Selection(share=0.05 if share is None else share)
    return replace(base, name=f"{base.name}+proxies", coreset_proxy=ProxySettings(chosen, work))
