"""Any element-wise torch optimizer over a stack of parties, whose moments may differ in age.

An optimizer counts its steps once per tensor, but a party that took part three times has younger moments than one that
took part ten times. Rows of equal age are therefore grouped, and each group is one tensor for the optimizer.
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

from ..core.algorithm import NamedTensors
from ..core.settings import unknown_name_error
from ..errors import SettingError
from .kernels.traced_kernel import Stack

OptimizerFactory: TypeAlias = Callable[..., Optimizer]
_PREFIX = "moment."


def optimizer_factory(optimizer: str | type[Optimizer], options: Mapping[str, Any]) -> OptimizerFactory:
    """Return the constructor of an optimizer, given by its name in `torch.optim` or as a class."""
    if "lr" in options:
        raise SettingError("The learning rate of an optimizer is the solver's own 'lr': leave it out of 'options'.")
    if isinstance(optimizer, type):
        return partial(optimizer, **options)
    if not isinstance(optimizer, str):
        raise SettingError(f"Give the name of an optimizer of torch.optim, or its class. Got {optimizer!r:.60}.")
    names = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    if optimizer not in names:
        raise unknown_name_error("optimizer", optimizer, names)
    return partial(getattr(torch.optim, optimizer), **options)


def check_elementwise(factory: OptimizerFactory) -> None:
    """Raise if an optimizer mixes the rows of a stack: two parties stepped together must equal each stepped alone.

    Plain descent is not tried: importing torch's first optimizer takes 70 MB and a second.
    """
    if is_plain_sgd(factory) and not factory.keywords:
        return

    def run_steps(rows: Tensor) -> Tensor:
        rows = rows.clone()
        optimizer = factory([rows], lr=0.1)
        for scale in (1.0, -0.3, 0.7):
            rows.grad = scale * (rows + torch.tensor([[0.3, -2.0]]))
            optimizer.step()
        unsaved = [key for key, value in optimizer.state[rows].items() if not isinstance(value, Tensor | None)]
        if unsaved:
            raise TypeError(f"it keeps {unsaved[0]!r} as a value that is not a tensor, which cannot be saved")
        return rows

    both_rows = torch.tensor([[1.0, -2.0], [30.0, 0.5]])
    name = getattr(getattr(factory, "func", factory), "__name__", repr(factory))
    try:
        batched = run_steps(both_rows)
        separate = torch.cat([run_steps(both_rows[:1]), run_steps(both_rows[1:])])
    except Exception as error:
        raise SettingError(f"The optimizer {name} cannot step a stack of parties: {error}") from error
    if not torch.allclose(batched, separate):
        raise SettingError(
            f"The optimizer {name} is not element-wise: it would mix the parties of a stack. Use Sgd or Adam."
        )


def grouping_key(state: NamedTensors) -> tuple[tuple[str, float], ...]:
    """Return the key of the group of a party: the names of its moments, and the values of the scalar ones."""
    moments = sorted((name, tensor) for name, tensor in state.items() if name.startswith(_PREFIX))
    return tuple((name, tensor.item() if tensor.ndim == 0 else -1.0) for name, tensor in moments)


def is_plain_sgd(factory: OptimizerFactory) -> TypeGuard[partial[Optimizer]]:
    """Return whether a step is only w ← w - η·gradient, which needs no optimizer."""
    return isinstance(factory, partial) and factory.func is torch.optim.SGD and not any(factory.keywords.values())


@dataclass(frozen=True, eq=False)
class _Group:
    rows: slice
    lr: float
    columns: Tensor  # [k, D]
    gradient: Tensor  # [k, D]


class StackedOptimizer:
    """An optimizer over the columns of a stack, in place.

    Rows with equal keys must be adjacent; without keys, `step` does nothing.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        stack: Stack,
        lrs: Sequence[float],
        party_states: Sequence[NamedTensors],
        keys: Sequence[Any],
    ) -> None:
        self._groups: list[_Group] = []
        for _, rows in groupby(range(len(keys)), key=lambda row: keys[row]):
            indices = list(rows)
            at = slice(indices[0], indices[-1] + 1)
            self._groups.append(_Group(at, lrs[at.start], stack.columns[at], gradient=stack.gradient[at]))
        self._plain = is_plain_sgd(factory)
        if not self._plain:
            self._optimizer = factory(
                [{"params": [group.columns], "lr": group.lr} for group in self._groups], lr=lrs[0]
            )
            for group in self._groups:
                self._optimizer.state[group.columns] = _stack_states(party_states[group.rows])

    def step(self, alive: Sequence[bool]) -> None:
        """Take one step with every group that is still active."""
        for group in self._groups:
            active = alive[group.rows.start]
            if not self._plain:
                group.columns.grad = group.gradient if active else None
            elif active:
                group.columns.add_(group.gradient, alpha=-group.lr)
        if not self._plain:
            self._optimizer.step()

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return the moments of each party, to be stored in its party state."""
        party_states: list[dict[str, Tensor]] = []
        for group in self._groups:
            state = {} if self._plain else self._optimizer.state.get(group.columns, {})
            tensors = {_PREFIX + name: value for name, value in state.items() if isinstance(value, Tensor)}
            for row in range(len(group.columns)):
                party_tensors = ((name, t[row] if t.shape == group.columns.shape else t) for name, t in tensors.items())
                party_states.append({name: tensor.clone() for name, tensor in party_tensors})
        return party_states


def _stack_states(party_states: Sequence[NamedTensors]) -> dict[str, Tensor]:
    names = [name for name in party_states[0] if name.startswith(_PREFIX)]
    merged = {}
    for name in names:
        first = party_states[0][name]
        merged[name.removeprefix(_PREFIX)] = (
            first.clone() if first.ndim == 0 else torch.stack([m[name] for m in party_states])
        )
    return merged
