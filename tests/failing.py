"""Models, losses and parties that fail inside a worker, for the tests of engines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from descant import parties
from descant.engines.processes.engine_worker import INSIDE
from descant.parties import People
from problems import classes, network


def fragile(output: Tensor, y: Tensor, order: str) -> Tensor:
    """A loss whose worker dies once, when a file says so."""
    if INSIDE in os.environ and Path(order).exists():
        Path(order).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, y)


def deadly(output: Tensor, y: Tensor) -> Tensor:
    """A loss that no worker survives for one party."""
    if INSIDE in os.environ and (y == 2).all():
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, y)


def slow(output: Tensor, y: Tensor) -> Tensor:
    """A loss that no worker comes to the end of."""
    if INSIDE in os.environ:
        time.sleep(60)
    return nn.functional.cross_entropy(output, y)


def looped() -> nn.Module:
    """Dropout is drawn party by party, so that the loss sees one party's targets."""
    return nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1))


def mostly_fine() -> People:
    """The second of three parties is what `deadly` dies of."""
    generator = torch.Generator().manual_seed(0)
    targets = [torch.tensor([0, 1, 0, 1]), torch.tensor([2, 2, 2]), torch.tensor([0, 1, 1])]
    return parties.from_arrays([(torch.randn(len(y), 6, generator=generator), y) for y in targets], test=0)


def nowhere() -> nn.Module:
    """No model, where workers are."""
    if INSIDE in os.environ:
        raise ZeroDivisionError("there is no such thing here")
    return network()


def otherwise() -> People:
    """Other parties, where workers are."""
    return classes(5 if INSIDE in os.environ else 4)
