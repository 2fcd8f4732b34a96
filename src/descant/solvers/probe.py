"""Try a model on one batch before the work starts: what is wrong with it, and how its stacks can be computed."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from .. import seeds
from ..core import Loss, Term
from ..errors import ModelError
from ..flat import Net
from .descent import LOOPED, SINGLE, STACKED, TOGETHER, VECTORISED, Descent
from .objective import Objective, private_columns
from .stacked import Stack, kernel_of

WAYS = (STACKED, SINGLE, VECTORISED)
_AT_ONCE = 2**18  # columns


def probe(net: Net, loss: Loss, terms: tuple[Term, ...], x: Tensor, y: Tensor) -> dict[str, str]:
    """Why each way of computing parties at once cannot be taken ("" if it can); an error if the model cannot learn."""
    buffers = {name: buffer.clone() for name, buffer in net.module.named_buffers()}
    net.module.train()
    row, size = net.row(), net.layout.size
    private = private_columns(terms, row[:size], {}, partial(seeds.stream, 0, 0, "probe"))
    objective = Objective(net, loss, terms, tuple(len(part) for part in private))
    columns = torch.cat([row[:size], *private])
    parts = (columns, row[size:], row[:size], row.new_ones(len(terms)), x, y)
    draws = _try(objective, parts)
    _check_buffers(net, buffers)
    if draws:
        return dict.fromkeys(WAYS, "it draws random numbers (dropout, say), which are keyed by party")
    two = [part.expand(2, *part.shape) for part in parts]
    two[0] = torch.stack([columns, 1.1 * columns])  # two unlike parties: a way that mixes them is found out
    alone = _by_turns(objective, LOOPED, two)
    net.rest()
    return {way: _why_not(objective, way, two, alone) for way in WAYS}


def _try(objective: Objective, parts: tuple[Tensor, ...]) -> bool:
    """Whether the module draws random numbers; an error if it fails or is not finite at the start."""
    x, y = parts[-2:]
    name = type(objective.net.module).__name__
    with torch.random.fork_rng(devices=[]):
        state = torch.random.get_rng_state()
        try:
            value, *_ = objective.one(*parts)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{name}, its loss or a term fails on a batch {tuple(x.shape)} {x.dtype} with targets {tuple(y.shape)} "
                f"{y.dtype}: {type(error).__name__}: {error}{_hint(objective.net, x)}"
            ) from error
        if not isinstance(value, Tensor) or value.ndim:
            raise ModelError(f"The loss and every term must give one number a batch; they gave {value!r:.80}.")
        if not torch.isfinite(value):
            raise ModelError(
                f"The loss is {value.item()} at the start, before any training. Check the data's scale and the loss."
            )
        return not torch.equal(state, torch.random.get_rng_state())


def _hint(net: Net, x: Tensor) -> str:
    if x.dtype == net.layout.dtype:
        return ""
    return (
        f". The model is {net.layout.dtype}: parties.from_arrays(..., dtype={net.layout.dtype}) makes the data so, too."
    )


def _check_buffers(net: Net, before: dict[str, Tensor]) -> None:
    statistics = net.layout.names[net.layout.parameters :]
    for name, buffer in net.module.named_buffers():
        if name not in statistics and not torch.equal(buffer, before[name]):
            raise ModelError(
                f"The buffer {name!r} changes while the model trains, and only running_mean and running_var travel: "
                "its change would be lost. Make it a parameter, or name it after the statistic that it is."
            )


def _why_not(objective: Objective, way: str, parts: list[Tensor], alone: Tensor) -> str:
    if way != VECTORISED:
        kernel = kernel_of(objective.net, int(way == STACKED))
        if isinstance(kernel, str):
            return kernel
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it would fall back to a loop of its own
            found = _gradient(objective, way, parts) if way in TOGETHER else _by_turns(objective, way, parts)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"torch does not take it ({lines[0] if lines else type(error).__name__})"
    return "" if _close(found, alone) else "it computes another gradient"


def _close(found: Tensor, alone: Tensor) -> bool:
    """Whether two gradients are alike, a few columns at a time: a comparison takes several times what it compares."""
    largest = max(float(torch.linalg.vector_norm(row, torch.inf)) for row in alone)
    pieces = zip(torch.split(found, _AT_ONCE, 1), torch.split(alone, _AT_ONCE, 1), strict=True)
    return all(torch.allclose(*pair, rtol=1e-3, atol=1e-4 * largest) for pair in pieces)


def _by_turns(objective: Objective, way: str, parts: list[Tensor]) -> Tensor:
    return torch.cat([_gradient(objective, way, [part[k : k + 1] for part in parts]) for k in range(2)])


@torch.no_grad()
def _gradient(objective: Objective, way: str, parts: list[Tensor]) -> Tensor:
    columns, statistics, received, strengths, x, y = parts
    stack = Stack(objective.net.layout, [columns], lead=int(way != SINGLE))
    descent = Descent(objective, way, stack, statistics.clone(), received, strengths)
    descent(x, y)
    return descent.stack.gradient
