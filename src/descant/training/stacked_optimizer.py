"""Any element-wise torch optimiser over a stack of parties, whose memories may differ in age.

An optimiser counts its steps once for a whole tensor, but a party that took part three times is younger than one that
took part ten times. So rows of equal age stand together, and each such group is one tensor to the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.algorithm import Memory
from ..core.settings import unknown
from ..errors import SettingError
from .kernels.traced_kernel import Stack

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
_PREFIX = "moment."


def maker(optimizer: str | type[Optimizer], options: Mapping[str, Any]) -> MakeOptimizer:
    """The constructor of an optimiser by its name in `torch.optim`, or of a class of the user's own."""
    if "lr" in options:
        raise SettingError("The learning rate of an optimizer is the solver's own 'lr': leave it out of 'options'.")
    if isinstance(optimizer, type):
        return partial(optimizer, **options)
    if not isinstance(optimizer, str):
        raise SettingError(f"Give the name of an optimiser of torch.optim, or its class. Got {optimizer!r:.60}.")
    names = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    if optimizer not in names:
        raise unknown("optimizer", optimizer, names)
    return partial(getattr(torch.optim, optimizer), **options)


def check_elementwise(make: MakeOptimizer) -> None:
    """Refuse an optimiser that mixes the rows of a stack: two parties stepped together must equal each alone.

    Plain descent has none to try, and torch's first optimiser takes 70 MB and a second to be there.
    """
    if is_plain(make) and not make.keywords:
        return

    def stepped(rows: Tensor) -> Tensor:
        rows = rows.clone()
        optimizer = make([rows], lr=0.1)
        for scale in (1.0, -0.3, 0.7):
            rows.grad = scale * (rows + torch.tensor([[0.3, -2.0]]))
            optimizer.step()
        strange = [key for key, value in optimizer.state[rows].items() if not isinstance(value, Tensor | None)]
        if strange:
            raise TypeError(f"it keeps {strange[0]!r} as something else than a tensor, which cannot be saved")
        return rows

    both = torch.tensor([[1.0, -2.0], [30.0, 0.5]])
    name = getattr(getattr(make, "func", make), "__name__", repr(make))
    try:
        together = stepped(both)
        alone = torch.cat([stepped(both[:1]), stepped(both[1:])])
    except Exception as error:
        raise SettingError(f"The optimizer {name} cannot step a stack of parties: {error}") from error
    if not torch.allclose(together, alone):
        raise SettingError(
            f"The optimizer {name} is not element-wise: it would mix the parties of a stack. Use Sgd or Adam."
        )


def age(memory: Memory) -> tuple[tuple[str, float], ...]:
    """What must be equal for two parties to share a tensor: which moments they have, and every scalar among them."""
    moments = sorted((name, tensor) for name, tensor in memory.items() if name.startswith(_PREFIX))
    return tuple((name, tensor.item() if tensor.ndim == 0 else -1.0) for name, tensor in moments)


def is_plain(make: MakeOptimizer) -> TypeGuard[partial[Optimizer]]:
    """Whether a step is w ← w - η·gradient and nothing else, which needs no optimiser."""
    return isinstance(make, partial) and make.func is torch.optim.SGD and not any(make.keywords.values())


@dataclass(frozen=True, eq=False)
class _Group:
    at: slice
    lr: float
    columns: Tensor  # [k, D]
    gradient: Tensor  # [k, D]


class Moments:
    """An optimiser over the columns of a stack, in place; rows with equal keys must stand next to each other, and
    without keys there is nothing to do."""

    def __init__(
        self,
        make: MakeOptimizer,
        stack: Stack,
        lrs: Sequence[float],
        memories: Sequence[Memory],
        keys: Sequence[Any],
    ) -> None:
        self._groups: list[_Group] = []
        for _, rows in groupby(range(len(keys)), key=lambda row: keys[row]):
            members = list(rows)
            at = slice(members[0], members[-1] + 1)
            self._groups.append(_Group(at, lrs[at.start], stack.columns[at], stack.gradient[at]))
        self._plain = is_plain(make)
        if not self._plain:
            self._optimizer = make([{"params": [group.columns], "lr": group.lr} for group in self._groups], lr=lrs[0])
            for group in self._groups:
                self._optimizer.state[group.columns] = _merged(memories[group.at])

    def step(self, alive: Sequence[bool]) -> None:
        """One step of every group that still works."""
        for group in self._groups:
            works = alive[group.at.start]
            if not self._plain:
                group.columns.grad = group.gradient if works else None
            elif works:
                group.columns.add_(group.gradient, alpha=-group.lr)
        if not self._plain:
            self._optimizer.step()

    def memories(self) -> list[dict[str, Tensor]]:
        """The moments of each party, to be kept."""
        kept: list[dict[str, Tensor]] = []
        for group in self._groups:
            state = {} if self._plain else self._optimizer.state.get(group.columns, {})
            tensors = {_PREFIX + name: value for name, value in state.items() if isinstance(value, Tensor)}
            for row in range(len(group.columns)):
                own = ((name, t[row] if t.shape == group.columns.shape else t) for name, t in tensors.items())
                kept.append({name: tensor.clone() for name, tensor in own})
        return kept


def _merged(memories: Sequence[Memory]) -> dict[str, Tensor]:
    names = [name for name in memories[0] if name.startswith(_PREFIX)]
    merged = {}
    for name in names:
        first = memories[0][name]
        merged[name.removeprefix(_PREFIX)] = (
            first.clone() if first.ndim == 0 else torch.stack([m[name] for m in memories])
        )
    return merged
