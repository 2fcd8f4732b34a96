"""Faults at the one place that writes: a process that dies at the n-th write, and a disk that is full from then on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from descant.store import disk


class Death(BaseException):
    """Nothing catches it, and nothing is written after it."""


class Faults:
    """Lets ``n`` changes through; the next one happens not at all, or by half if it is torn. Then comes the error."""

    def __init__(self, n: int, torn: bool, error: Callable[[], BaseException]) -> None:
        self.left, self.torn, self.error, self.tears = n, torn, error, False
        self.reached = False

    def __call__(self, change: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            return change(*arguments)
        if not self.reached and self.torn:
            self.tears = _by_half(change, arguments)
        self.reached = True
        raise self.error()


def _by_half(change: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Do half of a write; a rename, a sync or a commit has no half."""
    if change is os.write:
        os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
    elif isinstance(change, partial):  # safetensors
        change(*arguments)
        os.truncate(arguments[0], arguments[0].stat().st_size // 2)
    return change is os.write or isinstance(change, partial)


def death() -> BaseException:
    return Death()


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def faults(n: int, torn: bool = False, error: Callable[[], BaseException] = death) -> Iterator[Faults]:
    """Faults from the n-th write on, within the block."""
    before, found = disk._do, Faults(n, torn, error)
    disk._do = found
    try:
        yield found
    finally:
        disk._do = before
