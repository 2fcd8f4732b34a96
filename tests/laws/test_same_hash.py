"""The same seed gives the same model hash: twice, and after stopping at any round and continuing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from descant import Federation, Sgd, algorithms
from descant.errors import StateError
from problems import METHODS, classes, network

ROUNDS = 4


def made(name: str, seed: int = 7, **solver: object) -> Federation:
    settings: dict[str, object] = {"lr": 0.1, "steps": 3, "batch": 4, **solver}
    return Federation(network(), classes(5), METHODS[name](), solver=Sgd(**settings), seed=seed)  # type: ignore[arg-type]


def run(fed: Federation, rounds: int = ROUNDS) -> Federation:
    return fed.fit(rounds, progress=False)


@pytest.mark.parametrize("name", METHODS)
def test_twice_and_after_any_stop(name: str, tmp_path: Path) -> None:
    whole = run(made(name)).hash()
    assert run(made(name)).hash() == whole
    assert run(made(name, seed=8)).hash() != whole
    for stop in range(ROUNDS + 1):
        run(made(name), stop).save(tmp_path / str(stop))
        again = made(name).load(tmp_path / str(stop))
        assert run(again, ROUNDS - stop).hash() == whole
        assert [entry["round"] for entry in again.history_] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_memories_survive_a_stop(moments: str, tmp_path: Path) -> None:
    whole = run(made("stragglers", optimizer="Adam", moments=moments)).hash()
    run(made("stragglers", optimizer="Adam", moments=moments), 2).save(tmp_path / "run")
    again = made("stragglers", optimizer="Adam", moments=moments).load(tmp_path / "run")
    assert run(again, ROUNDS - 2).hash() == whole


def test_a_broken_round_leaves_no_trace() -> None:
    """Stopped in the middle of a round (here by an interrupt), the next call does that round as if nothing had been."""
    fed = made("FedAvgPlus", optimizer="Adam")
    run(fed, 2)
    collect = fed._engine.collect
    fed._engine.collect = lambda timeout: (collect(timeout), _interrupt())[0]  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(fed, 1)
    fed._engine.collect = collect  # type: ignore[method-assign]
    assert fed.state.round == 2
    assert run(fed, 2).hash() == run(made("FedAvgPlus", optimizer="Adam")).hash()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_break_and_go_on() -> None:
    fed = made("FedGeoMedPlus")
    for round in fed.rounds(ROUNDS):
        if round.index == 2:
            break
    assert run(fed, ROUNDS - 2).hash() == run(made("FedGeoMedPlus")).hash()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "FedCoMedPlus"])
def test_another_number_of_threads_agrees(name: str, threads: None) -> None:
    torch.set_num_threads(1)
    one = run(made(name)).state.center
    torch.set_num_threads(2)
    two = run(made(name)).state.center
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_the_hash_covers_every_party_and_its_memory() -> None:
    fed = run(made("FedAvgPlus", optimizer="Adam"))
    before = fed.hash()
    row = fed.state.own.get("3")["model"]
    row[0] += 1e-7
    fed.state.own.stage("3", {"model": row})
    fed.state.own.commit()
    changed = fed.hash()
    memory = fed._engine.memory.get("0")
    fed._engine.memory.stage("0", {**memory, "moment.step": memory["moment.step"] + 1})
    fed._engine.memory.commit()
    assert len({before, changed, fed.hash()}) == 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return run(made("FedAvgPlus"), 1).save(tmp_path / "run")


def test_a_run_of_another_federation_is_refused(saved: Path) -> None:
    with pytest.raises(StateError, match="another federation: seed 7, here 8"):
        made("FedAvgPlus", seed=8).load(saved)
    with pytest.raises(StateError, match="algorithm"):
        made("FedAvg").load(saved)
    with pytest.raises(StateError, match="layout"):
        Federation(torch.nn.Linear(6, 3), classes(5), algorithms.FedAvgPlus(), seed=7).load(saved)


@pytest.mark.parametrize("damage", ["missing", "torn json", "torn tensors", "edited"])
def test_a_damaged_run_is_named_and_nothing_is_lost(saved: Path, damage: str) -> None:
    if damage == "missing":
        saved = saved.parent / "nowhere"
    elif damage == "torn json":
        (saved / "state.json").write_text((saved / "state.json").read_text()[:-20])
    elif damage == "torn tensors":
        (saved / "own-0000.safetensors").write_bytes((saved / "own-0000.safetensors").read_bytes()[:-5])
    else:
        manifest = json.loads((saved / "state.json").read_text())
        (saved / "state.json").write_text(json.dumps(manifest | {"digest": "0" * 64}))
    fed = run(made("FedAvgPlus"), 2)
    before = fed.hash()
    with pytest.raises(StateError):
        fed.load(saved)
    assert fed.hash() == before


def test_saving_twice_keeps_the_newest(saved: Path) -> None:
    fed = made("FedAvgPlus").load(saved)
    run(fed, 2).save(saved)
    assert made("FedAvgPlus").load(saved).hash() == fed.hash()
    assert [file.name for file in saved.parent.iterdir()] == ["run"]
