"""Laws of penalties: a prox is a minimizer, an envelope is smooth, and the aggregate is a minimizer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from descant.aggregation.aggregators import fixed_point_step
from descant.aggregation.penalties import (
    ByLayer,
    DiagonalQ,
    HalfSquare,
    Indicator,
    LayerSum,
    Norm1,
    Norm2,
    NormP,
    Penalty,
    Zero,
    envelope,
    proximal_anchor,
)
from descant.errors import SettingError
from descant.models.flat import Net

D = 6
PENALTIES: dict[str, Penalty] = {
    "half square": HalfSquare(),
    "l2": Norm2(),
    "l1": Norm1(),
    "diagonal": DiagonalQ((0.0, 0.1, 1.0, 2.0, 5.0, 30.0)),
    "lp 1": NormP(1.0),
    "lp 1.05": NormP(1.05),
    "lp 1.5": NormP(1.5),
    "lp 2": NormP(2.0),
    "lp 3": NormP(3.0),
    "lp 8": NormP(8.0),
    "lp inf": NormP(math.inf),
    "zero": Zero(),
    "indicator": Indicator(),
    "layers": LayerSum(((((0, 1), (3, 4)), Norm2()), (((1, 3),), Norm1()))),
}
every_penalty = pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())
law = settings(derandomize=True, deadline=None, max_examples=12)
seeds = st.integers(0, 10_000)
rhos = st.sampled_from([0.01, 0.3, 1.0, 7.0])
scales = st.sampled_from([0.1, 1.0, 20.0])


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cost(penalty: Penalty, w: Tensor, v: Tensor, rho: float) -> Tensor:
    return penalty.value(w) + (v - w).square().sum(-1) / (2 * rho)


def objective(penalty: Penalty, models: Tensor, z: Tensor, rho: float, shares: Tensor) -> float:
    return float(shares @ envelope(penalty, models - z, rho))


@every_penalty
@law
@given(seed=seeds, rho=rhos, scale=scales)
def test_prox_is_the_minimizer(penalty: Penalty, seed: int, rho: float, scale: float) -> None:
    v = scale * draw(seed, D)
    w = penalty.prox(v, rho)
    for size in (1e-4, 1e-2, 1.0):
        around = w + size * draw(seed + 1, 200, D) * (1 if size > 1e-3 else scale)
        assert (cost(penalty, around, v, rho) >= cost(penalty, w, v, rho) - 1e-11 * (1 + scale / rho)).all()


@every_penalty
@law
@given(seed=seeds, rho=rhos, scale=scales)
def test_prox_is_firmly_nonexpansive(penalty: Penalty, seed: int, rho: float, scale: float) -> None:
    a = scale * draw(seed, D)
    b = scale * draw(seed + 1, D)
    moved = penalty.prox(a, rho) - penalty.prox(b, rho)
    assert moved @ moved <= moved @ (a - b) + 1e-12 * scale**2


@every_penalty
@law
@given(seed=seeds, rho=rhos)
def test_prox_of_a_stack_equals_prox_of_its_rows(penalty: Penalty, seed: int, rho: float) -> None:
    stack = draw(seed, 4, D)
    kept = stack.clone()
    together = penalty.prox(stack, rho)
    assert torch.equal(stack, kept)
    for row, alone in zip(together, stack, strict=True):
        torch.testing.assert_close(row, penalty.prox(alone, rho), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(penalty.value(together)[2], penalty.value(together[2]), rtol=1e-13, atol=1e-14)


@every_penalty
@law
@given(seed=seeds, rho=rhos, scale=scales)
def test_envelope_is_below_phi_with_gradient_v_minus_prox(
    penalty: Penalty, seed: int, rho: float, scale: float
) -> None:
    v = scale * draw(seed, D)
    assert 0 <= envelope(penalty, v, rho) <= penalty.value(v) + 1e-12
    h = 1e-5 * scale
    steps = h * torch.eye(D, dtype=torch.float64)
    rise = (envelope(penalty, v + steps, rho) - envelope(penalty, v - steps, rho)) / (2 * h)
    # A kink of the gradient within h of v costs at most h/rho.
    torch.testing.assert_close(rise, (v - penalty.prox(v, rho)) / rho, rtol=1e-5, atol=2e-5 * (1 + scale / rho))


@pytest.mark.parametrize("p", [1.0, 1.05, 1.5, 2.0, 3.0, 40.0, math.inf])
@pytest.mark.parametrize("v", [0.0, 0.4, -0.4, 1.0, 2.5, -30.0])
def test_in_one_dimension_every_norm_is_the_absolute_value(p: float, v: float) -> None:
    grid = torch.linspace(-40, 40, 800_001, dtype=torch.float64)
    brute = grid[(grid.abs() + (grid - v) ** 2 / 2).argmin()]
    assert NormP(p).prox(torch.tensor([v], dtype=torch.float64), 1.0).item() == pytest.approx(brute.item(), abs=2e-4)


@pytest.mark.parametrize("p", [1.001, 1.05, 1.3, 1.9, 2.1, 3.0, 10.0, 200.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_prox_of_a_p_norm_solves_its_equation_to_rounding(p: float, scale: float) -> None:
    v = scale * draw(3, 50, 30)
    w = NormP(p).prox(v, 1.0)
    q = p / (p - 1)
    vanished = torch.linalg.vector_norm(v, ord=q, dim=1) <= 1
    assert torch.equal((w == 0).all(dim=1), vanished)
    w = w[~vanished]
    v = v[~vanished]
    # (v - w)/rho must be the gradient of the norm at w: of dual norm 1 and aligned with w.
    slope = v - w
    rounding = 1e-15 * max(1.0, scale) * max(p, q)  # of v - w, as the dual norm magnifies it
    one = torch.ones(len(w)).double()
    torch.testing.assert_close(NormP(q).value(slope), one, rtol=0, atol=10 * rounding)
    torch.testing.assert_close((slope * w).sum(1), NormP(p).value(w), rtol=10 * rounding, atol=1e-11)


def test_prox_of_float32_stays_float32_and_near_the_float64_one() -> None:
    v = draw(0, 3, D)
    for penalty in PENALTIES.values():
        narrow = penalty.prox(v.float(), 0.5)
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), penalty.prox(v.float().double(), 0.5), rtol=1e-5, atol=1e-6)


@law
@given(seed=seeds, rho=rhos)
def test_closed_forms_of_section_5_2(seed: int, rho: float) -> None:
    personal = draw(seed, D)
    center = draw(seed + 1, D)
    gap = personal - center
    mixes = {
        HalfSquare(): torch.tensor(rho / (1 + rho), dtype=torch.float64),
        Norm2(): (rho / gap.norm()).clamp(max=1),
        Norm1(): (rho / gap.abs()).clamp(max=1),
    }
    for penalty, mix in mixes.items():
        torch.testing.assert_close(
            proximal_anchor(penalty, personal, center, rho=rho), (1 - mix) * personal + mix * center
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_proximal_anchor_keeps_bits(dtype: torch.dtype) -> None:
    personal = draw(1, 3, 1000).to(dtype) * 1e-3
    center = 1e3 * draw(2, 1000).to(dtype)
    assert not torch.equal(center + (personal - center), personal)  # the naive way loses them
    assert torch.equal(proximal_anchor(Zero(), personal, center, rho=1.0), personal)
    assert torch.equal(proximal_anchor(Indicator(), personal, center, rho=1.0), center.expand_as(personal))
    hybrid = LayerSum(((((10, 20),), Indicator()),))
    mixed = proximal_anchor(hybrid, personal, center, rho=1.0)
    assert torch.equal(mixed[:, 20:], personal[:, 20:]) and torch.equal(mixed[0, 10:20], center[10:20])


@pytest.mark.parametrize(("sign", "expected", "printed_value"), [(1.0, 0.25, -0.5), (-1.0, -0.25, -6.0)])
def test_erratum_9_the_printed_threshold_loses_negatives(sign: float, expected: float, printed_value: float) -> None:
    models = sign * torch.tensor([[-1.0], [-0.5], [10.0]], dtype=torch.float64)
    rho = 2.0
    ours = printed = models.mean(0)
    for _ in range(400):
        ours = fixed_point_step(models, ours, Norm1(), rho=rho)
        d = models - printed
        printed = models.mean(0) - torch.clamp(d - rho * d.sign(), min=0).mean(0)
    assert printed.item() == pytest.approx(printed_value, abs=1e-9)
    assert ours.item() == pytest.approx(expected, abs=1e-9)
    assert Norm1().center(rho)(models).point.item() == pytest.approx(expected, abs=1e-12)


@every_penalty
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("count", "rho"), [(1, 1.0), (2, 0.5), (5, 30.0), (8, 0.5)])
def test_center_is_the_minimizer(penalty: Penalty, weighted: bool, count: int, rho: float) -> None:
    models = 3 * draw(count, count, D)
    weights = 0.1 + draw(9, count).abs() if weighted else None
    shares = torch.full((count,), 1 / count, dtype=torch.float64) if weights is None else weights / weights.sum()
    center = penalty.center(rho)(models, weights)
    best = shares @ envelope(penalty, models - center.point, rho)
    for size in (1e-3, 0.1, 3.0):
        points = center.point + size * draw(4, 40, 1, D)
        assert (envelope(penalty, models - points, rho) @ shares >= best - 1e-10).all()
    # The gap is the norm of the gradient; it is found here by eq. (34), and small.
    uphill = center.point - fixed_point_step(models, center.point, penalty, rho=rho, weights=weights)
    assert float(uphill.norm()) / rho == pytest.approx(center.gap, abs=1e-9)
    assert center.gap < 1e-8


@pytest.mark.parametrize("name", ["l2", "l1", "lp 1.5", "lp inf", "layers", "half square"])
def test_center_agrees_with_equation_34_iterated(name: str) -> None:
    penalty = PENALTIES[name]
    rho = 1.0
    models = 2 * draw(11, 7, D)
    shares = torch.full((7,), 1 / 7, dtype=torch.float64)
    z = models.mean(0)
    before = objective(penalty, models, z, rho, shares)
    for _ in range(300):
        z = fixed_point_step(models, z, penalty, rho=rho)
    oracle = objective(penalty, models, z, rho, shares)
    best = objective(penalty, models, penalty.center(rho)(models).point, rho, shares)
    assert best == pytest.approx(oracle, abs=1e-9)
    if name != "half square":
        assert oracle < before - 1e-3  # the oracle had to move


def test_norm_p_centers_approach_those_of_exact_norms() -> None:
    models = draw(5, 9, D)
    for exact, near in ((1.0, 1.0001), (2.0, 2.0001)):
        a = NormP(exact).center(1.0)(models)
        b = NormP(near).center(1.0)(models)
        torch.testing.assert_close(a.point, b.point, rtol=0, atol=2e-3)


NET = Net(nn.ModuleDict({"body": nn.Linear(3, 1), "head": nn.Linear(3, 1)}))


def test_first_matching_pattern_gets_the_layer_and_neighbors_join() -> None:
    bound = ByLayer((("head.weight", Norm2()), ("head.*", Norm1()), ("body.*", HalfSquare()))).bind(NET)
    assert bound == LayerSum(((((4, 7),), Norm2()), (((7, 8),), Norm1()), (((0, 4),), HalfSquare())))
    assert ByLayer({"*.bias": Norm2()}).bind(NET) == LayerSum(((((3, 4), (7, 8)), Norm2()),))


def test_layer_sum_treats_each_layer_separately() -> None:
    models = 2 * draw(6, 5, 8)
    bound = ByLayer({"*.bias": Norm2(), "head.*": Norm1()}).bind(NET)
    bias = [3, 7]
    head = [4, 5, 6]
    rest = [0, 1, 2]
    value = Norm2().value(models[:, bias]) + Norm1().value(models[:, head])
    torch.testing.assert_close(bound.value(models), value)
    moved = bound.prox(models, 0.7)
    center = bound.center(0.7)(models)
    for columns, penalty in ((bias, Norm2()), (head, Norm1()), (rest, Zero())):
        torch.testing.assert_close(moved[:, columns], penalty.prox(models[:, columns], 0.7))
        torch.testing.assert_close(center.point[columns], penalty.center(0.7)(models[:, columns]).point)


@pytest.mark.parametrize("pattern", ["neck.*", "HEAD.*"])
def test_a_pattern_without_a_layer_names_the_layers(pattern: str) -> None:
    with pytest.raises(SettingError, match=r"matches no layer\. Layers: body\.weight, body\.bias, head\.weight"):
        ByLayer({pattern: Norm1()}).bind(NET)


def test_invalid_penalty_settings_are_rejected() -> None:
    v = torch.ones(3)
    with pytest.raises(SettingError, match="The 'p' of NormP must be >= 1"):
        NormP(0.5).prox(v, 1.0)
    for q in ((1.0, 1.0), (1.0, -1.0, 1.0)):
        with pytest.raises(SettingError, match="The 'q' of DiagonalQ must be 3 numbers >= 0"):
            DiagonalQ(q).prox(v, 1.0)
    for ranges in (((0, 2), (1, 3)), ((2, 5),)):
        with pytest.raises(SettingError, match="disjoint and within"):
            LayerSum(((ranges, Norm1()),)).prox(v, 1.0)
    with pytest.raises(SettingError, match="after patterns that match all"):
        ByLayer({"*": Norm1(), "head.*": Norm2()}).bind(NET)
