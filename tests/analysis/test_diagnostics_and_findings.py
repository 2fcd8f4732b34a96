"""The instruments: what they measure is what happens, and measuring changes nothing."""

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
from descant.studies.result import StudyResult
from descant.studies.study import Study
from descant.training.evaluation import evaluate_test_sets
from toy_problems import METHODS, half_squared_error, network

SOLVER = Sgd(lr=0.1, steps=3, batch=4)


def with_tests(count: int = 5, seed: int = 0) -> Population:
    """Small parties with test sets, but the last, which has none."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for k in range(count):
        x = torch.randn(12 + 5 * k, 6, generator=generator) + 0.5 * k
        data.append((x, torch.randint(0, 3, (len(x),), generator=generator)))
    data[-1] = (data[-1][0][:1], data[-1][1][:1])  # one sample cannot be cut in two
    return parties.from_arrays(data)


def made(name: str, **settings: object) -> Federation:
    return Federation(network(), with_tests(), METHODS[name](), solver=SOLVER, seed=7, **settings)  # type: ignore[arg-type]


def ran(fed: Federation, rounds: int) -> Federation:
    return fed.fit(rounds, progress=False)


# ── before and after ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", METHODS)
def test_judging_changes_no_hash_and_agrees_with_scores(name: str) -> None:
    """Own before is what the party had when the round began, as far as the method lets it start there."""
    plain = made(name)
    fed = made(name)
    for _ in plain.rounds(3, evaluate_local_in=()):
        pass
    earlier = [fed.scores()] + [scored.scores for scored in fed.rounds(3, evaluate_local_in=(1, 2, 3))]
    assert plain.hash() == fed.hash()
    assert plain.history_[-1]["loss"] == fed.history_[-1]["loss"] and "after" not in plain.history_[-1]
    assert np.isnan(plain.scores().before.values).all()
    scores = fed.scores()
    judged = ~np.isnan(scores.personal.values)
    assert not judged[-1] and judged[:-1].all()
    assert (np.isnan(scores.before.values) == ~judged).all() and (np.isnan(scores.after.values) == ~judged).all()
    if name in ("Local", "FedAvgPlus", "FedGeoMedPlus", "FedPlusV1"):  # these start at, and keep, their own
        np.testing.assert_array_equal(scores.after.values, scores.personal.values)
        np.testing.assert_array_equal(scores.before.values[judged], earlier[2].personal.values[judged])
    if name in ("FedAvg", "FedProx", "RFA", "FedPer", "FedRep"):  # these start at the centre
        np.testing.assert_array_equal(scores.before.values[judged], earlier[2].global_model.values[judged])
    if name == "Ditto":  # its own model is private, and learns in the same work
        np.testing.assert_array_equal(scores.after.values, scores.personal.values)


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "Ditto", "FedPer"])
def test_every_cut_and_bytes_judge_alike(name: str) -> None:
    def judged(**settings: object) -> tuple[np.ndarray, np.ndarray, list[float]]:
        fed = ran(made(name, **settings), 3)
        scores = fed.scores()
        return scores.before.values, scores.after.values, interpolate(fed, points=3).mean.tolist()

    whole = judged()
    for pieces in (2, 5):
        for here, there in zip(whole, judged(engine=partial(BytesEngine, batch_count=pieces)), strict=True):
            np.testing.assert_array_equal(here, there)


def test_only_the_last_round_is_judged_unless_one_says_otherwise() -> None:
    fed = made("FedAvg", participation=2)
    ran(fed, 4)
    assert ["after" in entry for entry in fed.history_] == [False, False, False, True]
    assert {found.round for found in fed.state.local_scores.values()} == {4} and len(fed.state.local_scores) <= 2
    before = dict(fed.state.local_scores)
    for _ in fed.rounds(2, evaluate_local_in=()):
        pass
    assert fed.state.local_scores == before
    mean = np.mean([found.after for found in before.values()])
    assert fed.history_[3]["after"] == pytest.approx(mean)


def failing(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no score today")


def test_a_metric_that_fails_costs_no_party_its_round() -> None:
    fed = made("FedAvg", metric=failing)
    plain = made("FedAvg")
    assert ran(fed, 2).hash() == ran(plain, 2).hash()
    assert not fed.rejections_ and not fed.state.local_scores


def test_what_parties_say_of_themselves_is_not_fed_back_to_tune() -> None:
    assert not {"before", "after"} & set(ran(made("FedAvg"), 1).state.feedback)


# ── coverage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgPlus", "Local"])
def test_coverage_counts_the_accepted_and_survives_a_stop(name: str, tmp_path: Path) -> None:
    fed = made(name, participation=2)
    counted = dict.fromkeys(fed.population, 0)
    for scored in fed.rounds(2):
        for party in scored.round.accepted:
            counted[party] += 1
    assert coverage(fed).rounds == counted
    fed.save(tmp_path / "run")
    again = made(name, participation=2).load(tmp_path / "run")
    assert coverage(again).rounds == counted
    assert again.state.local_scores == fed.state.local_scores
    assert coverage(ran(again, 3)).rounds == coverage(ran(made(name, participation=2), 5)).rounds


def test_a_refused_party_has_not_trained() -> None:
    def spoil(report: Reply) -> list[Reply]:
        if report.party == "1" and report.kind == "train":
            report = replace(report, arrays={n: a * math.nan for n, a in report.arrays.items()})
        return [report]

    fed = made("FedAvg", engine=partial(BytesEngine, tamper=spoil))
    with pytest.warns(match="rejected"):
        ran(fed, 2)
    assert coverage(fed).untrained == ("1",)
    assert "1 of 5 parties never trained and are evaluated with the global model." in fed.findings()


def test_who_never_trained_alone_is_judged_by_the_first_model() -> None:
    fed = ran(made("Local", participation=1), 1)
    found = fed.findings()
    assert f"\n- {found[0]}" in str(fed.table())
    assert found == ("4 of 5 parties never trained and are evaluated with the initial model.",)
    assert not any("never trained" in sentence for sentence in made("Local").findings())  # before the first round


# ── spikes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fixed:
    """A solver that puts every party where it is told, so that all is known by hand."""

    hyper = Hyper()
    metric = None
    examine = staticmethod(evaluate_test_sets)

    def __init__(self, places: dict[str, list[float]]) -> None:
        self.places = places

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: object, count: int
    ) -> dict[str, str]:
        return {"fixed": ""}

    def train(self, job: TrainJob) -> TrainResult:
        rows = torch.stack([torch.tensor(self.places[party.name]) for party in job.parties])
        memories: list[NamedTensors] = [{}] * len(rows)
        return TrainResult(rows, memories, [{"samples": 1.0, "loss": 0.0}] * len(rows))


def placed(algorithm: algorithms.Algorithm, **places: list[float]) -> Federation:  # type: ignore[name-defined]
    people = parties.from_arrays({name: ([[1.0, 0.0]], [1.0]) for name in places}, test=0)
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    return Federation(module, people, algorithm, solver=Fixed(places), loss=half_squared_error)  # type: ignore[arg-type]


def test_spikes_by_hand() -> None:
    """w = (±3, 0) and w̃ = 0: everybody is thrown by 3; with (3, 0) and (0, 4) by 2.5."""
    (entry,) = ran(placed(algorithms.FedAvg(), a=[3.0, 0.0], b=[-3.0, 0.0]), 1).history_
    assert (entry["jump"], entry["jump_sd"], entry["norm"]) == (3.0, 0.0, 0.0)
    (entry,) = ran(placed(algorithms.FedAvg(), a=[3.0, 0.0], b=[0.0, 4.0]), 1).history_
    assert (entry["jump"], entry["jump_sd"], entry["norm"]) == (2.5, 0.0, 2.5)
    mixed = algorithms.FedPlus(alpha=1.0, init_mix=0.5)
    (entry,) = ran(placed(mixed, a=[3.0, 0.0], b=[0.0, 0.0], c=[0.0, 0.0]), 1).history_  # w̃ = (1, 0)
    assert entry["jump"] == pytest.approx(0.5 * (2 + 1 + 1) / 3)
    assert entry["jump_sd"] == pytest.approx(0.5 * np.std([2, 1, 1]))


@pytest.mark.parametrize("name", ["Local", "FedAvgPlus", "FedGeoMedPlus", "FedCoMedPlus", "FedPlusV1"])
def test_who_keeps_its_own_model_is_never_thrown(name: str) -> None:
    fed = ran(made(name), 3)
    assert [entry["jump"] for entry in fed.history_] == [0.0, 0.0, 0.0]
    assert (analysis.spikes(fed).y == 0).all()


def test_a_common_model_throws_the_parties() -> None:
    assert all(entry["jump"] > 0 for entry in ran(made("FedAvg"), 3).history_)


# ── ρ, the pull, the majority ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "far"), [(algorithms.FedGeoMedPlus, 5.0), (algorithms.FedCoMedPlus, 4.0)], ids=["‖·‖₂", "‖·‖∞"]
)
def test_rho_never_binds_iff_nobody_is_farther(make: object, far: float) -> None:
    """a and b stand at ±(3, 4): the centre is 0, and they are 5 from it, or 4 in their largest number."""
    for rho, told in ((far + 0.01, True), (far - 0.01, False)):
        fed = ran(placed(make(alpha=100.0, rho=rho), a=[3.0, 4.0], b=[-3.0, -4.0]), 2)  # type: ignore[operator]
        assert fed.history_[-1]["max_distance"] == pytest.approx(far)
        assert any("never binds" in sentence for sentence in fed.findings()) is told


def test_rho_binds_a_newcomer_that_begins_far_from_the_centre() -> None:
    """The reports lie together at (9, 0), but who comes new begins at 0, which is 9 from the centre."""
    algorithm = algorithms.FedGeoMedPlus(alpha=100.0, rho=1.0)
    fed = ran(placed(algorithm, a=[9.0, 0.0], b=[9.0, 0.0]), 1)
    assert any("never binds" in sentence for sentence in fed.findings())
    late = placed(replace(algorithm, participation=Later()), a=[9.0, 0.0], b=[9.0, 0.0])
    ran(late, 2)
    assert late.history_[-1]["max_distance"] == pytest.approx(9.0)
    assert not any("never binds" in sentence for sentence in late.findings())


class Later:
    """First a, then b."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, attending: ParticipationContext) -> dict[str, Hyper]:
        self.calls += 1
        return {("a" if self.calls <= 2 else "b"): attending.hyper}  # the first call only counts who would come


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
def test_the_pull_of_a_round(algorithm: algorithms.Algorithm, share: float | None) -> None:  # type: ignore[name-defined]
    fed = Federation(network(), with_tests(), algorithm, lr=0.01, steps=20, batch=4)
    assert proximal_share_per_round(fed.plan_, 1) == (None if share is None else pytest.approx(share))


def test_a_weak_pull_is_told_and_epochs_count_as_steps() -> None:
    def found(alpha: float = 0.01, **work: int) -> str:
        fed = Federation(network(), with_tests(), algorithms.FedAvgPlus(alpha), solver=Sgd(lr=0.01, batch=4, **work))  # type: ignore[arg-type]
        return " ".join(ran(fed, 1).findings())

    assert "The proximal term of FedAvgPlus moves a party at most 0.2 % of the way to the global model per round: federation is "
        "nearly off" in found(steps=20)
    assert "0.12 % of the way" in found(epochs=2)  # the largest party has 22 samples: 6 batches an epoch
    assert "nearly off" not in found(alpha=0.1, steps=20)


def test_below_the_majority_is_told_once_scores_are_known() -> None:
    x = torch.zeros(20, 6)
    people = parties.from_arrays([(x, torch.tensor([0] * 16 + [1] * 4))] * 2)
    module = nn.Linear(6, 3)
    nn.init.constant_(module.bias, 0.0)
    with torch.no_grad():
        module.bias[2] = 50.0  # so sure of the third class that two steps do not help
    fed = ran(Federation(module, people, algorithms.FedAvg(), lr=0.01, steps=2), 1)
    assert not any("majority" in sentence for sentence in fed.findings())
    assert "FedAvg is below the majority baseline: 0.000 accuracy" in str(fed.table())
    ran(fed, 1)
    assert not any("majority" in sentence for sentence in fed.findings())  # scores of an earlier round do not count


# ── collapse ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("before", [5, 6, 7])
def test_a_change_that_is_not_finite_is_a_jump_and_no_warning(before: int) -> None:
    assert biggest_jump([1.0] * before + [math.inf] * 12) == (before, math.inf)
    assert biggest_jump([math.inf] * 12) is None and biggest_jump([1.0] * before + [math.nan] * 9) is None


@given(st.lists(st.floats(0.5, 1.5), min_size=6, max_size=40), st.floats(16.0, 1e6), st.data())
def test_a_jump_is_found_where_it_is_and_nowhere_else(changes: list[float], times: float, data: st.DataObject) -> None:
    assert biggest_jump(changes) is None
    place = data.draw(st.integers(5, len(changes) - 1))
    found = biggest_jump([*changes[:place], times, *changes[place + 1 :]])
    assert found is not None and found[0] == place and times / 1.5 <= found[1] <= times / 0.5


@given(st.lists(st.floats(-0.02, 0.02), min_size=20, max_size=40), st.integers(8, 16), st.sampled_from([1.0, -1.0]))
def test_a_lasting_fall_is_found_and_noise_is_not(noise: list[float], place: int, sign: float) -> None:
    learned = [min(0.9, 0.1 + 0.15 * i) + e for i, e in enumerate(noise)]
    assert lasting_drop([sign * value for value in learned], sign > 0) is None
    fallen = [*learned[:place], *(0.1 + e for e in noise[place:])]
    assert lasting_drop([sign * value for value in fallen], sign > 0) == place
    recovered = [*fallen[:-1], 0.9]
    assert lasting_drop([sign * value for value in recovered], sign > 0) is None


def test_a_fall_with_gaps_and_models_that_failed() -> None:
    assert lasting_drop([0.1, math.nan, 0.8, 0.9, -math.inf, -math.inf, -math.inf], True) == 4
    assert lasting_drop([0.1, 0.9, 0.2], True) is None  # too short to say that it stays
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
    """No step went down before, so that there is no usual step back to hold the fall against."""
    assert lasting_drop(drift, True) is None
    assert lasting_drop([5 * (1 - value) for value in drift], False) is None
    assert lasting_drop([1000 * value for value in [*drift, *[0.0] * 9]], True) is not None  # of another scale


def test_a_collapse_is_judged_by_those_who_trained() -> None:
    """Who never trained is judged by the centre: its fall is not that of what the parties have learned."""
    steady = {"loss": math.nan, "change": 1.0}
    falling = [0.2, 0.5, 0.8, 0.9, 0.1, 0.1, 0.1, 0.1]
    told = [{"round": at, "personal": own, "personal_trained": 0.9, **steady} for at, own in enumerate(falling, 1)]
    assert detect_collapse("FedAvgPlus", told) is None
    found = detect_collapse(
        "FedAvg", [{**entry, "personal_trained": own} for entry, own in zip(told, falling, strict=True)]
    )
    assert found is not None and found.round == 5
    people = parties.digits(count=6)
    fed = ran(Federation(lambda: nn.Linear(64, 10), people, algorithms.FedAvgPlus(), participation=2, lr=0.1), 1)
    for scored in fed.rounds(1):
        scored.scores  # noqa: B018
    trained = [name for name, count in coverage(fed).rounds.items() if count]
    assert 0 < len(trained) < 6
    own = dict(zip(fed.scores().names, fed.scores().personal.values, strict=True))
    assert fed.history_[-1]["personal_trained"] == pytest.approx(np.mean([own[name] for name in trained]))
    assert fed.history_[-1]["personal"] == pytest.approx(np.mean(list(own.values())))


def history(losses: list[float], changes: list[float]) -> list[dict[str, float]]:
    return [{"round": i + 1, "loss": a, "change": b} for i, (a, b) in enumerate(zip(losses, changes, strict=True))]


def test_collapse_in_a_sentence() -> None:
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
def test_a_desk_that_falls_behind_is_found_and_a_bad_season_is_not(days: list[float], place: int, size: float) -> None:
    """Rewards of a round are mostly its days; only beside training alone on the same days can a collapse be seen."""
    alone = size * np.array(days)
    rising = np.abs(alone) + size * 0.0001
    assert shortfall_start(alone, alone) is None and shortfall_start(0.8 * rising, rising) is None
    cash = np.where(np.arange(len(days)) < place, rising, 0.0)
    assert shortfall_start(cash, rising) == place
    assert shortfall_start([*cash[:-1], size], rising) is None  # it came back


def test_a_reward_far_below_one_is_no_share() -> None:
    """0.001 a day that is lost is all there was, though it is little for an accuracy."""
    earned = [0.0, 0.0002, 0.0006, 0.001, 0.001, 0.00001, 0.00001, 0.00001, 0.00001]
    found = detect_collapse(
        "FedAvg", [{"round": at, "reward": value, "steps": 1} for at, value in enumerate(earned, 1)]
    )
    assert found is not None and found.kind == "collapse" and found.round == 6


def test_a_study_marks_a_collapse_that_only_training_alone_can_tell() -> None:
    days = np.random.default_rng(0).normal(0.0005, 0.0008, 40)
    names = ("a", "b")
    scores = Scores(names, "annual return", *(ScoreColumn(np.ones(2)) for _ in range(5)))

    def result(method: str, earned: Numbers) -> StudyResult:
        still = {name: np.zeros(40) for name in ("loss", "change", "norm", "jump", "jump_sd")}
        series = {"round": np.arange(1.0, 41), "reward": earned, "steps": np.full(40, 50.0), **still}
        return StudyResult(
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


def test_a_run_that_breaks_down_is_found_out() -> None:
    """The learning rate is a hundred times too large from round 9 on."""

    def tune(tuning: TuneContext) -> TuneResult:
        return TuneResult(replace(tuning.hyper, lr=100.0) if tuning.round >= 9 else tuning.hyper, tuning.tuner_state)

    people = parties.digits(count=3, seed=0)
    algorithm = replace(algorithms.FedAvg(), tune=tune)
    fed = ran(Federation(lambda: nn.Linear(64, 10), people, algorithm, lr=0.2, steps=10, batch=10), 14)
    (sentence,) = fed.findings()
    assert "jumped" in sentence and "at round 9" in sentence and "collapse" in sentence


# ── the walk ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", METHODS)
def test_the_walk_shows_the_next_round_and_leaves_no_trace(name: str) -> None:
    """λ=0 is the own model after the local work, λ=1 the new centre, dotted the centre of the round before."""
    fed = ran(made(name, participation=3), 2)
    before = fed.hash()
    history = list(fed.history_)
    scores = fed.scores()
    walked = interpolate(fed, points=3)
    assert fed.hash() == before and fed.history_ == history and fed.state.round == 2
    next(iter(fed.rounds(1)))
    undisturbed = ran(made(name, participation=3), 3)
    assert fed.hash() == undisturbed.hash()
    at = [fed.population.names.index(party) for party in walked.names]
    now = undisturbed.scores()
    np.testing.assert_array_equal(walked.scores[:, -1], now.global_model.values[at])
    if METHODS[name]().personal_model is None:  # else the own model is off the line
        np.testing.assert_array_equal(walked.scores[:, 0], now.after.values[at])
    if not METHODS[name]().private_layers:  # there the parties' own layers have moved on
        np.testing.assert_array_equal(walked.previous, scores.global_model.values[at])


def test_a_walk_by_hand() -> None:
    """From (±3, 0) to 0 with half the squared error against 1: ½(±3(1-λ) - 1)²."""
    fed = placed(algorithms.FedAvg(), a=[3.0, 0.0], b=[-3.0, 0.0])
    test = {name: ([[1.0, 0.0]], [1.0], [[1.0, 0.0]], [1.0]) for name in ("a", "b")}
    fed.population = parties.from_arrays(test)
    walked = interpolate(fed, points=4)
    np.testing.assert_allclose(walked.scores, [[2.0, 0.5, 0.0, 0.5], [8.0, 4.5, 2.0, 0.5]], atol=1e-5)
    np.testing.assert_allclose(walked.mean, [5.0, 2.5, 1.0, 0.5], atol=1e-5)
    assert walked.mean_previous == 0.5 and not walked.higher_is_better


def test_a_walk_with_some_and_bad_walks() -> None:
    fed = ran(made("FedAvg"), 1)
    assert interpolate(fed, points=2, max_parties=3).names == ("0", "2", "4")
    with pytest.raises(SettingError, match="at least 2 points"):
        interpolate(fed, points=1)
    deaf = made("FedAvg", engine=partial(BytesEngine, tamper=lambda report: []))
    deaf_hash = deaf.hash()
    with pytest.raises(DescantError, match="no report was accepted"):
        interpolate(deaf)
    assert deaf.hash() == deaf_hash


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["spikes", "collapse", "interpolation"])
def test_a_federation_draws_its_instruments(kind: str, tmp_path: Path) -> None:
    from matplotlib.image import imread

    file = ran(made("FedAvg"), 4).plot(kind, tmp_path / "deep" / "it.png")
    image = imread(file)[..., :3]
    blue = np.abs(image - np.array([0, 0x72, 0xB2]) / 255).max(-1) < 0.02
    assert blue.sum() > 200


def test_an_unknown_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DescantError, match=r"no picture of a federation 'spike'\. Did you mean 'spikes'"):
        made("FedAvg").plot("spike", tmp_path / "it.png")


def test_a_nan_loss_is_nan_after_loading(tmp_path: Path) -> None:
    fed = ran(Federation(network(), with_tests(), algorithms.FedAvg(), lr=0.1, steps=0), 1)
    assert math.isnan(fed.history_[0]["loss"])
    fed.save(tmp_path / "run")
    again = Federation(network(), with_tests(), algorithms.FedAvg(), lr=0.1, steps=0).load(tmp_path / "run")
    assert math.isnan(again.history_[0]["loss"]) and again.history_[0].keys() == fed.history_[0].keys()
