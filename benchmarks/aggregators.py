"""Time of the aggregators, also as multiples of a plain sum over the same stack of models.

`models.sum(0)` reads the stack once and does hardly anything else: it is the yardstick, limited by memory alone. Every
aggregator is timed in turn with it, and the best of several turns counts. Run it on a quiet machine:

    python benchmarks/aggregators.py            # options: --threads 2, --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.aggregation.aggregators import (
    CoordinateMedian,
    GeometricMedian,
    Mean,
    SmoothedCoordinateMedian,
    TrimmedMean,
)
from descant.reporting.table import Table

SIZES = ((100, 1_000_000), (10, 7_850))  # the second is a logistic regression on 28 x 28 images


def model_stacks(count: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random models, the same with 30 % of the rows shifted by a million, and weights."""
    generator = torch.Generator().manual_seed(0)
    models = torch.randn(count, d, generator=generator)
    with_outliers = models.clone()
    with_outliers[: 3 * count // 10] += 1e6
    return models, with_outliers, 0.1 + torch.rand(count, generator=generator)


def benchmark_cases(count: int, d: int) -> dict[str, Callable[[], Any]]:
    """Return the timed functions, the yardstick first."""
    models, with_outliers, weights = model_stacks(count, d)
    return {
        "models.sum(0)": lambda: models.sum(0),
        "Mean": lambda: Mean()(models),
        "Mean, weighted": lambda: Mean()(models, weights),
        "GeometricMedian": lambda: GeometricMedian()(models),
        "GeometricMedian, weighted": lambda: GeometricMedian()(models, weights),
        "GeometricMedian, rho 0.1": lambda: GeometricMedian(0.1)(models),
        "GeometricMedian, 30 % outliers": lambda: GeometricMedian()(with_outliers),
        "GeometricMedian to 1e-6, 30 % outliers": lambda: GeometricMedian(tolerance=1e-6)(with_outliers),
        "CoordinateMedian": lambda: CoordinateMedian()(models),
        "CoordinateMedian, weighted": lambda: CoordinateMedian()(models, weights),
        "SmoothedCoordinateMedian, rho 0.1": lambda: SmoothedCoordinateMedian(0.1)(models),
        "SmoothedCoordinateMedian, rho 0.1, weighted": lambda: SmoothedCoordinateMedian(0.1)(models, weights),
        "SmoothedCoordinateMedian, rho 9": lambda: SmoothedCoordinateMedian(9.0)(models),
        "TrimmedMean": lambda: TrimmedMean()(models),
        "torch.median(dim=0)": lambda: torch.median(models, dim=0),
        "numpy.median(axis=0)": lambda: np.median(models.numpy(), axis=0),
    }


def best_seconds(cases: dict[str, Callable[[], Any]], turns: int, calls: int) -> dict[str, float]:
    """Return the least time of a call of each, measured in turns, so that noise affects all alike."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(turns):
        for name, run_case in cases.items():
            started = time.perf_counter()
            for _ in range(calls):
                run_case()
            best[name] = min(best[name], (time.perf_counter() - started) / calls)
    return best


def table(count: int, d: int, turns: int) -> Table:
    """Return the times for a stack of this shape."""
    small = count * d < 10**6
    best = best_seconds(benchmark_cases(count, d), turns * (10 if small else 1), 10 if small else 1)
    unit, scale = ("µs", 1e6) if small else ("ms", 1e3)
    yardstick = best["models.sum(0)"]
    rows = [{"aggregator": name, unit: scale * seconds, "sums": seconds / yardstick} for name, seconds in best.items()]
    verdict = f"K = {count}, d = {d}, float32, {torch.get_num_threads()} threads; best of {turns} turns."
    return Table(("aggregator", unit, "sums"), rows, verdict, decimals={unit: 1, "sums": 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print records instead of tables")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables = [table(count, d, options.turns) for count, d in SIZES]
    if options.json:
        print(json.dumps([{"verdict": each.verdict, "rows": list(each.rows)} for each in tables]))
        return
    print(*tables, sep="\n\n")


if __name__ == "__main__":
    main()
