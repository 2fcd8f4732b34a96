"""Parties and their data: file readers, partitions, the papers' populations, and bundled data to start with.

>>> population = digits(count=10, split="dirichlet", alpha=0.1, seed=0)
>>> len(population), population["3"].name
(10, '3')
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..coresets.selection import Coreset, Selection
    from ..portfolio.desk import Desk, desks
    from ..rl.agent_parties import Agent, agents
    from . import partition
    from .adapters import arrays_of
    from .audio import mel_spectrogram, spoken_words
    from .dataset_catalog import data_folder
    from .datasets.async_silos_paper import mnist_svhn, newsgroups, rotated_mnist
    from .datasets.digits import digits
    from .datasets.fed_plus_paper import femnist, mnist, sentiment
    from .datasets.generic import cifar10, csv, npz, svhn
    from .datasets.representation_matching_paper import representation_matching_clients
    from .datasets.synthetic import shared_structure, synthetic
    from .population import Party, Population, from_arrays, from_rows
    from .population_names import POPULATIONS
    from .population_plot import plot_population
    from .readers import read_wave
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".population_names": ("POPULATIONS",),
            "..coresets.selection": ("Coreset", "Selection"),
            "..portfolio.desk": ("Desk", "desks"),
            "..rl.agent_parties": ("Agent", "agents"),
            ".": ("partition",),
            ".adapters": ("arrays_of",),
            ".audio": ("mel_spectrogram", "spoken_words"),
            ".dataset_catalog": ("data_folder",),
            ".datasets.async_silos_paper": ("mnist_svhn", "newsgroups", "rotated_mnist"),
            ".datasets.digits": ("digits",),
            ".datasets.fed_plus_paper": ("femnist", "mnist", "sentiment"),
            ".datasets.generic": ("cifar10", "csv", "npz", "svhn"),
            ".datasets.representation_matching_paper": ("representation_matching_clients",),
            ".datasets.synthetic": ("shared_structure", "synthetic"),
            ".population": ("Party", "Population", "from_arrays", "from_rows"),
            ".population_plot": ("plot_population",),
            ".readers": ("read_wave",),
        },
    )

__all__ = [
    "Agent",
    "Coreset",
    "Desk",
    "POPULATIONS",
    "Party",
    "Population",
    "Selection",
    "agents",
    "arrays_of",
    "cifar10",
    "representation_matching_clients",
    "csv",
    "data_folder",
    "desks",
    "digits",
    "plot_population",
    "femnist",
    "from_arrays",
    "from_rows",
    "mel_spectrogram",
    "mnist",
    "mnist_svhn",
    "newsgroups",
    "npz",
    "partition",
    "read_wave",
    "rotated_mnist",
    "sentiment",
    "shared_structure",
    "svhn",
    "synthetic",
    "spoken_words",
]
