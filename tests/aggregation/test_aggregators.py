"""Laws of aggregators: equivariance, independence of order, an exact gap, and robustness to outliers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from descant.aggregation import geometric_median, order_statistics
from descant.aggregation.aggregators import (
    Aggregator,
    CoordinateMedian,
    GeometricMedian,
    LayerwiseAggregator,
    Mean,
    ProximalAggregator,
    SmoothedCoordinateMedian,
    TrimmedMean,
)
from descant.aggregation.penalties import NormP
from descant.errors import SettingError

AGGREGATORS: dict[str, Aggregator] = {
    "mean": Mean(),
    "geometric": GeometricMedian(),
    "geometric smooth": GeometricMedian(rho=1.0),
    "coordinate": CoordinateMedian(),
    "coordinate smooth": SmoothedCoordinateMedian(rho=0.5),
    "trimmed": TrimmedMean(0.25),
    "proximal": ProximalAggregator(NormP(3.0), rho=1.0),
    "layers": LayerwiseAggregator(((((0, 1), (2, 3)), GeometricMedian()), (((1, 2),), CoordinateMedian()))),
}
every_aggregator = pytest.mark.parametrize("aggregator", AGGREGATORS.values(), ids=AGGREGATORS.keys())
law = settings(derandomize=True, deadline=None, max_examples=12)
seeds = st.integers(0, 10_000)
counts = st.integers(1, 9)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def smooth_loss(models: Tensor, z: Tensor, shares: Tensor, rho: float) -> Tensor:
    """Return mean Phi_rho of eq. (5) for phi = l2, by the definition of the Huber function."""
    distance = torch.linalg.vector_norm(models - z, dim=-1)
    return torch.where(distance > rho, distance - rho / 2, distance**2 / (2 * rho)) @ shares


@every_aggregator
@law
@given(seed=seeds, count=counts, weighted=st.booleans())
def test_translation_sign_order_and_scale_of_weights(
    aggregator: Aggregator, seed: int, count: int, weighted: bool
) -> None:
    """(28): A(w - w_1, ..., w - w_K) = w - A(w_1, ..., w_K); and neither order nor the scale of weights matters."""
    models = draw(seed, count, 5)
    shift = 10 * draw(seed + 1, 5)
    weights = 0.2 + draw(seed + 2, count).abs() if weighted else None
    kept = models.clone()
    point = aggregator(models, weights).point
    assert torch.equal(models, kept)
    # The smooth objectives may be flat to rounding about their minimizer: then z is known to about sqrt(eps).
    close = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(aggregator(shift - models, weights).point, shift - point, **close)  # eq. (28)
    torch.testing.assert_close(aggregator(models + shift, weights).point, shift + point, **close)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    shuffled = None if weights is None else weights[order]
    torch.testing.assert_close(aggregator(models[order], shuffled).point, point, **close)
    if weights is not None:
        torch.testing.assert_close(aggregator(models, 1e5 * weights).point, point, **close)


@every_aggregator
def test_ties_do_not_depend_on_order_or_sign(aggregator: Aggregator) -> None:
    models = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0], [2.0]]).double().expand(6, 5)
    weights = torch.tensor([1.0, 9.0, 2.0, 1.0, 5.0, 3.0])
    point = aggregator(models, weights).point
    for order in ([5, 4, 3, 2, 1, 0], [1, 0, 4, 2, 3, 5]):
        torch.testing.assert_close(aggregator(models[order], weights[order]).point, point, rtol=0, atol=1e-7)
    torch.testing.assert_close(aggregator(-models, weights).point, -point, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name != "trimmed"])
@law
@given(seed=seeds, weights=st.lists(st.integers(0, 4), min_size=2, max_size=6).filter(any))
def test_integer_weight_equals_repeated_rows(name: str, seed: int, weights: list[int]) -> None:
    models = draw(seed, len(weights), 5)
    counts = torch.tensor(weights)
    aggregator = AGGREGATORS[name]
    repeated = aggregator(models.repeat_interleave(counts, dim=0)).point
    torch.testing.assert_close(aggregator(models, counts).point, repeated, rtol=0, atol=1e-6)


@every_aggregator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_of_weight_zero_is_absent_and_one_row_is_its_own_aggregate(
    aggregator: Aggregator, dtype: torch.dtype
) -> None:
    models = draw(1, 6, 5).to(dtype)
    models[2] = 1e6
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    result = aggregator(models, weights)
    present = [0, 1, 3, 4, 5]
    torch.testing.assert_close(result.point, aggregator(models[present]).point, rtol=0, atol=1e-6)
    assert result.point.dtype == dtype
    torch.testing.assert_close(aggregator(models[:1]).point, models[0], rtol=1e-7, atol=0)
    torch.testing.assert_close(aggregator(models[:1].repeat(4, 1)).point, models[0], rtol=1e-7, atol=0)


def test_forty_percent_outliers_move_the_mean_only() -> None:
    models = draw(2, 50, 20)
    models[:20] += 1e4
    good = models[20:].mean(0)
    robust = [GeometricMedian(), CoordinateMedian(), SmoothedCoordinateMedian(0.1), TrimmedMean(0.4)]
    for aggregator in robust:
        assert (aggregator(models).point - good).norm() < 15, aggregator
    assert (Mean()(models).point - good).norm() > 1e4
    assert (TrimmedMean(0.1)(models).point - good).norm() > 1e3


@pytest.mark.parametrize("d", [3, 200])
@pytest.mark.parametrize("far", [1e30, 1e200, 1.7e308])
def test_geometric_median_survives_rows_whose_squares_overflow(d: int, far: float) -> None:
    models = draw(0, 9, d)
    models[4] = far
    result = GeometricMedian(rho=0.1)(models)
    assert result.point.isfinite().all()
    assert (result.point - GeometricMedian(rho=0.1)(models[[0, 1, 2, 3, 5, 6, 7, 8]]).point).norm() < 2


@pytest.mark.parametrize("p", [1.5, 3.0, math.inf])
def test_aggregators_without_a_closed_form_survive_an_outlier(p: float) -> None:
    models = draw(0, 9, 4)
    models[4] = 1e9
    result = ProximalAggregator(NormP(p), rho=1.0)(models)
    assert result.point.norm() < 10
    assert result.gap < 1e-6
    models[4] = 3e38
    assert (
        ProximalAggregator(NormP(p), rho=1e-6)(models).gap > 1e10
    )  # its pull is lost to rounding, and the gap shows it


def test_medians_of_few_numbers() -> None:
    even = torch.tensor([[4.0], [1.0], [100.0], [2.0]])
    assert CoordinateMedian()(even).point.item() == 3.0  # torch.median says 2: ERRATA 25
    assert CoordinateMedian()(even, torch.tensor([1, 1, 1, 3])).point.item() == 2.0 + 0.0
    assert CoordinateMedian()(even, torch.tensor([1, 1, 1, 0])).point.item() == 4.0
    tenths = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)  # 0.1 + 0.2 is not 0.3, yet this is a tie
    assert CoordinateMedian()(torch.tensor([[0.0], [1.0], [2.0]]), tenths).point.item() == 1.5
    equal = torch.full((4,), 0.3)
    models = draw(3, 4, 50)
    assert torch.equal(CoordinateMedian()(models).point, CoordinateMedian()(models, equal).point)
    assert torch.equal(CoordinateMedian()(models).point, models.sort(dim=0).values[1:3].mean(dim=0))


@pytest.mark.parametrize("count", [*range(1, 18), 31, 64, 100, 128, 129])
def test_median_equals_that_of_the_sorted_column(count: int) -> None:
    models = draw(count, count, 60).float()
    models[:, :20] = models[:, :20].round()  # ties
    models[count // 2, 20:30] = math.nan  # goes to the end, like infinity
    values = models.sort(dim=0).values
    right = (values[(count - 1) // 2] + values[count // 2]) / 2
    assert torch.equal(CoordinateMedian()(models).point.nan_to_num(7), right.nan_to_num(7))


@law
@given(seed=seeds, count=st.integers(2, 40), grid=st.booleans())
def test_weighted_median_halves_the_weight(seed: int, count: int, grid: bool) -> None:
    models = draw(seed, count, 30).round() if grid else draw(seed, count, 30)
    weights = torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))
    weights[0] = 1
    for column, z in zip(models.T, CoordinateMedian()(models, weights).point, strict=True):
        repeated = column.repeat_interleave(weights).sort().values
        assert z == (repeated[(len(repeated) - 1) // 2] + repeated[len(repeated) // 2]) / 2


@law
@given(
    seed=seeds, count=counts, rho=st.sampled_from([1e-3, 0.3, 1.0, 50.0]), weighted=st.booleans(), grid=st.booleans()
)
def test_smoothed_coordinate_median_is_the_midpoint_of_the_minimizers(
    seed: int, count: int, rho: float, weighted: bool, grid: bool
) -> None:
    models = 3 * draw(seed, count, 4)
    models = models.round() if grid else models  # a grid has ties, and flat stretches
    weights = torch.randint(1, 4, (count,), generator=torch.Generator().manual_seed(seed)) if weighted else None
    shares = torch.full((count,), 1.0).double() if weights is None else weights.double()
    point = SmoothedCoordinateMedian(rho)(models, weights).point
    for column, z in zip(models.T, point, strict=True):
        # psi is linear between its breakpoints: its zeros are those breakpoints, and one crossing if there is none.
        at = torch.cat([column - rho, column + rho]).sort().values
        psi = ((at[:, None] - column) / rho).clamp(-1, 1) @ shares
        zeros = at[psi.abs() < 1e-9]
        if len(zeros):
            right = (zeros.min() + zeros.max()) / 2
        else:
            i = int((psi < 0).sum())
            right = at[i - 1] - psi[i - 1] * (at[i] - at[i - 1]) / (psi[i] - psi[i - 1])
        assert z.item() == pytest.approx(right.item(), abs=1e-7)


def test_trimmed_mean_counts_and_weighs() -> None:
    models = torch.arange(100.0)[:, None] ** 2
    assert TrimmedMean(0.29)(models).point.item() == pytest.approx(float((torch.arange(29.0, 71.0) ** 2).mean()))
    assert torch.allclose(TrimmedMean(0.0)(models).point, Mean()(models).point)
    four = torch.tensor([[1.0], [2.0], [4.0], [99.0]])
    assert TrimmedMean(0.25)(four, torch.tensor([7.0, 1.0, 3.0, 5.0])).point.item() == pytest.approx(3.5)


HARD: dict[str, tuple[Tensor, Tensor | None]] = {
    "random, few columns": (draw(0, 30, 3), None),
    "random, few rows": (draw(0, 30, 700), None),
    "random, many of both": (draw(0, 300, 400), None),
    "two, equal": (draw(0, 2, 100), None),
    "two, unequal": (draw(0, 2, 100), torch.tensor([1.0, 1.001])),
    "identical": (draw(0, 1, 100).repeat(5, 1), None),
    "half the rows the same": (torch.cat([draw(0, 1, 100).repeat(10, 1), draw(1, 10, 100)]), None),
    "collinear, odd": (draw(0, 7, 1) * draw(1, 100), None),
    "collinear, even": (draw(0, 8, 1) * draw(1, 100), None),
    "one row outweighs": (draw(0, 20, 100), torch.tensor([40.0] + [1.0] * 19)),
    "one row nearly outweighs": (draw(0, 20, 100), torch.tensor([4.4] + [1.0] * 19)),
    "many of both, one outweighs": (draw(0, 300, 400), torch.tensor([400.0] + [1.0] * 299)),
    "far outliers": (draw(0, 20, 700) + 1e7 * (torch.arange(20) < 8)[:, None], None),
    "far outliers, many of both": (draw(0, 300, 400) + 1e5 * (torch.arange(300) < 120)[:, None], None),
    "an angle of 120 degrees": (torch.tensor([[0.0, 0.0], [1.0, 0.0], [-0.5001, 0.866]]).double(), None),
    "some weights zero": (draw(0, 20, 100), torch.tensor([0.0] * 5 + [1.0] * 15)),
    "far from the origin": (1e-3 * draw(0, 20, 100) + 5, None),
}


@pytest.mark.parametrize("rho", [1e-6, 0.5])
@pytest.mark.parametrize("name", HARD)
def test_geometric_median_is_optimal_and_reports_its_gap(name: str, rho: float) -> None:
    models, weights = HARD[name]
    shares = torch.ones(len(models)).double() if weights is None else weights.double()
    shares = shares / shares.sum()
    result = GeometricMedian(rho)(models, weights)
    assert result.gap < 1e-9
    z = result.point
    best = smooth_loss(models, z, shares, rho)
    rounding = 1e-15 * best
    # Convexity: no point u has a loss under best - gap * |u - z|, and neither the rows nor the mean may lie under it.
    for u in (*models, shares @ models, z + 1e-3 * draw(7, z.numel())):
        assert smooth_loss(models, u, shares, rho) >= best - 1e-9 * (u - z).norm() - 4 * rounding
    # The gap against autograd, where z is not within rho of a row and rounding is negligible.
    if (torch.linalg.vector_norm(models - z, dim=1) > rho).all():
        there = z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(smooth_loss(models, there, shares, rho), there)
        assert slope.norm().item() == pytest.approx(result.gap, abs=1e-10)


@pytest.mark.parametrize("shape", [(30, 3), (30, 700), (300, 400)])
def test_gap_is_exact_after_an_early_stop(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometric_median, "MAX_GRAM_ROWS", 0)
    monkeypatch.setattr(geometric_median, "MAX_DIRECT_COLUMNS", 0)
    models = draw(5, *shape) * torch.logspace(-1, 1, shape[0])[:, None]
    shares = torch.full((shape[0],), 1 / shape[0], dtype=torch.float64)
    gaps = []
    for most in (1, 2, 4):
        result = GeometricMedian(1e-6, max_iterations=most)(models)
        z = result.point.clone().requires_grad_()
        (slope,) = torch.autograd.grad(smooth_loss(models, z, shares, 1e-6), z)
        assert result.gap == pytest.approx(slope.norm().item(), rel=1e-9)
        assert result.iterations == most
        gaps.append(result.gap)
    assert gaps[0] > gaps[1] > gaps[2] > 1e-9


@pytest.mark.parametrize("rho", [1e-6, 20.0])
def test_gram_columns_and_passes_agree(rho: float, monkeypatch: pytest.MonkeyPatch) -> None:
    models = draw(8, 40, 50) * torch.logspace(-1, 1, 40)[:, None]
    weights = draw(9, 40).abs()
    by_columns = GeometricMedian(rho)(models, weights).point
    monkeypatch.setattr(geometric_median, "MAX_DIRECT_COLUMNS", 0)
    by_gram = GeometricMedian(rho)(models, weights).point
    monkeypatch.setattr(geometric_median, "MAX_GRAM_ROWS", 0)
    by_passes = GeometricMedian(rho, tolerance=1e-13)(models, weights).point
    torch.testing.assert_close(by_gram, by_columns, rtol=0, atol=1e-10)
    torch.testing.assert_close(by_passes, by_columns, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["random, few columns", "random, few rows", "random, many of both"])
def test_float32_geometric_median_is_the_float64_one_rounded(name: str) -> None:
    models = HARD[name][0].float()
    result = GeometricMedian()(models)
    assert result.gap < 1e-6
    torch.testing.assert_close(result.point.double(), GeometricMedian()(models.double()).point, rtol=1e-6, atol=1e-7)


OUTLIERS = {"a million away": 1e6, "as far as float32 goes": 3e38, "the same": 0.0}


@pytest.mark.parametrize("far", OUTLIERS.values(), ids=OUTLIERS.keys())
@pytest.mark.parametrize("rho", [1e-6, 0.1])
def test_one_gram_matrix_of_float32_is_enough_for_a_gap_of_a_millionth(far: float, rho: float) -> None:
    models = draw(12, 40, 30_000).float()  # more than a block
    models[:12] = far
    result = GeometricMedian(rho, tolerance=1e-6)(models)
    assert result.gap < 1e-6
    assert result.iterations == 1


@every_aggregator
def test_block_width_does_not_change_the_result(aggregator: Aggregator, monkeypatch: pytest.MonkeyPatch) -> None:
    models = draw(10, 7, 33)
    weights = draw(11, 7).abs()
    whole = aggregator(models, weights).point
    monkeypatch.setattr(order_statistics, "BLOCK", 20)
    monkeypatch.setattr("descant.aggregation.aggregators.BLOCK", 20)
    torch.testing.assert_close(aggregator(models, weights).point, whole, rtol=0, atol=1e-7)


MEMORY = """
import resource, sys, torch
from descant.aggregation.aggregators import *
torch.set_num_threads(1)
stack = torch.empty(100, 400_000).normal_(generator=torch.Generator().manual_seed(0))  # 160 MB
for warm in (1, 0):
    for aggregator in (Mean(), GeometricMedian(), CoordinateMedian(), SmoothedCoordinateMedian(9.0), TrimmedMean(0.1)):
        aggregator(stack[:, :40_000] if warm else stack)
    if warm:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux kilobytes
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit)
"""


def test_aggregators_do_not_copy_the_stack() -> None:
    """Compare peak memory in a separate process: ten times the columns must not need ten times the memory."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60  # MB; a copy would be 160 in float32


@pytest.mark.parametrize(
    ("models", "weights", "message"),
    [
        (torch.zeros(0, 3), None, "at least one model"),
        (torch.zeros(3), None, "one model per row"),
        (torch.zeros(2, 3, dtype=torch.int64), None, "float tensor"),
        (torch.zeros(2, 3), torch.ones(3), r"one number per model: \[2\]"),
        (torch.zeros(2, 3), torch.tensor([1.0, -1.0]), "not negative"),
        (torch.zeros(2, 3), torch.zeros(2), "not all 0"),
        (torch.zeros(2, 3), torch.tensor([1.0, math.nan]), "finite"),
    ],
)
@every_aggregator
def test_invalid_stacks_and_weights_are_rejected(
    aggregator: Aggregator, models: Tensor, weights: Tensor | None, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        aggregator(models, weights)


def test_settings_have_bounds() -> None:
    stack = torch.zeros(3, 2)
    for aggregator in (GeometricMedian(0.0), SmoothedCoordinateMedian(-1.0), TrimmedMean(0.5)):
        with pytest.raises(SettingError, match="must be"):
            aggregator(stack)
