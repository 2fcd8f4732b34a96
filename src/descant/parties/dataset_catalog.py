"""The data folder: the files of each data set and their sources. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.settings import unknown_name_error
from ..errors import PartyError

DATA_VARIABLE = "DESCANT_DATA"
BUNDLED_DATA_HINT = "digits, synthetic and shared_structure run without any file."
_COMPRESSION_SUFFIXES = ("", ".gz", ".xz")


@dataclass(frozen=True)
class DatasetFiles:
    """A data set's source and its files: at least one group of files must be complete."""

    title: str
    homepage: str
    file_groups: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.title}: {' or '.join(map(_format_files, self.file_groups))}. From {self.homepage}."


def _format_files(files: tuple[str, ...]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} … {files[-1]} ({len(files)} files)"


_MNIST = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_EMNIST = tuple(f"emnist-byclass-{part}-ubyte" for part in ("train-images-idx3", "train-labels-idx1"))
_EMNIST += tuple(f"emnist-byclass-{part}-ubyte" for part in ("test-images-idx3", "test-labels-idx1"))
_CIFAR = (*(f"cifar-10-batches-bin/data_batch_{k}.bin" for k in range(1, 6)), "cifar-10-batches-bin/test_batch.bin")
_MATLAB = ("train_32x32.mat", "test_32x32.mat")
_SHEETS = ("labels.npz", "train_00.webp", "test_00.webp")

DATASETS: Mapping[str, DatasetFiles] = {
    "mnist": DatasetFiles(
        "MNIST, as mnist.npz (x_train, y_train, x_test, y_test) or as the four IDX files, gzipped or not",
        "yann.lecun.com/exdb/mnist",
        (("mnist.npz",), _MNIST, tuple(f"MNIST/raw/{name}" for name in _MNIST)),
    ),
    "emnist": DatasetFiles(
        "EMNIST, as an npz of the letters a to j (x, y = 0..9) or as the four IDX files of its by-class split",
        "www.nist.gov/itl/products-and-services/emnist-dataset",
        (("emnist_lower_aj.npz",), _EMNIST),
    ),
    "cifar10": DatasetFiles(
        "CIFAR-10, as its six binary batches, as an npz (x_train, y_train, x_test, y_test) or as WebP sheets",
        "www.cs.toronto.edu/~kriz/cifar.html",
        (_CIFAR, ("cifar10.npz",), tuple(f"cifar10/{name}" for name in _SHEETS)),
    ),
    "svhn": DatasetFiles(
        "SVHN, its cropped digits, as the two files of MATLAB, as an npz (x_train, y_train, x_test, y_test) or as WebP "
        "sheets",
        "ufldl.stanford.edu/housenumbers",
        (_MATLAB, tuple(f"svhn/{name}" for name in _MATLAB), ("svhn.npz",), tuple(f"svhn/{name}" for name in _SHEETS)),
    ),
    "newsgroups": DatasetFiles(
        "20 Newsgroups, as a CSV with the columns label (0 to 19, in the order of the groups' names) and text, "
        "compressed or not",
        "qwone.com/~jason/20Newsgroups",
        (("20newsgroups.csv",),),
    ),
    "speech": DatasetFiles(
        "Speech Commands v0.02, ten of its words as log-mel images: an npz with x (bytes of shape [n, 32, 32], rows "
        "are time), y = 0..9 and split (0 train, 1 validation, 2 test); for WAV files use parties.spoken_words",
        "www.tensorflow.org/datasets/catalog/speech_commands",
        (("speech_commands_32x32.npz",),),
    ),
    "sp500": DatasetFiles(
        "daily prices of assets, as an npz (dates, tickers, adj_close of shape [days, assets])",
        "any source of adjusted closing prices; desks also read a CSV of dates and assets by its path",
        (("sp500_tech50_2006_2019.npz",),),
    ),
    "critics": DatasetFiles(
        "film reviews, a CSV with the columns account, label (1 is fresh) and text, compressed or not",
        "any collection of critics' reviews with their authors, such as rt.reviews.tsv",
        (("rt_critics.csv",),),
    ),
    "sent140": DatasetFiles(
        "Sentiment140, as its training CSV or as a CSV with the columns account, label and text, compressed or not",
        "help.sentiment140.com/for-students",
        (("training.1600000.processed.noemoticon.csv",), ("sent140_sample.csv",)),
    ),
    "glove100": DatasetFiles(
        "GloVe 6B, 100 numbers per word, as its text file or as an npz (words joined by line breaks, vectors)",
        "nlp.stanford.edu/projects/glove",
        (("glove6b_100d_subset.npz",), ("glove.6B.100d.txt",)),
    ),
    "glove300": DatasetFiles(
        "GloVe 6B, 300 numbers per word, as its text file",
        "nlp.stanford.edu/projects/glove",
        (("glove.6B.300d.txt",),),
    ),
    "word2vec300": DatasetFiles(
        "word2vec of Google News, 300 numbers per word, as an npz (words joined by line breaks, vectors)",
        "code.google.com/archive/p/word2vec",
        (("word2vec_gnews_300d_subset.npz",),),
    ),
}


def data_folder(folder_argument: str | Path | None = None) -> Path:
    """Return the folder with the data sets: the given one, else the one in DESCANT_DATA."""
    location = str(folder_argument) if folder_argument is not None else os.environ.get(DATA_VARIABLE, "")
    folder = Path(location).expanduser()
    if location and folder.is_dir():
        return folder
    problem = f"{folder} is not a folder" if location else "No data folder is given"
    dataset_list = "\n".join(f"  {name}: {data_set}" for name, data_set in DATASETS.items())
    raise PartyError(
        f"{problem}. Give data=..., or set {DATA_VARIABLE} to a folder with the files that you need:\n"
        f"{dataset_list}\n{BUNDLED_DATA_HINT}"
    )


def locate_files(name: str, data: str | Path | None = None) -> tuple[Path, ...]:
    """Return the files of a data set, from its first complete group; an error names the files and their source."""
    if name not in DATASETS:
        raise unknown_name_error("data set", name, DATASETS)
    folder = data_folder(data)
    for group in DATASETS[name].file_groups:
        files = [_find_file(folder / file) for file in group]
        if all(files):
            return tuple(file for file in files if file is not None)
    raise PartyError(f"{folder} does not hold {name}. {DATASETS[name]} Put it there; {BUNDLED_DATA_HINT}")


def _find_file(file: Path) -> Path | None:
    """Return the file or its compressed form, if either exists."""
    return next(
        (path for suffix in _COMPRESSION_SUFFIXES if (path := file.with_name(file.name + suffix)).is_file()), None
    )
