"""Local iterations per second of portfolio desks: in stacks, and in a loop over plain modules of torch's own layers.

Both use batches of 50 days of 9 assets and Adam, on one thread and in turns; seconds are processor time. The output
also extrapolates the time of the papers' experiment (50 desks, 800 rounds of 50 iterations) per method:

    python benchmarks/portfolio_throughput.py [--iterations 30] [--turns 5] [--desks 10]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from descant import Federation, Trader, algorithms, parties
from descant import models as networks
from descant.portfolio import generate_market
from descant.reporting.table import Table

KINDS = ("cnn", "rnn", "lstm")
BATCH = 50
ASSETS = 9
WINDOW = 30
COST = 0.002


class PlainEiie(nn.Module):
    """The EIIE network built from torch's own layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "cnn":
            self.days = nn.Conv1d(1, 3, 2)
            self.all = nn.Linear(3 * (WINDOW - 1), 10)
        else:
            self.step = (nn.RNN if kind == "rnn" else nn.LSTM)(1, 20, batch_first=True)
        self.vote = nn.Linear(11 if kind == "cnn" else 21, 1)
        self.cash = nn.Parameter(torch.zeros(1))

    def forward(self, prices: Tensor, previous_weights: Tensor) -> Tensor:
        flat = prices.flatten(0, 1)
        if self.kind == "cnn":
            features = torch.relu(self.all(torch.relu(self.days(flat.unsqueeze(1))).flatten(1)))
        else:
            features = self.step(flat.unsqueeze(2))[0][:, -1]
        votes = self.vote(
            torch.cat([features.view(*previous_weights.shape, -1), previous_weights.unsqueeze(2)], 2)
        ).squeeze(2)
        return torch.cat([self.cash.expand(len(votes), 1), votes], 1).softmax(1)


def looped_rate(kind: str, population: parties.Population, iterations: int) -> float:
    """Return the iterations per second of one desk after another, as in a single-file implementation."""
    models = [PlainEiie(kind) for _ in population]
    optimizers = [torch.optim.Adam(model.parameters(), 5e-5) for model in models]
    price_tables = [torch.from_numpy(desk.prices).float() for desk in population.values()]  # type: ignore[attr-defined]
    portfolio_weights = [torch.full((len(book), ASSETS), 1 / ASSETS) for book in price_tables]
    rng = np.random.default_rng(0)
    began = time.process_time()
    for _ in range(iterations):
        for model, optimizer, book, held in zip(models, optimizers, price_tables, portfolio_weights, strict=True):
            first = int(rng.integers(WINDOW, len(book) - BATCH - 1))
            today = book[first : first + BATCH]
            prices = book[first - WINDOW + 1 : first + BATCH].unfold(0, WINDOW, 1) / today.unsqueeze(2)
            relatives = torch.cat([torch.ones(BATCH, 1), book[first + 1 : first + 1 + BATCH] / today], 1)
            weights = model(prices, held[first - 1 : first - 1 + BATCH])
            earned = weights * relatives
            grown = earned.sum(1)
            drifted = earned[:-1] / grown[:-1, None]
            left = 1 - COST * (weights[1:, 1:] - drifted[:, 1:]).abs().sum(1)
            loss = -(grown.log().sum() + left.log().sum()) / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            held[first : first + BATCH] = weights.detach()[:, 1:]
    return len(models) * iterations / (time.process_time() - began)


def stacked_rate(kind: str, population: parties.Population, iterations: int) -> float:
    """Return the iterations per second of Descant."""
    solver = Trader(iterations=iterations, batch=BATCH)
    fed = Federation(partial(networks.eiie, kind, WINDOW), population, algorithms.Local(), solver=solver)
    next(iter(fed.rounds(1, evaluate_local_in=())))  # warm-up
    began = time.process_time()
    next(iter(fed.rounds(1, evaluate_local_in=())))
    return len(population) * iterations / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30, help="measured iterations per desk")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each; the median counts")
    parser.add_argument("--desks", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    population = parties.desks(generate_market(), count=given.desks, assets=ASSETS, augment=("gbm",))
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.turns):
        for kind in KINDS:
            for mode, measure in (("stacked", stacked_rate), ("looped", looped_rate)):
                rates.setdefault((kind, mode), []).append(measure(kind, population, given.iterations))
    rows = []
    for kind in KINDS:
        ours, theirs = (median(rates[kind, mode]) for mode in ("stacked", "looped"))
        row = {"evaluator": kind, "iterations/s": ours, "plain modules": theirs, "ratio": ours / theirs}
        rows.append({**row, "minutes of 50 desks": 50 * 800 * 50 / ours / 60})
    decimals = {"iterations/s": 0, "plain modules": 0, "ratio": 2, "minutes of 50 desks": 0}
    print(Table(tuple(rows[0]), rows, "Minutes are of one core, for a method with one seed.", decimals=decimals))


if __name__ == "__main__":
    main()
