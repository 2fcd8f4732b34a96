"""Stacks beyond the budget lie in files that have no name: the numbers are the same, and nothing is left of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from descant import Federation, Sgd, algorithms
from descant.core import Report
from descant.errors import EngineError, StateError
from descant.store import PartyStore
from descant.store import room as rooms
from descant.store.room import Filed, room
from descant.wire import pack, unpack
from problems import METHODS, classes, network
from test_letters import NAMES, Post, desks, in_file, met, recipe, same, simulated

STAND_INS = {"late": lambda: algorithms.FedBuff(2), "everybody": lambda: METHODS["FedPlus, over all"]()}


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How many bytes were mapped, each time; and temporary files lie in a folder of their own."""
    sizes: list[int] = []

    def counting(descriptor: int, size: int) -> None:
        sizes.append(size)
        reserve(descriptor, size)

    reserve = rooms.reserve
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(rooms, "reserve", counting)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return sizes


@pytest.mark.parametrize("method", ["fedavg", "comed", "rfa", "fedgeomed+"])
def test_answers_beyond_the_budget_go_to_files_and_change_nothing(
    tmp_path: Path, mapped: list[int], method: str
) -> None:
    fed = met(Post(desks(tmp_path / "silos")), recipe(method))
    fed.budget = 0
    for _ in fed.rounds(3):
        named = [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
        assert not [path for path in named if path.suffix != ".safetensors"]  # those are what parties keep
    model = fed._plan.net.layout.width * 4
    first, *tried = mapped[:-4]
    assert first == model and set(tried) <= {4 * -(-model // 64) * 16 * rows for rows in (1, 2)}  # how it is computed
    assert mapped[-4:] == [2 * model, *[len(NAMES) * model] * 3]  # two to rehearse with, and the stack of every round
    same(fed, simulated(recipe(method), 3))


@pytest.mark.parametrize("name", [*METHODS, *STAND_INS])
def test_no_method_sees_where_its_stack_lies(mapped: list[int], name: str) -> None:
    def hashed(budget: int) -> str:
        make = {**METHODS, **STAND_INS}[name]
        solver = Sgd(lr=0.05, steps=2, batch=4)
        return Federation(network(), classes(5), make(), solver=solver, budget=budget).fit(2, progress=False).hash()

    assert hashed(2**30) == hashed(0) and mapped


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    code = "import os, torch; from descant.store.room import room; room((2**20,), torch.float32, 0).fill_(1)"
    command, where = [sys.executable, "-c", f"{code}; os.kill(os.getpid(), 9)"], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(tmp_path.iterdir())


def test_what_parties_keep_is_staged_and_given_out_in_files_where_it_does_not_fit(mapped: list[int]) -> None:
    rows = {name: torch.randn(2**18 + 1) for name in "abc"}  # a little over 1 MB each
    size = rows["a"].nbytes
    roomy, small = PartyStore(2**30), PartyStore(size)
    for store in (roomy, small):
        for name, row in rows.items():
            store.stage(name, {"model": row})
        store.commit(1, list(rows))
    assert mapped == [size]  # the third, when the first two were already too many
    for name, row in rows.items():
        given = small.get(name)["model"]
        assert given.equal(row) and roomy.get(name)["model"].equal(row)
        given.zero_()  # a copy
        assert small.get(name)["model"].equal(row)
    assert mapped == [size] * 7


@pytest.mark.parametrize("place", [True, False], ids=["mapped", "read"])
def test_a_letter_in_a_file_is_the_same_letter_and_outlives_it(monkeypatch: pytest.MonkeyPatch, place: bool) -> None:
    if not place:  # a system that gives its files no names by their numbers
        monkeypatch.setattr(Filed, "place", None)
    arrays = {"w": torch.randn(300, 7), "b": torch.arange(5.0).double(), "none": torch.empty(0, 3)}
    report = Report("a", 3, "train", arrays=arrays, metrics={"loss": 1.5}, sealed=b"closed")
    file = in_file(pack(report))
    found = unpack(file, Report)
    del file
    assert replace(found, arrays={}) == replace(report, arrays={}) and found.arrays.keys() == arrays.keys()
    assert all(found.arrays[name].equal(tensor) for name, tensor in arrays.items())


def test_a_letter_in_a_file_that_is_spoiled_anywhere_is_refused() -> None:
    whole = pack(Report("a", 3, "train", arrays={"w": torch.randn(30)}, metrics={"loss": 1.5}))
    for at in range(0, len(whole), 3):
        with pytest.raises(EngineError, match=f"These {at} bytes"):
            unpack(in_file(whole[:at]), Report)
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises(EngineError):
            unpack(in_file(flipped), Report)


def test_a_disk_that_is_full_when_an_answer_comes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    filed = Filed()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StateError, match=r"1 MB for models cannot be had in .*No space left.*TMPDIR"):
        filed.add(bytes(10**6))


def test_a_full_disk_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(StateError, match=r"8 MB for models cannot be had in .*No space left.*TMPDIR"):
        room((2, 10**6), torch.float32, 0)
