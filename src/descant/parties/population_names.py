"""Names of populations in recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..portfolio.desk import desks
from ..rl.agent_parties import agents
from .audio import spoken_words
from .datasets.async_silos_paper import mnist_svhn, newsgroups, rotated_mnist
from .datasets.digits import digits
from .datasets.fed_plus_paper import femnist, mnist, sentiment
from .datasets.generic import cifar10, csv, npz, svhn
from .datasets.representation_matching_paper import representation_matching_clients
from .datasets.synthetic import shared_structure, synthetic
from .population import Population

POPULATIONS: Mapping[str, Callable[..., Population]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            digits,
            synthetic,
            shared_structure,
            mnist,
            femnist,
            sentiment,
            representation_matching_clients,
            mnist_svhn,
            rotated_mnist,
            newsgroups,
            cifar10,
            svhn,
            npz,
            csv,
            spoken_words,
            agents,
            desks,
        )
    }
)
"""Functions that return populations, by name; keywords are JSON values, and the first docstring line is shown."""
