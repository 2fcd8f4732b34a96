"""Diagnostics and findings: they report what happens, and measuring changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import DescantError, Federation, Sgd, algorithms, analysis, parties
from descant.analysis import biggest_jump, coverage, interpolate, lasting_drop, proximal_share_per_round
from descant.analysis.collapse import shortfall_start
from descant.analysis.findings import detect_collapse
from descant.analysis.scores import Numbers, ScoreColumn, Scores
from descant.core.algorithm import Hyper, Loss, LossTerm, NamedTensors, ParticipationContext, TuneContext, TuneResult
from descant.core.interfaces import TrainJob, TrainResult
from descant.core.messages import Reply
from descant.errors import SettingError
from descant.models.flat import Net
from descant.parties import Population
from descant.studies.study import Study
from descant.studies.training_result import TrainingResult
from descant.training.evaluation import evaluate_test_sets
from toy_problems import METHODS, half_squared_error, network

SOLVER = Sgd(lr=0.1, steps=3, batch=4)


def population_with_tests(count: int = 5, seed: int = 0) -> Population:
    """Small parties with test sets, but the last, which has none."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for k in range(count):
        x = torch.randn(12 + 5 * k, 6, generator=generator) + 0.5 * k
        data.append((x, torch.randint(0, 3, (len(x),), generator=generator)))
    data[-1] = (data[-1][0][:1], data[-1][1][:1])  # one sample cannot be cut in two
    return parties.from_arrays(data)


def make_federation(name: str, **settings: object) -> Federation:
    return Federation(network(), population_with_tests(), METHODS[name](), solver=SOLVER, seed=7, **settings)  # type: ignore[arg-type]


def run(fed: Federation, rounds: int) -> Federation:
    return fed.fit(rounds, progress=False)


@pytest.mark.parametrize("name", METHODS)
def test_evaluation_leaves_the_hash_unchanged_and_agrees_with_scores(name: str) -> None:
    """The score before local training is that of the party's start model, which depends on the method."""
    plain = make_federation(name)
    fed = make_federation(name)
    for _ in plain.rounds(3, evaluate_local_in=()):
        pass
    earlier = [fed.scores()] + [scored.scores for scored in fed.rounds(3, evaluate_local_in=(1, 2, 3))]
    assert plain.hash() == fed.hash()
    assert plain.history_[-1]["loss"] == fed.history_[-1]["loss"] and "after" not in plain.history_[-1]
    assert np.isnan(plain.scores().before.values).all()
    scores = fed.scores()
    evaluated = ~np.isnan(scores.personal.values)
    assert not evaluated[-1] and evaluated[:-1].all()
    assert (np.isnan(scores.before.values) == ~evaluated).all() and (np.isnan(scores.after.values) == ~evaluated).all()
    if name in ("Local", "FedAvgPlus", "FedGeoMedPlus", "FedPlusV1"):  # these start from and keep their personal models
        np.testing.assert_array_equal(scores.after.values, scores.personal.values)
        np.testing.assert_array_equal(scores.before.values[evaluated], earlier[2].personal.values[evaluated])
    if name in ("FedAvg", "FedProx", "RFA", "FedPer", "FedRep"):  # these start from the global model
        np.testing.assert_array_equal(scores.before.values[evaluated], earlier[2].global_model.values[evaluated])
    if name == "Ditto":  # its personal model is private and trains in the same step
        np.testing.assert_array_equal(scores.after.values, scores.personal.values)


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "Ditto", "FedPer"])
def test_every_batching_and_serialization_gives_the_same_scores(name: str) -> None:
    def evaluate(**settings: object) -> tuple[np.ndarray, np.ndarray, list[float]]:
        fed = run(make_federation(name, **settings), 3)
        scores = fed.scores()
        return scores.before.values, scores.after.values, interpolate(fed, points=3).mean.tolist()

    whole = evaluate()
    for pieces in (2, 5):
        for here, there in zip(whole, evaluate(engine=partial(BytesEngine, batch_count=pieces)), strict=True):
            np.testing.assert_array_equal(here, there)


def test_only_the_last_round_is_evaluated_by_default() -> None:
    fed = make_federation("FedAvg", participation=2)
    run(fed, 4)
    assert ["after" in entry for entry in fed.history_] == [False, False, False, True]
    assert {scores.round for scores in fed.state.local_scores.values()} == {4} and len(fed.state.local_scores) <= 2
    before = dict(fed.state.local_scores)
    for _ in fed.rounds(2, evaluate_local_in=()):
        pass
    assert fed.state.local_scores == before
    mean = np.mean([scores.after for scores in before.values()])
    assert fed.history_[3]["after"] == pytest.approx(mean)


def failing(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no score today")


def test_a_failing_metric_rejects_no_update() -> None:
    fed = make_federation("FedAvg", metric=failing)
    plain = make_federation("FedAvg")
    assert run(fed, 2).hash() == run(plain, 2).hash()
    assert not fed.rejections_ and not fed.state.local_scores


def test_local_scores_are_not_fed_back_to_the_tuner() -> None:
    assert not {"before", "after"} & set(run(make_federation("FedAvg"), 1).state.feedback)


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgPlus", "Local"])
def test_coverage_counts_accepted_updates_and_survives_a_restart(name: str, tmp_path: Path) -> None:
    fed = make_federation(name, participation=2)
    counted = dict.fromkeys(fed.population, 0)
    for scored in fed.rounds(2):
        for party in scored.round.accepted:
            counted[party] += 1
    assert coverage(fed).rounds == counted
    fed.save(tmp_path / "run")
    again = make_federation(name, participation=2).load(tmp_path / "run")
    assert coverage(again).rounds == counted
    assert again.state.local_scores == fed.state.local_scores
    assert coverage(run(again, 3)).rounds == coverage(run(make_federation(name, participation=2), 5)).rounds


def test_a_party_with_rejected_updates_counts_as_untrained() -> None:
    def spoil(reply: Reply) -> list[Reply]:
        if reply.party == "1" and reply.kind == "train":
            reply = replace(reply, arrays={n: a * math.nan for n, a in reply.arrays.items()})
        return [reply]

    fed = make_federation("FedAvg", engine=partial(BytesEngine, tamper=spoil))
    with pytest.warns(match="party '1', tensor '0.weight': not finite"):
        run(fed, 2)
    assert coverage(fed).untrained == ("1",)
    assert "1 of 5 parties never trained and are evaluated with the global model." in fed.findings()


def test_an_untrained_party_under_local_is_evaluated_with_the_initial_model() -> None:
    fed = run(make_federation("Local", participation=1), 1)
    found = fed.findings()
    assert f"\n- {found[0]}" in str(fed.table())
    assert found == ("4 of 5 parties never trained and are evaluated with the initial model.",)
    assert not any(
        "never trained" in sentence for sentence in make_federation("Local").findings()
    )  # before the first round


class FixedSolver:
    """A solver that returns given models, so that all results are known by hand."""

    hyper = Hyper()
    metric = None
    evaluate = staticmethod(evaluate_test_sets)

    def __init__(self, places: dict[str, list[float]]) -> None:
        self.places = places

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: object, count: int
    ) -> dict[str, str]:
        return {"fixed": ""}

    def train(self, job: TrainJob) -> TrainResult:
        rows = torch.stack([torch.tensor(self.places[party.name]) for party in job.parties])
        states: list[NamedTensors] = [{}] * len(rows)
        return TrainResult(rows, states, [{"samples": 1.0, "loss": 0.0}] * len(rows))


def federation_of_fixed_models(algorithm: algorithms.Algorithm, **places: list[float]) -> Federation:  # type: ignore[name-defined]
    population = parties.from_arrays({name: ([[1.0, 0.0]], [1.0]) for name in places}, test=0)
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    return Federation(module, population, algorithm, solver=FixedSolver(places), loss=half_squared_error)  # type: ignore[arg-type]


def test_spikes_match_a_calculation_by_hand() -> None:
    """For w = (±3, 0) and w̃ = 0 every model changes by 3; for (3, 0) and (0, 4) by 2.5."""
    (entry,) = run(federation_of_fixed_models(algorithms.FedAvg(), a=[3.0, 0.0], b=[-3.0, 0.0]), 1).history_
    assert (entry["jump"], entry["jump_sd"], entry["norm"]) == (3.0, 0.0, 0.0)
    (entry,) = run(federation_of_fixed_models(algorithms.FedAvg(), a=[3.0, 0.0], b=[0.0, 4.0]), 1).history_
    assert (entry["jump"], entry["jump_sd"], entry["norm"]) == (2.5, 0.0, 2.5)
    mixed = algorithms.FedPlus(alpha=1.0, init_mix=0.5)
    (entry,) = run(
        federation_of_fixed_models(mixed, a=[3.0, 0.0], b=[0.0, 0.0], c=[0.0, 0.0]), 1
    ).history_  # w̃ = (1, 0)
    assert entry["jump"] == pytest.approx(0.5 * (2 + 1 + 1) / 3)
    assert entry["jump_sd"] == pytest.approx(0.5 * np.std([2, 1, 1]))


@pytest.mark.parametrize("name", ["Local", "FedAvgPlus", "FedGeoMedPlus", "FedCoMedPlus", "FedPlusV1"])
def test_methods_with_personal_models_have_no_spikes(name: str) -> None:
    fed = run(make_federation(name), 3)
    assert [entry["jump"] for entry in fed.history_] == [0.0, 0.0, 0.0]
    assert (analysis.spikes(fed).y == 0).all()


def test_fedavg_has_spikes() -> None:
    assert all(entry["jump"] > 0 for entry in run(make_federation("FedAvg"), 3).history_)


@pytest.mark.parametrize(
    ("make", "far"), [(algorithms.FedGeoMedPlus, 5.0), (algorithms.FedCoMedPlus, 4.0)], ids=["‖·‖₂", "‖·‖∞"]
)
def test_rho_never_binds_iff_every_distance_is_below_it(make: object, far: float) -> None:
    """The models ±(3, 4) have the global model 0, the distance 5 and the largest coordinate 4."""
    for rho, expected in ((far + 0.01, True), (far - 0.01, False)):
        fed = run(federation_of_fixed_models(make(alpha=100.0, rho=rho), a=[3.0, 4.0], b=[-3.0, -4.0]), 2)  # type: ignore[operator]
        assert fed.history_[-1]["max_distance"] == pytest.approx(far)
        assert any("never binds" in sentence for sentence in fed.findings()) is expected


def test_rho_binds_a_newcomer_that_starts_far_from_the_global_model() -> None:
    """All updates are (9, 0), but a newcomer starts at 0, at distance 9 from the global model."""
    algorithm = algorithms.FedGeoMedPlus(alpha=100.0, rho=1.0)
    fed = run(federation_of_fixed_models(algorithm, a=[9.0, 0.0], b=[9.0, 0.0]), 1)
    assert any("never binds" in sentence for sentence in fed.findings())
    late = federation_of_fixed_models(replace(algorithm, participation=SecondPartyLater()), a=[9.0, 0.0], b=[9.0, 0.0])
    run(late, 2)
    assert late.history_[-1]["max_distance"] == pytest.approx(9.0)
    assert not any("never binds" in sentence for sentence in late.findings())


class SecondPartyLater:
    """Selects a first, then b."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, context: ParticipationContext) -> dict[str, Hyper]:
        self.calls += 1
        return {("a" if self.calls <= 2 else "b"): context.hyper}  # the first call only counts the parties


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        (algorithms.FedAvgPlus(0.01, rho=1000.0), (1 - 1.0001**-20) * 1000 / 1001),
        (algorithms.FedGeoMedPlus(1.0), 1 - 1.01**-20),
        (algorithms.FedPlusFixed(0.5, alpha=1.0), 0.5 * (1 - 1.01**-20)),
        (algorithms.FedAvgPlus(1.0, rho=1.0, init_mix=0.25), 0.25 + 0.75 * 0.5 * (1 - 1.01**-20)),
        (algorithms.FedAvg(), None),
    ],
    ids=["FedAvg+", "FedGeoMed+", "fixed", "mixed", "FedAvg"],
)
def test_proximal_share_per_round_matches_its_formula(algorithm: algorithms.Algorithm, share: float | None) -> None:  # type: ignore[name-defined]
    fed = Federation(network(), population_with_tests(), algorithm, lr=0.01, steps=20, batch=4)
    assert proximal_share_per_round(fed.plan_, 1) == (None if share is None else pytest.approx(share))


def test_a_weak_proximal_term_is_reported_and_epochs_count_as_steps() -> None:
    def findings(alpha: float = 0.01, **work: int) -> str:
        fed = Federation(
            network(), population_with_tests(), algorithms.FedAvgPlus(alpha), solver=Sgd(lr=0.01, batch=4, **work)
        )  # type: ignore[arg-type]
        return " ".join(run(fed, 1).findings())

    moved = "moves a party at most 0.2 % of the way to the global model per round: federation is nearly off"
    assert f"The proximal term of FedAvgPlus {moved}" in findings(steps=20)
    assert "0.12 % of the way" in findings(epochs=2)  # the largest party has 22 samples: 6 batches an epoch
    assert "nearly off" not in findings(alpha=0.1, steps=20)


def test_a_score_below_the_majority_baseline_is_reported() -> None:
    x = torch.zeros(20, 6)
    population = parties.from_arrays([(x, torch.tensor([0] * 16 + [1] * 4))] * 2)
    module = nn.Linear(6, 3)
    nn.init.constant_(module.bias, 0.0)
    with torch.no_grad():
        module.bias[2] = 50.0  # two steps do not change the predicted class
    fed = run(Federation(module, population, algorithms.FedAvg(), lr=0.01, steps=2), 1)
    assert not any("majority" in sentence for sentence in fed.findings())
    assert "FedAvg is below the majority baseline: 0.000 accuracy" in str(fed.table())
    run(fed, 1)
    assert not any("majority" in sentence for sentence in fed.findings())  # scores of an earlier round do not count


@pytest.mark.parametrize("before", [5, 6, 7])
def test_a_non_finite_change_is_a_jump_without_a_warning(before: int) -> None:
    assert biggest_jump([1.0] * before + [math.inf] * 12) == (before, math.inf)
    assert biggest_jump([math.inf] * 12) is None and biggest_jump([1.0] * before + [math.nan] * 9) is None


@given(st.lists(st.floats(0.5, 1.5), min_size=6, max_size=40), st.floats(16.0, 1e6), st.data())
def test_a_jump_is_found_at_its_index_only(changes: list[float], times: float, data: st.DataObject) -> None:
    assert biggest_jump(changes) is None
    place = data.draw(st.integers(5, len(changes) - 1))
    found = biggest_jump([*changes[:place], times, *changes[place + 1 :]])
    assert found is not None and found[0] == place and times / 1.5 <= found[1] <= times / 0.5


@given(st.lists(st.floats(-0.02, 0.02), min_size=20, max_size=40), st.integers(8, 16), st.sampled_from([1.0, -1.0]))
def test_a_lasting_drop_is_found_and_noise_is_not(noise: list[float], place: int, sign: float) -> None:
    learned = [min(0.9, 0.1 + 0.15 * i) + e for i, e in enumerate(noise)]
    assert lasting_drop([sign * value for value in learned], sign > 0) is None
    fallen = [*learned[:place], *(0.1 + e for e in noise[place:])]
    assert lasting_drop([sign * value for value in fallen], sign > 0) == place
    recovered = [*fallen[:-1], 0.9]
    assert lasting_drop([sign * value for value in recovered], sign > 0) is None


def test_a_drop_is_found_despite_gaps_and_diverged_models() -> None:
    assert lasting_drop([0.1, math.nan, 0.8, 0.9, -math.inf, -math.inf, -math.inf], True) == 4
    assert lasting_drop([0.1, 0.9, 0.2], True) is None  # too short to be lasting
    assert lasting_drop([], True) is None and lasting_drop([math.nan] * 9, True) is None


@pytest.mark.parametrize(
    "drift",
    [
        [0.330, 0.338, 0.342, 0.336, 0.335, 0.336, 0.336],
        [0.140, 0.156, 0.137, 0.137, 0.137, 0.137],
        [0.10, 0.11, 0.12, 0.13, 0.14, 0.115, 0.11, 0.11],
    ],
)
def test_a_drift_of_a_few_points_is_no_collapse(drift: list[float]) -> None:
    """These curves have no earlier step back, so the usual step back is unknown."""
    assert lasting_drop(drift, True) is None
    assert lasting_drop([5 * (1 - value) for value in drift], False) is None
    assert lasting_drop([1000 * value for value in [*drift, *[0.0] * 9]], True) is not None  # of another scale


def test_collapse_counts_trained_parties_only() -> None:
    """Untrained parties are evaluated with the global model, whose drop is not a collapse of the others."""
    steady = {"loss": math.nan, "change": 1.0}
    falling = [0.2, 0.5, 0.8, 0.9, 0.1, 0.1, 0.1, 0.1]
    entries = [
        {"round": at, "personal": score, "personal_trained": 0.9, **steady} for at, score in enumerate(falling, 1)
    ]
    assert detect_collapse("FedAvgPlus", entries) is None
    found = detect_collapse(
        "FedAvg", [{**entry, "personal_trained": score} for entry, score in zip(entries, falling, strict=True)]
    )
    assert found is not None and found.round == 5
    population = parties.digits(count=6)
    fed = run(Federation(lambda: nn.Linear(64, 10), population, algorithms.FedAvgPlus(), participation=2, lr=0.1), 1)
    for scored in fed.rounds(1):
        scored.scores  # noqa: B018
    trained = [name for name, count in coverage(fed).rounds.items() if count]
    assert 0 < len(trained) < 6
    personal = dict(zip(fed.scores().names, fed.scores().personal.values, strict=True))
    assert fed.history_[-1]["personal_trained"] == pytest.approx(np.mean([personal[name] for name in trained]))
    assert fed.history_[-1]["personal"] == pytest.approx(np.mean(list(personal.values())))


def history(losses: list[float], changes: list[float]) -> list[dict[str, float]]:
    return [{"round": i + 1, "loss": a, "change": b} for i, (a, b) in enumerate(zip(losses, changes, strict=True))]


def test_collapse_and_jump_are_reported_in_a_sentence() -> None:
    losses = [2.0, 1.5, 1.0, 0.5, 0.4, 0.3, 5.0, 5.0, 5.0]
    found = detect_collapse("FedAvg", history(losses, [1.0] * 6 + [40.0, 1.0, 1.0]))
    assert found is not None and found.kind == "collapse" and found.round == 7
    assert found.text.startswith(
        "The model of FedAvg jumped 40× at round 7; what FedAvg had learned was lost at round 7"
    )
    jumped = detect_collapse("RFA", history([1.0] * 9, [1.0] * 6 + [12.0, 1.0, 1.0]))
    assert jumped is not None and jumped.kind == "jump" and "collapse" not in jumped.text
    assert detect_collapse("RFA", history([2.0, 1.0, 0.5, 0.4, 0.3, 0.3], [1.0] * 6)) is None


@given(st.lists(st.floats(-0.003, 0.004), min_size=60, max_size=90), st.integers(6, 50), st.sampled_from([1.0, 1e5]))
def test_a_lasting_shortfall_is_found_and_a_bad_season_is_not(days: list[float], place: int, size: float) -> None:
    """A round's reward depends mostly on its days: a collapse shows only against local training on the same days."""
    local = size * np.array(days)
    rising = np.abs(local) + size * 0.0001
    assert shortfall_start(local, local) is None and shortfall_start(0.8 * rising, rising) is None
    cash = np.where(np.arange(len(days)) < place, rising, 0.0)
    assert shortfall_start(cash, rising) == place
    assert shortfall_start([*cash[:-1], size], rising) is None  # it recovers


def test_a_reward_below_one_is_not_treated_as_a_fraction() -> None:
    """A loss of 0.001 is the whole reward here, though it would be small for an accuracy."""
    earned = [0.0, 0.0002, 0.0006, 0.001, 0.001, 0.00001, 0.00001, 0.00001, 0.00001]
    found = detect_collapse(
        "FedAvg", [{"round": at, "reward": value, "steps": 1} for at, value in enumerate(earned, 1)]
    )
    assert found is not None and found.kind == "collapse" and found.round == 6


def test_a_study_reports_a_collapse_seen_only_against_local_training() -> None:
    days = np.random.default_rng(0).normal(0.0005, 0.0008, 40)
    names = ("a", "b")
    scores = Scores(names, "annual return", *(ScoreColumn(np.ones(2)) for _ in range(5)))

    def result(method: str, earned: Numbers) -> TrainingResult:
        still = {name: np.zeros(40) for name in ("loss", "change", "norm", "jump", "jump_sd")}
        series = {"round": np.arange(1.0, 41), "reward": earned, "steps": np.full(40, 50.0), **still}
        return TrainingResult(
            method,
            0,
            scores,
            curve=(),
            seconds=0.0,
            rejected=0,
            baseline="Local",
            rounds_trained=np.full(2, 40.0),
            series=series,
        )

    held = np.where(np.arange(40) < 25, days, 0.0)
    study = Study((result("Local", days), result("FedAvg", held), result("FedAvg+", days)), {})
    assert list(study.collapse_rounds()) == ["FedAvg"] and 20 <= study.collapse_rounds()["FedAvg"] <= 26
    assert "FedAvg collapsed at round" in study.verdict()
    assert "less than half of what local training earned" in " ".join(study.findings())


def test_a_training_that_breaks_down_is_reported() -> None:
    """From round 9 on, the learning rate is a hundred times too large."""

    def tune(context: TuneContext) -> TuneResult:
        hyper = replace(context.hyper, lr=100.0) if context.round >= 9 else context.hyper
        return TuneResult(hyper, context.tuner_state)

    population = parties.digits(count=3, seed=0)
    algorithm = replace(algorithms.FedAvg(), tune=tune)
    fed = run(Federation(lambda: nn.Linear(64, 10), population, algorithm, lr=0.2, steps=10, batch=10), 14)
    (sentence,) = fed.findings()
    assert "jumped" in sentence and "at round 9" in sentence and "collapse" in sentence


@pytest.mark.parametrize("name", METHODS)
def test_interpolation_predicts_the_next_round_and_changes_nothing(name: str) -> None:
    """λ=0 is the model after local training, λ=1 the new global model, ``previous`` the old global model."""
    fed = run(make_federation(name, participation=3), 2)
    before = fed.hash()
    history = list(fed.history_)
    scores = fed.scores()
    interpolation = interpolate(fed, points=3)
    assert fed.hash() == before and fed.history_ == history and fed.state.round == 2
    next(iter(fed.rounds(1)))
    undisturbed = run(make_federation(name, participation=3), 3)
    assert fed.hash() == undisturbed.hash()
    at = [fed.population.names.index(party) for party in interpolation.names]
    now = undisturbed.scores()
    np.testing.assert_array_equal(interpolation.scores[:, -1], now.global_model.values[at])
    if METHODS[name]().personal_model is None:  # else the personal model is not on the line
        np.testing.assert_array_equal(interpolation.scores[:, 0], now.after.values[at])
    if not METHODS[name]().private_layers:  # private layers have changed meanwhile
        np.testing.assert_array_equal(interpolation.previous, scores.global_model.values[at])


def test_interpolation_matches_a_calculation_by_hand() -> None:
    """From (±3, 0) to 0 the half squared error against 1 is ½(±3(1-λ) - 1)²."""
    fed = federation_of_fixed_models(algorithms.FedAvg(), a=[3.0, 0.0], b=[-3.0, 0.0])
    test = {name: ([[1.0, 0.0]], [1.0], [[1.0, 0.0]], [1.0]) for name in ("a", "b")}
    fed.population = parties.from_arrays(test)
    interpolation = interpolate(fed, points=4)
    np.testing.assert_allclose(interpolation.scores, [[2.0, 0.5, 0.0, 0.5], [8.0, 4.5, 2.0, 0.5]], atol=1e-5)
    np.testing.assert_allclose(interpolation.mean, [5.0, 2.5, 1.0, 0.5], atol=1e-5)
    assert interpolation.mean_previous == 0.5 and not interpolation.higher_is_better


def test_interpolation_limits_parties_and_rejects_bad_settings() -> None:
    fed = run(make_federation("FedAvg"), 1)
    assert interpolate(fed, points=2, max_parties=3).names == ("0", "2", "4")
    with pytest.raises(SettingError, match="at least 2 points"):
        interpolate(fed, points=1)
    silent = make_federation("FedAvg", engine=partial(BytesEngine, tamper=lambda report: []))
    hash_before = silent.hash()
    with pytest.raises(DescantError, match="no reply was accepted"):
        interpolate(silent)
    assert silent.hash() == hash_before


@pytest.mark.parametrize("kind", ["spikes", "collapse", "interpolation"])
def test_a_federation_draws_its_pictures(kind: str, tmp_path: Path) -> None:
    from matplotlib.image import imread

    file = run(make_federation("FedAvg"), 4).plot(kind, tmp_path / "deep" / "it.png")
    image = imread(file)[..., :3]
    blue = np.abs(image - np.array([0, 0x72, 0xB2]) / 255).max(-1) < 0.02
    assert blue.sum() > 200


def test_an_unknown_kind_of_picture_raises(tmp_path: Path) -> None:
    with pytest.raises(DescantError, match=r"no picture of a federation 'spike'\. Did you mean 'spikes'"):
        make_federation("FedAvg").plot("spike", tmp_path / "it.png")


def test_a_nan_loss_stays_nan_after_loading(tmp_path: Path) -> None:
    fed = run(Federation(network(), population_with_tests(), algorithms.FedAvg(), lr=0.1, steps=0), 1)
    assert math.isnan(fed.history_[0]["loss"])
    fed.save(tmp_path / "run")
    again = Federation(network(), population_with_tests(), algorithms.FedAvg(), lr=0.1, steps=0).load(tmp_path / "run")
    assert math.isnan(again.history_[0]["loss"]) and again.history_[0].keys() == fed.history_[0].keys()
