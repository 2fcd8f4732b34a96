"""Differences between the assets of desks: dynamic time warping and spread of returns (v1 §4.2, fig. 5, table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..portfolio import universe_distances
from ..reporting.figure import Numbers
from ..reporting.portfolio_plots import draw_universes
from ..reporting.table import Table
from .desk_results import desks_of

if TYPE_CHECKING:
    from ..federation import Federation


@dataclass(frozen=True, eq=False)
class AssetUniverses:
    """The training returns of all desks, compared pairwise."""

    names: tuple[str, ...]
    returns: tuple[Numbers, ...]  # [days, assets] of each desk
    distances: Numbers  # [desks, desks] by dynamic time warping

    def table(self) -> Table:
        """Return a table with each desk's covariance norms and its mean distance from the other desks."""
        rows = []
        for k, (name, returns) in enumerate(zip(self.names, self.returns, strict=True)):
            spectral, frobenius = universe_distances.covariance_norms(returns)
            mean = float(np.delete(self.distances[k], k).mean())
            rows.append(
                {"desk": name, "ℓ2 norm ×1000": 1e3 * spectral, "Frobenius ×1000": 1e3 * frobenius, "distance": mean}
            )
        verdict = f"Mean distance of all pairs: {self.mean_distance:.1f}."
        return Table(tuple(rows[0]), rows, verdict, decimals={"distance": 1})

    @property
    def mean_distance(self) -> float:
        """The mean distance over all pairs of desks."""
        return float(self.distances[np.triu_indices(len(self.names), 1)].mean())

    def plot(self, file: str | Path) -> Path:
        """Draw the first two desks' cumulative distance by day, and each desk's mean distance, into a PNG file."""
        aligned_days = universe_distances.alignment(self.returns[0], self.returns[1])
        cumulative_distance = np.linalg.norm(
            self.returns[0][aligned_days[:, 0]] - self.returns[1][aligned_days[:, 1]], axis=1
        ).cumsum()
        means = [float(np.delete(row, k).mean()) for k, row in enumerate(self.distances)]
        return draw_universes(
            Path(file), aligned_days, cumulative_distance, means=dict(zip(self.names, means, strict=True))
        )


def compare_universes(federation: Federation, day_step: int = 4) -> AssetUniverses:
    """Compare the asset universes of a federation's desks on every ``day_step``-th day, which saves time.

    This needs dtaidistance: pip install 'descant[finance]'.
    """
    desks = desks_of(federation)
    returns = tuple(desk.prices[1:] / desk.prices[:-1] - 1 for desk in desks)
    return AssetUniverses(
        federation.population.names, returns, universe_distances.pairwise_distances(returns, day_step)[1]
    )
