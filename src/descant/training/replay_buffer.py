"""Replay buffers of a stack of agents, which are not copied between rounds.

An agent's replay is an append-only log in its party state: existing rows never change. The party-state store keeps the
log without a copy (see `core.algorithm.APPEND_ONLY`), and new rows are written after its end. An interrupted round
leaves rows there that no log covers; the next round overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from .kernels.layers import Array

_MIN_SPARE_ROWS = 1024  # the least number of free rows that a new buffer gets
_BUFFERS: WeakValueDictionary[int, Array] = WeakValueDictionary()
"""End address of a log -> the array of the whole stack that contains it, while any log of it is alive."""


@dataclass(frozen=True)
class Transitions:
    """Some steps of every agent, and the states reached n steps later or at the end of the episode."""

    x: Array  # [K, batch, *shape]
    actions: Array  # [K, batch]
    rewards: Array  # [K, batch] Σ γ^i r
    next_x: Array  # [K, batch, *shape]
    discount: Array  # [K, batch] γ^n for the value of next_x; 0 after a terminal state


class ReplayBuffer:
    """The last ``capacity`` steps of K agents that have taken equally many: one row per step (FedRL, §3).

    A row is: observation | next observation | action, reward, terminated, ended.
    """

    def __init__(self, logs: Sequence[Tensor | None], shape: tuple[int, ...], capacity: int, steps: int) -> None:
        self._shape = shape
        self._capacity = capacity
        self._observation_size = int(np.prod(shape))
        present = [log for log in logs if log is not None]
        lengths = {len(log) for log in present} if len(present) == len(logs) else {0}
        assert len(lengths) == 1, "agents of one stack have taken equally many steps"
        self._begin = 0
        self._end = lengths.pop()
        kept = min(self._end, capacity)
        reused = _reuse_buffer(present, steps) if self._end else None
        if reused is not None:
            self._rows, self._begin = reused
            self._end += self._begin
            return
        spare_rows = steps + max(_MIN_SPARE_ROWS, kept // 2)
        self._rows = np.empty((len(logs), kept + spare_rows, 2 * self._observation_size + 4), dtype=np.float32)
        for rows, log in zip(self._rows, present, strict=False):
            rows[:kept] = log[-kept:].numpy() if kept else 0
        self._end = kept

    @property
    def _oldest(self) -> int:
        return max(self._begin, self._end - self._capacity)

    def __len__(self) -> int:
        return self._end - self._oldest

    def add(
        self,
        observations: Array,
        next_observations: Array,
        actions: Array,
        rewards: Array,
        terminated: Array,
        ended: Array,
    ) -> None:
        """Append one step of every agent."""
        row = self._rows[:, self._end]
        n = self._observation_size
        row[:, :n], row[:, n : 2 * n] = observations.reshape(len(row), n), next_observations.reshape(len(row), n)
        row[:, -4], row[:, -3], row[:, -2], row[:, -1] = actions, rewards, terminated, ended
        self._end += 1

    def sample(self, uniform: Array, n_step: int, gamma: float) -> Transitions:
        """Return the steps at uniform positions ``[K, batch]``; n-step rewards stop at the end of an episode."""
        all_rows = self._rows.reshape(-1, self._rows.shape[2])
        positions = self._oldest + (uniform * len(self)).astype(np.int64)
        positions = np.minimum(positions, self._end - 1)
        row_offsets = (np.arange(len(positions)) * self._rows.shape[1])[:, None]
        rows = all_rows.take(positions + row_offsets, axis=0)  # [K, batch, columns]
        rewards = rows[..., -3].copy()
        final_rows = rows
        discount = np.full(positions.shape, np.float32(gamma))
        for _ in range(1, n_step):
            continues = (final_rows[..., -1] == 0) & (positions < self._end - 1)
            positions = positions + continues
            final_rows = np.where(continues[..., None], all_rows.take(positions + row_offsets, axis=0), final_rows)
            rewards += np.where(continues, discount * final_rows[..., -3], 0)
            discount = np.where(continues, discount * np.float32(gamma), discount)
        n = self._observation_size
        shape = (*positions.shape, *self._shape)
        x, next_x = (np.ascontiguousarray(part).reshape(shape) for part in (rows[..., :n], final_rows[..., n : 2 * n]))
        return Transitions(x, rows[..., -4], rewards, next_x=next_x, discount=discount * (1 - final_rows[..., -2]))

    def logs(self) -> list[Tensor]:
        """Return the log of each agent, to be stored in its party state."""
        logs = [torch.from_numpy(rows[self._oldest : self._end]) for rows in self._rows]
        if len(self):
            _BUFFERS[_end_address(logs[0])] = self._rows
        return logs


def _end_address(log: Tensor) -> int:
    return log.data_ptr() + log.numel() * log.element_size()


def _reuse_buffer(logs: Sequence[Tensor], steps: int) -> tuple[Array, int] | None:
    """Return the array that contains all these logs and their first row, if it has room for more steps."""
    rows = _BUFFERS.get(_end_address(logs[0]))
    if rows is None or len(rows) != len(logs):
        return None
    begin, remainder = divmod(logs[0].data_ptr() - rows.ctypes.data, rows.strides[1])
    offsets = [log.data_ptr() - logs[0].data_ptr() for log in logs]
    if remainder or begin < 0 or offsets != [k * rows.strides[0] for k in range(len(rows))]:
        return None
    return (rows, begin) if begin + len(logs[0]) + steps <= rows.shape[1] else None
