"""How unlike the assets of desks are: dynamic time warping and the spread of returns (v1 §4.2, fig. 5, table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..portfolio import time_warping
from ..reporting.figure import Numbers
from ..reporting.portfolio_plots import draw_universes
from ..reporting.table import Table
from .desk_results import desks_of

if TYPE_CHECKING:
    from ..federation import Federation


@dataclass(frozen=True, eq=False)
class AssetUniverses:
    """The returns that desks learn by, held against each other."""

    names: tuple[str, ...]
    returns: tuple[Numbers, ...]  # [days, assets] of each
    distances: Numbers  # [desks, desks] by dynamic time warping

    def table(self) -> Table:
        """Each desk: the norms of its returns' covariance, and its mean distance from the others."""
        rows = []
        for k, (name, returns) in enumerate(zip(self.names, self.returns, strict=True)):
            spectral, frobenius = time_warping.covariance_norms(returns)
            mean = float(np.delete(self.distances[k], k).mean())
            rows.append(
                {"desk": name, "ℓ2 norm ×1000": 1e3 * spectral, "Frobenius ×1000": 1e3 * frobenius, "distance": mean}
            )
        verdict = f"Mean distance of all pairs: {self.mean_distance:.1f}."
        return Table(tuple(rows[0]), rows, verdict, decimals={"distance": 1})

    @property
    def mean_distance(self) -> float:
        """Over all pairs."""
        return float(self.distances[np.triu_indices(len(self.names), 1)].mean())

    def plot(self, file: str | Path) -> Path:
        """How the distance of the first two desks grows by the day, and how far each desk is from the others."""
        aligned_days = time_warping.alignment(self.returns[0], self.returns[1])
        cumulative_distance = np.linalg.norm(
            self.returns[0][aligned_days[:, 0]] - self.returns[1][aligned_days[:, 1]], axis=1
        ).cumsum()
        means = [float(np.delete(row, k).mean()) for k, row in enumerate(self.distances)]
        return draw_universes(
            Path(file), aligned_days, cumulative_distance, means=dict(zip(self.names, means, strict=True))
        )


def compare_universes(federation: Federation, day_step: int = 4) -> AssetUniverses:
    """The asset universes of a federation's desks; each ``every``-th day is looked at, for the time that it takes.

    It needs dtaidistance: pip install 'descant[finance]'.
    """
    desks = desks_of(federation)
    returns = tuple(desk.prices[1:] / desk.prices[:-1] - 1 for desk in desks)
    return AssetUniverses(federation.population.names, returns, time_warping.pairwise_distances(returns, day_step)[1])
