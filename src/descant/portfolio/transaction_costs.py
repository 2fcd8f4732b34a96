"""What is left of a portfolio's value when weights change and both buying and selling cost the share c.

Weights are ``[..., 1 + assets]``, cash first; c is one number, or one a path, ``[...]``. Fed+ prints what is lost
where what is left belongs: with its β_t = c·Σ|w'_t - w_t| as the factor, who does not trade loses all. Both functions
give the share that is left.
"""

from __future__ import annotations

import math

import numpy as np

from .market import Array


def approximate_factor(before: Array, after: Array, c: float | Array) -> Array:
    """1 - c·Σ_{i≥1} |w'_i - w_i|: as in training, where a gradient goes through it.

    >>> float(approximate(np.array([1.0, 0.0]), np.array([0.0, 1.0]), c=0.01))
    0.99
    """
    return 1 - c * turnover(before, after)


def exact_factor(before: Array, after: Array, c: float | Array) -> Array:
    """The μ at which the trade pays for itself, to 1e-10: equation 14 of Jiang, Xu, Liang (2017), by its iteration.

    A Deep Reinforcement Learning Framework for the Financial Portfolio Management Problem. Its map brings any two μ
    together by 2c - c² or better, so a path's c alone says how often to apply it, and none depends on those beside it.

    >>> float(exact(np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0]), c=0.5))
    0.25
    """
    contraction = 2 * c - c * c
    iterations = np.reshape([_iterations(one) for one in np.ravel(contraction).tolist()], np.shape(contraction))
    mu = np.ones(np.broadcast_shapes(before.shape, after.shape)[:-1])
    for applied in range(iterations.max()):
        sold = np.maximum(before[..., 1:] - mu[..., None] * after[..., 1:], 0).sum(-1)
        mu = np.where(applied < iterations, (1 - c * before[..., 0] - contraction * sold) / (1 - c * after[..., 0]), mu)
    return mu


def _iterations(contraction: float) -> int:
    """How often to shrink a distance by this factor until 1e-10 of it is left."""
    return math.ceil(math.log(1e-10) / math.log(contraction)) if contraction else 0


def turnover(before: Array, after: Array) -> Array:
    """Σ_{i≥1} |w'_i - w_i|: the share of the value that is bought or sold."""
    traded: Array = np.abs(before[..., 1:] - after[..., 1:]).sum(-1)
    return traded
