"""The Python interface: results, and messages on bad input."""

from __future__ import annotations

import io
import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from descant import DescantError, Federation, Metric, Sgd, algorithms, compare, parties
from descant.aggregation.aggregators import TrimmedMean
from descant.aggregation.penalties import DiagonalQ
from descant.core import progress
from descant.core.settings import PerParty
from descant.engines import InProcess
from descant.errors import DescantWarning, ModelError, PartyError, SettingError
from descant.parties import Population
from descant.rounds.loop import initial_state, run
from toy_problems import classification_parties, half_squared_error, network

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def population() -> Population:
    return parties.digits(count=5, split="dirichlet", alpha=0.5, seed=1)


def net() -> nn.Module:
    return nn.Linear(64, 10)


def test_the_round_generator_equals_fit(population: Population) -> None:
    fed = Federation(net, population, algorithms.FedAvg(), lr=0.1, steps=5)
    engine = InProcess(fed.plan_)
    rounds = list(run(fed.plan_, engine, initial_state(fed.plan_), 3))
    assert [r.index for r in rounds] == [1, 2, 3]
    assert rounds[0].accepted == population.names
    assert rounds[2].loss < rounds[0].loss
    assert torch.equal(rounds[-1].state.global_model, fed.fit(3, progress=False).state.global_model)


def test_the_table_shows_each_party_whether_joining_helped(population: Population) -> None:
    fed = Federation(net, population, algorithms.FedAvgPlus(alpha=1.0), lr=0.5, steps=10, seed=0)
    assert fed.fit(5, progress=False) is fed
    table = fed.table()
    assert [row["party"] for row in table.rows] == list(population)
    alone = Federation(net, population, algorithms.Local(), lr=0.5, steps=10, seed=0).fit(5, progress=False).scores()
    for row, value in zip(table.rows, alone.personal.values, strict=True):
        assert row["local"] == value
        assert row["gain"] == row["personal"] - row["local"]
    gained = sum(row["gain"] > 0 for row in table.rows)
    assert f"{gained} of 5 parties gained by joining" in table.verdict


def test_scores_are_the_accuracy_of_the_personal_modules(population: Population) -> None:
    for algorithm in (algorithms.FedAvgPlus(alpha=1.0), algorithms.Ditto(), algorithms.FedPer(), algorithms.APFL()):
        model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
        fed = Federation(model, population, algorithm, lr=0.3, steps=5, seed=0).fit(2, progress=False)
        scores = fed.scores()
        for i, (name, party) in enumerate(population.items()):
            hits = (fed.models_[name](party.x_test).argmax(1) == party.y_test).double().mean().item()
            assert scores.personal.values[i] == pytest.approx(hits, abs=1e-12)
            majority = (party.y_test == party.y.mode().values).double().mean().item()
            assert scores.majority.values[i] == majority
        assert set(fed.models_) == set(population)


def test_a_party_that_never_trained_is_evaluated_with_the_global_model(population: Population) -> None:
    """ERRATA 15."""
    two = algorithms.Sample(2)
    fed = Federation(net, population, algorithms.FedAvgPlus(), lr=0.5, steps=5, participation=two).fit(
        1, progress=False
    )
    trained = fed.state.personal_models.names()
    assert len(trained) == 2
    for name in population:
        assert torch.equal(fed.models_[name].weight, fed.global_model_.weight) == (name not in trained)  # type: ignore[arg-type]


def test_scores_of_a_round_must_be_read_before_the_next_round(population: Population) -> None:
    fed = Federation(net, population, algorithms.FedAvg(), lr=0.1, steps=2)
    first, second = fed.rounds(2)
    assert 0 <= second.scores.personal.mean <= 1
    assert fed.history_[-1]["personal"] == second.scores.personal.mean
    with pytest.raises(DescantError, match="scores of round 1 must be read while the run stands there; it is at 2"):
        _ = first.scores


def test_custom_loss_and_metric() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(x, x.sum(1)) for x in (torch.randn(30, 3, generator=generator) for _ in range(3))]
    population = parties.from_arrays(data)
    fed = Federation(
        lambda: nn.Linear(3, 1), population, algorithms.FedAvg(), lr=0.1, steps=20, loss=half_squared_error
    )
    fed.fit(10, progress=False)
    scores = fed.scores()
    assert scores.metric == "loss" and scores.personal.mean < 0.05
    assert math.isnan(scores.majority.mean)
    assert "gained" in fed.table().verdict
    worst = Metric("worst miss", lambda output, y: (output.squeeze(-1) - y).abs(), higher_is_better=False)
    fed.metric = worst
    assert (
        Federation(
            lambda: nn.Linear(3, 1), population, algorithms.FedAvg(), lr=0.1, loss=half_squared_error, metric=worst
        )
        .scores()
        .personal.worst
        > scores.personal.worst
    )


def test_compare_includes_local_and_the_majority_class(population: Population) -> None:
    study = compare(
        [algorithms.FedAvg(), algorithms.FedAvgPlus()],
        net,
        population,
        rounds=3,
        seeds=2,
        progress=False,
        lr=0.3,
        steps=5,
    )
    table = study.table()
    assert [row["method"] for row in table.rows] == ["majority class", "Local", "FedAvg", "FedAvgPlus"]
    alone = study.of("Local")
    fedavg = study.of("FedAvg")
    gains = [r.scores.personal.values - a.scores.personal.values for r, a in zip(fedavg, alone, strict=True)]
    assert table.rows[2]["gained"] == (np.mean(gains, axis=0) > 1e-9).sum()
    assert all(result.curve[-1][0] == 3 for result in study.results)
    single = Federation(net, population, algorithms.FedAvg(), lr=0.3, steps=5, seed=1).fit(3, progress=False)
    np.testing.assert_array_equal(study.of("FedAvg")[1].scores.personal.values, single.scores().personal.values)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (algorithms.FedGeoMedPlus(rho=-1.0), r"The 'rho' of FedGeoMedPlus must be > 0. Got -1.0."),
        (algorithms.FedAvgPlus(alpha=-0.1), r"The 'alpha' of FedAvgPlus must be >= 0. Got -0.1."),
        (algorithms.FedAvgPlus(init_mix=1.5), r"The 'init_mix' of FedAvgPlus must be >= 0 and <= 1. Got 1.5."),
        (algorithms.FedPlusFixed((0.5, 2.0)), r"The 'gamma' of FedPlusFixed must be >= 0 and <= 1. Got 2.0."),
        (algorithms.FedProx(mu=float("nan")), r"The 'mu' of FedProx must be >= 0. Got nan."),
        (algorithms.L2GD(p=0.0), r"The 'p' of L2GD must be > 0 and < 1. Got 0.0."),
        (algorithms.FedPlusFixed(PerParty({"1": 5.0})), r"The 'gamma' of FedPlusFixed must be >= 0 and <= 1. Got 5.0."),
        (algorithms.FedPlusFixed((0.5, 0.5)), r"FedPlusFixed does not fit a model of 53 parameters"),
        (algorithms.FedPlus(DiagonalQ((1.0,))), r"The 'q' of DiagonalQ must be 53 numbers >= 0, one per column"),
        (algorithms.L2GD(lam=1000.0), r"L2GD's step to the mean, lr·λ\(1-p\)/p, must be <= 1. Got 90"),
        (
            replace(algorithms.FedAvg(), aggregate_over="all"),
            r"aggregates over all, but its parties have no personal models",
        ),
        (
            replace(algorithms.FedAvg(), participation=algorithms.Sample(2.5)),
            r"'count' of Sample must be a whole number >= 1",
        ),  # type: ignore[arg-type]
        (algorithms.FedPer("2.*"), r"The 'private_layers' of FedPer must be a tuple of name patterns. Got '2.\*'."),  # type: ignore[arg-type]
        (algorithms.FedPer(("*",)), r"All layers of the model are private in FedPer: nothing is left to share."),
        (algorithms.FedAvg, r"Give an algorithm, such as algorithms.FedAvg\(\) with its parentheses"),
        ("fedavg", r"Give an algorithm, such as algorithms.FedAvg\(\)"),
        (
            algorithms.FedPlus(aggregate_over="some"),
            r"The 'aggregate_over' of FedPlus must be one of 'active', 'all'. Got 'some'.",
        ),  # type: ignore[arg-type]
    ],
)
def test_a_value_out_of_bounds_is_named(algorithm: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Federation(network(), classification_parties(3), algorithm).fit(1, progress=False)  # type: ignore[arg-type]


def test_every_run_of_a_plan_starts_from_the_same_model() -> None:
    """The looped mode runs the module itself; its training must not change the next run's initial model."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))
    fed = Federation(model, classification_parties(3), algorithms.FedAvg(), lr=0.5, steps=5, batch=4)
    first = initial_state(fed.plan_)
    assert first.execution_mode == "looped"
    (after,) = run(fed.plan_, InProcess(fed.plan_), first, 1)
    assert not torch.equal(after.state.global_model, first.global_model)
    assert torch.equal(initial_state(fed.plan_).global_model, first.global_model)


@pytest.mark.parametrize("given", [{"solver": "sgd"}, {"solver": Sgd}, {"engine": "ray"}, {"engine": None}])
def test_an_invalid_solver_or_engine_is_named(given: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=r"Give a solver such as Sgd\(lr=0.1\), and an engine such as InProcess"):
        Federation(network(), classification_parties(3), algorithms.FedAvg(), **given).fit(1, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [-1, 2.5, "3", True])
def test_the_number_of_rounds_must_be_a_whole_number(rounds: object) -> None:
    with pytest.raises(SettingError, match=r"The number of rounds must be a whole number >= 0. Got"):
        Federation(network(), classification_parties(3), algorithms.FedAvg()).fit(rounds, progress=False)  # type: ignore[arg-type]


def test_a_list_is_not_a_population() -> None:
    with pytest.raises(PartyError, match=r"made by descant.parties, such as from_arrays\(...\). Got .*list"):
        Federation(network(), [1, 2], algorithms.FedAvg()).fit(1, progress=False)  # type: ignore[arg-type]


def test_an_unknown_party_is_named(population: Population) -> None:
    fed = Federation(net, population, algorithms.FedAvg())
    with pytest.raises(KeyError, match="99"):
        fed.models_["99"]


def test_bad_input_leaves_the_run_where_it_was(population: Population) -> None:
    fed = Federation(net, population, algorithms.FedAvg(), lr=0.1, steps=2).fit(1, progress=False)
    before = fed.hash()
    with pytest.raises(SettingError):
        compare([algorithms.FedAvg()], net, population, rounds=0)
    with pytest.raises(SettingError, match="Two algorithms have the same name"):
        compare([algorithms.FedAvg(), algorithms.FedAvg()], net, population, rounds=1)
    with pytest.raises(ModelError):
        Federation(nn.Linear(3, 3), population, algorithms.FedAvg()).fit(1, progress=False)
    assert fed.hash() == before


def test_any_aggregator_can_be_used(population: Population) -> None:
    algorithm = replace(algorithms.FedAvg(), name="trimmed", aggregate=TrimmedMean(0.2))
    fed = Federation(net, population, algorithm, solver=Sgd(lr=0.3, steps=5)).fit(2, progress=False)
    assert fed.scores().global_model.mean > 0.2


def test_local_training_leaves_untrained_parties_at_the_initial_model(population: Population) -> None:
    fed = Federation(net, population, algorithms.Local(), lr=0.5, steps=5, participation=2).fit(1, progress=False)
    trained = fed.state.personal_models.names()
    assert len(trained) == 2
    for name in population:
        weight = fed.models_[name].get_parameter("weight").flatten()
        assert torch.equal(weight, fed.state.initial_model[:640]) == (name not in trained)


def test_the_local_baseline_has_the_participation_and_work_of_its_method(population: Population) -> None:
    l2gd = algorithms.L2GD(p=0.5)
    study = compare([algorithms.FedAvg(), l2gd], net, population, rounds=4, progress=False, lr=0.3, steps=20)
    assert study.methods == ("Local", "Local, as L2GD", "FedAvg", "L2GD")
    fed = Federation(net, population, l2gd, lr=0.3, steps=20).fit(4, progress=False)
    alone = [row["local"] for row in fed.table().rows]
    np.testing.assert_array_equal(study.local_results("L2GD")[0].scores.personal.values, alone)
    assert study.local_results("FedAvg")[0].method == "Local"
    with pytest.raises(SettingError, match="'Local' is the name of local training"):
        compare([replace(algorithms.FedAvg(), name="Local")], net, population, rounds=1)


def test_a_table_after_loading_an_earlier_round_compares_the_same_round(population: Population, tmp_path: Path) -> None:
    def made() -> Federation:
        return Federation(net, population, algorithms.FedAvgPlus(alpha=1.0), lr=0.5, steps=5)

    fed = made().fit(1, progress=False)
    fed.save(tmp_path / "run")
    expected = str(fed.table())
    fed.fit(4, progress=False).table()
    assert str(fed.load(tmp_path / "run").table()) == expected == str(made().load(tmp_path / "run").table())


@pytest.mark.parametrize("rounds", [0, 2])
def test_the_progress_bar_shows_on_a_terminal(
    rounds: int, population: Population, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=shown, force_terminal=True))
    Federation(net, population, algorithms.FedAvg(), lr=0.1, steps=2).fit(rounds)
    assert "FedAvg" in shown.getvalue() and f"{rounds}/{rounds}" in shown.getvalue()


def test_participation_may_be_a_number_and_a_metric_a_function(population: Population) -> None:
    def hits(output: torch.Tensor, target: torch.Tensor) -> float:
        return float((output.argmax(1) == target).float().mean())

    fed = Federation(net, population, algorithms.FedAvg(), lr=0.1, steps=2, participation=3, metric=hits)  # type: ignore[arg-type]
    fed.fit(1, progress=False)
    assert fed.history_[-1]["participants"] == 3
    scores = fed.scores()
    assert scores.metric == "hits" and 0 <= scores.personal.mean <= 1
    assert repr(fed) == "<Federation of 5 parties by FedAvg, after 1 rounds>"
    with pytest.raises(SettingError, match="'participation' must be a number of parties a round"):
        Federation(net, population, algorithms.FedAvg(), participation=algorithms.Sample).fit(1, progress=False)


def test_a_name_is_not_a_metric(population: Population) -> None:
    with pytest.raises(SettingError, match=r"A metric is a function of \(output, target\), or a descant.Metric"):
        Federation(net, population, algorithms.FedAvg(), metric="acc").fit(1, progress=False)  # type: ignore[arg-type]


def test_float_targets_are_not_classes() -> None:
    population = parties.from_arrays([(torch.randn(9, 3), torch.randn(9))])
    with pytest.raises(SettingError, match=r"the targets are torch.float32 numbers. Give classes as whole"):
        Federation(lambda: nn.Linear(3, 1), population, algorithms.FedAvg()).fit(1, progress=False)


def test_data_of_another_dtype_than_the_model_gets_advice() -> None:
    population = parties.from_arrays([(np.zeros((9, 6), dtype=np.uint8), np.zeros(9, dtype=int))])
    with pytest.raises(
        ModelError, match=r"parties.from_arrays\(..., dtype=torch.float32\) gives the data the same dtype."
    ):
        Federation(network(), population, algorithms.FedAvg()).fit(1, progress=False)


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "first.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "parties gained by joining" in printed
    assert "majority class" in printed


def test_the_local_baseline_has_the_same_parties() -> None:
    """A population function may draw other parties at each call: the baseline must not call it again."""
    made: list[parties.Population] = []

    def population() -> parties.Population:
        made.append(parties.digits(count=3, seed=len(made)))
        return made[-1]

    fed = Federation(lambda: nn.Linear(64, 10), population, algorithms.Local(), lr=0.1, steps=2, batch=5)
    table = fed.fit(2, progress=False).table()
    assert len(made) == 1 and [row["gain"] for row in table.rows] == [0.0, 0.0, 0.0]


def test_a_mistake_in_the_code_is_not_mistaken_for_a_numerical_failure() -> None:
    def mistaken(models: Tensor, global_model: Tensor, hyper: object) -> Tensor:
        return models + None if len(models) > 2 else models  # type: ignore[operator]

    algorithm = replace(algorithms.FedAvgPlus(), personalize=mistaken)
    fed = Federation(lambda: nn.Linear(64, 10), parties.digits(count=3), algorithm, lr=0.1, steps=1)
    with pytest.raises(TypeError):
        fed.fit(1, progress=False)
    assert fed.state.round == 0


@pytest.mark.parametrize("tested", [False, True])
def test_a_label_without_a_model_output_is_named_before_training(tested):
    x = np.zeros((4, 2), dtype=np.float32)
    y = np.array([0, 1, 2, 0])
    bad = np.array([0, 1, 5, 0])
    data = {"a": (x, y, x, y), "b": (x, y, x, bad) if tested else (x, bad, x, y)}
    row = "row 2 of its test set" if tested else "row 2"
    message = f"Party 'b' has the label 5 in {row}, and the model has 3 outputs: labels go from 0 to 2"
    with pytest.raises(PartyError, match=message):
        Federation(lambda: nn.Linear(2, 3), parties.from_arrays(data), algorithms.FedAvg()).fit(1, progress=False)
    with pytest.raises(PartyError, match="Party '1' has the label 5 in row 1,"):  # of its own rows
        population = parties.from_rows(x, bad, [np.array([0, 1]), np.array([3, 2])])
        Federation(lambda: nn.Linear(2, 3), population, algorithms.FedAvg()).fit(1, progress=False)
    Federation(lambda: nn.Linear(2, 6), parties.from_arrays(data), algorithms.FedAvg()).fit(1, progress=False)


def test_rejections_and_their_reasons_are_in_findings_and_table():
    """The data of one party are so large that its model overflows in the first step."""
    x = np.ones((6, 2), dtype=np.float32)
    y = np.array([0, 1, 0, 1, 0, 1])
    population = parties.from_arrays({"a": (x, y), "b": (3e38 * x, y)})
    with pytest.warns(DescantWarning, match="were rejected, the first: round 1, party 'b'"):
        study = compare([algorithms.FedAvg()], lambda: nn.Linear(2, 2), population, rounds=2, lr=1.0, progress=False)
    sentences = [finding for finding in study.findings() if "rejected" in finding]
    assert sentences and sentences[0].startswith("2 updates of ")
    assert "round 1, party 'b'" in sentences[0] and "not finite" in sentences[0]
    assert sentences[0].count("party 'b'") == 1, "once, though it was rejected twice"
    assert sentences[0] in study.table().notes and sentences[0] in json.loads(study.to_json())["findings"]


class Clamping(nn.Linear):
    """A module that writes to its parameters when it runs, as `nn.Embedding(max_norm=...)` does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_evaluation_does_not_change_a_model_that_writes_to_its_parameters(population: Population) -> None:
    model = Clamping(64, 10)
    first = torch.cat([parameter.detach().clone().flatten() for parameter in model.parameters()])
    fed = Federation(model, population, algorithms.FedAvgPlus(), lr=0.1, steps=2, batch=4)
    assert first.abs().max() > 0.1 and torch.equal(fed.state.global_model, first)
    fed.scores()
    assert torch.equal(fed.state.global_model, first)
    fed.fit(2, progress=False)
    before = fed.hash()
    fed.scores()
    assert fed.hash() == before and torch.equal(fed.state.initial_model, first)
