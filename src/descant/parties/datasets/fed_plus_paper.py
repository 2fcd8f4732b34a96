"""Populations of the Fed+ papers from real data; each docstring marks what is not from the papers.

"Fed+: A Unified Approach to Robust Personalized Federated Learning" (Yu et al., v1 §8 and v2 §8.1), which takes its
populations from "Federated Optimization in Heterogeneous Networks" (FedProx; Li et al., 2020). The files are described
in :mod:`..dataset_catalog`. Every party keeps a fifth of its rows for its test set, as in v2 §8.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.seeds import ALL_PARTIES, stream
from ...core.settings import check_settings, setting
from ...errors import PartyError
from .. import partition
from ..dataset_catalog import locate_files
from ..images import ImageScaling, all_images, pixel_moments
from ..partition import RowIndices
from ..population import Population, from_rows
from ..readers import parse_labels, read_table
from ..text import VECTOR_SIZES, encode_texts, word_vectors


@dataclass(frozen=True)
class _PopulationSettings:
    count: int | None = setting(None, "number of parties; None: all", least=1, whole=True)
    classes: int = setting(1, "number of classes per party", least=1, most=10, whole=True)
    max_words: int = setting(25, "number of words read from each text", least=1, whole=True)
    min_texts: int = setting(10, "minimum number of texts per account", least=2, whole=True)
    source: str = setting("critics", "collection of texts", one_of=("critics", "sent140"))
    vectors: str = setting("glove100", "set of word vectors", one_of=tuple(VECTOR_SIZES))


def mnist(
    count: int = 1000,
    classes: int = 1,
    angles: Sequence[float] = (),
    test: float = 0.2,
    seed: int = 0,
    data: str | Path | None = None,
) -> Population:
    """MNIST over 1,000 parties of one digit (Fed+), or of two (`classes=2`: FedProx), in log-normal sizes.

    Party u has the digits u, u+1, … modulo 10, at least 10 images, and of each digit a log-normal(0, 2) share of the
    rest. This is FedProx's code, except that all 70,000 images are used, where that code leaves 965. Both papers call
    these sizes a power law (ERRATA 23); Fed+ prints one digit and FedProx's code has two (ERRATA 20). Each pixel is
    standardized over all parties, with 0.001 added to the deviation, as in that code. `angles` is not from a paper: the
    images of party u are rotated by `angles[u]` (cyclic).
    """
    check_settings(_PopulationSettings(count, classes), "mnist")
    x, y = all_images("mnist", data)
    rng = stream(seed, 0, ALL_PARTIES, purpose="mnist")
    shares = rng.lognormal(0, 2, (count, classes))
    rows = partition.round_robin(y, shares, rng, min_rows=-(-10 // classes), fill=True)
    mean, deviation = pixel_moments(x)
    return from_rows(x, y, rows, test=test, seed=seed, prepare=ImageScaling(mean, deviation + 0.001, tuple(angles)))


def femnist(
    count: int = 200,
    classes: int = 5,
    leaky: bool = False,
    angles: Sequence[float] = (),
    test: float = 0.2,
    seed: int = 0,
    data: str | Path | None = None,
) -> Population:
    """EMNIST's lower-case letters a to j over 200 parties of 5 classes, in log-normal sizes: the papers' "FEMNIST".

    Party u has the letters u … u+4 modulo 10, ⌊log-normal(4, 1)⌋ + 5 images in equal parts, at least 2 of each. This is
    FedProx's code, with the 5 classes that both papers print where the code has 3 (ERRATA 21). No image is used twice,
    so the parties of a rare letter get fewer images. `leaky` reproduces the inverted index of that code instead: nearly
    every party then begins at the same image, and test images of one party are training images of others. Pixels are in
    [0, 1]. `angles` is not from a paper: see :func:`mnist`.
    """
    check_settings(_PopulationSettings(count, classes), "femnist")
    x, y = all_images("emnist", data)
    rng = stream(seed, 0, ALL_PARTIES, purpose="femnist")
    sizes = partition.log_normal_sizes(count, rng, 4.0, 1.0, 5)
    row_counts = np.repeat(np.maximum(sizes // classes, 2)[:, None], classes, axis=1)  # [count, classes]
    rows = _leaky_round_robin(y, row_counts) if leaky else partition.round_robin(y, row_counts, rng, min_rows=2)
    note = "images are shared between parties, as in FedProx's code: scores are too high" if leaky else ""
    return from_rows(x, y, rows, test=test, seed=seed, prepare=ImageScaling(angles=tuple(angles)), note=note)


def _leaky_round_robin(y: NDArray[np.int64], row_counts: RowIndices) -> list[RowIndices]:
    """Reproduce FedProx's inverted reset (ERRATA 21): the index goes back to 0 while there *are* images left."""
    by_class = [np.flatnonzero(y == label) for label in np.unique(y)]
    offsets = [0] * len(by_class)
    parts = []
    for party_classes, sizes in zip(
        partition.round_robin_classes(len(row_counts), row_counts.shape[1], len(by_class)), row_counts, strict=True
    ):
        party_parts = []
        for label, size in zip(party_classes, sizes, strict=True):
            if offsets[label] + size < len(by_class[label]):
                offsets[label] = 0
            party_parts.append(by_class[label][offsets[label] : offsets[label] + size])
            offsets[label] += size
        parts.append(np.sort(np.concatenate(party_parts)))
    return parts


def sentiment(
    source: str = "critics",
    count: int | None = None,
    max_words: int = 25,
    min_texts: int = 10,
    vectors: str = "glove100",
    test: float = 0.2,
    seed: int = 0,
    data: str | Path | None = None,
) -> Population:
    """Sentiment of short texts, one party per account; a text is the ids of its first 25 words.

    The papers use 772 accounts of Sent140, split into words by FedProx's rule ("25 characters" is a misprint for words:
    ERRATA 22). Sentiment140 is `source="sent140"`. In a part of it few accounts have enough tweets; then the reviews of
    film critics replace it, and `note` says so. FedProx's accounts have 30 texts or more; `min_texts` is 10 here, so
    that 772 accounts are available. Accounts are in an order drawn by the seed, because a file may sort them by their
    number of texts: the first `count` are a random sample. Features are row numbers of `vectors`, int64, 0 for unknown
    words. Give the same `vectors` to :func:`descant.models.lstm`, which holds the word vectors. GloVe has 100 numbers
    per word here, where the papers have 300 ("glove300", if you have its file).
    """
    check_settings(
        _PopulationSettings(count, max_words=max_words, min_texts=min_texts, source=source, vectors=vectors),
        "sentiment",
    )
    accounts, labels, texts, note = _read_texts(source, data)
    rows_by_account = partition.by_group(accounts, min_texts)
    if count is not None and count > len(rows_by_account):
        raise PartyError(
            f"{len(rows_by_account)} accounts of {source} have {min_texts} texts or more. Got count={count}: "
            "ask for fewer parties, or for a smaller 'min_texts'."
        )
    ordered = sorted(rows_by_account, key=_name_sort_key)
    chosen = [ordered[k] for k in stream(seed, 0, ALL_PARTIES, purpose="sentiment").permutation(len(ordered))[:count]]
    used = np.sort(np.concatenate([rows_by_account[name] for name in chosen]))  # only these are split into words
    x = encode_texts([texts[row] for row in used], word_vectors(vectors, data).ids, max_words)
    rows = {name: np.searchsorted(used, rows_by_account[name]) for name in chosen}
    return from_rows(x, labels[used], rows, test=test, seed=seed, note=note)


def _name_sort_key(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts numbers by value, before other names."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def _read_texts(source: str, data: str | Path | None) -> tuple[list[str], NDArray[np.int64], list[str], str]:
    """Return accounts, labels, texts, and a caveat on them or ""."""
    (file,) = locate_files(source, data)
    if file.name.startswith("training"):  # the original Sentiment140
        header = ("polarity", "id", "date", "query", "account", "text")
        table = read_table(file, ("account", "polarity", "text"), header, encoding="latin-1")
        labels = parse_labels(file, table["polarity"], {"0": 0, "4": 1}, first_row=1)
        note = ""
    else:
        table = read_table(file, ("account", "label", "text"))
        labels = parse_labels(file, table["label"], {"0": 0, "1": 1})
        note = "the reviews of film critics replace Sent140: these are not the paper's data"
        if source == "sent140":
            note = f"a part of Sentiment140: {len(labels):,} of its 1,600,000 tweets"
    return table["account"], labels, table["text"], note
