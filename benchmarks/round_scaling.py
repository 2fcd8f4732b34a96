"""Growth of a round's time and memory with participants, parameters and population.

    python benchmarks/round_scaling.py --out growth        # about three minutes; writes growth.json and growth.png

Each point is measured in its own process. Memory is the peak over the rounds of a run, minus the memory before the
first round, when the data is already loaded. Every party keeps a personal model and Adam's moments, three rows in all.
The budget is 32 MB for models and as much for moments; beyond it they are on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

BUDGET = 2**25
FEATURES = 20
CLASSES = 10
AXES = {"participants": "parties per round", "parameters": "parameters", "population": "parties in all"}


@dataclass(frozen=True)
class GrowthPoint:
    """One measurement: the varied axis, and all three numbers."""

    axis: str
    participants: int = 10
    parameters: int = 10_000
    population: int = 1000


GROWTH_POINTS = [
    *(GrowthPoint("participants", participants=count) for count in (1, 3, 10, 30, 100, 300, 1000)),
    *(GrowthPoint("parameters", parameters=d, population=10) for d in (1000, 10_000, 100_000, 1_000_000, 10_000_000)),
    *(GrowthPoint("population", population=count) for count in (100, 1000, 10_000, 100_000)),
]


def proc_status_kilobytes(field: str) -> int:
    """Return a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(point: GrowthPoint) -> dict[str, Any]:
    """Measure the time of a round, and its memory beyond the data."""
    import torch
    from torch import nn

    from descant import Federation, Sgd, algorithms, parties

    torch.set_num_threads(1)
    width = max(1, point.parameters // (FEATURES + CLASSES + 1))
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(point.population * 10, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (len(x),), generator=generator)
    cuts = range(0, len(x), 10)
    population = parties.from_arrays([(x[at : at + 10], y[at : at + 10]) for at in cuts], test=0)
    solver = Sgd(lr=0.001, steps=5, batch=10, optimizer="Adam")
    participation = min(point.participants, point.population)
    fed = Federation(
        net, population, algorithms.FedAvgPlus(), solver=solver, participation=participation, memory_budget=BUDGET
    )
    execution_mode = fed.state.execution_mode
    seconds = []
    fed.engine_  # noqa: B018  creates the engine before memory is measured
    before = proc_status_kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    end = time.perf_counter() + 4
    while len(seconds) < 3 or (len(seconds) < 40 and time.perf_counter() < end):
        began = time.perf_counter()
        fed.fit(1, progress=False)
        seconds.append(time.perf_counter() - began)
    megabytes = (proc_status_kilobytes("VmHWM") - before) / 1e3
    rows = participation * fed.state.global_model.numel() * 4 / 1e6
    return {
        "execution mode": execution_mode,
        "rounds": len(seconds),
        "ms": 1e3 * median(seconds[1:]),
        "MB": megabytes,
        "rows MB": rows,
    }


def draw(results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5), sharex="col", layout="constrained")
    for column, (axis, label) in enumerate(AXES.items()):
        points = [result for result in results if result["axis"] == axis]
        x_values = [point[axis] for point in points]
        for row, name in enumerate(("ms", "MB")):
            shown = axes[row][column]
            shown.loglog(x_values, [point[name] for point in points], "o-", color="#1f6f8b", label="measured")
            if name == "MB":
                model_sizes = [point["rows MB"] for point in points]
                shown.loglog(x_values, model_sizes, ":", color="#888888", label="the models that take part")
                shown.axhline(BUDGET / 1e6, color="#c0603a", linewidth=0.8, label="the budget for party state")
            shown.grid(True, which="major", alpha=0.3)
            shown.set_ylim(bottom=0.5)
        axes[1][column].set_xlabel(label)
    axes[0][0].set_ylabel("ms per round")
    axes[1][0].set_ylabel("MB beyond the data")
    axes[1][0].legend(fontsize=8)
    figure.suptitle("How a round grows: 5 steps of Adam a party, personal models kept, one thread")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("growth"), help="the folder for growth.json and growth.png")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(measure(GrowthPoint(**json.loads(given.point)))))
        return
    results: list[dict[str, Any]] = []
    for point in GROWTH_POINTS:
        command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{point} failed:\n{done.stderr}")
        results.append({**asdict(point), **json.loads(done.stdout)})
        last = results[-1]
        print(f"{AXES[point.axis]:>17} {last[point.axis]:>10,}: {last['ms']:9.1f} ms {last['MB']:8.1f} MB", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "growth.json").write_text(json.dumps(results, indent=1))
    draw(results, given.out / "growth.png")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
