"""The papers' networks by name: functions from JSON values to modules, with one output per class.

>>> sorted(NETWORKS)
['cnn', 'eiie', 'keyword_cnn', 'logistic', 'lstm', 'mlp']
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .eiie_network import eiie
    from .lstm_network import lstm
    from .network_names import NETWORKS
    from .networks import cnn, keyword_cnn, logistic, mlp
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".network_names": ("NETWORKS",),
            ".eiie_network": ("eiie",),
            ".lstm_network": ("lstm",),
            ".networks": ("cnn", "keyword_cnn", "logistic", "mlp"),
        },
    )

__all__ = [
    "NETWORKS",
    "cnn",
    "eiie",
    "keyword_cnn",
    "logistic",
    "lstm",
    "mlp",
]
