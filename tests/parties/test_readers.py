"""Readers: files are read as written, under all their usual names; damaged files are rejected with a reason."""

from __future__ import annotations

import contextlib
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_files import (
    numbered_images,
    write_compressed,
    write_csv,
    write_emnist_letters,
    write_idx,
    write_mnist,
    write_tile_sheet,
    write_word_vectors,
)
from descant import parties
from descant.errors import PartyError, SettingError
from descant.parties import dataset_catalog, images, readers, text

TABLE = [("account", "label", "text"), ("ann", 1, "good,\nvery"), ("bob", 0, "ä")]


def test_the_data_folder_is_an_argument_or_an_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DESCANT_DATA", raising=False)
    assert parties.data_folder(tmp_path) == parties.data_folder(str(tmp_path)) == tmp_path
    with pytest.raises(PartyError, match="No data folder is given") as missing:
        parties.data_folder()
    for name in dataset_catalog.DATASETS:
        assert f"  {name}: " in str(missing.value), "every data set is described"
        assert dataset_catalog.DATASETS[name].homepage in str(missing.value), "with its source"
    assert "digits, synthetic and shared_structure run without" in str(missing.value)
    monkeypatch.setenv("DESCANT_DATA", str(tmp_path))
    assert parties.data_folder() == tmp_path
    with pytest.raises(PartyError, match=r"nowhere is not a folder\. Give data="):
        parties.data_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", list(dataset_catalog.DATASETS))
def test_a_missing_data_set_is_described_with_its_source(name: str, tmp_path: Path) -> None:
    with pytest.raises(PartyError, match=f"does not hold {name}") as error:
        dataset_catalog.locate_files(name, tmp_path)
    assert dataset_catalog.DATASETS[name].homepage in str(error.value) and "run without any file" in str(error.value)
    with pytest.raises(SettingError, match="Did you mean 'mnist'"):
        dataset_catalog.locate_files("minst", tmp_path)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_idx_files_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, kind: str, shape: list[int], data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.integers(0, 100), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    array = np.array(values, dtype=kind).reshape(shape)
    ending = data.draw(st.sampled_from(["", ".gz", ".xz"]))
    values_read = readers.read_idx(write_idx(tmp_path_factory.mktemp("idx") / f"a-idx{ending}", array))
    assert values_read.dtype == array.dtype and np.array_equal(values_read, array)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("under", ["", "MNIST/raw/"])
def test_mnist_is_found_under_all_its_names(tmp_path: Path, ending: str, under: str) -> None:
    expected = images.all_images("mnist", write_mnist(tmp_path / "npz"))
    x, y = numbered_images()
    for part, rows in (("train", slice(0, 300)), ("t10k", slice(300, 400))):
        write_idx(tmp_path / f"idx/{under}{part}-images-idx3-ubyte{ending}", x[rows])
        write_idx(tmp_path / f"idx/{under}{part}-labels-idx1-ubyte{ending}", y[rows])
    loaded = images.all_images("mnist", tmp_path / "idx")
    assert expected[0].shape == (400, 1, 28, 28) and expected[1].dtype == np.int64
    assert np.array_equal(expected[0], loaded[0]) and np.array_equal(expected[1], loaded[1])


def test_images_of_the_original_emnist_are_transposed(tmp_path: Path) -> None:
    x, _ = numbered_images(64)
    y = np.arange(64, dtype=np.uint8) % 62
    for part in ("train", "test"):
        write_idx(tmp_path / f"emnist-byclass-{part}-images-idx3-ubyte.gz", x.swapaxes(1, 2).copy())
        write_idx(tmp_path / f"emnist-byclass-{part}-labels-idx1-ubyte.gz", y)
    loaded, labels = images.all_images("emnist", tmp_path)
    assert labels.tolist() == list(range(10)) * 2, "a to j are 36 to 45 there"
    assert np.array_equal(loaded[:10, 0], x[36:46])


def cifar_bytes(n: int, label_bytes: int = 1) -> bytes:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (n, label_bytes + 3072), dtype=np.uint8)
    rows[:, :label_bytes] = np.arange(n)[:, None] % 10
    return rows.tobytes()


def test_cifar_batches_npz_and_sheets_agree(tmp_path: Path) -> None:
    batch = write_compressed(cifar_bytes(50), tmp_path / "bin/cifar-10-batches-bin/data_batch_1.bin")
    for name in [*(f"data_batch_{k}.bin" for k in range(2, 6)), "test_batch.bin"]:
        write_compressed(batch.read_bytes(), batch.with_name(name))
    x, y = images.all_images("cifar10", tmp_path / "bin")
    assert x.shape == (300, 3, 32, 32) and y.tolist() == list(range(10)) * 30
    pictures = x.transpose(0, 2, 3, 1)
    (tmp_path / "npz").mkdir()
    np.savez(
        tmp_path / "npz/cifar10.npz",
        x_train=pictures[:250],
        y_train=y[:250],
        x_test=pictures[250:],
        y_test=y[250:],
    )
    for number in range(5):
        write_tile_sheet(tmp_path / f"webp/cifar10/train_{number:02}.webp", pictures[50 * number : 50 * number + 50])
    write_tile_sheet(tmp_path / "webp/cifar10/test_00.webp", pictures[250:])
    np.savez(tmp_path / "webp/cifar10/labels.npz", y_train=y[:250], y_test=y[250:290])
    for other, n in (("npz", 300), ("webp", 290)):
        loaded = images.all_images("cifar10", tmp_path / other)
        assert np.array_equal(loaded[0], x[:n]) and np.array_equal(loaded[1], y[:n])


def test_cifar_100_is_read_with_fine_labels(tmp_path: Path) -> None:
    rows = np.zeros((3, 3074), dtype=np.uint8)
    rows[:, 1] = [99, 3, 7]
    _, y = readers.read_cifar(write_compressed(rows.tobytes(), tmp_path / "train.bin"), classes=100)
    assert y.tolist() == [99, 3, 7]


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_csv_files_are_read_by_column(tmp_path: Path, ending: str) -> None:
    file = write_csv(tmp_path / f"a.csv{ending}", TABLE)
    assert readers.read_table(file, ("text", "account")) == {"text": ["good,\nvery", "ä"], "account": ["ann", "bob"]}
    bare = write_csv(tmp_path / f"b.csv{ending}", TABLE[1:], "latin-1")
    assert readers.read_table(bare, ("t",), header=("a", "l", "t"), encoding="latin-1") == {"t": ["good,\nvery", "ä"]}
    assert readers.read_header(file) == ["account", "label", "text"]


def test_word_vectors_are_cached_and_equal_in_all_formats(tmp_path: Path) -> None:
    words = text.word_vectors("glove100", write_word_vectors(tmp_path))
    assert words is text.word_vectors("glove100", tmp_path)
    assert not words.vectors[0].any() and words.ids["good"] == 1 and words.vectors.shape == (7, 100)
    with pytest.raises(ValueError, match="read-only"):
        words.vectors[1] = 0
    (tmp_path / "txt").mkdir()
    lines = [f"{word} {' '.join(map(str, words.vectors[row].tolist()))}\n" for word, row in words.ids.items()]
    write_compressed("".join(lines).encode(), tmp_path / "txt/glove.6B.100d.txt")
    again = text.word_vectors("glove100", tmp_path / "txt")
    assert again.ids == words.ids and np.array_equal(again.vectors, words.vectors)


def npz_file(catalog: Path) -> Path:
    np.savez_compressed(catalog / "a.npz", x=np.arange(60.0).reshape(20, 3), y=np.arange(20))
    return catalog / "a.npz"


def sheet_file(catalog: Path) -> Path:
    return write_tile_sheet(
        catalog / "train_00.webp", np.random.default_rng(0).integers(0, 255, (50, 32, 32, 3), np.uint8)
    )


FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "npz": (npz_file, lambda file: readers.read_npz(file, ("x", "y"))),
    "idx": (lambda catalog: write_idx(catalog / "a", np.arange(60, dtype="u1").reshape(20, 3)), readers.read_idx),
    "idx.gz": (lambda catalog: write_idx(catalog / "a.gz", np.arange(60, dtype="u1").reshape(20, 3)), readers.read_idx),
    "cifar": (lambda catalog: write_compressed(cifar_bytes(2), catalog / "a.bin"), readers.read_cifar),
    "csv": (
        lambda catalog: write_csv(catalog / "a.csv", TABLE * 9),
        lambda f: readers.read_table(f, ("label", "text")),
    ),
    "csv.xz": (
        lambda catalog: write_csv(catalog / "a.csv.xz", TABLE * 9),
        lambda f: readers.read_table(f, ("text",)),
    ),
    "webp": (sheet_file, lambda file: images.read_sheets(file.parent, "train", 50)),
}


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_files_are_read_or_rejected_by_name(
    format_name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    write, read = FORMATS[format_name]
    file = write(tmp_path_factory.mktemp("damage"))
    whole = bytearray(file.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])
    try:
        read(file)
    except PartyError as error:
        assert file.name in str(error) and "xpected" in str(error)


@pytest.mark.parametrize("format_name", FORMATS)
def test_truncated_and_missing_files_are_rejected(format_name: str, tmp_path: Path) -> None:
    write, read = FORMATS[format_name]
    file = write(tmp_path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 3])
    with pytest.raises(PartyError, match=f"{file.name} cannot be used: .*Expected"):
        read(file)
    file.unlink()
    with pytest.raises(PartyError, match=rf"There is no file .*{file.name}\. Expected"):
        read(file)


def test_objects_in_an_npz_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([print, {}], dtype=object))
    with pytest.raises(PartyError, match=r"a\.npz cannot be used: it holds objects") as error:
        readers.read_npz(tmp_path / "a.npz", ("x",))
    assert "allow_pickle" not in str(error.value)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.integers(0, 127), st.sampled_from(b"()[]{}',: L019<>fOV|#\n\0\xff"), min_size=1, max_size=5))
def test_an_npz_file_with_a_damaged_header_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, bad: dict[int, int]
) -> None:
    """The checksums are valid, so numpy reads the damaged headers."""
    whole = io.BytesIO()
    np.save(whole, np.arange(6).reshape(2, 3))
    data = bytearray(whole.getvalue())
    for place, byte in bad.items():
        data[place] = byte
    file = tmp_path_factory.mktemp("head") / "a.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", bytes(data))
    with contextlib.suppress(PartyError):
        assert isinstance(readers.read_npz(file, ("x",))[0], np.ndarray)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda f: write_idx(f / "a", np.zeros((3, 2), "u1")).write_bytes(b"\0\0\x08\x02" + bytes(8) + b"x"),
            "continues after",
        ),
        (
            lambda f: write_compressed(b"\0\0\x08\x01\0\0\0\x05abc", f / "a"),
            "it ends in row 3.*Expected 5 rows of 1 bytes",
        ),
        (lambda f: write_compressed(b"\x1f\x8b\x08\0", f / "a"), "it begins with 1f 8b 08 00"),
    ],
)
def test_a_truncated_idx_file_is_rejected_with_the_row(
    write: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(PartyError, match=message):
        readers.read_idx(tmp_path / "a")


def test_invalid_csv_files_are_rejected_with_the_row(tmp_path: Path) -> None:
    short = write_csv(tmp_path / "short.csv", [*TABLE, ("x", 1)])
    with pytest.raises(PartyError, match=r"row 4 has 2 fields\. Expected 3 fields per row"):
        readers.read_table(short, ("text",))
    with pytest.raises(
        PartyError,
        match=r"There is no column 'lable'\. Did you mean 'label'\? Allowed: account, label, text\. Expected",
    ):
        readers.read_table(short, ("lable",))
    with pytest.raises(PartyError, match="a byte 0xe4"):
        readers.read_table(write_csv(tmp_path / "latin.csv", TABLE, "latin-1"), ("text",))
    with pytest.raises(PartyError, match="it has no rows"):
        readers.read_table(write_csv(tmp_path / "empty.csv", TABLE[:1]), ("text",))


def test_messages_count_csv_rows_like_a_spreadsheet(tmp_path: Path) -> None:
    """Column names are row 1; a quoted text with line breaks is part of one row."""
    valid = [("x", "label", "account"), (1, 0, "a\nb"), (2, 1, "c")]
    for invalid, message in (
        ((3, 1), "row 4 has 2 fields"),
        (("no", 1, "c"), "row 4 of column 'x' holds 'no'"),
        ((3, "no", "c"), "row 4 of column 'label' holds 'no'"),
        ((3, -1, "c"), "row 4 of column 'label' holds -1"),
    ):
        file = write_csv(tmp_path / "a.csv", [*valid, invalid])
        with pytest.raises(PartyError, match=message):
            parties.csv(file, party_column="account")
    bare = write_csv(tmp_path / "bare.csv", [(1, 2), (3,)])
    with pytest.raises(PartyError, match="row 2 has 1 fields"):
        readers.read_table(bare, ("a",), header=("a", "b"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "it has no column besides 'label'"),
        ([("label",)], "it has no column besides 'label'"),
        ([("label",), (1,), (0,)], "it has no column besides 'label'"),
        ([("x", "label")], "it has no rows"),
    ],
)
def test_a_csv_file_without_features_or_rows_is_rejected(
    rows: list[tuple[object, ...]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PartyError, match=message):
        parties.csv(write_csv(tmp_path / "a.csv", rows))
    with pytest.raises(PartyError, match="it has no rows"):
        readers.read_table(write_csv(tmp_path / "b.csv", rows[:1]), ())


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", TABLE, "utf-8-sig")
    assert readers.read_header(file) == ["account", "label", "text"]
    assert readers.read_table(file, ("account",)) == {"account": ["ann", "bob"]}


def test_labels_outside_their_range_are_rejected_with_the_row(tmp_path: Path) -> None:
    x, y = numbered_images(40)
    y[7] = 10
    np.savez(tmp_path / "emnist_lower_aj.npz", x=x, y=y)
    with pytest.raises(PartyError, match=r"the label of row 7 is 10\. Expected labels .* from 0 to 9"):
        images.all_images("emnist", tmp_path)
    data = bytearray(cifar_bytes(3))
    data[3073] = 11
    with pytest.raises(PartyError, match="the label of row 1 is 11"):
        readers.read_cifar(write_compressed(bytes(data), tmp_path / "a.bin"))
    np.savez(tmp_path / "emnist_lower_aj.npz", x=x, y=y / 2)
    with pytest.raises(PartyError, match=r"labels have shape \(40,\) of float64"):
        images.all_images("emnist", tmp_path)


def test_images_and_labels_must_agree(tmp_path: Path) -> None:
    x, y = numbered_images(40)
    for arrays, message in (
        ({"x": x[:30], "y": y}, "30 images and 40 labels"),
        ({"x": x[:, :27], "y": y}, r"images have shape \(1, 27, 28\).*Expected bytes of shape \(1, 28, 28\)"),
        ({"x": x / 255, "y": y}, "of float64"),
        ({"y": y}, "it has no 'x', only y"),
    ):
        np.savez(tmp_path / "emnist_lower_aj.npz", **arrays)
        with pytest.raises(PartyError, match=message):
            images.all_images("emnist", tmp_path)
    np.save(tmp_path / "one.npy", x)
    with pytest.raises(PartyError, match="one array without a name"):
        readers.read_npz(tmp_path / "one.npy", ("x",))


def test_features_that_are_not_finite_are_rejected_with_the_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[0.0], [np.nan]]), y=[0, 1])
    with pytest.raises(PartyError, match=r"Row 1 of 'x' in .*a\.npz holds nan"):
        parties.npz(tmp_path / "a.npz", count=1)
    file = write_csv(tmp_path / "a.csv", [("a", "label"), (1, 0), ("inf", 1)])
    with pytest.raises(PartyError, match=r"row 3 of column 'a' holds 'inf'\. Expected a finite number"):
        parties.csv(file, count=1)
    file = write_csv(tmp_path / "a.csv", [("a", "label"), (1, 0), ("one", 1)])
    with pytest.raises(PartyError, match="row 3 of column 'a' holds 'one'"):
        parties.csv(file, count=1)


def test_invalid_word_vectors_are_rejected(tmp_path: Path) -> None:
    write_word_vectors(tmp_path, size=99)
    with pytest.raises(PartyError, match=r"6 words and vectors \(6, 99\)\. Expected 100 numbers per word"):
        text.word_vectors("glove100", tmp_path)
    numbers = " ".join(["0.5"] * 300)
    write_compressed(f"the {numbers}\nof {numbers[:-3]}x\n".encode(), tmp_path / "glove.6B.300d.txt")
    with pytest.raises(PartyError, match=r"line 2: .*Expected a word and 300 numbers per line"):
        text.word_vectors("glove300", tmp_path)


def test_a_missing_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PartyError, match=r"pip install 'descant\[images\]'"):
        images.read_sheets(tmp_path, "train", 1)


def test_the_emnist_letters_file_is_read(tmp_path: Path) -> None:
    x, y = images.all_images("emnist", write_emnist_letters(tmp_path))
    assert x.shape == (400, 1, 28, 28) and np.bincount(y).tolist() == [40] * 10


def test_duplicate_columns_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "twice.csv"
    file.write_text("a,a,label\n1,2,0\n")
    with pytest.raises(PartyError, match="two columns are named 'a'"):
        readers.read_table(file, ["a", "label"])


def test_an_unknown_label_is_rejected_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(PartyError, match="the label of row 3 is '7'"):
        readers.parse_labels(tmp_path / "it.csv", ["0", "7"], {"0": 0})
