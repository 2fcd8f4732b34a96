"""What a party minimises, f_k + Σ terms, written for one party and computed for a stack of them.

There are two ways to compute a stack. *Vectorised*: all parties at once by `torch.vmap`, for small models, where
starting operations costs more than the operations. *Looped*: one party after another, for large models and for modules
that draw random numbers or that vmap cannot take (an `nn.LSTM`, say).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import Loss, Memory, Sight, Term
from ..errors import ModelError
from ..flat import Net
from ..settings import value_at

VECTORISED, LOOPED = "vectorised", "looped"


@dataclass(frozen=True)
class Objective:
    """The local objective of a party: its loss and the terms that the algorithm adds."""

    net: Net
    loss: Loss
    terms: tuple[Term, ...]
    widths: tuple[int, ...] = ()  # how many private columns each term owns

    def private(self, received: Tensor, memory: Memory) -> list[Tensor]:
        """The private columns of each term: remembered, or begun from what was received."""
        empty = received.new_empty(0)
        begun = ((i, term.begin) for i, term in enumerate(self.terms))
        return [memory.get(f"private.{i}", empty if begin is None else begin(received)) for i, begin in begun]

    def strengths(self, round: int, names: Sequence[str], like: Tensor) -> Tensor:
        """The factor before each term for each party, ``[K, terms]``."""
        values = [[value_at(term.strength, round, name) for term in self.terms] for name in names]
        return like.new_tensor(values).reshape(len(names), len(self.terms))

    def stacked(self, way: str, columns: Tensor, statistics: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``[K]`` and new statistics ``[K, s]`` of a stack ``columns [K, d + private]``."""
        alone = columns.shape[0] == 1
        if way == LOOPED:
            if not alone:
                raise ValueError("the looped way takes one party at a time")
            loss, after = self.one(columns[0], statistics[0], *(part[0] for part in rest))
            return loss.unsqueeze(0), after.unsqueeze(0)
        parts = (columns, statistics, *rest)
        if alone:  # vmap of one party rounds otherwise than vmap of many: a lone party is computed as two
            parts = tuple(part.expand(2, *part.shape[1:]) for part in parts)
        losses, after = torch.vmap(self.one)(*parts)
        return (losses[:1], after[:1]) if alone else (losses, after)

    def one(
        self, columns: Tensor, statistics: Tensor, received: Tensor, strengths: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of one party on one batch, and its statistics afterwards."""
        w, *private = torch.split_with_sizes(columns, [received.shape[-1], *self.widths])
        points = tuple(dict.fromkeys(point for term in self.terms for point in term.points))
        seen: dict[str, Tensor] = {}
        seen_received: dict[str, Tensor] = {}

        def elsewhere(parameters: Tensor, inputs: Tensor) -> Tensor:
            return self.net.apply(parameters, statistics, inputs)[0]

        with ExitStack() as stack:
            if points:
                stack.enter_context(self.net.watch(points, seen))
            output, after = self.net.apply(w, statistics, x)
        if points:
            with self.net.watch(points, seen_received), torch.no_grad():
                elsewhere(received, x)
        total = self.loss(output, y).mean()
        for i, term in enumerate(self.terms):
            own = private[i] if private else w.new_empty(0)
            sight = Sight(w, received, own, x, y, output, seen, seen_received, elsewhere, self.loss)
            total = total + strengths[i] * term.value(sight)
        return total, after


def probe(bare: Objective, x: Tensor, y: Tensor) -> str | None:
    """Try an objective on one batch: an error if it cannot learn, else why it must be looped; None if it need not."""
    net = bare.net
    before = {name: buffer.clone() for name, buffer in net.module.named_buffers()}
    net.module.train()
    row, size = net.row(), net.layout.size
    private = bare.private(row[:size], {})
    objective = replace(bare, widths=tuple(len(part) for part in private))
    parts = (torch.cat([row[:size], *private]), row[size:], row[:size], row.new_ones(len(bare.terms)), x, y)
    with torch.random.fork_rng(devices=[]):
        state = torch.random.get_rng_state()
        try:
            value, _ = objective.one(*parts)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{type(net.module).__name__} or its loss fails on a batch of shape {tuple(x.shape)} with targets "
                f"{tuple(y.shape)} {y.dtype}: {type(error).__name__}: {error}"
            ) from error
        draws = not torch.equal(state, torch.random.get_rng_state())
    _check_probe(net, value, before)
    if draws:
        return "it draws random numbers (dropout, say), which are keyed by party"
    return _why_not_vmap(objective, parts, value)


def _check_probe(net: Net, value: Tensor, before: dict[str, Tensor]) -> None:
    if not torch.isfinite(value):
        raise ModelError(
            f"The loss is {value.item()} at the start, before any training. Check the data's scale and the loss."
        )
    statistics = net.layout.names[net.layout.parameters :]
    for name, buffer in net.module.named_buffers():
        if name in statistics or name.endswith("num_batches_tracked"):
            continue
        if not torch.equal(buffer, before[name]):
            raise ModelError(
                f"The buffer {name!r} changes while the model trains, and only running_mean and running_var travel: "
                "its change would be lost. Make it a parameter, or name it after the statistic that it is."
            )


def _why_not_vmap(objective: Objective, parts: tuple[Tensor, ...], value: Tensor) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it would fall back to a loop of its own
            columns, *rest = (part.expand(2, *part.shape).clone() for part in parts)
            losses, _ = objective.stacked(VECTORISED, columns.requires_grad_(), *rest)
            torch.autograd.grad(losses.sum(), columns)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"torch.vmap does not take it ({first})"
    if not torch.allclose(losses, value.expand(2), rtol=1e-3, atol=1e-5):
        return "torch.vmap computes another loss for it"
    return None
