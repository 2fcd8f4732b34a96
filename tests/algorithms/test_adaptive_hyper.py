"""Adaptive hyper-parameters: the laws of the distribution, of eq. (7) and of the guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytes_engine import BytesEngine
from descant import DescantWarning, Federation, algorithms, parties
from descant.algorithms.adaptive_hyper.discrete_gaussian import (
    GridAxis,
    Numbers,
    cholesky_factor,
    clip_psi,
    draw_point,
    grid_points,
    grid_spacing,
    initial_psi,
    log_probabilities,
    scale_precision,
    score,
)
from descant.algorithms.adaptive_hyper.reinforce import ReinforceTuner, reinforce_gradient
from descant.analysis import Finding
from descant.core.algorithm import Hyper, TuneContext, TuneResult
from descant.core.messages import Reply
from descant.errors import SettingError
from descant.parties import Population
from toy_problems import classification_parties, network

NUMBERS = st.integers(1, 10**6).map(lambda number: number / 10**4)
GRID_VALUES = st.lists(NUMBERS, min_size=2, max_size=6, unique=True).map(sorted).map(tuple)
AXES = st.lists(st.builds(GridAxis, st.just("lr"), GRID_VALUES, st.booleans()), min_size=1, max_size=3)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[Numbers, list[GridAxis]]:
    """Draw axes and any valid ψ on them."""
    axes = draw(AXES)
    count = 2 * len(axes) + len(axes) * (len(axes) - 1) // 2
    numbers = draw(st.lists(st.floats(-3, 3), min_size=count, max_size=count))
    return clip_psi(np.array(numbers), grid_spacing(axes)), axes


@given(distributions())
def test_distribution_sums_to_one_and_precision_is_positive_definite(
    found: tuple[Numbers, list[GridAxis]],
) -> None:
    psi, axes = found
    points = grid_points(axes)
    assert len(points) == math.prod(len(axis.values) for axis in axes)
    assert abs(points).max() <= 0.5 + 1e-12
    assert np.exp(log_probabilities(psi, points)).sum() == pytest.approx(1, abs=1e-12)
    factor = cholesky_factor(psi, len(axes))
    assert np.linalg.eigvalsh(factor @ factor.T).min() > 0


@given(distributions())
def test_distribution_is_proportional_to_the_gaussian_density(found: tuple[Numbers, list[GridAxis]]) -> None:
    psi, axes = found
    points = grid_points(axes)
    factor = cholesky_factor(psi, len(axes))
    offset = points - psi[: len(axes)]
    exponents = -0.5 * np.einsum("pi,ij,pj->p", offset, factor @ factor.T, offset)
    difference = log_probabilities(psi, points) - exponents
    np.testing.assert_allclose(difference, difference[0], atol=1e-9)


@given(distributions())
def test_score_has_zero_mean(found: tuple[Numbers, list[GridAxis]]) -> None:
    """Its mean under the distribution itself is 0, so the baselines in eq. (6) and eq. (7) add no bias."""
    psi, axes = found
    points = grid_points(axes)
    scores = np.stack([score(psi, points, at) for at in range(len(points))])
    np.testing.assert_allclose(np.exp(log_probabilities(psi, points)) @ scores, 0, atol=1e-9 * (1 + abs(scores).max()))


@given(distributions(), st.integers(0, 10**6))
def test_score_agrees_with_finite_differences(found: tuple[Numbers, list[GridAxis]], position: int) -> None:
    psi, axes = found
    points = grid_points(axes)
    step = 1e-6
    at = position % len(points)
    for i, slope in enumerate(score(psi, points, at)):
        perturbation = np.zeros(len(psi))
        perturbation[i] = step
        there, here = (log_probabilities(psi + sign * perturbation, points)[at] for sign in (1, -1))
        assert slope == pytest.approx((there - here) / (2 * step), rel=1e-6, abs=1e-6)


@given(AXES, st.data())
def test_clipping_keeps_the_mean_on_the_grid_and_the_precision_in_bounds(
    axes: list[GridAxis], data: st.DataObject
) -> None:
    """The precision is at least 1 (draws from the whole grid); the deviation is at least half the grid spacing."""
    size = len(axes)
    spacing = grid_spacing(axes)
    count = 2 * size + size * (size - 1) // 2
    psi = np.array(data.draw(st.lists(st.floats(-1e9, 1e9), min_size=count, max_size=count)))
    kept = clip_psi(psi, spacing)
    mean, logs, rest = np.split(kept, [size, 2 * size])
    assert (abs(mean) <= 0.5).all() and (logs >= 0).all() and (np.exp(logs) <= (1 + 1e-12) * 2 / spacing).all()
    assert (abs(rest) <= 2 / spacing.min()).all()
    np.testing.assert_array_equal(clip_psi(kept, spacing), kept)  # values in bounds keep every bit


@given(distributions(), st.floats(1.5, 10))
def test_scale_precision_multiplies_the_whole_matrix(found: tuple[Numbers, list[GridAxis]], times: float) -> None:
    psi, axes = found
    size = len(axes)
    before, after = (
        factor @ factor.T for factor in (cholesky_factor(one, size) for one in (psi, scale_precision(psi, size, times)))
    )
    np.testing.assert_allclose(after, times * before, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(scale_precision(psi, size, times)[:size], psi[:size])


def test_draws_follow_the_distribution() -> None:
    axes = (GridAxis("lr", (0.01, 0.1, 1.0), log=True), GridAxis("work", (1.0, 5.0)))
    psi = initial_psi(2, 4.0) + 0.2
    points = grid_points(axes)
    rng = np.random.default_rng(0)
    counts = np.bincount([draw_point(psi, points, rng) for _ in range(4000)], minlength=len(points))
    np.testing.assert_allclose(counts / 4000, np.exp(log_probabilities(psi, points)), atol=0.03)


def test_grid_axis_has_mid_range_zero_and_inverts_its_positions() -> None:
    """ERRATA 3: an uneven grid cannot have mean 0 and fill [-0.5, 0.5]."""
    even = GridAxis("lr", (0.001, 0.01, 0.1), log=True)
    uneven = GridAxis("work", (1, 2, 5))
    np.testing.assert_allclose(even.positions, [-0.5, 0, 0.5], atol=1e-12)
    np.testing.assert_allclose(uneven.positions, [-0.5, -0.25, 0.5])
    for axis in (even, uneven):
        assert [axis.value_at(position) for position in axis.positions] == pytest.approx(list(axis.values))


def tuned(
    tuner: ReinforceTuner, feedback: dict[str, float], before: TuneResult | None = None, round: int = 1
) -> TuneResult:
    memory = {} if before is None else before.tuner_state
    return tuner(
        TuneContext(
            round,
            Hyper(),
            memory,
            feedback=feedback,
            global_model=torch.full((3,), float(round)),
            rng=np.random.default_rng(round),
        )
    )


def make_tuner(**settings: object) -> ReinforceTuner:
    algorithm = algorithms.AdaptiveHyper(**settings).tune  # type: ignore[arg-type]
    assert isinstance(algorithm, ReinforceTuner)
    return algorithm


def simulate_rounds(
    tuner: ReinforceTuner, loss_after: Callable[[int, Hyper, float], float], rounds: int
) -> list[TuneResult]:
    """Run the tuner on a simulated loss, computed from the round, its hyper-parameters and the last loss."""
    loss = 1.0
    found = []
    for round in range(1, rounds + 1):
        found.append(tuned(tuner, {"validation": loss}, found[-1] if found else None, round))
        start = loss if found[-1].global_model is None else found[-1].tuner_state["numbers"][2].item()
        loss = loss_after(round, found[-1].hyper, start)
    return found


@pytest.mark.parametrize(("weighting", "rate"), [("uniform", 0.01), ("triangular", 0.05)])
@pytest.mark.parametrize("goals", [((0.3, -0.3), (-0.3, 0.1)), ((-0.4, 0.4), (0.0, 0.0))])
def test_mean_moves_to_the_best_point_and_follows_it(
    goals: tuple[Sequence[float], ...], weighting: str, rate: float
) -> None:
    tuner = make_tuner(weighting=weighting, step_size=rate)
    positions = [dict(zip(axis.values, axis.positions, strict=True)) for axis in tuner.axes]
    noise = np.random.default_rng(7).normal(0, 0.01, 1000)

    def loss_after(round: int, hyper: Hyper, loss: float) -> float:
        position = np.array([positions[0][hyper.lr], positions[1][hyper.work]])
        offset = ((position - np.array(goals[round > 300])) ** 2).sum()
        return loss * (1 - 0.1 * math.exp(-offset / 0.125) + noise[round])

    found = simulate_rounds(tuner, loss_after, 600)
    for goal, end in zip(goals, (300, 600), strict=True):
        means = np.array([one.tuner_state["psi"][:2].numpy() for one in found[end - 30 : end]])
        np.testing.assert_allclose(means.mean(0), goal, atol=0.13)


def test_equation_7_by_hand() -> None:
    """Sum over the window with its mean as the baseline, each score at its own ψ, and ascent (ERRATA 1, 2)."""
    tuner = make_tuner(window=2, collapse_factor=None)
    losses = [4.0, 3.0, 2.9, 1.0, 0.9]
    found: list[TuneResult] = []
    scores = []
    rewards = []
    psi = initial_psi(2, 85.0)
    for round, loss in enumerate(losses, 1):
        found.append(tuned(tuner, {"validation": loss}, found[-1] if found else None, round))
        if round > 1:
            rewards.append((losses[round - 2] - loss) / losses[round - 2])
            window = np.array(rewards[-3:])
            step = sum((r - window.mean()) * s for r, s in zip(window, scores[-3:], strict=True))
            psi = clip_psi(psi + 0.01 * step, grid_spacing(tuner.axes))
            assert found[-1].metrics["reward"] == rewards[-1]
        np.testing.assert_allclose(found[-1].tuner_state["psi"].numpy(), psi, rtol=1e-12, atol=1e-15)
        positions = [
            axis.values.index(value) for axis, value in zip(tuner.axes, vars(found[-1].hyper).values(), strict=True)
        ]
        at = int(np.ravel_multi_index(positions, [len(axis.values) for axis in tuner.axes]))
        scores.append(score(psi, grid_points(tuner.axes), at))
    assert torch.equal(found[0].tuner_state["psi"], found[1].tuner_state["psi"])  # no update at t=1


def test_equation_6_with_past_rewards_weights_recent_ones_more() -> None:
    """γ_Z = 2/(Z(Z+1)) for the causal window (ERRATA 2); each score counts once."""
    scores = np.array([[7.0], [8.0], [9.0], [1.0]])
    rewards = np.array([0.1, 0.2, 0.3, 0.9])
    baseline = 2 / (3 * 4) * (1 * 0.1 + 2 * 0.2 + 3 * 0.3)
    np.testing.assert_allclose(reinforce_gradient(scores, rewards, "triangular"), [0.9 - baseline])
    assert reinforce_gradient(scores[:1], rewards[:1], "triangular") == 0


def test_client_losses_arrive_a_round_late_and_reward_their_own_draw() -> None:
    """L_t is the loss measured in round t: before round t+1 it rewards the draw of round t-1."""
    tuner = make_tuner(reward="clients", window=2)
    losses = [2.0, 1.5, 1.4, 0.7, 0.6]  # L_1 ...
    before: TuneResult | None = None
    drawn: list[Numbers] = []
    for round in range(1, 6):
        before = tuned(tuner, {} if round == 1 else {"received_loss": losses[round - 2]}, before, round)
        drawn.append(before.tuner_state["pending_scores"][-1].numpy())
        if round > 2:
            earlier, later = losses[round - 3 : round - 1]
            assert before.metrics["reward"] == (earlier - later) / earlier
            np.testing.assert_array_equal(before.tuner_state["scores"][-1].numpy(), drawn[round - 3])
        else:
            assert "reward" not in before.metrics


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, 0.0])
def test_unknown_reward_changes_nothing(bad: float | None) -> None:
    """Neither the round of the bad loss nor the next one, which would divide by it, changes ψ."""
    clients = bad is None
    tuner = make_tuner(reward="clients" if clients else "validation", collapse_factor=None)
    name = "received_loss" if clients else "validation"
    before: TuneResult | None = None
    for round, loss in enumerate((2.0, 1.5, 1.4, 1.2), 1):
        before = tuned(tuner, {name: loss}, before, round)
    assert before is not None
    at = before.tuner_state["psi"]
    moved = []
    for round, feedback in enumerate(({} if clients else {name: bad}, {name: 1.1}, {name: 1.0}, {name: 0.5}), 5):
        before = tuned(tuner, feedback, before, round)  # type: ignore[arg-type]
        moved.append(not torch.equal(before.tuner_state["psi"], at))
        assert before.tuner_state["psi"].isfinite().all()
    assert moved == [
        bad == 0.0,
        bad == 0.0,
        True,
        True,
    ]  # a loss of 0 is the best possible; the next reward is unknown


@pytest.mark.parametrize(("reward", "late"), [("validation", 0), ("clients", 1)])
def test_round_without_a_usable_model_gets_the_lowest_reward(reward: str, late: int) -> None:
    """Its loss did not change and carries no information. An earlier draw still waits for its own late reward."""
    name = "received_loss" if late else "validation"
    before = None
    for round, loss in enumerate((2.0, 1.5, 1.4), 1):
        before = tuned(make_tuner(reward=reward), {name: loss}, before, round)
    assert before is not None and len(before.tuner_state["pending_scores"]) == 1 + late
    feedback = {"used": 0.0} | ({} if late else {name: 1.4})
    free, after = (
        tuned(make_tuner(reward=reward, collapse_factor=guard), feedback, before, 4) for guard in (None, 1.5)
    )
    assert after.metrics["reward"] == after.tuner_state["rewards"][-1] == -1
    assert torch.equal(after.tuner_state["scores"][-1], before.tuner_state["pending_scores"][-1])
    assert torch.equal(after.tuner_state["pending_scores"][:-1], before.tuner_state["pending_scores"][:-1])
    assert free.metrics.get("reward") == (None if late else 0)  # the paper's own scheme has no such rule
    again = tuned(make_tuner(reward=reward), {name: 1.2}, after, 5)
    assert again.metrics["reward"] == pytest.approx((1.4 - 1.2) / 1.4)


def test_draws_that_make_all_parties_diverge_become_rare() -> None:
    algorithm = algorithms.AdaptiveHyper(
        algorithms.RepresentationMatching(), lr=(0.05, 0.1, 1e30), work=None, step_size=0.05
    )
    fed = Federation(network(), population_with_validation(), algorithm, lr=0.1, steps=3, batch=4, seed=2)
    with pytest.warns(DescantWarning, match="no reply was accepted"):
        fed.fit(40, progress=False)
    diverging = [entry["lr"] > 1 for entry in fed.history_]
    after = [later["reward"] for entry, later in pairwise(fed.history_) if entry["lr"] > 1]
    assert 1 <= sum(diverging) < 8 and after == [-1.0] * len(after)
    assert fed.history_[-1]["lr_mean"] < 0.1


def test_noise_in_first_and_low_losses_is_not_a_collapse() -> None:
    rng = np.random.default_rng(0)
    for losses in (math.log(10) * rng.uniform(0.9, 1.3, 50), np.r_[2.3, 1.0, 0.05 * rng.uniform(0.5, 3, 50)]):
        before: TuneResult | None = None
        for round, loss in enumerate(losses, 1):
            before = tuned(make_tuner(), {"validation": loss}, before, round)
            assert before.global_model is None and not before.note


@pytest.mark.parametrize("bad", [math.nan, math.inf, 50.0])
def test_collapse_rolls_back_narrows_and_moves_away(bad: float) -> None:
    tuner = make_tuner()
    before = None
    for round, loss in enumerate((2.0, 1.5, 0.5, 0.6, bad), 1):
        before = tuned(tuner, {"validation": loss}, before, round)
        if loss == 0.5:
            there = before.tuner_state["psi"].numpy()
    assert before is not None and before.global_model is not None
    assert torch.equal(before.global_model, torch.full((3,), 3.0))  # the start of round 3
    assert before.metrics["rolled_back"] == 2 and before.note.startswith("it collapsed at round 4 (a loss of")
    assert "rolled back to round 2; it now draws lr around 0.00" in before.note
    psi = before.tuner_state["psi"].numpy()
    narrower = np.minimum(4 * 85, (2 / grid_spacing(tuner.axes)) ** 2)
    np.testing.assert_allclose(np.exp(2 * psi[2:4]), narrower, rtol=0.5)
    assert (psi[:2] < there[:2]).all()
    after = tuned(tuner, {"validation": 0.4}, before, 6)
    assert after.metrics["reward"] == pytest.approx((0.5 - 0.4) / 0.5)  # relative to the loss of the restored model


def test_collapsed_draw_gets_the_lowest_reward() -> None:
    """The restored ψ takes one step of eq. (7) with the collapsed draw, becomes narrower and moves a step down."""
    tuner = make_tuner()
    before = None
    for round, loss in enumerate((2.0, 1.5, 0.5, 0.6), 1):
        before = tuned(tuner, {"validation": loss}, before, round)
    assert before is not None
    held = {name: tensor.numpy() for name, tensor in before.tuner_state.items()}
    scores = np.vstack([held["scores"], held["pending_scores"]])
    rewards = np.append(held["rewards"], -1.0)
    psi = held["lowest_loss_psi"] + 0.01 * (rewards - rewards.mean()) @ scores
    psi = np.concatenate([psi[:2] - grid_spacing(tuner.axes), psi[2:4] + math.log(4) / 2, 2 * psi[4:]])
    after = tuned(tuner, {"validation": 50.0}, before, 5)
    np.testing.assert_allclose(after.tuner_state["psi"].numpy(), clip_psi(psi, grid_spacing(tuner.axes)), rtol=1e-12)


def test_guard_bounds_the_reward_of_a_single_bad_loss() -> None:
    for guard, least in ((1.5, -1.0), (None, -2.0)):
        tuner = make_tuner(collapse_factor=guard)
        before = None
        for round, loss in enumerate((2.0, 0.05, 0.15), 1):
            before = tuned(tuner, {"validation": loss}, before, round)
        assert before is not None and before.global_model is None
        assert before.metrics["reward"] == pytest.approx(-2.0)
        assert before.tuner_state["rewards"][-1].item() == pytest.approx(least)


def test_no_point_is_retried_forever() -> None:
    """If every learning rate above 0.004 destroys the model, the mean decreases until training is stable."""
    tuner = make_tuner(work=None)

    def loss_after(round: int, hyper: Hyper, loss: float) -> float:
        return 50.0 if hyper.lr > 0.004 else loss * 0.97

    found = simulate_rounds(tuner, loss_after, 120)
    rollback_rounds = [round for round, one in enumerate(found) if one.global_model is not None]
    means = [found[at].metrics["lr_mean"] for at in rollback_rounds]
    assert 2 <= len(rollback_rounds) < 40 and means[-1] < means[0] < 0.01
    assert sum(one.hyper.lr <= 0.004 for one in found[60:]) > 40
    diverging = simulate_rounds(tuner, lambda round, hyper, loss: 1.0 if round < 3 else math.nan, 30)
    assert diverging[-1].metrics["lr_mean"] == pytest.approx(0.001)  # the lower end of the grid


def population_with_validation(count: int = 5) -> Population:
    """Return small parties and a validation set that represents them."""
    population = classification_parties(count)
    x, y = (torch.cat([getattr(party, part) for party in population.values()]) for part in "xy")
    return population.with_validation(x[::2], y[::2])


def adaptive_federation(reward: str = "validation", **settings: object) -> Federation:
    settings_of_tuner = {"collapse_factor": settings.pop("collapse_factor", 1.5), "reward": reward, "loss_samples": 100}
    algorithm = algorithms.AdaptiveHyper(lr=(0.05, 0.1, 0.2), work=(2, 4, 8), **settings_of_tuner)  # type: ignore[arg-type]
    population = population_with_validation() if reward == "validation" else classification_parties(5)
    return Federation(network(), population, algorithm, lr=0.1, steps=3, batch=4, seed=2, **settings)  # type: ignore[arg-type]


def inflate_updates(report: Reply, in_rounds: Sequence[int] = (6,)) -> Sequence[Reply]:
    """Let all parties send very large models in some rounds."""
    if report.kind != "train" or report.round not in in_rounds:
        return [report]
    return [replace(report, arrays={name: 300 * tensor for name, tensor in report.arrays.items()})]


@pytest.mark.parametrize(("reward", "detected_round"), [("validation", 7), ("clients", 8)])
def test_an_injected_collapse_is_rolled_back_and_reported(reward: str, detected_round: int) -> None:
    fed = adaptive_federation(reward, engine=partial(BytesEngine, tamper=inflate_updates))
    name = "validation" if reward == "validation" else "received_loss"
    with pytest.warns(
        DescantWarning, match=rf"Round {detected_round}: it collapsed at round 6 .* rolled back to round 5"
    ):
        rounds = list(fed.rounds(16))
    before = fed.history_[detected_round - 2]
    assert before[name] > 3 * fed.history_[4][name]
    assert fed.history_[detected_round - 1]["rolled_back"] == 5 and rounds[detected_round - 1].round.tuner_note
    assert [bool(entry.get("tuner_note")) for entry in fed.history_].count(True) == 1
    assert fed.history_[-1][name] < fed.history_[4][name]  # training continues
    (finding,) = (text for text in fed.findings() if "rolled back" in text)
    assert finding.startswith("FedAvg+AH: it collapsed at round 6")


def test_round_after_a_collapse_starts_at_the_lowest_loss() -> None:
    received: dict[int, torch.Tensor] = {}

    class Watching(BytesEngine):
        def submit(self, tasks: Sequence[object]) -> None:
            received[tasks[0].round] = tasks[0].arrays["global_model"]  # type: ignore[attr-defined]
            super().submit(tasks)  # type: ignore[arg-type]

    fed = adaptive_federation(engine=partial(Watching, tamper=inflate_updates))
    with pytest.warns(DescantWarning, match="collapsed"):
        global_models = [one.round.state.global_model for one in fed.rounds(7)]
    assert torch.equal(received[7], global_models[4]) and torch.equal(received[6], global_models[4])
    assert not torch.equal(global_models[6], global_models[4])


def test_without_a_guard_nothing_is_rolled_back() -> None:
    fed = adaptive_federation(engine=partial(BytesEngine, tamper=inflate_updates), collapse_factor=None).fit(
        9, progress=False
    )
    assert not any("rolled_back" in entry for entry in fed.history_)
    assert "lowest_loss_model" not in fed.state.server_state["tune"]


def test_easy_clients_do_not_set_the_lowest_loss() -> None:
    """With other clients in every round, the running mean detects a lasting or a very large increase."""
    tuner = make_tuner(reward="clients")
    before = None
    rollback_rounds = []
    easy_and_hard = [2.3, *(0.4 if round % 3 else 2.2 for round in range(1, 30))]
    for round, loss in enumerate(easy_and_hard, 2):
        before = tuned(tuner, {"received_loss": loss}, before, round)
        assert before.global_model is None
    last = round
    for bad, soon in ((2.3, 4), (1e6, 1)):
        lost = before
        for round in range(last + 1, last + 8):
            lost = tuned(tuner, {"received_loss": bad}, lost, round)
            if lost.global_model is not None:
                rollback_rounds.append(round - last)
                break
        assert rollback_rounds[-1] <= soon and "a mean loss of" in lost.note


def test_first_loss_after_a_rollback_is_that_of_the_restored_model() -> None:
    """Party state was reset, so the loss may be higher than before: that is not a second collapse."""
    tuner = make_tuner(reward="clients")
    before = None
    for round, loss in enumerate((2.3, 1.0, 0.6, 0.5, 40.0), 2):
        before = tuned(tuner, {"received_loss": loss}, before, round)
    assert before is not None and before.global_model is not None
    for round, loss in enumerate((1.6, 1.5, 1.4), 7):
        before = tuned(tuner, {"received_loss": loss}, before, round)
        assert before.global_model is None
    assert tuned(tuner, {"received_loss": 40.0}, before, 10).global_model is not None


def test_small_samples_of_different_clients_are_not_a_collapse() -> None:
    population = parties.digits(count=10, split="dirichlet", alpha=0.05, seed=1)
    algorithm = algorithms.AdaptiveHyper(reward="clients", lr=(0.01, 0.03, 0.1, 0.3), work=(5, 10, 20))
    fed = Federation(
        partial(torch.nn.Linear, 64, 10), population, algorithm, steps=10, batch=10, participation=2, seed=1
    )
    fed.fit(60, progress=False)
    assert not any("rolled_back" in entry for entry in fed.history_)


def test_silent_clients_cause_one_rollback() -> None:
    tuner = make_tuner(reward="clients")
    before = None
    rollback_rounds = []
    for round in range(1, 15):
        feedback = {} if round == 1 or round >= 6 else {"received_loss": 2.0 - 0.1 * round}
        before = tuned(tuner, feedback, before, round)
        rollback_rounds += [round] if before.global_model is not None else []
    assert rollback_rounds == [8]


def test_equal_seeds_repeat_a_run_and_other_seeds_do_not() -> None:
    here, there = (adaptive_federation().fit(5, progress=False) for _ in range(2))
    assert here.hash() == there.hash()
    drawn = [(entry["lr"], entry["work"]) for entry in here.history_]
    assert len(set(drawn)) > 1
    other = Federation(network(), population_with_validation(), here.algorithm, lr=0.1, steps=3, batch=4, seed=3).fit(
        5, progress=False
    )
    assert [(entry["lr"], entry["work"]) for entry in other.history_] != drawn


@pytest.mark.parametrize("reward", ["validation", "clients"])
@pytest.mark.parametrize("stop", [1, 4, 6, 7])
def test_resumed_run_equals_an_uninterrupted_one(reward: str, stop: int, tmp_path: Path) -> None:
    """Resume before, at and after a collapse, with the tuner's state and the stored global model."""
    engine = partial(BytesEngine, tamper=inflate_updates)
    with pytest.warns(DescantWarning, match="collapsed"):
        whole = adaptive_federation(reward, engine=engine).fit(10, progress=False)
        again = adaptive_federation(reward, engine=engine).fit(stop, progress=False)
        again.save(tmp_path / "run")
        again = adaptive_federation(reward, engine=engine).load(tmp_path / "run").fit(10 - stop, progress=False)
    assert again.hash() == whole.hash()
    assert [entry["lr_mean"] for entry in again.history_] == [entry["lr_mean"] for entry in whole.history_]


def test_findings_count_the_rollbacks(tmp_path: Path) -> None:
    from descant.analysis.findings import rollback_finding

    fed = adaptive_federation(engine=partial(BytesEngine, tamper=partial(inflate_updates, in_rounds=(6, 9))))
    with pytest.warns(DescantWarning, match="collapsed"):
        fed.fit(12, progress=False)
    found = rollback_finding("X", fed.history_)
    assert isinstance(found, Finding) and found.round == 7 and found.text.startswith("X rolled back 2 times; the last")
    assert fed.plot("hyperparameters", tmp_path / "hyper.png").stat().st_size > 10_000
    plain = Federation(network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=1).fit(
        1, progress=False
    )
    assert rollback_finding("X", plain.history_) is None
    with pytest.raises(SettingError, match="FedAvg was not tuned in any round"):
        plain.plot("hyperparameters", tmp_path / "none.png")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": (0.1,)}, "The grid 'lr' of AdaptiveHyper must be two or more rising numbers > 0, or None"),
        ({"lr": (0.01, math.nextafter(0.01, 1))}, "The grid 'lr' of AdaptiveHyper must be two or more rising numbers"),
        ({"work": (True, 2)}, "The 'work' of AdaptiveHyper must be a whole number >= 1. Got True"),
        ({"lr": (0.1, True)}, "The 'lr' of AdaptiveHyper must be > 0. Got True"),
        ({"lr": 0.1}, "The grid 'lr' of AdaptiveHyper must be two or more rising numbers > 0, or None.* Got 0.1"),
        ({"work": "5, 10"}, "The grid 'work' of AdaptiveHyper must be two or more rising.* Got '5, 10'"),
        ({"log_axes": "lr"}, "AdaptiveHyper tunes 'lr', 'work' or both"),
        (
            {"reward": "clients", "loss_samples": 0},
            "The 'loss_samples' of AdaptiveHyper must be a whole number >= 1. Got 0",
        ),
        (
            {"reward": "clients", "loss_samples": None},
            "The 'loss_samples' of AdaptiveHyper must be a whole number >= 1. Got None",
        ),
        ({"window": None}, "The 'window' of AdaptiveHyper must be a whole number >= 1. Got None"),
        ({"step_size": None}, "The 'step_size' of AdaptiveHyper must be > 0. Got None"),
        ({"work": (4, 2)}, "The grid 'work' of AdaptiveHyper must be two or more rising"),
        ({"lr": (0.0, 0.1)}, "The 'lr' of AdaptiveHyper must be > 0"),
        ({"work": (1.5, 2.0)}, "The 'work' of AdaptiveHyper must be a whole number"),
        ({"lr": None, "work": None}, "AdaptiveHyper tunes 'lr', 'work' or both"),
        ({"log_axes": ("rate",)}, "AdaptiveHyper tunes 'lr', 'work' or both"),
        ({"reward": "test"}, "The 'reward' of AdaptiveHyper must be one of 'validation', 'clients'"),
        ({"window": 0}, "The 'window' of AdaptiveHyper must be a whole number >= 1"),
        ({"collapse_factor": 0.5}, "The 'collapse_factor' of AdaptiveHyper must be >= 1"),
        ({"base": algorithms.L2GD()}, "AdaptiveHyper cannot tune L2GD, which is tuned already"),
        ({"base": algorithms.Local()}, "AdaptiveHyper cannot tune Local, which has no global model"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        algorithms.AdaptiveHyper(**settings)  # type: ignore[arg-type]


def test_missing_validation_set_is_an_error_before_training() -> None:
    fed = Federation(network(), classification_parties(5), algorithms.AdaptiveHyper(), lr=0.1, steps=1)
    with pytest.raises(SettingError, match="needs the server's own validation set"):
        fed.state  # noqa: B018


def test_one_hyper_parameter_can_stay_untuned() -> None:
    algorithm = algorithms.AdaptiveHyper(lr=(0.05, 0.1), work=None)
    fed = Federation(network(), population_with_validation(), algorithm, lr=0.3, steps=3, batch=4).fit(
        4, progress=False
    )
    assert {entry["work"] for entry in fed.history_} == {3} and {entry["lr"] for entry in fed.history_} <= {0.05, 0.1}
    assert "work_mean" not in fed.history_[-1]


def test_adaptive_hyper_wraps_methods_with_personal_models() -> None:
    algorithm = algorithms.AdaptiveHyper(algorithms.FedAvgPlus(alpha=1.0), lr=(0.05, 0.1), work=(1, 2))
    assert algorithm.name == "FedAvgPlus+AH"
    fed = Federation(network(), population_with_validation(), algorithm, lr=0.3, steps=3, batch=4).fit(
        3, progress=False
    )
    assert len(fed.state.personal_models.names()) == 5


def test_decay_schedule_by_hand() -> None:
    algorithm = algorithms.DecaySchedule(lr_factor=0.5, work_factor=0.5, interval=2, min_lr=0.02, min_work=3)
    assert algorithm.name == "FedAvg"
    fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=10, batch=4).fit(7, progress=False)
    assert [entry["lr"] for entry in fed.history_] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.02]
    assert [entry["work"] for entry in fed.history_] == [10, 10, 5, 5, 3, 3, 3]
    low = algorithms.DecaySchedule(min_lr=1.0, min_work=50).tune
    assert low(
        TuneContext(9, Hyper(0.1, 5), {}, feedback={}, global_model=torch.zeros(1), rng=np.random.default_rng(0))
    ).hyper == Hyper(0.1, 5)
    with pytest.raises(SettingError, match="The 'lr_factor' of DecaySchedule must be > 0 and <= 1"):
        algorithms.DecaySchedule(lr_factor=1.5)
    with pytest.raises(SettingError, match="DecaySchedule cannot tune FedAvg\\+AH, which is tuned already"):
        algorithms.DecaySchedule(algorithms.AdaptiveHyper())


def test_tuner_leaves_a_learning_rate_that_is_too_small() -> None:
    """On real data the tuner leaves a bad start by itself."""
    population = parties.digits(count=4, split="iid", seed=0)
    x, y = (torch.cat([getattr(party, part) for party in population.values()])[::8] for part in "xy")
    population = population.with_validation(x, y)
    algorithm = algorithms.AdaptiveHyper(lr=(0.003, 0.01, 0.03, 0.1, 0.3), work=None)
    fed = Federation(partial(torch.nn.Linear, 64, 10), population, algorithm, steps=10, batch=10).fit(
        40, progress=False
    )
    assert fed.history_[-1]["lr_mean"] > 0.05
