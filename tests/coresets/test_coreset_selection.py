"""Coreset selection: laws of every method, guarantees of each, feature spaces, bad input, and weighted training."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from descant import Federation, Sgd, algorithms, parties
from descant.analysis import coreset_preview
from descant.core.seeds import stream
from descant.coresets import constructions, features
from descant.coresets.features import FeatureSpace
from descant.coresets.selection import CONSTRUCTIONS, SelectedCoreset, balanced_counts
from descant.errors import ModelError, PartyError, SettingError
from descant.parties import Coreset, Party, Selection
from descant.training.batches import draw_batches

BY_DISTANCE = ["k-means++", "k-center", "herding", "sensitivity"]
KEEP_CLASSES = ["balanced", "k-means++", "k-center", "herding"]


def party_of(x: Tensor, y: Tensor, name: str = "a") -> Party:
    return Party(name, x, y, x_test=x[:0], y_test=y[:0])


def clouds(n: int = 60, classes: int = 3, d: int = 4, seed: int = 0) -> Party:
    """Unequal classes, each a cloud of its own."""
    rng = np.random.default_rng(seed)
    y = np.sort(rng.integers(0, classes, n) * rng.integers(0, 2, n))
    x = rng.normal(size=(n, d)) + 5 * rng.normal(size=(classes, d))[y]
    order = rng.permutation(n)
    return party_of(torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order]))


@st.composite
def data(draw: st.DrawFn) -> Party:
    """Small parties; in some many rows are alike, in some all of them."""
    n = draw(st.integers(1, 40))
    d = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1e-30, 1.0, 1e30]))
    kinds = draw(st.sampled_from([1, 3, 1000]))
    x = rng.integers(0, kinds, (n, d)) * scale
    y = rng.integers(0, draw(st.integers(1, 5)), n)
    return party_of(torch.tensor(x, dtype=torch.float32), torch.tensor(y))


@pytest.mark.parametrize("by", CONSTRUCTIONS)
@settings(max_examples=40, deadline=None)
@given(party=data(), share=st.floats(0.01, 1.0), seed=st.integers(0, 5))
def test_rows_are_distinct_and_weights_add_up(by: str, party: Party, share: float, seed: int) -> None:
    chosen = Selection(share=share, method=by).choose(party, seed)
    rows = chosen.rows
    coreset = chosen.coreset
    assert len(rows) == max(1, round(share * party.samples)) and (np.diff(rows) > 0).all()
    assert torch.equal(coreset.x, party.x[rows]) and torch.equal(coreset.y, party.y[rows])
    assert coreset.weights.dtype == torch.float64 and (coreset.weights > 0).all()
    assert math.isclose(float(coreset.weights.sum()), party.samples, rel_tol=1e-9)
    again = Selection(share=share, method=by).choose(party, seed)
    assert np.array_equal(again.rows, rows) and torch.equal(again.coreset.weights, coreset.weights)
    if by in KEEP_CLASSES:
        there = len(party.y.unique())
        assert len(coreset.y.unique()) == min(there, len(rows)), "every class, as far as the count allows"


@pytest.mark.parametrize("by", CONSTRUCTIONS)
@pytest.mark.parametrize("space", ["input", "embedding"])
def test_coreset_of_all_rows_is_the_data_with_unit_weights(by: str, space: str) -> None:
    party = clouds()
    for selection in (Selection(share=1, method=by, space=space), Selection(count=60, method=by, space=space)):
        chosen = selection.choose(party, seed=0)
        assert torch.equal(chosen.coreset.x, party.x) and torch.equal(chosen.coreset.y, party.y)
        assert torch.equal(chosen.coreset.weights, torch.ones(60, dtype=torch.float64))
        assert chosen.rows.tolist() == list(range(60))


@pytest.mark.parametrize("by", CONSTRUCTIONS)
def test_choice_depends_on_seed_and_party_name_only_if_it_draws(by: str) -> None:
    party = clouds(200)
    drawn = [tuple(Selection(method=by).choose(party, seed).rows) for seed in range(4)]
    renamed = tuple(Selection(method=by).choose(replace(party, name="b"), 0).rows)
    if by in ("k-center", "herding"):  # these draw nothing
        assert len({*drawn, renamed}) == 1
    else:
        assert len({*drawn, renamed}) == 5


@pytest.mark.parametrize("by", ["k-center", "herding"])
@settings(max_examples=20, deadline=None, derandomize=True)  # two rows may be alike to the last bit but one
@given(seed=st.integers(0, 1000), share=st.sampled_from([0.05, 0.2, 0.6]))
def test_choice_does_not_depend_on_row_order(by: str, seed: int, share: float) -> None:
    party = clouds(60, classes=2, seed=seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(60))
    turned = replace(party, x=party.x[order], y=party.y[order])
    selection = Selection(share=share, method=by)
    rows = selection.choose(party, 0)
    moved = selection.choose(turned, 0)
    assert set(order[moved.rows].tolist()) == set(rows.rows.tolist())
    weights = dict(zip(rows.rows.tolist(), rows.coreset.weights.tolist(), strict=True))
    for row, weight in zip(order[moved.rows].tolist(), moved.coreset.weights.tolist(), strict=True):
        assert weight == pytest.approx(weights[row])


@pytest.mark.parametrize("by", BY_DISTANCE)
def test_choice_does_not_depend_on_units_or_origin(by: str) -> None:
    party = clouds()
    moved = replace(party, x=party.x.double() * 1e-9 + 1e-6, name="a")
    assert np.array_equal(Selection(method=by).choose(party, 0).rows, Selection(method=by).choose(moved, 0).rows)


def radius(x: Tensor, y: Tensor, rows: object) -> float:
    """Return the largest distance from a row to the nearest chosen row of its class."""
    far = torch.cdist(x.double(), x[rows].double())
    far[y[:, None] != y[rows]] = torch.inf
    return float(far.min(1).values.max())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(4, 9), count=st.integers(2, 4), classes=st.integers(1, 2))
def test_k_center_radius_is_within_twice_the_optimum(seed: int, n: int, count: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(size=(n, 2)), dtype=torch.float32)
    y = torch.tensor(np.arange(n) % classes)
    found = radius(x, y, Selection(count=count, method="k-center").choose(party_of(x, y), 0).rows)
    best = min(radius(x, y, list(rows)) for rows in itertools.combinations(range(n), count))
    assert found <= 2 * best + 1e-5


def test_k_center_in_blocks_equals_k_center_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructions, "_BLOCK", 16)
    monkeypatch.setattr(constructions, "_CHUNK", 50)
    for seed in range(5):
        party = clouds(300, classes=3, d=5, seed=seed)
        party = replace(
            party, y=torch.from_numpy(np.random.default_rng(seed).integers(0, 3, 300))
        )  # one upon the other
        x = party.x.double()
        y = party.y
        rows = []
        for label in y.unique():
            own = torch.nonzero(y == label)[:, 0]
            rows.append(int(own[(x[own] - x[own].mean(0)).square().sum(1).argmin()]))
        while len(rows) < 60:
            far = torch.cdist(x, x[rows])
            far[y[:, None] != y[rows]] = torch.inf
            rows.append(int(far.min(1).values.argmax()))
        chosen = Selection(count=60, method="k-center").choose(party, 0)
        assert chosen.rows.tolist() == sorted(rows)
        nearest = torch.cdist(x, x[chosen.rows]).masked_fill(y[:, None] != y[chosen.rows], torch.inf).argmin(1)
        assert torch.equal(torch.bincount(nearest, minlength=60).double(), chosen.coreset.weights)


def test_k_means_seeding_draws_by_squared_distance() -> None:
    """Three rows of five are drawn in blocks; how often a triple comes is what drawing one by one gives."""
    x = torch.tensor([[0.0], [1.0], [3.0], [4.0], [8.0]])
    party = party_of(x, torch.zeros(5, dtype=torch.int64))
    distance = (x - x.T).square().double().numpy()
    expected: dict[tuple[int, ...], float] = {}
    for triple in itertools.permutations(range(5), 3):
        second = distance[triple[0]]
        third = np.minimum(second, distance[triple[1]])
        chance = 0.2 * second[triple[1]] / second.sum() * third[triple[2]] / third.sum()
        key = tuple(sorted(triple))
        expected[key] = expected.get(key, 0.0) + chance
    assert math.isclose(sum(expected.values()), 1)
    found = dict.fromkeys(expected, 0)
    for seed in range(2000):
        found[tuple(Selection(count=3, method="k-means++").choose(party, seed).rows.tolist())] += 1
    for triple, chance in expected.items():  # five standard errors
        assert abs(found[triple] / 2000 - chance) < 5 * math.sqrt(chance * (1 - chance) / 2000) + 1e-9, triple


def test_k_means_weights_count_the_nearest_rows() -> None:
    x = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1], [0.1]])
    party = party_of(x, torch.tensor([0, 0, 0, 0, 0, 1]))
    for seed in range(5):
        coreset = Selection(count=3, method="k-means++")(party, seed)
        by_place = {
            (round(float(row) / 10), int(y)): float(w) for row, y, w in zip(*vars(coreset).values(), strict=True)
        }
        if set(by_place) == {(0, 0), (1, 0), (0, 1)}:
            assert by_place == {(0, 0): 3, (1, 0): 2, (0, 1): 1}, (
                "the row of the other class is as near, and not counted"
            )
            return
    raise AssertionError("none of five draws took both clouds")


@pytest.mark.parametrize("count", [8, 30])
def test_sensitivity_weights_are_unbiased(count: int) -> None:
    """The weighted sum of any function is right on average: within 4 standard errors over 1,500 draws."""
    party = clouds(80, seed=3)
    functions = torch.stack([party.x[:, 0].exp(), party.x[:, 1] ** 2, (party.y == 1).float(), torch.ones(80)]).double()
    space = FeatureSpace.from_targets(party.y, lambda: party.x)
    found = []
    for seed in range(1500):
        places, weights = constructions.sensitivity_sampling(space, count, stream(seed, 0, "a", purpose="coreset"))
        assert len(set(places.tolist())) == count
        found.append((functions[:, space.order[places]] * torch.from_numpy(weights)).sum(1))
    sums = torch.stack(found)
    error = sums.std(0) / math.sqrt(len(sums))
    assert ((sums.mean(0) - functions.sum(1)).abs() < 4 * error + 1e-9).all()
    assert float(error[2]) > 0, "it does vary"


def test_sensitivity_sampling_prefers_outliers() -> None:
    x = torch.cat([torch.randn(999, 3, generator=torch.Generator().manual_seed(0)), torch.full((1, 3), 50.0)])
    party = party_of(x, torch.zeros(1000, dtype=torch.int64))
    hits = sum(999 in Selection(count=20, method="sensitivity").choose(party, seed).rows for seed in range(50))
    even = sum(999 in Selection(count=20).choose(party, seed).rows for seed in range(50))
    assert hits > 15 and even < 5


@given(sizes=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=30), data=st.data())
def test_inclusion_probabilities_add_up_and_are_at_most_one(sizes: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes) - 1))
    chances = constructions.inclusion_probabilities(np.array(sizes), count)
    assert math.isclose(chances.sum(), count, rel_tol=1e-9) and (chances > 0).all() and (chances <= 1).all()
    order = np.argsort(sizes)
    assert (np.diff(chances[order]) >= -1e-12).all()
    drawn = constructions.systematic_sample(chances, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == count and set(np.flatnonzero(chances == 1)) <= set(drawn.tolist())
    taken = np.cumsum(np.isin(np.arange(len(sizes)), drawn))
    assert (np.abs(taken - chances.cumsum()) < 1 + 1e-9).all(), "every class gets its part"


def test_herding_approaches_the_class_mean_faster_than_uniform_rows() -> None:
    """1/k for a herd, 1/√k for rows drawn evenly: at 64 of 2,000 rows it is 5 times as near at least."""
    rng = np.random.default_rng(0)
    y = torch.arange(4000) % 2
    party = party_of(torch.tensor(rng.normal(size=(4000, 5)), dtype=torch.float32) + 3 * y[:, None], y)

    def away(count: int, by: str, seed: int = 0) -> float:
        coreset = Selection(count=2 * count, method=by)(party, seed)
        return max(float((coreset.x[coreset.y == k].mean(0) - party.x[y == k].mean(0)).norm()) for k in (0, 1))

    for count in (16, 64):
        assert 5 * away(count, "herding") < np.mean([away(count, "uniform", seed) for seed in range(20)])
    assert away(64, "herding") < 0.5 * away(16, "herding")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_balanced_counts_differ_by_one_at_most_where_classes_allow(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, sum(sizes)))
    counts = balanced_counts(np.array(sizes), count)
    assert counts.sum() == count and (counts <= sizes).all()
    not_all = counts[counts < sizes]
    if len(not_all):
        assert counts.max() - not_all.min() <= 1, "who gives less than another gives all that it has"
    party = party_of(torch.zeros(sum(sizes), 1), torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)))
    coreset = Selection(count=count, method="balanced")(party, 0)
    assert torch.bincount(coreset.y, minlength=len(sizes)).tolist() == counts.tolist()
    if (counts > 0).all():
        carried = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, coreset.y, coreset.weights)
        assert torch.allclose(carried, torch.tensor(sizes, dtype=torch.float64)), "and stands for its class"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3))


def test_embedding_is_the_last_linear_input_or_a_named_layers_output() -> None:
    module = net()
    party = clouds(1500)
    module[1].eval()
    inner = module.eval()[:3](party.x)
    module.train()
    module[1].eval()
    assert torch.allclose(features.embedding_features(module)(party.x, party.y), inner)
    assert torch.allclose(features.embedding_features(module, "2")(party.x, party.y), inner)
    assert torch.allclose(features.embedding_features(module, "0")(party.x, party.y), module[0](party.x))
    assert module.training and not module[1].training, "the module is as it was"
    assert not module[3]._forward_hooks
    with pytest.raises(SettingError, match=r"There is no layer '7'. .*Allowed: 0, 1, 2, 3"):
        features.embedding_features(module, "7")
    with pytest.raises(ModelError, match="no linear layer"):
        features.embedding_features(nn.Tanh())


@pytest.mark.parametrize("bias", [True, False])
def test_gradient_space_is_the_gradient_of_the_last_layer(bias: bool) -> None:
    module = net().eval()
    party = clouds(7)
    module[3] = nn.Linear(5, 3, bias=bias)
    found = features.gradient_features(module)(party.x, party.y)
    for row in range(7):
        loss = nn.functional.cross_entropy(module(party.x[row : row + 1]), party.y[row : row + 1])
        grads = torch.autograd.grad(loss, list(module[3].parameters()))
        expected = torch.cat([grads[0], grads[1][:, None]], 1) if bias else grads[0]
        assert torch.allclose(found[row], expected.flatten(), atol=1e-6)
    with pytest.raises(PartyError, match=r"The model knows the labels 0 to 2\. Got 3"):
        features.gradient_features(module)(party.x, torch.full_like(party.y, 3))
    with pytest.raises(ModelError, match="one number per class"):
        features.gradient_features(module)(party.x, party.y.float())


@pytest.mark.parametrize("by", BY_DISTANCE)
def test_distances_are_measured_in_the_chosen_space(by: str) -> None:
    party = clouds(80)
    rows = {
        space: Selection(share=0.2, method=by, space=space)
        .choose(party, 0, features.FEATURE_SPACES[space](net()))
        .rows.tolist()
        for space in features.FEATURE_SPACES
    }
    rows["input"] = Selection(share=0.2, method=by).choose(party, 0).rows.tolist()
    assert len({tuple(found) for found in rows.values()}) == 3
    embedded = replace(party, x=features.embedding_features(net())(party.x, party.y))
    assert Selection(share=0.2, method=by).choose(embedded, 0).rows.tolist() == rows["embedding"]


def test_targets_that_are_not_labels_form_one_class() -> None:
    party = clouds()
    real = replace(party, y=party.y.double())
    one = replace(party, y=torch.zeros_like(party.y))
    for by in CONSTRUCTIONS:
        assert np.array_equal(Selection(method=by).choose(real, 0).rows, Selection(method=by).choose(one, 0).rows)


@pytest.mark.parametrize("share", [0.2, 1])
@pytest.mark.parametrize("by", CONSTRUCTIONS)
def test_dropped_columns_neither_leave_nor_affect_the_choice(by: str, share: float) -> None:
    party = clouds()
    secret = party.x.clone()
    secret[:, 2] = torch.arange(60).float() * 1000
    chosen = Selection(share=share, method=by, drop_columns=(2,)).choose(replace(party, x=secret), 0)
    other = Selection(share=share, method=by, drop_columns=(2,)).choose(party, 0)
    assert np.array_equal(chosen.rows, other.rows) and torch.equal(chosen.coreset.x, other.coreset.x)
    assert not chosen.coreset.x[:, 2].any() and chosen.coreset.x[:, [0, 1, 3]].any()
    assert secret[5, 2] == 5000, "the party's own data stay"


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(share=0), r"The 'share' of Selection must be > 0 and <= 1\. Got 0"),
        (Selection(share=1.5), r"The 'share' of Selection must be > 0 and <= 1\. Got 1\.5"),
        (Selection(share=float("nan")), "The 'share' of Selection"),
        (Selection(count=0), r"The 'count' of Selection must be a whole number >= 1\. Got 0"),
        (Selection(count=61), r"The 'count' of Selection is 61, and party 'a' has 60 rows\. Give at most that number"),
        (Selection(method="k-medoid"), "The 'method' of Selection must be one of 'uniform'"),
        (Selection(space="inputs"), "The 'space' of Selection must be one of 'input', 'embedding', 'gradient'"),
        (Selection(drop_columns=(4,)), r"must name columns from 0 to 3, which party 'a' has\. Got 4"),
        (Selection(drop_columns=(-1,)), r"The 'drop_columns' of Selection must be a whole number >= 0\. Got -1"),
        (Selection(method="herding", space="gradient"), r"needs a model\. Give features=gradient_features\(module\)"),
    ],
)
def test_invalid_selection_settings_are_rejected(selection: Selection, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        selection(clouds(), 0)


def test_data_without_distances_are_rejected() -> None:
    party = clouds()
    pictures = replace(party, x=party.x.reshape(60, 1, 2, 2))
    with pytest.raises(
        SettingError, match=r"has features of shape \(1, 2, 2\), which have none: leave 'drop_columns' out"
    ):
        Selection(drop_columns=(0,))(pictures, 0)
    assert Selection(method="k-center")(pictures, 0).x.shape == (3, 1, 2, 2)
    words = replace(party, x=party.x.long())
    with pytest.raises(SettingError, match=r"whole numbers .* no distance.* not method='k-center' in the input"):
        Selection(method="k-center")(words, 0)
    assert Selection(method="balanced")(words, 0).x.dtype == torch.int64
    with pytest.raises(PartyError, match="not finite"):
        Selection(method="k-center", space="embedding")(party, 0, lambda x, y: x / 0)
    with pytest.raises(PartyError, match="Got 59 points for 60 rows"):
        Selection(method="k-center", space="embedding")(party, 0, lambda x, y: x[1:])


def test_preview_shows_every_row_that_would_leave() -> None:
    party = clouds(200, classes=4)
    chosen = Selection(count=5, method="k-center", drop_columns=(0,)).choose(party, 0)
    table = coreset_preview(party, chosen, dropped_columns=(0,), max_values=2)
    assert table.columns == ("row", "label", "weight", "0", "1") and len(table.rows) == 5
    for row in table.rows:
        assert row["label"] == int(party.y[row["row"]])
        assert row["0"] == 0 and row["1"] == float(party.x[row["row"], 1])
    assert sum(row["weight"] for row in table.rows) == 200
    assert table.verdict == "5 of the 200 rows of party 'a' would leave (2.5 %)."
    assert table.notes == ("Columns 0 would not leave: they are 0 in the coreset.",)
    one = coreset_preview(party, Selection(count=1, method="k-center").choose(party, 0))
    assert one.notes == ("The coreset would lack the labels 1, 2, 3, which the party has.",)
    real = replace(party, y=torch.rand(200))
    assert coreset_preview(real, Selection(count=2).choose(real, 0)).columns[1] == "target"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.tensor([1.0, -1.0])}, "a weight that is not a number > 0"),
        ({"weights": torch.tensor([1.0, math.nan])}, "a weight that is not a number > 0"),
        ({"weights": torch.ones(3)}, r"one target and one weight each\. Got 2 rows, 2 targets and weights \(3,\)"),
        ({"y": torch.zeros(1)}, "Got 2 rows, 1 targets"),
        ({"x": torch.zeros(0, 1)}, "must have rows"),
        ({"x": torch.tensor([[1.0], [math.inf]])}, "holds numbers that are not finite"),
    ],
)
def test_invalid_coreset_cannot_become_a_party(change: dict[str, Tensor], message: str) -> None:
    fine = Coreset(torch.zeros(2, 1), torch.zeros(2), torch.tensor([1.0, 2.0]))
    assert fine.as_party("b").samples == 2 and len(fine.as_party("b").x_test) == 0
    with pytest.raises(PartyError, match=f"The coreset of party 'b' .*{message}"):
        replace(fine, **change).as_party("b")


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    batch=st.sampled_from([None, 1, 3, 20]),
    work=st.integers(0, 5),
    unit=st.sampled_from(["steps", "epochs"]),
    weight=st.sampled_from([1.0, 0.1, 20.0]),
)
def test_equal_weights_change_no_draw(n: int, batch: int | None, work: int, unit: str, weight: float) -> None:
    plain = draw_batches(n, batch, work, unit=unit, rng=np.random.default_rng(1))
    equal = draw_batches(
        n, batch, work, unit=unit, rng=np.random.default_rng(1), weights=torch.full((n,), weight, dtype=torch.float64)
    )
    assert torch.equal(plain.indices, equal.indices) and plain.lengths == equal.lengths
    unlike = draw_batches(n + 1, batch, work, unit=unit, rng=np.random.default_rng(1), weights=torch.arange(1.0, n + 2))
    shape = draw_batches(n + 1, batch, work, unit=unit, rng=np.random.default_rng(1))
    assert unlike.lengths == shape.lengths and unlike.indices.shape == shape.indices.shape, "as much work as ever"
    assert unlike.indices.numel() == 0 or 0 <= int(unlike.indices.min()) <= int(unlike.indices.max()) <= n


@pytest.mark.parametrize("batch", [None, 4])
def test_draws_follow_the_weights(batch: int | None) -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 4.0, 0.0], dtype=torch.float64)
    drawn = draw_batches(7, batch, 5000, unit="steps", rng=np.random.default_rng(0), weights=weights).indices
    found = torch.bincount(drawn.flatten(), minlength=7).double() / drawn.numel()
    expected = weights / 10
    error = (expected * (1 - expected) / drawn.numel()).sqrt()
    assert ((found - expected).abs() <= 4 * error).all(), "within 4 standard errors, and never where the weight is 0"


def trained(*members: Party) -> Tensor:
    """Return the global model that parties train; solvers draw rows by the parties' weights."""
    population = parties.from_arrays({p.name: (p.x, p.y) for p in members}, test=0)
    for p in members:
        population._cache[p.name] = p
    torch.manual_seed(0)
    fed = Federation(nn.Linear(4, 3), population, algorithms.FedAvg(), solver=Sgd(lr=0.1, steps=30, batch=8), seed=0)
    fed.fit(2, progress=False)
    return fed.state.global_model


def test_coreset_of_all_rows_trains_exactly_like_its_party() -> None:
    party = clouds()
    other = replace(clouds(seed=1), name="b")
    whole = Selection(share=1, method="k-center")(party, 0).as_party("a")
    assert torch.equal(trained(party, other), trained(whole, other))
    heavy = replace(whole, weights=1 + 50 * (party.y == 1).double())
    assert not torch.equal(trained(party, other), trained(heavy, other))


def test_choose_and_call_give_the_same_coreset() -> None:
    party = clouds()
    selection = Selection(method="sensitivity", share=0.2)
    chosen: SelectedCoreset = selection.choose(party, 3)
    coreset = selection(party, 3)
    assert torch.equal(coreset.x, chosen.coreset.x) and torch.equal(coreset.weights, chosen.coreset.weights)
