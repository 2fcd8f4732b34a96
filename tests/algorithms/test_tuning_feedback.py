"""The feedback of tuners and its effects: validation sets, clients' losses, sample shares, replays, records."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bytes_engine import BytesEngine
from descant import DescantWarning, Federation, algorithms, compare, parties
from descant.algorithms.components import ReplayHyper
from descant.core.algorithm import NamedTensors, TuneContext, TuneResult
from descant.errors import PartyError, SettingError, StateError
from descant.parties import Population
from descant.studies.run_versus_local import evaluate_run, study_from_run
from descant.studies.study import Study
from descant.tracking import Run, read_run
from test_adaptive_hyper import adaptive_federation, inflate_updates, population_with_validation
from toy_problems import classification_parties, network


def validation_loss(fed: Federation, population: Population) -> float:
    assert population.validation is not None
    x, y = population.validation
    with torch.no_grad():
        return float(functional.cross_entropy(fed.global_model_(x), y))


def test_every_round_records_the_validation_loss_of_its_global_model() -> None:
    population = population_with_validation()
    fed = Federation(network(), population, algorithms.FedAvg(), lr=0.1, steps=3, batch=4)
    assert fed.state.feedback == {"validation": pytest.approx(validation_loss(fed, population))}
    for round in fed.rounds(3):
        assert round.round.state.feedback["validation"] == pytest.approx(validation_loss(fed, population))
        assert round.round.to_record()["validation"] == fed.history_[-1]["validation"]
    plain = Federation(network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=3, batch=4).fit(
        3, progress=False
    )
    assert "validation" not in plain.history_[-1] and "lr" not in plain.history_[-1]
    assert torch.equal(fed.state.global_model, plain.state.global_model)  # evaluation changes nothing


def test_validation_loss_uses_evaluation_mode_for_any_set_size() -> None:
    """No dropout, running statistics, and more samples than fit into one forward pass."""
    population = classification_parties(7).subset(["0", "1", "2", "3", "4"])
    generator = torch.Generator().manual_seed(0)
    population = population.with_validation(
        torch.randn(5000, 6, generator=generator), torch.zeros(5000, dtype=torch.int64)
    )
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    fed = Federation(model, population, algorithms.FedAvg(), lr=0.1, steps=3, batch=4).fit(2, progress=False)
    assert fed.history_[-1]["validation"] == pytest.approx(validation_loss(fed, population), rel=1e-5)


def test_unchanged_global_model_keeps_its_validation_loss() -> None:
    fed = Federation(network(), population_with_validation(), algorithms.Local(), lr=0.1, steps=3, batch=4).fit(
        2, progress=False
    )
    assert (
        fed.history_[0]["validation"]
        == fed.history_[1]["validation"]
        == pytest.approx(validation_loss(fed, population_with_validation()))
    )


X = [[0.0] * 6] * 4


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (([], []), "The validation set is empty"),
        ((X, [0, 1, 2, 7]), "The validation set has labels that no party has: 7"),
        ((X, [0, 1]), "The validation set has 4 samples but 2 targets"),
        (([[0.0] * 5], [0]), "The validation set has features"),
        (([[math.nan] * 6], [0]), "Row 0 of the features of the validation set holds nan"),
        ((X, [0.5] * 4), "The validation set has features"),
        (X, "The validation set must be a pair"),
        ("xy", "The validation set must be a pair"),
    ],
)
def test_invalid_validation_sets_are_rejected(validation: object, message: str) -> None:
    data = [(party.x, party.y) for party in classification_parties(5).values()]
    with pytest.raises(PartyError, match=message):
        parties.from_arrays(data, validation=validation)  # type: ignore[arg-type]


def test_validation_set_is_described_and_part_of_the_run_identity(tmp_path: Path) -> None:
    population = population_with_validation()
    assert population.subset(["1", "0"]).validation is population.validation
    assert population.validation is not None
    assert f"the server validates on {len(population.validation[0])} samples of its own" in population.describe()

    def make_federation(population: Population) -> Federation:
        return Federation(network(), population, algorithms.FedAvg(), lr=0.1, steps=3, batch=4)

    make_federation(population).fit(2, progress=False).save(tmp_path / "run")
    make_federation(population).load(tmp_path / "run")
    x, y = population.validation
    for other in (classification_parties(5), population.with_validation(x + 1, y)):
        with pytest.raises(StateError, match="saved by another federation: validation"):
            make_federation(other).load(tmp_path / "run")


def test_parties_measure_the_loss_of_the_received_model() -> None:
    algorithm = replace(algorithms.FedAvg(), loss_samples=4)
    fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=3, batch=4)
    for _ in range(2):
        global_model = fed.global_model_
        losses = []
        for party in fed.population.values():
            some = torch.arange(0, party.samples, math.ceil(party.samples / 4))
            assert len(some) <= 4
            losses.append(functional.cross_entropy(global_model(party.x[some]), party.y[some]).item())
        fed.fit(1, progress=False)
        assert fed.history_[-1]["received_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    plain = Federation(network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=3, batch=4).fit(
        2, progress=False
    )
    assert torch.equal(plain.state.global_model, fed.state.global_model)
    assert "received_loss" not in plain.state.feedback
    with pytest.raises(SettingError, match="The 'loss_samples' of FedAvg must be a whole number >= 0"):
        Federation(network(), classification_parties(5), replace(algorithm, loss_samples=-1), lr=0.1, steps=1).state  # noqa: B018


@pytest.mark.parametrize("participant_count", [2, 5])
def test_total_shares_are_line_14_of_algorithm_1(participant_count: int) -> None:
    """Compare w + Σ n_k/N (w_k - w) over the participants (ERRATA 6) with the mean over the participants."""

    def after(normalize: str) -> tuple[Tensor, Tensor, float]:
        algorithm = algorithms.FedAvg(normalize=normalize)  # type: ignore[arg-type]
        fed = Federation(
            network(torch.float64),
            classification_parties(5, torch.float64),
            algorithm,
            lr=0.1,
            steps=3,
            participation=participant_count,
        )
        (round,) = fed.rounds(1)
        replied = sum(fed.population.samples[name] for name in round.round.accepted)
        return fed.state.initial_model, fed.state.global_model, replied / sum(fed.population.samples.values())

    before, mean, share = after("selected")
    _, total, _ = after("total")
    torch.testing.assert_close(total, before + share * (mean - before), rtol=1e-12, atol=1e-12)
    assert torch.equal(total, mean) == (participant_count == 5)  # all parties took part: bit for bit the same
    with pytest.raises(SettingError, match="The 'normalize' of FedAvg must be one of 'selected', 'total'"):
        after("all")


def test_rollback_resets_the_server_state() -> None:
    def momentum(
        global_model: Tensor, aggregate: Tensor, server_state: NamedTensors, share: float
    ) -> tuple[Tensor, NamedTensors]:
        had_state.append("move" in server_state)
        return aggregate, {"move": aggregate - global_model}

    def tune(context: TuneContext) -> TuneResult:
        return TuneResult(context.hyper, {}, global_model=context.global_model + 1 if context.round == 3 else None)

    had_state: list[bool] = []
    algorithm = replace(algorithms.FedAvg(), server_update=momentum, tune=tune)
    fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=1)
    fed.state  # noqa: B018  the rehearsal has its own server state
    had_state.clear()
    fed.fit(4, progress=False)
    assert had_state == [False, True, False, True]


def tuned_work(fed: Federation) -> list[tuple[float, int]]:
    return [(entry["lr"], entry["work"]) for entry in fed.history_]


def test_local_baseline_takes_the_same_steps_as_the_federation() -> None:
    fed = adaptive_federation().fit(4, progress=False)
    assert len(set(tuned_work(fed))) > 1
    for more in (0, 3):  # continues with the run
        fed.fit(more, progress=False).table()
        assert tuned_work(fed._twin) == tuned_work(fed)
    local = replace(algorithms.Local(), tune=ReplayHyper.from_history(fed.history_))
    baseline = Federation(network(), population_with_validation(), local, lr=0.1, steps=3, batch=4, seed=2).fit(
        7, progress=False
    )
    assert baseline.hash() == fed._twin.hash()
    assert adaptive_federation().table().rows  # before the first round there is nothing to replay


def test_every_tuned_method_has_a_local_baseline_with_its_work() -> None:
    data = [(party.x, party.y, party.x, party.y) for party in classification_parties(4).values()]
    population = parties.from_arrays(data, validation=data[0][:2])
    grids = {"lr": (0.05, 0.1, 0.2), "work": (2, 4, 8)}
    methods = [
        algorithms.FedAvg(),
        algorithms.AdaptiveHyper(**grids),  # type: ignore[arg-type]
        algorithms.AdaptiveHyper(algorithms.FedProx(1.0), **grids),  # type: ignore[arg-type]
        replace(algorithms.DecaySchedule(lr_factor=0.5), name="decaying"),
        replace(algorithms.DecaySchedule(algorithms.FedProx(1.0), lr_factor=0.5), name="decaying FedProx"),
    ]
    study = compare(methods, network, population, rounds=4, seeds=2, progress=False, lr=0.1, steps=3, batch=4)
    baselines = {name: study.of(name)[0].baseline for name in study.methods}
    assert baselines["FedAvg"] == "Local" and baselines["FedAvg+AH"] == "Local, as FedAvg+AH"
    assert baselines["decaying FedProx"] == baselines["decaying"] == "Local, as decaying"  # the same work
    for method in ("FedAvg+AH", "FedProx+AH", "decaying"):
        for result, baseline in zip(study.of(method), study.local_results(method), strict=True):
            for name in ("lr", "work"):
                np.testing.assert_array_equal(result.series[name], baseline.series[name])
    assert study.methods[: len(set(baselines.values()))] == tuple(dict.fromkeys(r.baseline for r in study.results))


def test_given_local_method_is_the_baseline_of_methods_with_its_work() -> None:
    data = [(party.x, party.y, party.x, party.y) for party in classification_parties(3).values()]
    decay = algorithms.DecaySchedule(lr_factor=0.5)
    methods = [replace(decay, name="decaying"), replace(algorithms.Local(), tune=decay.tune), algorithms.FedAvg()]
    study = compare(methods, network, parties.from_arrays(data), rounds=2, progress=False, lr=0.1, steps=2)
    assert study.methods == ("Local", "Local, as FedAvg", "decaying", "FedAvg")
    assert study.of("decaying")[0].baseline == "Local"


def test_tuned_values_are_in_records_tables_and_reports(tmp_path: Path) -> None:
    data = [(party.x, party.y, party.x, party.y) for party in classification_parties(5).values()]
    validation = population_with_validation().validation
    population = parties.from_arrays(data, validation=validation)
    algorithm = algorithms.AdaptiveHyper(lr=(0.05, 0.1, 0.2), work=(2, 4, 8))
    fed = Federation(
        network(), population, algorithm, lr=0.1, steps=3, seed=2, engine=partial(BytesEngine, tamper=inflate_updates)
    )
    with pytest.warns(DescantWarning, match="collapsed"), Run.start(tmp_path / "run", fed) as run:
        for _ in run.rounds(9, score_every=3):
            pass
        table = evaluate_run(run)
    assert any(note.startswith("FedAvg+AH: it collapsed at round 6") for note in table.notes)
    found = read_run(tmp_path / "run")
    metrics = found.numbers.metrics
    for name in ("lr", "work", "lr_mean", "work_mean", "validation"):
        np.testing.assert_array_equal(metrics[name], [entry[name] for entry in fed.history_])
    assert np.isfinite(metrics["rolled_back"]).tolist() == [round == 7 for round in range(1, 10)]
    assert any("Round 7: it collapsed at round 6" in text for text in found.warnings)
    study = study_from_run(tmp_path / "run")
    assert [text for text in study.findings() if "rolled back" in text] == [
        n for n in table.notes if "rolled back" in n
    ]
    page = study.save(tmp_path / "study") / "report.html"
    assert (tmp_path / "study" / "hyperparameters.png").exists() and "Tuned hyperparameters" in page.read_text(
        encoding="utf-8"
    )
    again = Study.load(tmp_path / "study")
    assert (
        again.plot("hyperparameters", tmp_path / "again.png").read_bytes()
        == (tmp_path / "study" / "hyperparameters.png").read_bytes()
    )
    assert "hyperparameters" not in [file.stem for file in (plain_study(population).save(tmp_path / "plain")).iterdir()]


def plain_study(population: Population) -> Study:
    return compare([algorithms.FedAvg()], network, population, rounds=1, progress=False, lr=0.1, steps=1)
