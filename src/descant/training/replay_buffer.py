"""What a stack of agents remembers of its steps, without a copy of it a round.

An agent's replay is a part of its memory that only ever grows at its end: rows that are there never change. So the
store keeps it as it is (see `core.LOG`), and what is new is written behind its end, where no memory looks. A round that
is broken off leaves numbers there that nobody sees, and that the next one overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from .kernels.layers import Array

_MIN_SPARE_ROWS = 1024  # rows of room, at least, where it runs out
_BUFFERS: WeakValueDictionary[int, Array] = WeakValueDictionary()
"""Where a log ends in memory -> the array of a whole stack that it lies in, as long as anybody has a part of it."""


@dataclass(frozen=True)
class Transitions:
    """Some steps of every agent, and what they led to after n more, or at the end of their episode."""

    x: Array  # [K, batch, *shape]
    actions: Array  # [K, batch]
    rewards: Array  # [K, batch] Σ γ^i r
    next_x: Array  # [K, batch, *shape]
    discount: Array  # [K, batch] γ^n for what comes after; 0 where nothing does


class ReplayBuffer:
    """The last ``capacity`` steps of K agents that have all taken as many: one row a step (FedRL, §3).

    A row is: what was seen | what was seen next | action, reward, terminated, ended.
    """

    def __init__(self, logs: Sequence[Tensor | None], shape: tuple[int, ...], capacity: int, steps: int) -> None:
        self._shape = shape
        self._capacity = capacity
        self._observation_size = int(np.prod(shape))
        found = [log for log in logs if log is not None]
        lengths = {len(log) for log in found} if len(found) == len(logs) else {0}
        assert len(lengths) == 1, "agents of one stack have taken as many steps"
        self._begin = 0
        self._end = lengths.pop()
        kept = min(self._end, capacity)
        reused = _reuse_buffer(found, steps) if self._end else None
        if reused is not None:
            self._rows, self._begin = reused
            self._end += self._begin
            return
        spare_rows = steps + max(_MIN_SPARE_ROWS, kept // 2)
        self._rows = np.empty((len(logs), kept + spare_rows, 2 * self._observation_size + 4), dtype=np.float32)
        for rows, log in zip(self._rows, found, strict=False):
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
        """One step of every agent."""
        row = self._rows[:, self._end]
        n = self._observation_size
        row[:, :n], row[:, n : 2 * n] = observations.reshape(len(row), n), next_observations.reshape(len(row), n)
        row[:, -4], row[:, -3], row[:, -2], row[:, -1] = actions, rewards, terminated, ended
        self._end += 1

    def sample(self, uniform: Array, n_step: int, gamma: float) -> Transitions:
        """Steps at places that are uniform numbers ``[K, batch]``; rewards go on to the end of the episode, at most."""
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
        """What each agent remembers, to be kept."""
        found = [torch.from_numpy(rows[self._oldest : self._end]) for rows in self._rows]
        if len(self):
            _BUFFERS[_end_address(found[0])] = self._rows
        return found


def _end_address(log: Tensor) -> int:
    return log.data_ptr() + log.numel() * log.element_size()


def _reuse_buffer(logs: Sequence[Tensor], steps: int) -> tuple[Array, int] | None:
    """The array that all these logs lie in, side by side, if there is room behind them; and where they begin."""
    rows = _BUFFERS.get(_end_address(logs[0]))
    if rows is None or len(rows) != len(logs):
        return None
    begin, remainder = divmod(logs[0].data_ptr() - rows.ctypes.data, rows.strides[1])
    offsets = [log.data_ptr() - logs[0].data_ptr() for log in logs]
    if remainder or begin < 0 or offsets != [k * rows.strides[0] for k in range(len(rows))]:
        return None
    return (rows, begin) if begin + len(logs[0]) + steps <= rows.shape[1] else None
