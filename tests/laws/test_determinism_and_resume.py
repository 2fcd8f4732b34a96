"""Determinism: one seed gives one model hash, run twice or resumed after any round."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from descant import DescantError, Federation, Sgd, algorithms, parties
from descant.core.algorithm import NamedTensors
from descant.errors import StateError
from descant.rounds import checkpoint
from descant.rounds.checkpoint import digest_of_models, run_digest
from descant.rounds.loop import run as rounds
from descant.storage import atomic, party_store
from toy_problems import ALL_METHODS, classification_parties, network

ROUNDS = 4


def make_federation(name: str, seed: int = 7, **solver: object) -> Federation:
    settings: dict[str, object] = {"lr": 0.1, "steps": 3, "batch": 4, **solver}
    return Federation(network(), classification_parties(5), ALL_METHODS[name](), solver=Sgd(**settings), seed=seed)  # type: ignore[arg-type]


def run(fed: Federation, rounds: int = ROUNDS) -> Federation:
    return fed.fit(rounds, progress=False)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_the_hash_is_the_same_twice_and_after_a_resume_at_any_round(name: str, tmp_path: Path) -> None:
    whole = run(make_federation(name)).hash()
    assert run(make_federation(name)).hash() == whole
    assert run(make_federation(name, seed=8)).hash() != whole
    for stop in range(ROUNDS + 1):
        run(make_federation(name), stop).save(tmp_path / str(stop))
        again = make_federation(name).load(tmp_path / str(stop))
        assert run(again, ROUNDS - stop).hash() == whole
        assert [entry["round"] for entry in again.history_] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_party_states_survive_a_resume(moments: str, tmp_path: Path) -> None:
    whole = run(make_federation("stragglers", optimizer="Adam", moments=moments)).hash()
    run(make_federation("stragglers", optimizer="Adam", moments=moments), 2).save(tmp_path / "run")
    again = make_federation("stragglers", optimizer="Adam", moments=moments).load(tmp_path / "run")
    assert run(again, ROUNDS - 2).hash() == whole


def test_an_interrupted_round_leaves_no_trace() -> None:
    """After an interrupt inside a round, the next call repeats that round from its start."""
    fed = make_federation("FedAvgPlus", optimizer="Adam")
    run(fed, 2)
    collect = fed.engine_.collect
    fed.engine_.collect = lambda timeout: (collect(timeout), _interrupt())[0]  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(fed, 1)
    fed.engine_.collect = collect  # type: ignore[method-assign]
    assert fed.state.round == 2
    assert run(fed, 2).hash() == run(make_federation("FedAvgPlus", optimizer="Adam")).hash()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_breaking_out_of_the_loop_and_continuing_gives_the_same_hash() -> None:
    fed = make_federation("FedGeoMedPlus")
    for round in fed.rounds(ROUNDS):
        if round.index == 2:
            break
    assert run(fed, ROUNDS - 2).hash() == run(make_federation("FedGeoMedPlus")).hash()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "FedCoMedPlus"])
def test_the_number_of_threads_hardly_changes_the_model(name: str, threads: None) -> None:
    """The model is wide enough that torch shares its work among threads."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(80, 200, generator=generator), torch.randint(0, 5, (80,), generator=generator)) for _ in range(3)
    ]
    population = parties.from_arrays(data, test=0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 5))
    centers = []
    for count in (1, 2):
        torch.set_num_threads(count)
        fed = Federation(model, population, ALL_METHODS[name](), lr=0.1, steps=3, batch=64)
        centers.append(run(fed, 3).state.global_model)
    torch.testing.assert_close(*centers, rtol=0, atol=1e-6)


def test_a_state_older_than_the_party_states_is_rejected() -> None:
    fed = make_federation("FedAvgPlus")
    first = next(iter(fed.rounds(1))).round
    run(fed, 2)
    with pytest.raises(StateError, match="state is of round 1, but the parties' models and party states are at 3"):
        next(rounds(fed.plan_, fed.engine_, first.state, 1))


def test_a_loop_overtaken_by_another_loop_raises() -> None:
    fed = make_federation("FedAvgPlus")
    loop = fed.rounds(5)
    next(loop)
    run(fed, 2)
    with pytest.raises(DescantError):
        next(loop)
    assert fed.state.round == 3
    assert run(fed, 1).hash() == run(make_federation("FedAvgPlus")).hash()


def momentum(
    center: Tensor, aggregate: Tensor, server_state: NamedTensors, share: float
) -> tuple[Tensor, NamedTensors]:
    """Update the server as FedAvgM does, with its last move as server state."""
    move = 0.5 * server_state.get("move", torch.zeros_like(center)) + aggregate - center
    return center + move, {"move": move}


def test_the_server_state_is_saved_and_hashed(tmp_path: Path) -> None:
    def server() -> Federation:
        return Federation(
            network(),
            classification_parties(4),
            replace(algorithms.FedAvg(), server_update=momentum),
            lr=0.1,
            steps=2,
            batch=4,
        )

    whole = run(server())
    assert (whole.state.global_model - run(make_federation("FedAvg")).state.global_model).abs().max() > 1e-3
    run(server(), 2).save(tmp_path / "run")
    again = server().load(tmp_path / "run")
    assert run(again, ROUNDS - 2).hash() == whole.hash()
    without_server_state = replace(whole.state, server_state={})
    assert run_digest(without_server_state, whole.engine_.party_states) != whole.hash()


def test_the_hash_covers_every_personal_model_and_party_state() -> None:
    fed = run(make_federation("FedAvgPlus", optimizer="Adam"))
    before = fed.hash()
    row = fed.state.personal_models.get("3")["model"]
    row[0] += 1e-7
    fed.state.personal_models.stage("3", {"model": row})
    fed.state.personal_models.commit(ROUNDS, ["3"])
    changed = fed.hash()
    party_state = fed.engine_.party_states.get("0")
    fed.engine_.party_states.stage("0", {**party_state, "moment.step": party_state["moment.step"] + 1})
    fed.engine_.party_states.commit(ROUNDS, ["0"])
    assert len({before, changed, fed.hash()}) == 3


def test_the_model_digest_covers_every_model_and_no_party_state() -> None:
    """A server prints this digest too, because silos keep their party states to themselves."""
    fed = run(make_federation("FedAvgPlus", optimizer="Adam"))
    before = digest_of_models(fed.state)
    party_state = fed.engine_.party_states.get("0")
    fed.engine_.party_states.stage("0", {**party_state, "moment.step": party_state["moment.step"] + 1})
    fed.engine_.party_states.commit(ROUNDS, ["0"])
    assert digest_of_models(fed.state) == before
    row = fed.state.personal_models.get("3")["model"]
    row[0] += 1e-7
    fed.state.personal_models.stage("3", {"model": row})
    fed.state.personal_models.commit(ROUNDS, ["3"])
    changed = digest_of_models(fed.state)
    fed.state = replace(fed.state, global_model=fed.state.global_model + 1e-7)
    assert len({before, changed, digest_of_models(fed.state)}) == 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return run(make_federation("FedAvgPlus"), 1).save(tmp_path / "run")


def test_a_checkpoint_of_an_earlier_version_is_rejected_in_one_sentence(saved: Path) -> None:
    manifest = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**manifest, "version": manifest["version"] - 1}))
    with pytest.raises(StateError, match="was written by an earlier version of Descant, whose format this version"):
        make_federation("FedAvgPlus").load(saved)


def test_a_checkpoint_of_another_federation_is_rejected(saved: Path) -> None:
    with pytest.raises(StateError, match="another federation: seed 7, here 8"):
        make_federation("FedAvgPlus", seed=8).load(saved)
    with pytest.raises(StateError, match=r"algorithm.name 'FedAvgPlus', here 'FedAvg'"):
        make_federation("FedAvg").load(saved)
    with pytest.raises(StateError, match=r"algorithm.proximal_step.alpha 1.0, here 0.5"):
        Federation(
            network(), classification_parties(5), algorithms.FedAvgPlus(0.5, 2.0), lr=0.1, steps=3, batch=4, seed=7
        ).load(saved)
    with pytest.raises(StateError, match="parties"):
        Federation(
            network(), classification_parties(6), ALL_METHODS["FedAvgPlus"](), lr=0.1, steps=3, batch=4, seed=7
        ).load(saved)
    with pytest.raises(StateError, match="loss"):
        other = Federation(
            network(), classification_parties(5), ALL_METHODS["FedAvgPlus"](), lr=0.1, steps=3, batch=4, seed=7
        )
        other.loss = torch.nn.functional.multi_margin_loss
        other.load(saved)
    with pytest.raises(StateError, match="layout"):
        Federation(torch.nn.Linear(6, 3), classification_parties(5), algorithms.FedAvgPlus(), seed=7).load(saved)


@pytest.mark.parametrize(
    "damage", ["missing", "torn json", "torn tensors", "digest", "round", "execution_mode", "history", "deep"]
)
def test_loading_a_damaged_checkpoint_raises_and_changes_nothing(saved: Path, damage: str) -> None:
    if damage == "missing":
        saved = saved.parent / "nowhere"
    elif damage == "torn json":
        (saved / "state.json").write_text((saved / "state.json").read_text()[:-20])
    elif damage == "torn tensors":
        (file,) = saved.glob("personal-*.safetensors")
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "deep":
        (saved / "state.json").write_text("[" * 100_000)
    else:
        manifest = json.loads((saved / "state.json").read_text())
        edited = {"digest": "0" * 64, "round": 0, "execution_mode": "looped", "history": None}[damage]
        (saved / "state.json").write_text(json.dumps(manifest | {damage: edited}))
    fed = run(make_federation("FedAvgPlus"), 2)
    before = fed.hash()
    with pytest.raises(StateError):
        fed.load(saved)
    assert fed.hash() == before


class FailOnNthCall:
    """A wrapper that raises instead of the n-th call."""

    def __init__(self, function: Callable[..., Any], n: int, error: BaseException) -> None:
        self.function = function
        self.remaining = n
        self.error = error

    def __call__(self, *arguments: Any) -> Any:
        self.remaining -= 1
        if self.remaining == 0:
            raise self.error
        return self.function(*arguments)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["interrupt", "full"]
)
@pytest.mark.parametrize("n", range(1, 12))
def test_an_interrupted_commit_is_undone(n: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget of one byte every row goes to disk; a failure of any write leads to a clean repeat."""

    def spilled() -> Federation:
        fed = make_federation("FedAvgPlus", optimizer="Adam")
        fed.memory_budget = 1
        return run(fed, 1)

    fed = spilled()
    with monkeypatch.context() as patch:
        patch.setattr(party_store, "save_file", FailOnNthCall(party_store.save_file, n, error))
        with contextlib.suppress(KeyboardInterrupt, StateError):
            run(fed, 1)
    assert run(fed, ROUNDS - fed.state.round).hash() == run(spilled(), ROUNDS - 1).hash()


def test_a_save_after_an_interrupted_commit_holds_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If party states are committed and models are not, neither counts for `hash` and `save`."""
    fed = run(make_federation("Ditto", optimizer="Adam"), 2)
    before = fed.hash()
    with monkeypatch.context() as patch:
        patch.setattr(
            fed.state.personal_models, "commit", FailOnNthCall(fed.state.personal_models.commit, 1, KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            run(fed, 1)
    assert fed.hash() == before
    fed.save(tmp_path / "run")
    again = make_federation("Ditto", optimizer="Adam").load(tmp_path / "run")
    assert run(again, ROUNDS - 2).hash() == run(make_federation("Ditto", optimizer="Adam")).hash()


@pytest.mark.parametrize("n", range(1, 9))
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(
    n: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_federation("FedAvgPlus").load(saved).hash()
    fed = run(make_federation("FedAvgPlus"), 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", FailOnNthCall(checkpoint.save_file, n, KeyboardInterrupt()))
        patch.setattr(
            checkpoint, "_remove_unlisted", FailOnNthCall(checkpoint._remove_unlisted, n - 3, KeyboardInterrupt())
        )
        patch.setattr(atomic, "replace", FailOnNthCall(atomic.replace, n - 4, KeyboardInterrupt()))
        with contextlib.suppress(KeyboardInterrupt):
            fed.save(saved)
    assert make_federation("FedAvgPlus").load(saved).hash() in (old, fed.hash())
    fed.save(saved)
    assert make_federation("FedAvgPlus").load(saved).hash() == fed.hash()
    assert len(list(saved.iterdir())) == 4  # manifest, global model, server state, personal models


def test_a_killed_first_save_cannot_be_loaded_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = run(make_federation("FedAvgPlus"), 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove_unlisted", lambda place, named: None)
        patch.setattr(checkpoint, "save_file", FailOnNthCall(checkpoint.save_file, 2, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            fed.save(tmp_path / "run")
    with pytest.raises(StateError):
        make_federation("FedAvgPlus").load(tmp_path / "run")
    assert make_federation("FedAvgPlus").load(fed.save(tmp_path / "run")).hash() == fed.hash()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_changes_nothing(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    with mode():
        fed = run(make_federation("FedGeoMedPlus"))
        table = fed.scores()
    assert fed.hash() == run(make_federation("FedGeoMedPlus")).hash()
    assert table.names == fed.population.names


def test_federations_in_parallel_threads_match_serial_runs() -> None:
    """The module draws from torch's global generator, so federations must take turns."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    population = classification_parties(4)

    def run_hash(seed: int) -> str:
        return run(Federation(model, population, algorithms.FedAvg(), lr=0.1, steps=5, batch=4, seed=seed)).hash()

    alone = [run_hash(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run_hash, range(4))) == alone


def test_saving_twice_keeps_the_newest(saved: Path) -> None:
    fed = make_federation("FedAvgPlus").load(saved)
    run(fed, 2).save(saved)
    assert make_federation("FedAvgPlus").load(saved).hash() == fed.hash()
    assert [file.name for file in saved.parent.iterdir()] == ["run"]


def test_a_checkpoint_with_other_frozen_layers_is_rejected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = nn.Linear(6, 6).requires_grad_(False)
    head = nn.Linear(6, 3)

    def frozen(value: float) -> Federation:
        first.weight.fill_(value)
        return Federation(
            nn.Sequential(first, head), classification_parties(4), algorithms.FedAvg(), lr=0.1, steps=1, batch=4
        )

    run(frozen(0.1), 1).save(tmp_path / "run")
    frozen(0.1).load(tmp_path / "run")
    with pytest.raises(StateError, match="constants"):
        frozen(0.2).load(tmp_path / "run")
