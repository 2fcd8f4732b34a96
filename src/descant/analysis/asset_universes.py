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
class Universes:
    """The returns that desks learn by, held against each other."""

    names: tuple[str, ...]
    returns: tuple[Numbers, ...]  # [days, assets] of each
    distances: Numbers  # [desks, desks] by dynamic time warping

    def table(self) -> Table:
        """Each desk: the norms of its returns' covariance, and its mean distance from the others."""
        rows = []
        for k, (name, returns) in enumerate(zip(self.names, self.returns, strict=True)):
            spectral, frobenius = time_warping.spread(returns)
            mean = float(np.delete(self.distances[k], k).mean())
            rows.append(
                {"desk": name, "ℓ2 norm ×1000": 1e3 * spectral, "Frobenius ×1000": 1e3 * frobenius, "distance": mean}
            )
        verdict = f"Mean distance of all pairs: {self.mean:.1f}."
        return Table(tuple(rows[0]), rows, verdict, {"distance": 1})

    @property
    def mean(self) -> float:
        """Over all pairs."""
        return float(self.distances[np.triu_indices(len(self.names), 1)].mean())

    def plot(self, file: str | Path) -> Path:
        """How the distance of the first two desks grows by the day, and how far each desk is from the others."""
        days = time_warping.alignment(self.returns[0], self.returns[1])
        apart = np.linalg.norm(self.returns[0][days[:, 0]] - self.returns[1][days[:, 1]], axis=1).cumsum()
        means = [float(np.delete(row, k).mean()) for k, row in enumerate(self.distances)]
        return draw_universes(Path(file), days, apart, dict(zip(self.names, means, strict=True)))


def universes(federation: Federation, every: int = 4) -> Universes:
    """The asset universes of a federation's desks; each ``every``-th day is looked at, for the time that it takes.

    It needs dtaidistance: pip install 'descant[finance]'.
    """
    desks = desks_of(federation)
    returns = tuple(desk.prices[1:] / desk.prices[:-1] - 1 for desk in desks)
    return Universes(federation.people.names, returns, time_warping.pairwise(returns, every)[1])
