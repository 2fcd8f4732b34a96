"""Who takes part, and with which data: readers, splits, the papers' populations, and bundled data to begin with.

>>> people = digits(count=10, split="dirichlet", alpha=0.1, seed=0)
>>> len(people), people["3"].name
(10, '3')
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..coresets.selection import Coreset, Selection
from ..portfolio.desk import Desk, desks
from ..rl.agent import Agent, agents
from . import partition
from .adapters import arrays_of
from .audio import mel_spectrogram, words
from .catalog import data_folder
from .datasets.async_silos_paper import mnist_svhn, newsgroups, rotated_mnist
from .datasets.digits import digits
from .datasets.fed_plus_paper import femnist, mnist, sentiment
from .datasets.generic import cifar10, csv, npz, svhn
from .datasets.representation_matching_paper import clients
from .datasets.synthetic import shared, synthetic
from .population import Party, People, from_arrays, from_rows
from .population_plot import draw
from .readers import read_wave

POPULATIONS: Mapping[str, Callable[..., People]] = MappingProxyType(
    {
        made.__name__: made
        for made in (
            *(digits, synthetic, shared, mnist, femnist, sentiment, clients, mnist_svhn, rotated_mnist, newsgroups),
            *(cifar10, svhn, npz, csv, words, agents, desks),
        )
    }
)
"""What makes parties, by name. Keywords are JSON values; the first line of a docstring says what it is."""

__all__ = [
    "POPULATIONS",
    "Agent",
    "Coreset",
    "Desk",
    "Party",
    "People",
    "Selection",
    "agents",
    "arrays_of",
    "cifar10",
    "clients",
    "csv",
    "data_folder",
    "desks",
    "digits",
    "draw",
    "femnist",
    "from_arrays",
    "from_rows",
    "mel_spectrogram",
    "mnist",
    "mnist_svhn",
    "newsgroups",
    "npz",
    "read_wave",
    "rotated_mnist",
    "sentiment",
    "shared",
    "partition",
    "svhn",
    "synthetic",
    "words",
]
