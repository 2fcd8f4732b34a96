"""Stacks beyond the budget lie in files that have no name: the numbers are the same, and nothing is left of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from descant import Federation, Sgd, algorithms
from descant.errors import StateError
from descant.store import room as rooms
from descant.store.room import room
from problems import METHODS, classes, network
from test_letters import NAMES, Post, desks, met, recipe, same, simulated

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
    assert mapped == [len(NAMES) * model] * 6  # a round's answers, and its stack
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


def test_a_full_disk_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(StateError, match=r"8 MB for models cannot be had in .*No space left.*TMPDIR"):
        room((2, 10**6), torch.float32, 0)
