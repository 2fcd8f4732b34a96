"""Networks by their names in recipes.

>>> sorted(NETWORKS)
['cnn', 'eiie', 'keyword_cnn', 'logistic', 'lstm', 'mlp']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from .eiie_network import eiie
from .lstm_network import lstm
from .networks import cnn, keyword_cnn, logistic, mlp

NETWORKS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {made.__name__: made for made in (logistic, mlp, cnn, keyword_cnn, lstm, eiie)}
)
