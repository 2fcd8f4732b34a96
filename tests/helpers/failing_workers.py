"""Models, losses and parties that fail inside a worker, for the tests of engines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from descant import parties
from descant.engines.processes.engine_worker import WORKER_ENV
from descant.parties import Population
from toy_problems import classification_parties, network


def loss_killing_worker_once(output: Tensor, y: Tensor, kill_file: str) -> Tensor:
    """Return the loss; kill this worker once if ``kill_file`` exists."""
    if WORKER_ENV in os.environ and Path(kill_file).exists():
        Path(kill_file).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, y)


def loss_killing_workers(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss; kill every worker that computes it for the second party."""
    if WORKER_ENV in os.environ and (y == 2).all():
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, y)


def loss_hanging_workers(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss; in a worker, sleep for a minute first."""
    if WORKER_ENV in os.environ:
        time.sleep(60)
    return nn.functional.cross_entropy(output, y)


def dropout_network() -> nn.Module:
    """Return a network with dropout: its draws are per party, so the loss sees one party's targets at a time."""
    return nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1))


def parties_with_worker_killer() -> Population:
    """Return three parties of which the second triggers `loss_killing_workers`."""
    generator = torch.Generator().manual_seed(0)
    targets = [torch.tensor([0, 1, 0, 1]), torch.tensor([2, 2, 2]), torch.tensor([0, 1, 1])]
    return parties.from_arrays([(torch.randn(len(y), 6, generator=generator), y) for y in targets], test=0)


def network_failing_in_workers() -> nn.Module:
    """Return a network; fail in a worker."""
    if WORKER_ENV in os.environ:
        raise ZeroDivisionError("there is no such thing here")
    return network()


def parties_differing_in_workers() -> Population:
    """Return four parties; in a worker, five."""
    return classification_parties(5 if WORKER_ENV in os.environ else 4)
