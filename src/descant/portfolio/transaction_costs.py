"""The share of a portfolio's value that remains after trading, when buying and selling cost the share c.

Weights are ``[..., 1 + assets]``, cash first; c is one number, or one per path, ``[...]``. Fed+ prints the share that
is lost where the share that remains belongs: with its β_t = c·Σ|w'_t - w_t| as the factor, a portfolio that does not
trade would lose everything. Both functions return the share that remains.
"""

from __future__ import annotations

import math

import numpy as np

from .market import Array


def approximate_factor(before: Array, after: Array, c: float | Array) -> Array:
    """Return 1 - c·Σ_{i≥1} |w'_i - w_i|, the differentiable form used in training.

    >>> float(approximate_factor(np.array([1.0, 0.0]), np.array([0.0, 1.0]), c=0.01))
    0.99
    """
    return 1 - c * turnover(before, after)


def exact_factor(before: Array, after: Array, c: float | Array) -> Array:
    """Return the μ at which the trade pays for itself, to 1e-10: equation 14 of Jiang, Xu, Liang (2017), iterated.

    The paper is "A Deep Reinforcement Learning Framework for the Financial Portfolio Management Problem". Its map
    contracts by 2c - c² or better. So c alone determines the number of iterations of a path, and no path depends on the
    others in the batch.

    >>> float(exact_factor(np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0]), c=0.5))
    0.25
    """
    contraction = 2 * c - c * c
    iterations = np.reshape([_iterations(rate) for rate in np.ravel(contraction).tolist()], np.shape(contraction))
    mu = np.ones(np.broadcast_shapes(before.shape, after.shape)[:-1])
    for applied in range(iterations.max()):
        sold = np.maximum(before[..., 1:] - mu[..., None] * after[..., 1:], 0).sum(-1)
        mu = np.where(applied < iterations, (1 - c * before[..., 0] - contraction * sold) / (1 - c * after[..., 0]), mu)
    return mu


def _iterations(contraction: float) -> int:
    """Return how many iterations with this contraction factor shrink a distance by a factor of 1e-10."""
    return math.ceil(math.log(1e-10) / math.log(contraction)) if contraction else 0


def turnover(before: Array, after: Array) -> Array:
    """Return Σ_{i≥1} |w'_i - w_i|: the share of the value that is bought or sold."""
    traded: Array = np.abs(before[..., 1:] - after[..., 1:]).sum(-1)
    return traded
