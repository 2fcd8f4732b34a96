"""Coreset proxies equal their party if given all rows, change nothing without absence, and store no row in clear."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import Algorithm, Federation, PolicyGradient, Sgd, algorithms, compare, models, parties
from descant.algorithms import CoresetProxies, Dropouts, PeriodicParticipation, Timetable
from descant.cli import app, typer
from descant.config import read_recipe as read_recipe
from descant.core.messages import Reply
from descant.coresets.selection import SelectedCoreset
from descant.engines import Processes
from descant.errors import DescantError, DescantWarning, SettingError, StateError
from descant.parties import Selection
from descant.storage.lock import FolderLock
from descant.storage.vault.coreset_rows import CoresetLimit
from descant.storage.vault.private_keys import PrivateKey, key_fingerprint, read_key
from descant.storage.vault.vault_folder import Vault
from descant.storage.vault.vault_location import VaultLocation
from descant.studies.run_versus_local import evaluate_run, study_from_run
from descant.tracking import Run, read_run
from tiny_recipe import TINY_RECIPE
from toy_problems import METHODS, classification_parties, network

ROUNDS = 6
AWAY = Dropouts({"1": 2, "3": 3})
RETURNS = Timetable.from_records(
    [{"party": "1", "from": 1, "to": 2}, {"party": "1", "from": 5}, {"party": "2", "from": 4}]
)
STATELESS = ("FedAvg", "FedProx", "RFA", "CoordinateMedian", "FedAvg, changes")


def make_federation(algorithm: Algorithm, attend: Timetable | None = None, **settings: object) -> Federation:
    solver = settings.pop("solver", Sgd(lr=0.1, steps=3, batch=4))
    attending = algorithm if attend is None else replace(algorithm, participation=attend)
    return Federation(network(), classification_parties(5), attending, solver=solver, seed=7, **settings)  # type: ignore[arg-type]


def fit_rounds(fed: Federation, rounds: int = ROUNDS) -> Federation:
    return fed.fit(rounds, progress=False)


def presence_by_round(fed: Federation) -> list[str]:
    return [entry["presence"] for entry in fed.history_]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def vault(tmp_path: Path) -> VaultLocation:
    key = PrivateKey.new()
    key.write(tmp_path / "key")
    Vault.create(tmp_path / "vault", key, "run 7", "tester")
    return VaultLocation(str(tmp_path / "vault"), str(tmp_path / "key"))


@pytest.mark.parametrize("name", STATELESS)
def test_proxy_with_all_rows_equals_its_party(name: str) -> None:
    """Eq. (5), (6): with C_i = D_i, τ′ = τ, stateless parties and their own draws, the result is Ideal."""
    ideal = fit_rounds(make_federation(METHODS[name]()))
    there = fit_rounds(make_federation(CoresetProxies(METHODS[name](), share=1.0), AWAY))
    assert presence_by_round(there) == ["ppppp", "ppppp", "psppp", "pspsp", "pspsp", "pspsp"]
    assert torch.equal(there.state.global_model, ideal.state.global_model)
    gone = fit_rounds(make_federation(METHODS[name](), AWAY))
    assert presence_by_round(gone)[-1] == "papap"
    assert not torch.equal(gone.state.global_model, ideal.state.global_model)


UNSEEN = ("FedPer", "FedRep", "matching", "stragglers")  # only the party has its layers; an absent one draws no work


@pytest.mark.parametrize("name", [name for name in METHODS if name not in UNSEEN])
def test_proxy_with_all_rows_equals_its_party_in_the_first_absent_round(name: str) -> None:
    """A proxy starts where its party would: at the global model, or at w_k if parties continue from it (ERRATA 33)."""
    ideal = fit_rounds(make_federation(METHODS[name]()), 3)
    there = fit_rounds(make_federation(CoresetProxies(METHODS[name](), share=1.0), Dropouts({"1": 2})), 3)
    assert presence_by_round(there)[-1] == "psppp"
    assert torch.equal(there.state.global_model, ideal.state.global_model)


def test_only_present_parties_count_without_proxies() -> None:
    """Eq. (4): the last round is that of the remaining parties, from the same global model."""
    fed = fit_rounds(make_federation(algorithms.FedAvg(), AWAY), 5)
    left = make_federation(algorithms.FedAvg())
    left.population = fed.population.subset(["0", "2", "4"])
    left.state = replace(left.state, round=5, global_model=fed.state.global_model)
    left.state.personal_models.commit(5, ())
    left.engine_.party_states.commit(5, ())
    assert torch.equal(fit_rounds(left, 1).state.global_model, fit_rounds(fed, 1).state.global_model)


@pytest.mark.parametrize("name", METHODS)
def test_without_absence_proxies_change_nothing(name: str) -> None:
    base = METHODS[name]()
    alone = fit_rounds(make_federation(base), 3)
    wrapped = fit_rounds(make_federation(CoresetProxies(base)), 3)
    assert torch.equal(wrapped.state.global_model, alone.state.global_model)
    for party in alone.state.personal_models.names():
        assert torch.equal(
            wrapped.state.personal_models.get(party)["model"], alone.state.personal_models.get(party)["model"]
        )


def test_party_that_never_came_does_not_count() -> None:
    """ERRATA 34: sums run over the parties that were ever seen."""
    never = Timetable.from_records([{"party": "2", "from": 99}, {"party": "1", "from": 1, "to": 2}])
    fed = fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg()), never))
    without = make_federation(CoresetProxies(algorithms.FedAvg()), Dropouts({"1": 2}))
    without.population = fed.population.subset(["0", "1", "3", "4"])
    assert torch.equal(fit_rounds(without).state.global_model, fed.state.global_model)
    assert {expected_presence[2] for expected_presence in presence_by_round(fed)} == {"."}


@pytest.mark.parametrize("name", METHODS)
def test_batching_and_resuming_never_change_the_result(name: str, tmp_path: Path) -> None:
    algorithm = CoresetProxies(METHODS[name](), share=0.4)
    if name == "stragglers":
        algorithm = replace(algorithm, participation=algorithms.Stragglers(0.5, RETURNS))
    else:
        algorithm = replace(algorithm, participation=RETURNS)
    whole = fit_rounds(make_federation(algorithm))
    assert [expected_presence[1:3] for expected_presence in presence_by_round(whole)] == [
        "p.",
        "p.",
        "s.",
        "sp",
        "pp",
        "pp",
    ]
    cut = fit_rounds(make_federation(algorithm, engine=partial(BytesEngine, batch_count=3)))
    torch.testing.assert_close(cut.state.global_model, whole.state.global_model, rtol=0, atol=1e-6)
    assert not cut.rejections_
    for stop in (2, 3, 4):
        fit_rounds(make_federation(algorithm), stop).save(tmp_path / str(stop))
        assert fit_rounds(make_federation(algorithm).load(tmp_path / str(stop)), ROUNDS - stop).hash() == whole.hash()


def test_party_state_is_untouched_while_a_proxy_trains() -> None:
    """Its personal model, its moments and its round count do not change."""
    solver = Sgd(lr=0.05, steps=3, batch=4, optimizer="Adam")
    fed = make_federation(CoresetProxies(algorithms.FedAvgPlus(alpha=1.0)), AWAY, solver=solver)
    fit_rounds(fed, 2)
    model = fed.state.personal_models.get("1")["model"]
    memory = fed.engine_.party_states.get("1")
    fit_rounds(fed, 3)
    assert presence_by_round(fed)[-1][1] == "s"
    assert torch.equal(fed.state.personal_models.get("1")["model"], model)
    after = fed.engine_.party_states.get("1")
    assert memory.keys() == after.keys() and all(torch.equal(memory[name], after[name]) for name in memory)
    assert fed.state.rounds_trained(fed.plan_).tolist() == [5, 2, 5, 3, 5]


def test_proxy_starts_at_the_global_model_with_its_own_work_and_counts_all_samples() -> None:
    """ERRATA 33, 34: with τ′ = 0 it reports the global model itself, with the weight |D_i|."""
    fed = fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg(), share=0.3, work=0), Dropouts({"2": 1})), 1)
    before = fed.state.global_model
    rest = make_federation(algorithms.FedAvg(), Dropouts({"2": 1}))
    fit_rounds(rest, 1)
    rest.state = replace(rest.state, global_model=before)
    sizes = fed.population.samples
    others = sum(sizes.values()) - sizes["2"]
    expected = (others * fit_rounds(rest, 1).state.global_model.double() + sizes["2"] * before.double()) / sum(
        sizes.values()
    )
    torch.testing.assert_close(fit_rounds(fed, 1).state.global_model.double(), expected, rtol=0, atol=1e-6)


def test_return_refreshes_the_coreset_and_state_does_not_grow() -> None:
    fed = make_federation(CoresetProxies(algorithms.FedAvg(), share=0.3), RETURNS)
    sizes = []
    for done in fed.rounds(12):
        sizes.append(sum(t.nbytes for m in done.round.state.server_state.values() for t in m.values()))
    assert fed.state.server_state["proxy"]["generation"].tolist() == [1, 2, 1, 1, 1]
    assert len(set(sizes[4:])) == 1
    held = {party: fed.engine_.party_states.get(party) for party in fed.population}
    assert {party: len(memory["coreset.rows"]) for party, memory in held.items()} == {
        party: max(1, round(0.3 * samples)) for party, samples in fed.population.samples.items()
    }


@pytest.mark.parametrize("space", ["embedding", "gradient"])
def test_feature_spaces_use_the_received_model(space: str, tmp_path: Path) -> None:
    algorithm = CoresetProxies(algorithms.FedAvg(), selection=Selection(share=0.4, method="k-center", space=space))
    whole = fit_rounds(make_federation(algorithm, RETURNS))
    assert not whole.rejections_ and presence_by_round(whole)[2][1] == "s"
    fit_rounds(make_federation(algorithm, RETURNS), 4).save(tmp_path / "run")
    assert fit_rounds(make_federation(algorithm, RETURNS).load(tmp_path / "run"), 2).hash() == whole.hash()


def test_proxies_are_recorded_and_plotted(tmp_path: Path) -> None:
    people = parties.digits(count=3, seed=0)
    algorithm = replace(CoresetProxies(algorithms.FedAvg(), share=0.2), participation=Dropouts({"1": 2}))
    fed = Federation(partial(nn.Linear, 64, 10), people, algorithm, lr=0.1, steps=2, batch=10)
    with Run.start(tmp_path / "run", fed) as run:
        for _ in run.rounds(4, score_every=1):
            pass
        run.log("local", round=4, personal=dict.fromkeys(people.names, 0.5), series={})
    assert presence_by_round(fed) == ["ppp", "ppp", "psp", "psp"] and [e["proxied"] for e in fed.history_] == [
        0,
        0,
        1,
        1,
    ]
    held = read_run(tmp_path / "run").numbers
    assert held.proxied.tolist() == [
        [c == "s" for c in expected_presence] for expected_presence in presence_by_round(fed)
    ]
    assert held.accepted.sum(axis=0).tolist() == [4, 2, 4]
    study = study_from_run(tmp_path / "run")
    assert list(study.results[1].presence) == presence_by_round(fed)
    for file in (study.plot("presence", tmp_path / "a.png"), fed.plot("presence", tmp_path / "b.png")):
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("space", ["input", "embedding", "gradient"])
def test_kill_after_a_newer_coreset_was_stored_changes_nothing(
    space: str, vault: VaultLocation, tmp_path: Path
) -> None:
    """The resumed state names the coreset before it, and the proxy uses that one."""
    algorithm = CoresetProxies(algorithms.FedAvg(), selection=Selection(share=0.4, method="k-center", space=space))
    whole = fit_rounds(make_federation(algorithm, RETURNS))
    killed = fit_rounds(make_federation(algorithm, RETURNS, vault=vault), 3)
    killed.save(tmp_path / "run")
    fit_rounds(killed, 3)
    again = make_federation(algorithm, RETURNS, vault=vault).load(tmp_path / "run")
    assert torch.equal(fit_rounds(again, 3).state.global_model, whole.state.global_model) and not again.rejections_


def test_vault_does_not_change_the_global_model(vault: VaultLocation, tmp_path: Path) -> None:
    algorithm = CoresetProxies(algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1), share=0.4)
    plain = fit_rounds(make_federation(algorithm, RETURNS))
    sealed = make_federation(algorithm, RETURNS, vault=vault)
    fit_rounds(sealed, 4).save(tmp_path / "run")
    assert torch.equal(fit_rounds(sealed, 2).state.global_model, plain.state.global_model)
    again = fit_rounds(make_federation(algorithm, RETURNS, vault=vault).load(tmp_path / "run"), 2)
    assert again.state.global_model.equal(plain.state.global_model) and presence_by_round(again) == presence_by_round(
        plain
    )
    held = {one.party: one for one in Vault(vault.folder).parties()}
    assert held["1"].generation == 3 and held["1"].opened == 2 and held["0"].opened == 0  # 3: round 5 was done twice
    vault.with_key.verify()


CANARY = 7777.125  # exactly a float32, and nowhere else


def with_canaries() -> parties.Population:
    data = []
    for name in range(3):
        x = torch.full((20, 6), CANARY) + torch.arange(20).unsqueeze(1) / 8 + 100 * name
        data.append((x, torch.arange(20) % 3))
    return parties.from_arrays(data, test=0.2)


def canaries() -> Iterator[bytes]:
    """Eight bytes or more of each row, in each encoding: four would occur in a ciphertext by chance."""
    for party in with_canaries().values():
        for value in {float(v) for v in torch.cat([party.x, party.x_test]).flatten()}:
            yield torch.tensor([value, value]).numpy().tobytes()
            yield torch.tensor(value, dtype=torch.float64).numpy().tobytes()
            yield repr(value).encode()


@pytest.mark.parametrize("sealed", [True, False], ids=["with a vault", "without"])
def test_no_row_is_in_any_file_of_a_run(sealed: bool, vault: VaultLocation, tmp_path: Path) -> None:
    algorithm = replace(CoresetProxies(algorithms.FedAvg(), share=0.5), participation=Dropouts({"1": 1}))
    settings: dict[str, object] = {"lr": 1e-9, "steps": 2, "batch": 5, "vault": vault if sealed else None}
    fed = Federation(network(), with_canaries(), algorithm, **settings)  # type: ignore[arg-type]
    with Run.start(tmp_path / "run", fed, sync="always") as run:
        for _ in run.rounds(3, score_every=1):
            pass
    assert presence_by_round(fed) == ["ppp", "psp", "psp"]
    files = [file for place in ("run", "vault") for file in (tmp_path / place).rglob("*") if file.is_file()]
    text = b"\n".join(file.read_bytes() for file in files)
    assert len(files) > 8 and (b"descant sealed" if sealed else b"coreset.rows") in text
    assert not [canary for canary in canaries() if canary in text]


def test_parties_encrypt_only_for_the_pinned_vault(vault: VaultLocation) -> None:
    message = key_fingerprint(Vault(vault.folder).public)
    fed = fit_rounds(
        make_federation(CoresetProxies(algorithms.FedAvg()), AWAY, vault=replace(vault, fingerprint=message)), 3
    )
    assert presence_by_round(fed)[-1] == "psppp" and not fed.rejections_
    fed = make_federation(CoresetProxies(algorithms.FedAvg()), AWAY, vault=replace(vault, fingerprint=message[::-1]))
    with pytest.warns(DescantWarning, match=f"asked to encrypt for vault {message}, and expects .* Nothing has left"):
        fit_rounds(fed, 3)
    assert presence_by_round(fed)[-1] == "pappp"


def damage_coreset(folder: Path, party: str) -> None:
    """Change a byte of one party's encrypted coreset."""
    (file,) = [f for f in (folder / "parties").rglob("coreset") if f'"party":"{party}"'.encode() in f.read_bytes()]
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("fault", ["damaged", "forgotten", "no key"])
def test_party_whose_proxy_fails_is_rejected_and_others_continue(
    fault: str, vault: VaultLocation, tmp_path: Path
) -> None:
    fed = fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg(), share=0.4), AWAY, vault=vault), 3)
    if fault == "damaged":
        damage_coreset(tmp_path / "vault", "1")
    elif fault == "forgotten":
        Vault(vault.folder).forget("1")
    else:
        (tmp_path / "key").unlink()
        vault.__dict__.pop("with_key")
    with pytest.warns(DescantWarning, match="[12] of 5 replies were rejected, the first: round 4, party '1'"):
        fit_rounds(fed, 1)
    assert presence_by_round(fed)[-1] == ("papap" if fault == "no key" else "papsp")
    assert fed.history_[-1]["change"] > 0


def test_vault_restored_from_an_older_copy_is_rejected(vault: VaultLocation, tmp_path: Path) -> None:
    here = Timetable.from_records([{"party": "1", "from": 1, "to": 2}, {"party": "1", "from": 4, "to": 4}])
    fed = fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg(), share=0.4), here, vault=vault), 3)
    shutil.copytree(vault.folder, tmp_path / "older")
    fit_rounds(fed, 1).save(tmp_path / "run")
    older = make_federation(
        CoresetProxies(algorithms.FedAvg(), share=0.4), here, vault=replace(vault, folder=str(tmp_path / "older"))
    )
    with pytest.warns(DescantWarning, match="is number 1, and not number 2 of this run: the vault was restored from"):
        fit_rounds(older.load(tmp_path / "run"), 1)
    assert presence_by_round(older)[-1] == "pappp"


def test_run_resumes_only_with_its_own_vault(vault: VaultLocation, tmp_path: Path) -> None:
    algorithm = CoresetProxies(algorithms.FedAvg(), share=0.4)
    fit_rounds(make_federation(algorithm, AWAY, vault=vault), 3).save(tmp_path / "run")
    for run, key, message in (
        ("run 8", vault.key, "run 'run 7', here 'run 8'"),
        ("run 7", None, "fingerprint '.*', here"),
    ):
        Vault.create(tmp_path / f"{run}{key}", PrivateKey.new() if key is None else read_key(key), run)
        other = make_federation(algorithm, AWAY, vault=VaultLocation(str(tmp_path / f"{run}{key}"), key))
        with pytest.raises(StateError, match=f"saved by another federation: vault.{message}"):
            other.load(tmp_path / "run")
    with pytest.raises(StateError, match=r"saved by another federation: vault .*'run 7'.*, here None"):
        make_federation(algorithm, AWAY).load(tmp_path / "run")
    with pytest.raises(SettingError, match="a vault is for one run: leave 'vault' out"):
        compare([algorithm], network(), classification_parties(5), rounds=1, vault=vault)


def test_coresets_of_another_run_in_the_same_vault_are_rejected(vault: VaultLocation) -> None:
    algorithm = CoresetProxies(algorithms.FedAvg(), share=0.4)
    fed, undisturbed = (fit_rounds(make_federation(algorithm, AWAY, vault=keep), 3) for keep in (vault, None))
    fit_rounds(make_federation(algorithm, AWAY, vault=replace(vault)), 1)
    assert torch.equal(
        fit_rounds(fed, 1).state.global_model, fit_rounds(undisturbed, 1).state.global_model
    )  # the one before is still held
    fit_rounds(make_federation(algorithm, AWAY, vault=replace(vault)), 1)
    with pytest.warns(DescantWarning, match="has stored others since, in rounds that .* or for another run"):
        fit_rounds(fed, 1)
    assert presence_by_round(fed)[-2:] == ["pspsp", "papap"]


def break_vault(fault: str, folder: Path, party: str) -> Callable[[], None]:
    """Break a vault so that a party cannot be invited; the returned function repairs it."""
    key = folder / "parties" / hashlib.sha256(party.encode()).hexdigest()[:32] / "key"
    log = folder / "audit.jsonl"
    kept = {file: file.read_bytes() for file in (key, log)}
    if fault == "no key":
        key.unlink()
    elif fault == "open key":
        key.chmod(0o644)
    elif fault == "a line less":
        log.write_bytes(b"".join(kept[log].splitlines(keepends=True)[:-1]))
    lock = FolderLock(folder / ".lock") if fault == "busy" else None

    def repair() -> None:
        for file, data in kept.items():
            file.write_bytes(data)
        key.chmod(0o600)
        if lock is not None:
            lock.release()

    return repair


@pytest.mark.parametrize("fault", ["no key", "open key", "a line less", "busy"])
def test_vault_fault_costs_a_returning_party_its_coreset_but_not_the_run(
    fault: str, vault: VaultLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("descant.storage.vault.party_entries.LOCK_TIMEOUT", 0.0)
    here = Timetable.from_records([{"party": "1", "from": 1, "to": 1}, {"party": "1", "from": 3}])
    fed = fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg(), share=0.4), here, vault=vault), 2)
    undo = break_vault(fault, tmp_path / "vault", "1")
    with pytest.warns(DescantWarning, match=r"party '1', .*: it was not asked for a coreset: "):
        fit_rounds(fed, 1)
    assert presence_by_round(fed) == ["ppppp", "psppp", "ppppp"] and len(fed.rejections_) == 1
    undo()
    fit_rounds(fed, 1)  # it is asked once more
    assert fed.state.server_state["proxy"]["generation"].tolist() == [1, 2, 1, 1, 1] and len(fed.rejections_) == 1


def test_coreset_that_the_vault_cannot_write_is_a_rejection(
    vault: VaultLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Vault, *arguments: object) -> None:
        raise StateError("it is full")

    monkeypatch.setattr(Vault, "store", full)
    with pytest.warns(DescantWarning, match="its coreset was not accepted: it is full"):
        fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg()), AWAY, vault=vault), 1)


def test_folder_without_a_vault_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds no vault"):
        fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg()), vault=VaultLocation(str(tmp_path))), 1)


def test_rows_beyond_the_coreset_limit_never_leave_a_party(vault: VaultLocation) -> None:
    for keep in (vault, None):
        fed = make_federation(
            CoresetProxies(algorithms.FedAvg(), share=0.4), AWAY, vault=keep, coreset_limit=CoresetLimit(share=0.1)
        )
        with pytest.warns(
            DescantWarning, match="it deposited no coreset: The coreset of party '0' has 4 of its 9 rows"
        ):
            fit_rounds(fed, 4)
        assert presence_by_round(fed) == ["ppppp", "ppppp", "pappp", "papsp"]  # its training counts all the same
        assert [(one.party, one.round) for one in fed.rejections_] == [("0", 1), ("1", 1), ("2", 1)]  # asked only once
    left = [one.party for one in Vault(vault.folder).parties() if one.generation is not None]
    assert left == ["3", "4"]  # one row may leave in any case


def test_coreset_limit_zero_deposits_nothing(vault: VaultLocation) -> None:
    fed = make_federation(
        CoresetProxies(algorithms.FedAvg(), share=0.4), AWAY, vault=vault, coreset_limit=CoresetLimit(share=0)
    )
    with pytest.warns(DescantWarning, match="Its limit is 0"):
        fit_rounds(fed, 4)
    assert presence_by_round(fed)[-1] == "papap" and all(
        one.generation is None for one in Vault(vault.folder).parties()
    )


def test_limit_is_checked_before_rows_are_chosen_and_again_on_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed = make_federation(CoresetProxies(algorithms.FedAvg(), share=0.4), RETURNS, coreset_limit=CoresetLimit(share=0))
    fed.state  # noqa: B018  the rehearsal chooses, too
    monkeypatch.setattr(Selection, "choose", lambda *arguments: pytest.fail("it was chosen"))
    with pytest.warns(DescantWarning, match="Its limit is 0"):
        fit_rounds(fed)
    rounds = [(one.party, one.round) for one in fed.rejections_]
    assert rounds == [("0", 1), ("1", 1), ("3", 1), ("4", 1), ("2", 4), ("1", 5)]
    assert not any("chosen" in one.reason for one in fed.rejections_)


@pytest.mark.parametrize("sealed", [True, False], ids=["with a vault", "without"])
def test_all_rows_that_ever_leave_are_within_the_coreset_limit(
    sealed: bool, vault: VaultLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the space of a changing model every return chooses other rows; the earlier ones stay known."""
    left: dict[str, set[int]] = {}
    choose = Selection.choose

    def seen(self: Selection, party: parties.Party, *more: object) -> SelectedCoreset:
        chosen = choose(self, party, *more)  # type: ignore[arg-type]
        left.setdefault(party.name, set()).update(chosen.rows.tolist())
        return chosen

    monkeypatch.setattr(Selection, "choose", seen)
    people = parties.digits(count=3, seed=0)
    selection = Selection(share=0.05, method="sensitivity", space="gradient")
    algorithm = replace(
        CoresetProxies(algorithms.FedAvg(), selection=selection), participation=PeriodicParticipation(2, {"1": 1})
    )
    for most in (1.0, 0.1):
        left.clear()
        settings: dict[str, object] = {"vault": vault if sealed else None, "coreset_limit": CoresetLimit(share=most)}
        fed = Federation(partial(nn.Linear, 64, 10), people, algorithm, lr=0.1, steps=3, batch=10, **settings)  # type: ignore[arg-type]
        if most == 1:
            fit_rounds(fed, 12)
            assert not fed.rejections_ and len(left["1"]) > 0.1 * people["1"].samples + 1
            assert fed.engine_.party_states.get("1")["coreset.ever"].tolist() == sorted(left["1"])
            continue
        with pytest.warns(DescantWarning, match=r"rows that have not left before, besides \d+ that have. Its limit is"):
            fit_rounds(fed, 12)
        assert len(fed.engine_.party_states.get("1")["coreset.ever"]) <= CoresetLimit(share=most).max_rows(
            people["1"].samples
        )
        assert {"s", "p"} == {
            expected_presence[1] for expected_presence in presence_by_round(fed)
        }  # the older one stands in still


@pytest.mark.filterwarnings("ignore::descant.errors.DescantWarning")
def test_missing_coresets_are_not_reported_as_rejected_updates(tmp_path: Path) -> None:
    algorithm = replace(CoresetProxies(algorithms.FedAvg(), share=0.4), participation=AWAY)
    people = parties.digits(count=4, seed=0)
    settings: dict[str, Any] = {"lr": 0.1, "steps": 2, "batch": 4, "coreset_limit": CoresetLimit(share=0.1)}
    fed = Federation(nn.Linear(64, 10), people, algorithm, **settings)
    with Run.start(tmp_path / "run", fed) as run:
        for _ in run.rounds(1, score_every=1):
            pass
        evaluate_run(run)
    compared = compare([algorithm], nn.Linear(64, 10), people, rounds=1, progress=False, **settings)
    for study in (compared, study_from_run(tmp_path / "run")):
        assert [result.rejected for result in study.results] == [0, 0] and "rejected" not in study.verdict()
        (message,) = (text for text in study.findings() if "coresets" in text)
        assert message.startswith(
            "4 coresets of FedAvg+proxies were missing, or rejected by the vault. The first: round 1"
        )
        assert "updates" not in "".join(study.findings())


def tamper_coresets(change: Callable[[bytes], bytes], party: str) -> partial[BytesEngine]:
    def fault(report: object) -> list[object]:
        if isinstance(report, Reply) and report.party == party and report.encrypted_coreset:
            return [replace(report, encrypted_coreset=change(report.encrypted_coreset))]
        return [report]

    return partial(BytesEngine, tamper=fault)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message", "expected_presence"),
    [
        (lambda sealed: sealed + bytes(10**6), "its encrypted coreset is too large", "p.ppp"),
        (lambda sealed: sealed[:-3], "its coreset was not accepted", "ppppp"),
        (lambda sealed: b"", "its coreset was not accepted: These bytes are no encrypted coreset", "ppppp"),
    ],
    ids=["too large", "cut", "none"],
)
def test_bad_coreset_is_rejected(
    change: Callable[[bytes], bytes], message: str, expected_presence: str, vault: VaultLocation
) -> None:
    fed = make_federation(
        CoresetProxies(algorithms.FedAvg(), share=0.4), vault=vault, engine=tamper_coresets(change, "1")
    )
    with pytest.warns(DescantWarning, match=message):
        fit_rounds(fed, 1)
    assert presence_by_round(fed) == [expected_presence]
    assert fed.state.server_state["proxy"]["generation"].tolist() == [1, 0, 1, 1, 1]


def test_unknown_labels_in_a_coreset_are_rejected(vault: VaultLocation) -> None:
    fed = make_federation(CoresetProxies(algorithms.FedAvg(), share=0.4), vault=vault)
    assert fed.plan_.classes == 3
    people = parties.from_arrays([(p.x, p.y) for p in classification_parties(5).values()], test=0)
    fed = Federation(network(), people, CoresetProxies(algorithms.FedAvg()), vault=vault, steps=0)
    fed.algorithm = replace(fed.algorithm, participation=Dropouts({"1": 1}))
    assert fed.state.round == 0  # labels are looked at before the work; these go wrong after it has begun
    people["1"].y.add_(5)
    with pytest.warns(DescantWarning, match="labels that the model does not know: they must be 0 to 2"):
        fit_rounds(fed, 2)


def test_recipe_wraps_a_method_with_coreset_proxies() -> None:
    chosen = '{is = "Selection", share = 0.1, method = "k-center", drop_columns = [3]}'
    wrap = f'wrap = [{{wrapper = "coreset_proxies", selection = {chosen}, work = 5}}]'
    found = read_recipe(TINY_RECIPE.replace('algorithm = "fedavg"', f'algorithm = "fedavg"\n{wrap}')).algorithms()[0]
    selection = Selection(share=0.1, method="k-center", drop_columns=(3,))
    assert found.coreset_proxy == CoresetProxies(algorithms.FedAvg(), selection=selection, work=5).coreset_proxy


def test_invalid_proxy_settings_are_rejected() -> None:
    with pytest.raises(SettingError, match="a share, or a selection"):
        CoresetProxies(algorithms.FedAvg(), share=0.1, selection=Selection())
    with pytest.raises(SettingError, match=r"FedAvg\+proxies already has coreset proxies"):
        CoresetProxies(CoresetProxies(algorithms.FedAvg(), share=0.1))
    for share in (0, 1.5):
        with pytest.raises(SettingError, match="The 'share' of Selection must be > 0 and <= 1"):
            fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg(), share=share)), 1)
    with pytest.raises(SettingError, match="The 'work' of ProxySettings must be a whole number >= 0"):
        fit_rounds(make_federation(CoresetProxies(algorithms.FedAvg(), work=-1)), 1)


WRONG: dict[str, tuple[Algorithm, dict[str, object], str]] = {
    "a word for a selection": (
        CoresetProxies(algorithms.FedAvg(), selection="herding"),  # type: ignore[arg-type]
        {},
        r"must be such as parties.Selection\(share=0.05\). Got 'herding'",
    ),
    "a column that is not there": (
        CoresetProxies(algorithms.FedAvg(), selection=Selection(drop_columns=(6,))),
        {},
        "'drop_columns' of Selection must name columns from 0 to 5.* Got 6",
    ),
    "a share and a count": (
        CoresetProxies(algorithms.FedAvg(), selection=Selection(share=0.3, count=2)),
        {},
        "Give Selection a share or a count, not both. Its share is 0.3",
    ),
    "too much agreed": (
        CoresetProxies(algorithms.FedAvg()),
        {"coreset_limit": CoresetLimit(share=2)},
        "The 'share' of CoresetLimit must be",
    ),
    "a number agreed": (
        CoresetProxies(algorithms.FedAvg()),
        {"coreset_limit": 0.05},
        r"'coreset_limit' .* descant.CoresetLimit\(share=0.05\)",
    ),
    "a path for a vault": (
        CoresetProxies(algorithms.FedAvg()),
        {"vault": "v"},
        "'vault' of Federation must be .*VaultLocation",
    ),
    "no vault there": (CoresetProxies(algorithms.FedAvg()), {"vault": VaultLocation("nowhere")}, "nowhere"),
    "no proxies": (algorithms.FedAvg(), {"vault": VaultLocation("nowhere")}, "FedAvg has no coreset proxies"),
}


@pytest.mark.parametrize("name", WRONG)
def test_setting_errors_are_found_before_training(name: str) -> None:
    algorithm, settings, message = WRONG[name]
    with pytest.raises(DescantError, match=message):
        make_federation(algorithm, **settings).state  # noqa: B018


def test_agents_have_no_rows_to_deposit() -> None:
    net = partial(models.mlp, 4, 2, (8,))
    algorithm = CoresetProxies(algorithms.FedAvg())
    agents = Federation(net, parties.agents(count=2), algorithm, solver=PolicyGradient())
    with pytest.raises(SettingError, match="deposits rows of the parties' data, and agents and desks have none"):
        agents.state  # noqa: B018


def preview(recipe: Path, *arguments: str) -> Result:
    return CliRunner().invoke(typer.main.get_command(app), ["vault", "preview", str(recipe), *arguments])


def test_preview_command_shows_the_rows_that_would_leave(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    shown = preview(tmp_path / "tiny.toml", "2", "--share", "0.1", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    party = parties.digits(count=4)["2"]
    chosen = Selection(share=0.1).choose(party, seed=0)
    assert [row["row"] for row in found["rows"]] == chosen.rows.tolist()
    assert found["verdict"].startswith(f"{len(chosen.rows)} of the {party.samples} rows of party '2' would leave")
    values = [[row[str(column)] for column in range(64)] for row in found["rows"]]
    torch.testing.assert_close(torch.tensor(values), chosen.coreset.x)
    shown = preview(tmp_path / "tiny.toml", "2")
    assert shown.exit_code == 1 and "tiny has no coreset proxies: nothing would leave" in shown.stderr


def test_preview_uses_the_method_with_coreset_proxies(tmp_path: Path) -> None:
    head, _, rest = TINY_RECIPE.partition("[method]")
    methods = "[[methods]]" + rest.partition("[[methods]]")[2]
    half, other = (
        f'\n[[methods]]\nalgorithm = "fedavg"\nname = "{name}"\n'
        f'wrap = [{{wrapper = "coreset_proxies", share = {share}}}]\n'
        for name, share in (("half", 0.5), ("all", 1.0))
    )
    (tmp_path / "one.toml").write_text(head + methods + half)
    (tmp_path / "two.toml").write_text(head + methods + half + other)
    party = parties.digits(count=4)["2"]
    for arguments, share in (
        (["one.toml", "2"], 0.5),
        (["two.toml", "2", "--method", "all"], 1.0),
        (["two.toml", "2", "--method", "half", "--share", "0.1"], 0.1),
    ):
        shown = preview(tmp_path / arguments[0], *arguments[1:], "--json")
        assert shown.exit_code == 0, shown.output
        assert len(json.loads(shown.stdout)["rows"]) == round(share * party.samples)
    for arguments, message in (
        (["2"], "select different coresets. Choose one: --method 'half', 'all'"),
        (["2", "--method", "fedavg"], "fedavg has no coreset proxies"),
        (["2", "--method", "hlaf"], "There is no algorithm 'hlaf'"),
    ):
        shown = preview(tmp_path / "two.toml", *arguments)
        assert shown.exit_code == 1 and message in shown.stderr, shown.output


def module() -> nn.Module:
    return network()


def test_proxies_train_in_worker_processes(vault: VaultLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("descant.engines.processes.worker_pool._START_AFTER", 0.0)
    algorithm = replace(CoresetProxies(algorithms.FedAvg(), share=0.4), participation=AWAY)
    settings: dict[str, object] = {"lr": 0.1, "steps": 3, "batch": 4, "seed": 7}
    processes = Processes(workers=1)
    try:
        centers: list[Tensor] = []
        for engine, keep in ((None, None), (processes, None), (processes, vault)):
            more = {} if engine is None else {"engine": engine}
            fed = Federation(module, classification_parties, algorithm, vault=keep, **settings, **more)  # type: ignore[arg-type]
            if engine is not None:
                fed.engine_.wait()  # type: ignore[attr-defined]
            centers.append(fit_rounds(fed, 4).state.global_model)
            assert presence_by_round(fed)[-1] == "pspsp" and not fed.rejections_
        assert torch.equal(centers[0], centers[1]) and torch.equal(centers[0], centers[2])
    finally:
        processes.close()
