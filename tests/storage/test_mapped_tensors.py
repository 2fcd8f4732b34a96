"""Mapped tensors equal those that safetensors reads, without its memory leak."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from descant.storage.mapped_tensors import map_tensors
from descant.storage.safetensors_header import DTYPES


@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_mapped_tensors_equal_those_of_safetensors(tmp_path: Path, kind: torch.dtype) -> None:
    drawn = torch.randint(0, 2, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    given = {"many": drawn.to(kind), "ä/one": drawn[0, 0, 0].clone().to(kind), "none": torch.empty(0, 7, dtype=kind)}
    save_file({**given, "odd": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "file", {"said": "something"})
    found = map_tensors(tmp_path / "file")
    expected = load_file(tmp_path / "file")
    assert found.keys() == expected.keys() == {*given, "odd"}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_writing_into_a_mapped_tensor_changes_no_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file({"w": torch.ones(1000)}, file)
    found = map_tensors(file)["w"]
    found[0] = 5.0
    assert map_tensors(file)["w"].sum() == 1000.0
    file.unlink()
    assert found.sum() == 1004.0


@pytest.mark.parametrize("cut", [0, 4, 40, 4000])
def test_truncated_file_is_rejected(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "file"
    save_file({"w": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(SafetensorError):
        map_tensors(file)


def test_repeated_mapping_leaks_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file({f"w{i}": torch.ones(300) for i in range(20)}, file)
    map_tensors(file)
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            map_tensors(file)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 200 * 20 * 5  # safetensors' own loses 56 of each
    finally:
        tracemalloc.stop()
