"""The papers' networks by name: functions of JSON values that make modules, for cross-entropy over `outputs` classes.

>>> sorted(NETS)
['cnn', 'eiie', 'keyword_cnn', 'logistic', 'lstm', 'mlp']
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from .eiie import eiie
from .lstm import lstm
from .networks import cnn, keyword_cnn, logistic, mlp

NETS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {made.__name__: made for made in (logistic, mlp, cnn, keyword_cnn, lstm, eiie)}
)

__all__ = ["NETS", "cnn", "eiie", "keyword_cnn", "logistic", "lstm", "mlp"]
