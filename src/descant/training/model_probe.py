"""Probe of a model on one batch before training: errors, and the execution modes that work for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..core import seeds
from ..core.algorithm import Loss, LossTerm
from ..errors import ModelError
from ..models.flat import Net
from .kernels.traced_kernel import Stack, kernel_of
from .objective import Objective, private_columns
from .stacked_gradient import BATCHED_MODES, LOOPED, SINGLE, STACKED, VECTORIZED, StackGradient

PROBED_MODES = (STACKED, SINGLE, VECTORIZED)
_CHUNK = 2**18  # columns compared at once
ProbeInputs: TypeAlias = tuple[Tensor, ...]
"""Columns, statistics, the received model, strengths of terms, and a batch (x, y)."""


def probe_model(
    net: Net, loss: Loss, terms: tuple[LossTerm, ...], x: Tensor, y: Tensor, modes: Sequence[str] = PROBED_MODES
) -> dict[str, str]:
    """Return why each execution mode is impossible ("" if it is possible); raise if the model cannot train."""
    buffers = {name: buffer.clone() for name, buffer in net.module.named_buffers()}
    net.module.train()
    row = net.copy_initial_row()
    size = net.layout.trainable_width
    private = private_columns(terms, row[:size], {}, draws=partial(seeds.stream, 0, 0, "probe"))
    objective = Objective(net, loss, terms, widths=tuple(len(part) for part in private))
    columns = torch.cat([row[:size], *private]) if private else row[:size]
    parts = (columns, row[size:], row[:size], row.new_ones(len(terms)), x, y)
    draws = _dry_run(objective, parts)
    _check_buffers(net, buffers)
    if draws:
        return dict.fromkeys(modes, "it draws random numbers (dropout, say), which are keyed by party")
    return {mode: _obstacle(objective, mode, parts) for mode in modes}


def _dry_run(objective: Objective, parts: ProbeInputs) -> bool:
    """Return whether the module draws random numbers; raise if it fails or its loss is not finite."""
    x, y = parts[-2:]
    name = type(objective.net.module).__name__
    with torch.random.fork_rng(devices=[]):
        state = torch.random.get_rng_state()
        try:
            value, *_ = objective.party_objective(*parts)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{name}, its loss or a term fails on a batch {tuple(x.shape)} {x.dtype} with targets {tuple(y.shape)} "
                f"{y.dtype}: {type(error).__name__}: {error}{_hint(objective.net, x)}"
            ) from error
        if not isinstance(value, Tensor) or value.ndim:
            raise ModelError(f"The loss and every term must give one number per batch; they gave {value!r:.80}.")
        if not torch.isfinite(value):
            raise ModelError(
                f"The loss is {value.item()} at the start, before any training. Check the data's scale and the loss."
            )
        return not torch.equal(state, torch.random.get_rng_state())


def _hint(net: Net, x: Tensor) -> str:
    if x.dtype == net.layout.dtype:
        return ""
    dtype = net.layout.dtype
    return f". The model is {dtype}: parties.from_arrays(..., dtype={dtype}) gives the data the same dtype."


def _check_buffers(net: Net, before: dict[str, Tensor]) -> None:
    statistics = net.layout.names[net.layout.parameter_count :]
    for name, buffer in net.module.named_buffers():
        if name not in statistics and not torch.equal(buffer, before[name]):
            raise ModelError(
                f"The buffer {name!r} changes while the model trains, but only running_mean and running_var are sent: "
                "its change would be lost. Make it a parameter, or name it running_mean or running_var."
            )


def _obstacle(objective: Objective, mode: str, parts: ProbeInputs) -> str:
    if mode != VECTORIZED:
        kernel = kernel_of(objective.net, int(mode == STACKED))
        if isinstance(kernel, str):
            return kernel
    largest = max(
        float(torch.linalg.vector_norm(_single_gradient(objective, LOOPED, parts, k=k), torch.inf)) for k in range(2)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it would fall back to its own loop
            batched = _batched_gradient(objective, mode, parts) if mode in BATCHED_MODES else None
            for k in range(2):
                gradient = _single_gradient(objective, mode, parts, k=k) if batched is None else batched[k]
                if not _is_close(gradient, _single_gradient(objective, LOOPED, parts, k=k), 1e-4 * largest):
                    return "it computes a different gradient"
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"torch rejects it ({lines[0] if lines else type(error).__name__})"
    return ""


def _is_close(gradient: Tensor, reference: Tensor, atol: float) -> bool:
    """Return whether two gradients agree; compared in chunks, because allclose needs several times their memory."""
    pieces = zip(torch.split(gradient, _CHUNK), torch.split(reference, _CHUNK), strict=True)
    return all(torch.allclose(*pair, rtol=1e-3, atol=atol) for pair in pieces)


def _unlike_columns(parts: ProbeInputs, k: int) -> Tensor:
    """Return the columns of one of two different parties, so that a mode that mixes parties is detected."""
    return 1.1 * parts[0] if k else parts[0]


def _batched_gradient(objective: Objective, mode: str, parts: ProbeInputs) -> Tensor:
    columns = torch.stack([_unlike_columns(parts, k) for k in range(2)])
    return _gradient(objective, mode, [columns, *(part.expand(2, *part.shape) for part in parts[1:])])


def _single_gradient(objective: Objective, mode: str, parts: ProbeInputs, k: int) -> Tensor:
    """Return the gradient of one of the two; computed on demand, so that few copies of a large model exist."""
    gradient = _gradient(objective, mode, [_unlike_columns(parts, k)[None], *(part[None] for part in parts[1:])])
    objective.net.restore_views()
    return gradient[0]


@torch.no_grad()
def _gradient(objective: Objective, mode: str, parts: Sequence[Tensor]) -> Tensor:
    columns, statistics, received, strengths, x, y = parts
    stack = Stack(objective.net.layout, [columns], int(mode != SINGLE), allocate=objective.net.allocate)
    stack_gradient = StackGradient(
        objective, mode, stack, statistics=statistics.clone(), received=received, strengths=strengths
    )
    stack_gradient(x, y)
    return stack_gradient.stack.gradient
