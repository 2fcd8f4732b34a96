"""Contributions of parties: laws of Shapley values on known games and on trained coalitions."""

from __future__ import annotations

import json
from itertools import permutations as all_orders
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from descant import Contributions, DescantError, Federation, Sgd, algorithms, contributions, parties
from descant.analysis import shapley
from descant.analysis.shapley_values import Coalition, draw_orders, needed_coalitions
from descant.cli import app
from descant.engines import VirtualClock
from descant.errors import SettingError, StateError
from descant.parties import Population
from toy_problems import METHODS

ABC = ("a", "b", "c")
WHOLE = Sgd(lr=0.2, steps=3, batch=None)  # full batches: equal data give equal models
NET = nn.Linear(2, 2)


def test_an_additive_game_gives_each_player_its_own_value() -> None:
    own = {"a": 1.0, "b": -2.0, "c": 5.0}
    found = shapley(ABC, lambda one: sum(own[name] for name in one))
    np.testing.assert_allclose(found.values, [1, -2, 5])


def test_a_weighted_majority_game_has_its_known_values() -> None:
    """[51; 50, 49, 1]: the player with 1 vote is worth as much as the one with 49."""
    votes = {"a": 50, "b": 49, "c": 1}
    found = shapley(ABC, lambda one: float(sum(votes[name] for name in one) >= 51))
    np.testing.assert_allclose(found.values, [4 / 6, 1 / 6, 1 / 6])


games = st.lists(st.floats(-10, 10), min_size=16, max_size=16)


def game_of(numbers: list[float], players: tuple[str, ...]) -> Any:
    def value(one: Coalition) -> float:
        return numbers[sum(1 << i for i, name in enumerate(players) if name in one)]

    return value


@given(games)
def test_exact_values_are_the_mean_over_all_orders_and_add_up_to_the_total(numbers: list[float]) -> None:
    players = ("a", "b", "c", "d")
    value = game_of(numbers, players)
    found = shapley(players, value).values
    by_order = []
    for order in all_orders(range(4)):
        added = np.zeros(4)
        before = frozenset[str]()
        for i in order:
            added[i], before = value(before | {players[i]}) - value(before), before | {players[i]}
        by_order.append(added)
    np.testing.assert_allclose(found, np.mean(by_order, 0), atol=1e-9)
    assert found.sum() == pytest.approx(numbers[15] - numbers[0], abs=1e-9)


@given(games, st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_drawn_values_add_up_to_the_total_and_repeat_with_the_seed(numbers: list[float], seed: int) -> None:
    players = ("a", "b", "c", "d")
    value = game_of(numbers, players)
    found, again = (shapley(players, value, permutations=5, seed=seed) for _ in range(2))
    assert found.values.sum() == pytest.approx(numbers[15] - numbers[0], abs=1e-9)
    np.testing.assert_array_equal(found.draws, again.draws)


@given(games)
@settings(max_examples=25, deadline=None)
def test_a_null_player_is_worth_zero_and_symmetric_players_are_worth_the_same(numbers: list[float]) -> None:
    """Player d changes nothing; for a and b only their number counts."""

    def value(one: Coalition) -> float:
        return numbers[len(one & {"a", "b"}) * 2 + ("c" in one)]

    a, b, _, d = shapley(("a", "b", "c", "d"), value).values
    assert a == pytest.approx(b, abs=1e-9) and d == pytest.approx(0, abs=1e-12)


def test_drawn_values_agree_with_exact_ones_within_their_errors() -> None:
    rng = np.random.default_rng(0)
    players = tuple("abcdef")
    value = game_of(rng.normal(size=64).tolist(), players)
    exact = shapley(players, value)
    drawn = shapley(players, value, permutations=400)
    assert np.isnan(exact.errors).all() and (drawn.errors > 0).all()
    off = np.abs(drawn.values - exact.values) / drawn.errors
    assert off.max() < 4 and off.mean() > 0.2  # errors are neither too small nor too large


def test_every_entry_of_an_array_is_a_separate_game() -> None:
    one, other = (game_of(np.random.default_rng(i).normal(size=8).tolist(), ABC) for i in (0, 1))
    both = shapley(ABC, lambda c: np.array([one(c), other(c)])).values
    np.testing.assert_allclose(both, np.stack([shapley(ABC, one).values, shapley(ABC, other).values], 1))


def test_each_coalition_is_evaluated_once_starting_with_all_players() -> None:
    asked: list[Coalition] = []
    shapley(tuple("abcdefghijk"), lambda one: float(asked.append(one) is None), permutations=3)
    assert len(set(asked)) == len(asked) <= 3 * 10 + 2 and len(asked[0]) == 11
    assert draw_orders(tuple("abcdefghijk"), None, 0) is not None  # more than 10 are drawn
    assert len(needed_coalitions(ABC, None)) == 8 and draw_orders(ABC, None, 0) is None


@pytest.mark.parametrize("bad", [0, 1, 2.5, True])
def test_too_few_permutations_raise(bad: Any) -> None:
    with pytest.raises(SettingError, match="'permutations' must be a whole number >= 2"):
        shapley(ABC, len, permutations=bad)


def population(count: int = 3, twins: bool = False, untested: bool = False) -> Population:
    generator = torch.Generator().manual_seed(0)
    data = {}
    for k, name in enumerate("abcdefghijkl"[:count]):
        x = torch.randn(16 + 4 * k, 2, generator=generator) + 0.3 * k
        data[name] = (x, (x[:, 0] > x[:, 1]).long(), x[:10] + 0.2, (x[:10, 0] > 0).long())
    if twins:
        data["b"] = data["a"]
    if untested:
        data["c"] = (*data["c"][:2], data["c"][2][:0], data["c"][3][:0])
    return parties.from_arrays(data)


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, y)


def contributions_by_loss(given: Population | None = None, name: str = "FedAvg", **more: Any) -> Contributions:
    """Return contributions measured by the loss, which is finer than the accuracy on ten rows."""
    settings: dict[str, Any] = {"rounds": 2, "solver": WHOLE, "loss": loss_of, "progress": False, **more}
    return contributions(METHODS[name](), NET, population() if given is None else given, **settings)


@pytest.mark.parametrize(("name", "permutations"), [("FedAvg", None), ("FedAvgPlus", 2), ("FedPer", None)])
def test_values_add_up_to_the_gain_of_training(name: str, permutations: int | None) -> None:
    """Efficiency: for each party's score, from the first model to all together; and for the sum of the gains."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    given = population()
    settings = {"solver": WHOLE, "loss": loss_of}
    found = contributions(METHODS[name](), net, given, rounds=2, progress=False, permutations=permutations, **settings)  # type: ignore[arg-type]
    fed = Federation(net, given, METHODS[name](), **settings)  # type: ignore[arg-type]
    first = fed.scores().global_model.values
    joint = fed.fit(2, progress=False).scores().personal.values
    np.testing.assert_allclose(found.pairwise.sum(0), first - joint, atol=1e-9)  # for a loss, lower is better
    np.testing.assert_array_equal(found.joint, joint)
    assert found.fair_share[0].sum() == pytest.approx(found.gain.sum(), abs=1e-9)


def test_local_scores_and_gains_match_the_table_of_the_federation() -> None:
    fed = Federation(NET, population(), algorithms.FedAvg(), solver=WHOLE, loss=loss_of).fit(2, progress=False)
    rows = fed.table().rows
    found = contributions_by_loss()
    np.testing.assert_allclose(found.local, [row["local"] for row in rows], rtol=1e-6)
    np.testing.assert_allclose(found.gain, [row["gain"] for row in rows], atol=1e-6)


def test_leave_one_out_matches_training_without_the_party() -> None:
    given = population()
    rest = Federation(NET, given.subset(["a", "c"]), algorithms.FedAvg(), solver=WHOLE, loss=loss_of)
    without_b = rest.fit(2, progress=False).scores().personal.values
    found = contributions_by_loss(given)
    expected = (without_b - found.joint[[0, 2]]).mean()
    assert found.leave_one_out[1] == pytest.approx(expected, abs=1e-9)


def test_parties_with_equal_data_are_worth_the_same() -> None:
    found = contributions_by_loss(population(twins=True))
    for each in (found.fair_share[0], found.given_to_others[0], found.gain, found.leave_one_out):
        assert each[0] == pytest.approx(each[1], abs=1e-6)
        assert abs(each[0] - each[2]) > 1e-4


@pytest.mark.filterwarnings("ignore::descant.DescantWarning")  # a coalition of c alone has no participants
def test_a_party_that_never_takes_part_is_worth_zero() -> None:
    found = contributions_by_loss(participation=algorithms.Dropouts({"c": 0}))
    assert found.given_to_others[0][2] == 0 and found.pairwise[2].tolist() == [0, 0, 0] and found.leave_one_out[2] == 0
    assert found.given_to_others[0][0] != 0


def test_a_virtual_clock_may_name_parties_outside_a_coalition() -> None:
    clock = VirtualClock({"a": 0.3, "c": 2.0})
    settings: dict[str, Any] = {"rounds": 3, "solver": WHOLE, "loss": loss_of, "progress": False}
    found = contributions(algorithms.FedBuff(2), NET, population(), engine=clock, **settings)
    assert np.isfinite(found.draws).all() and np.abs(found.given_to_others[0]).min() > 0
    assert not np.array_equal(found.joint, contributions(algorithms.FedBuff(2), NET, population(), **settings).joint)
    with pytest.raises(SettingError, match="a speed for party 'z'"):
        contributions(algorithms.FedBuff(2), NET, population(), engine=VirtualClock({"z": 2.0}), **settings)


def test_a_party_without_a_test_set_contributes_but_has_no_gain() -> None:
    found = contributions_by_loss(population(untested=True))
    assert np.isnan(found.gain[2]) and np.isfinite(found.fair_share[0]).all() and found.given_to_others[0][2] != 0
    assert "–" in str(found.table())


def test_drawn_contributions_agree_with_exact_ones_within_their_errors(tmp_path: Path) -> None:
    file = tmp_path / "coalitions.jsonl"  # drawn values need no further coalitions
    exact = contributions_by_loss(file=file)
    drawn = contributions_by_loss(file=file, permutations=40)
    for one, other in zip(
        (exact.fair_share, exact.given_to_others), (drawn.fair_share, drawn.given_to_others), strict=True
    ):
        assert (np.abs(one[0] - other[0]) < 4 * other[1]).all() and (other[1] > 0).all()
    np.testing.assert_array_equal(exact.leave_one_out, drawn.leave_one_out)


def test_seeds_give_standard_errors_and_repeat(tmp_path: Path) -> None:
    one, again = (
        contributions_by_loss(population(2), seeds=[3, 4], solver=Sgd(lr=0.2, steps=3, batch=4)) for _ in range(2)
    )
    np.testing.assert_array_equal(one.draws, again.draws)
    assert len(one.draws) == 2 and (one.fair_share[1] > 0).all()
    assert "6 trainings with 2 seeds" in str(one.table())
    single = contributions_by_loss(population(2))
    assert np.isnan(single.fair_share[1]).all() and "One seed" in str(single.table())
    assert one.plot(tmp_path / "contributions.png").read_bytes()[:4] == b"\x89PNG"


def artificial_contributions(share: list[float], gain: list[float]) -> Contributions:
    """Return contributions of parties a, b and c with given shares and gains."""
    each = np.zeros((1, 3, 4))
    each[0, :, -1] = share
    numbers = np.array(gain)
    return Contributions(
        tuple("abc"),
        (9, 9, 9),
        "accuracy",
        local=numbers,
        joint=numbers,
        gain=numbers,
        left_out=np.zeros((3, 3)),
        draws=each,
        description="Made up.",
    )


def test_a_party_with_a_negative_share_is_not_named_as_contributor() -> None:
    assert "beyond what it gets" not in str(artificial_contributions([-0.458, -0.6, -0.7], [-0.6, -0.6, -0.6]).table())
    text = str(artificial_contributions([-0.1, 0.3, 0.2], [-0.9, 0.2, 0.2]).table())
    assert "Party 'b' contributes most beyond what it gets: its share of the joint gain is +0.300" in text


def test_the_grid_is_visible_on_every_party(tmp_path: Path) -> None:
    from matplotlib.image import imread

    image = imread(artificial_contributions([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]).plot(tmp_path / "contributions.png"))[
        ..., 0
    ]
    banded = (np.abs(image - 0xF2 / 255) < 0.001).mean(0) > 0.6  # columns of gray bands
    first = int(np.flatnonzero(banded)[5])  # beside the axis, where there is no marker
    assert ((image[:, first] < 0.93) & (image[:, first] > 0.8)).sum() >= 4


def test_an_interrupted_call_continues_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "coalitions.jsonl"
    whole = contributions_by_loss(file=file)
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + 8
    file.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # killed while writing
    trained: list[Any] = []
    rounds = Federation.rounds
    monkeypatch.setattr(Federation, "rounds", lambda fed, *a, **k: (trained.append(fed), rounds(fed, *a, **k))[1])
    np.testing.assert_array_equal(contributions_by_loss(file=file).draws, whole.draws)
    assert len(trained) == 8 - 4 - 1  # the empty coalition does not train
    assert file.read_text().splitlines() == lines
    np.testing.assert_array_equal(contributions_by_loss(file=file).draws, whole.draws)
    assert len(trained) == 3


def test_a_file_of_another_training_raises(tmp_path: Path) -> None:
    file = tmp_path / "coalitions.jsonl"
    contributions_by_loss(population(2), file=file)
    for other in ({"rounds": 1}, {"solver": Sgd(lr=0.1, steps=3, batch=None)}, {"given": population(2, twins=True)}):
        with pytest.raises(StateError, match="another federation"):
            contributions_by_loss(**{"given": population(2), "file": file, **other})
    file.write_text("no json\n")
    with pytest.raises(StateError, match="Give another file"):
        contributions_by_loss(file=file)


def test_another_initial_model_does_not_reuse_stored_scores(tmp_path: Path) -> None:
    file = tmp_path / "coalitions.jsonl"
    contributions_by_loss(population(2), file=file)
    other = nn.Linear(2, 2)
    kept, fresh = (
        contributions(
            algorithms.FedAvg(), other, population(2), rounds=2, solver=WHOLE, loss=loss_of, progress=False, file=where
        )
        for where in (file, None)
    )
    np.testing.assert_array_equal(kept.draws, fresh.draws)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"seeds": 0}, {"seed": 1}, {"given": population(1)}])
def test_bad_arguments_raise_before_any_training(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="at least two parties, one round and one seed"):
        contributions_by_loss(**bad)


def test_parties_without_any_test_set_raise() -> None:
    given = population()
    none = parties.from_arrays({name: (given[name].x, given[name].y) for name in given}, test=0)
    with pytest.raises(SettingError, match="No party has a test set"):
        contributions_by_loss(none)


def test_a_diverged_model_raises() -> None:
    with pytest.raises(DescantError, match="has no score"):
        contributions_by_loss(metric=nan_loss)


def nan_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, y) * torch.nan


RECIPE = """
[run]
rounds = 1
[parties]
population = "digits"
count = 2
[model]
net = "logistic"
inputs = 64
outputs = 10
[training]
lr = 0.1
steps = 1
[method]
algorithm = "fedavg"
"""


def test_the_command_prints_json_and_writes_the_picture(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    out = tmp_path / "out"
    recipe.write_text(RECIPE)
    words = ["contributions", str(recipe), "--json", "--out", str(out)]
    found = json.loads(CliRunner().invoke(typer.main.get_command(app), words).stdout)
    assert [row["party"] for row in found["table"]] == ["0", "1"] and "joint" in found["verdict"]
    assert (out / "contributions.png").exists() and np.array(found["pairwise"]).shape == (2, 2)
