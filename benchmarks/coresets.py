"""Comparison of coreset constructions: time, and accuracy of a model trained on the coreset.

    python benchmarks/coresets.py [--count 3000] [--seeds 3] [--data FOLDER]        # four minutes of one core

Each construction selects 3,000 rows of 60,000 x 784: from MNIST if a data folder is given (or named by DESCANT_DATA),
else from random clusters. "distance" is the mean distance of a row to the nearest selected row of its class. "accuracy"
is that of a logistic regression trained on the weighted coreset, on 10,000 test rows, with its deviation over seeds.
"unweighted" is the accuracy when all selected rows have equal weights.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import mean, pstdev

import numpy as np
import torch
from torch import Tensor, nn

from descant.core.seeds import stream
from descant.coresets.features import embedding_features, gradient_features
from descant.coresets.selection import CONSTRUCTIONS
from descant.parties import Coreset, Party, Selection
from descant.parties.images import train_and_test_images
from descant.reporting.table import Table
from descant.training.batches import draw_batches


def mnist(data: str) -> Party:
    x, y, x_test, y_test = (torch.from_numpy(part) for part in train_and_test_images("mnist", data))
    return Party("mnist", x.flatten(1).float() / 255, y, x_test=x_test.flatten(1).float() / 255, y_test=y_test)


def clusters(n: int = 60_000, tests: int = 10_000, d: int = 784) -> Party:
    """Return ten classes of twenty clusters each."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(200, d)).astype(np.float32)
    cluster_index = rng.integers(200, size=n + tests)
    x = torch.from_numpy(centers[cluster_index] + 3 * rng.normal(size=(n + tests, d)).astype(np.float32))
    y = torch.from_numpy(cluster_index % 10)
    return Party("clusters", x[:n], y[:n], x_test=x[n:], y_test=y[n:])


def distance(party: Party, coreset: Coreset) -> float:
    """Return the mean distance of a row to the nearest selected row of its class."""
    total = 0.0
    for label in party.y.unique():
        class_rows = party.x[party.y == label]
        selected = coreset.x[coreset.y == label]
        total += sum(float(torch.cdist(part, selected).min(1).values.sum()) for part in torch.split(class_rows, 2000))
    return total / party.samples


def accuracy(party: Party, coreset: Coreset, weights: Tensor | None, seed: int) -> float:
    """Return the accuracy of a logistic regression after 2,000 steps of batch 200, drawn as in a solver."""
    torch.manual_seed(seed)
    net = nn.Linear(party.x.shape[1], 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draws = draw_batches(
        len(coreset.x), 200, 2000, unit="steps", rng=stream(seed, 0, "a", purpose="batch"), weights=weights
    )
    for rows in draws.indices:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(coreset.x[rows]), coreset.y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((net(party.x_test).argmax(1) == party.y_test).double().mean())


def trained_net(party: Party) -> nn.Module:
    """Return a small network trained for an epoch, whose activations and gradients give feature spaces."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(party.x.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in draw_batches(party.samples, 200, 1, unit="epochs", rng=stream(0, 0, "net", purpose="batch")).indices:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(party.x[rows]), party.y[rows]).backward()
        optimizer.step()
    return net


def benchmark_row(party: Party, selection: Selection, net: nn.Module, seeds: int) -> dict[str, object]:
    features = {"embedding": embedding_features, "gradient": gradient_features}.get(selection.space)
    seconds = []
    accuracies = []
    unweighted_accuracies = []
    distances = []
    for seed in range(seeds):
        began = time.perf_counter()
        coreset = selection(party, seed, features(net) if features else None)
        seconds.append(time.perf_counter() - began)
        accuracies.append(accuracy(party, coreset, coreset.weights, seed))
        unweighted_accuracies.append(accuracy(party, coreset, None, seed))
        distances.append(distance(party, coreset))
    row = {"method": selection.method, "space": selection.space, "seconds": mean(seconds), "distance": mean(distances)}
    return row | {"accuracy": mean(accuracies), "±": pstdev(accuracies), "unweighted": mean(unweighted_accuracies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default=os.environ.get("DESCANT_DATA", ""))
    given = parser.parse_args()
    party = mnist(given.data) if given.data else clusters()
    net = trained_net(party)
    rows = []
    for method in CONSTRUCTIONS:
        spaces = ("input", "embedding", "gradient") if method not in ("uniform", "balanced") else ("input",)
        for space in spaces:
            selection = Selection(count=given.count, method=method, space=space)
            rows.append(benchmark_row(party, selection, net, given.seeds))
    whole = Coreset(party.x, party.y, torch.ones(party.samples))
    rows.append({"method": "all rows", "accuracy": mean(accuracy(party, whole, None, s) for s in range(given.seeds))})
    columns = ("method", "space", "seconds", "distance", "accuracy", "±", "unweighted")
    caption = (
        f"{given.count:,} of {party.samples:,} rows of {party.x.shape[1]} numbers ({party.name}), {given.seeds} seeds."
    )
    print(Table(columns, rows, caption, decimals={"seconds": 1, "accuracy": 4, "±": 4, "unweighted": 4}))


if __name__ == "__main__":
    main()
