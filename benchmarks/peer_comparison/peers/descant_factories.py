"""The model and the parties of a workload, which Descant's workers import by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from descant.parties import Population, from_arrays

from .models import build, load
from .work import open_shared


def model(folder: str) -> nn.Module:
    """Return the model with the initial weights."""
    shared = open_shared(Path(folder))
    return load(build(shared.work.model), shared.initial())


def make_population(folder: str) -> Population:
    """Return the parties; all samples are for training."""
    shared = open_shared(Path(folder))
    x = torch.from_numpy(shared.x)
    y = torch.from_numpy(shared.y)
    return from_arrays([(x[cut], y[cut]) for cut in shared.cuts()], test=0)
