"""Short texts as rows of word ids, and the word vectors of these ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .dataset_catalog import locate_files
from .party import Array
from .readers import damaged_file_error, read_npz, read_text

_TOKEN = re.compile(r"[\w']+|[.,!?;]")  # FedProx's

VECTOR_SIZES = {"glove100": 100, "glove300": 300, "word2vec300": 300}
"""Names of the sets of word vectors, and the size of a vector in each."""


@dataclass(frozen=True, eq=False)
class WordEmbeddings:
    """Word vectors ``[1 + words, size]``; row 0 is zero, for padding and unknown words."""

    ids: Mapping[str, int]
    vectors: Array

    @cached_property
    def table(self) -> Tensor:
        """The vectors as one tensor, shared by all models."""
        return torch.tensor(self.vectors)


def split_tokens(text: str) -> list[str]:
    """Split a text into words and punctuation by FedProx's rule, in lower case.

    The vectors are in lower case; FedProx does not specify the case.

    >>> split_tokens("It's GOOD, isn't it?")
    ["it's", 'good', ',', "isn't", 'it', '?']
    """
    return _TOKEN.findall(text.lower())


def encode_texts(texts: Sequence[str], ids: Mapping[str, int], max_words: int) -> Array:
    """Return the ids of the first `max_words` words of each text, 0 for unknown words and as padding.

    >>> encode_texts(["a b c", "b ?"], {"a": 1, "b": 2}, 2).tolist()
    [[1, 2], [2, 0]]
    """
    rows = np.zeros((len(texts), max_words), dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        word_ids = [ids.get(word, 0) for word in split_tokens(text)[:max_words]]
        row[: len(word_ids)] = word_ids
    return rows


def word_vectors(name: str, data: str | Path | None = None) -> WordEmbeddings:
    """Return a set of word vectors with its word ids; it is read once and cached."""
    (file,) = locate_files(name, data)
    return _load_vectors(file, VECTOR_SIZES[name], file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _load_vectors(file: Path, size: int, modified_ns: int) -> WordEmbeddings:
    words, vectors = _from_text(file, size) if ".txt" in file.suffixes else _from_npz(file)
    if vectors.ndim != 2 or vectors.shape != (len(words), size) or vectors.dtype.kind != "f":
        raise damaged_file_error(
            file, f"it has {len(words)} words and vectors {vectors.shape}", f"{size} numbers per word"
        )
    table = np.concatenate([np.zeros((1, size), dtype=vectors.dtype), vectors])
    table.flags.writeable = False  # all models share it
    return WordEmbeddings({word: row for row, word in enumerate(words, 1)}, table)


def _from_npz(file: Path) -> tuple[list[str], Array]:
    words, vectors = read_npz(file, ("words", "vectors"))
    return str(words).split("\n"), vectors


def _from_text(file: Path, size: int) -> tuple[list[str], Array]:
    """Read GloVe's text format: a word and its numbers per line, separated by spaces."""
    words = list[str]()
    vectors = list[Array]()
    expected = f"a word and {size} numbers per line"
    for number, line in enumerate(read_text(file, expected), 1):
        word, *rest = line.rstrip("\n").rsplit(" ", size)
        try:
            vector = np.array(rest, dtype=np.float32)
        except ValueError as error:
            raise damaged_file_error(file, f"line {number}: {error}", expected) from error
        if len(vector) != size or not np.isfinite(vector).all():
            raise damaged_file_error(file, f"line {number} begins with {line[:30]!r}", expected)
        words.append(word)
        vectors.append(vector.astype(np.float16))
    return words, np.array(vectors, dtype=np.float16).reshape(len(words), -1)
