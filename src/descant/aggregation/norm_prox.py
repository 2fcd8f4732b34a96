"""Proximal maps of the norms ‖·‖_p that have no closed form, for :mod:`descant.aggregation.penalties`.

Each is of the norm itself, not of its p-th power: argmin over w of ‖w‖_p + ‖v - w‖²/(2 rho), for each row of v.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm(v: Tensor, p: float) -> Tensor:
    """Return ‖v‖_p of each row, scaled by the largest entry so that a large p does not overflow.

    >>> norm(torch.tensor([3000.0, 0.0]), 200.0)
    tensor(3000.)
    """
    largest = v.abs().amax(dim=-1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(v / torch.where(largest > 0, largest, 1.0), ord=p, dim=-1)
    return length * largest.squeeze(-1)


def prox_max_norm(v: Tensor, rho: float) -> Tensor:
    """Return the prox of rho‖·‖_∞: entries are clipped at the level tau at which the clipped parts sum to rho.

    >>> prox_max_norm(torch.tensor([[3.0, 1.0], [0.4, -0.5]]), rho=1.0)
    tensor([[2., 1.], [0., -0.]])
    """
    size, _ = v.abs().double().sort(dim=-1, descending=True)
    rank = torch.arange(1, v.shape[-1] + 1, dtype=torch.float64, device=v.device)
    levels = (size.cumsum(dim=-1) - rho) / rank  # tau if exactly the `rank` largest entries were cut
    cut = (size > levels).sum(dim=-1, keepdim=True).clamp(min=1)
    tau = levels.gather(-1, cut - 1).clamp(min=0)
    return v.sign() * v.abs().double().minimum(tau).to(v.dtype)


def prox_p_norm(v: Tensor, rho: float, p: float) -> Tensor:
    """Return the prox of rho‖·‖_p, 1 < p < ∞, by a root search in s = ‖w‖_p, one number per row.

    With w = s t the optimum has s t_i + rho t_i^(p-1) = |v_i| and Σ t_i^p = 1. The left sides grow with t, so each
    s has its t, and Σ t^p falls as s grows; it starts above 1 unless ‖v‖_q <= rho (q the dual of p), where w = 0.

    >>> w = prox_p_norm(torch.tensor([[3.0, 4.0]], dtype=torch.float64), 1.0, 3.0)
    >>> bool(((w + (w / w.norm(p=3)) ** 2) - torch.tensor([3.0, 4.0])).abs().max() < 1e-12)
    True
    """
    size = (v.double().abs() / rho).reshape(-1, v.shape[-1])  # of a norm, prox(v; rho) = rho · prox(v/rho; 1)
    dual = torch.linalg.vector_norm(size, ord=p / (p - 1), dim=1)
    rows = dual > 1
    w = torch.zeros_like(size)
    if rows.any():
        w[rows] = _prox_unit_rho(size[rows], p)
    return (v.sign() * (rho * w).reshape(v.shape)).to(v.dtype)


def _prox_unit_rho(size: Tensor, p: float) -> Tensor:
    """Return the prox of each row at rho = 1, for rows with entries >= 0 and a prox that is not 0."""
    high = size.amax(dim=1) * size.shape[1] ** (1 / p)  # >= ‖v‖_p, without powers that overflow
    low = torch.zeros_like(high)
    s = high / 2
    for iteration in range(200):
        t = _directions(size, s, p)
        excess = t.pow(p).sum(dim=1)  # falls with s; 1 at the root
        low = torch.where(excess > 1, s, low)
        high = torch.where(excess > 1, high, s)
        shrink = t / (s[:, None] + (p - 1) * t.pow(p - 2))  # -dt/ds
        slope = p * torch.where(t > 0, t.pow(p - 1) * shrink, 0.0).sum(dim=1)
        # Newton on log Σ t^p, which is straighter than the sum for large p.
        newton = s + excess * excess.log() / slope
        converged = ((newton - s).abs() <= 1e-14 * s) | (high - low <= 1e-15 * high)
        if converged.all():
            break
        usable = (
            (newton > low) & (newton < high) & (iteration % 4 != 3)
        )  # every fourth step halves the bracket, to bound the number of steps
        s = torch.where(converged, s, torch.where(usable, newton, (low + high) / 2))
    w: Tensor = s[:, None] * _directions(size, s, p)
    return w


def _directions(size: Tensor, s: Tensor, p: float) -> Tensor:
    """Solve s t + t^(p-1) = size for t >= 0, per entry, by Newton from the right of a convex root.

    For p < 2 the convex function is that of y = t^(p-1): y + s y^(1/(p-1)). At the start the two terms are together
    at most twice the right side, so even a huge exponent takes few steps.
    """
    power = p - 1 if p >= 2 else 1 / (p - 1)
    power_coefficient = torch.ones_like(s) if p >= 2 else s
    linear_coefficient = s if p >= 2 else torch.ones_like(s)
    power_coefficient = power_coefficient[:, None]
    linear_coefficient = linear_coefficient[:, None]
    y = torch.minimum(size / linear_coefficient, (size / power_coefficient).pow(1 / power))
    for _ in range(100):
        curve = power_coefficient * y.pow(power - 1)
        step = (curve * y + linear_coefficient * y - size) / (power * curve + linear_coefficient)
        if not (step > 1e-15 * y).any():
            break
        y = y - step.clamp(min=0)
    return y if p >= 2 else y.pow(power)
