"""The ten clients of representation matching, from MNIST, CIFAR-10 or Speech Commands.

"Robust Federated Learning Through Representation Matching and Adaptive Hyper-parameters" (Mostafa, 2019), §4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.seeds import ALL_PARTIES, stream
from ...core.settings import check_settings, setting
from ...errors import PartyError
from .. import partition
from ..images import images_with_test_start, scaling_by_color
from ..population import Population, from_rows

_FULL_SIZES = {"mnist": 70_000, "cifar10": 60_000, "speech": 34_843}  # samples, training and test set
_TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "speech": "the ten words of Speech Commands"}


@dataclass(frozen=True)
class _ClientSettings:
    source: str = setting("mnist", "data set", one_of=tuple(_FULL_SIZES))
    split: str = setting("label", "one class per client, or a random part of all classes", one_of=("label", "iid"))
    count: int = setting(10, "number of clients", least=1, whole=True)
    samples: int | None = setting(None, "total number of training samples; None: all", least=1, whole=True)
    validation: int = setting(0, "training samples that the server keeps for validation", least=0, whole=True)
    test_samples: int | None = setting(None, "total number of test samples; None: all", least=1, whole=True)


def representation_matching_clients(
    source: str = "mnist",
    split: str = "label",
    count: int = 10,
    samples: int | None = None,
    validation: int = 0,
    seed: int = 0,
    data: str | Path | None = None,
    test_samples: int | None = None,
) -> Population:
    """Ten clients with one class each, or random samples with `split="iid"`: MNIST, CIFAR-10 or speech (§4).

    The paper evaluates one global model on the common test set. So every client is tested on an equal random part of
    it with all classes. The mean over clients is the accuracy on the whole test set, and a client that learns only its
    own class reaches one tenth. With `split="label"` client k has class k.

    `source` is "mnist", "cifar10" or "speech": ten words of Speech Commands as log-mel images, with the training and
    test set of its authors and without their validation set. Pixels are standardized by channel over the training set,
    which the paper does not specify. `samples` uses a random part of the training set, and `test_samples` of the test
    set; not from the paper. `validation` random samples of the training set are kept by the server (§3.3).
    """
    check_settings(
        _ClientSettings(source, split, count, samples=samples, validation=validation, test_samples=test_samples),
        "representation_matching_clients",
    )
    x, y, test_start = images_with_test_start(source, data)
    rng = stream(seed, 0, ALL_PARTIES, purpose="clients")
    available = test_start - validation
    sample_count = available if samples is None else samples
    if not 0 < sample_count <= available:
        raise PartyError(
            f"The training set of {source} has {test_start} samples, of which the server keeps {validation}. "
            f"Got samples={samples}: ask for fewer."
        )
    order = rng.permutation(test_start)
    validation_rows = order[:validation]
    chosen = order[validation : validation + sample_count]
    parts = partition.iid(sample_count, count, rng) if split == "iid" else _by_class(y[chosen], count, rng)
    tests_per_client = None if test_samples is None else max(1, test_samples // count)
    test_rows = [test_start + part[:tests_per_client] for part in partition.iid(len(x) - test_start, count, rng)]
    rows = [np.sort(chosen[part]) for part in parts]
    prepare = scaling_by_color(x[:test_start])
    population = from_rows(
        x, y, rows, test=0.0, seed=seed, prepare=prepare, note=_note(source, len(x)), test_rows=test_rows
    )
    return population.with_validation(prepare(0, x[validation_rows]), y[validation_rows]) if validation else population


def _by_class(y: partition.RowIndices, count: int, rng: np.random.Generator) -> list[partition.RowIndices]:
    """Give client k class k, modulo the number of classes; several clients split a class equally."""
    return partition.round_robin(y, np.ones((count, 1)), rng, fill=True)


def _note(source: str, sample_count: int) -> str:
    explanation = (
        "each party is tested on its random part of the common test set, so the mean is the accuracy on all of it"
    )
    part = (
        f"{sample_count:,} of the {_FULL_SIZES[source]:,} samples of {_TITLES[source]}; "
        if sample_count < _FULL_SIZES[source]
        else ""
    )
    return part + explanation
