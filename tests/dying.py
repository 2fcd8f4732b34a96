"""Faults at the one place that writes: death at the n-th write, a disk that is full from then on, one interrupt."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from descant.storage import atomic

Doing = TypeVar("Doing", bound=Callable[..., Any])


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
            self.tears = by_half(change, arguments)
        self.reached = True
        raise self.error()


def by_half(change: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Do half of a write; a rename, a sync or a commit has no half."""
    if change is os.write:
        os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
    elif isinstance(change, partial):  # safetensors
        change(*arguments)
        os.truncate(arguments[0], arguments[0].stat().st_size // 2)
    return change is os.write or isinstance(change, partial)


class Interrupt:
    """One KeyboardInterrupt before the n-th change, or behind it; all other changes happen, later ones, too."""

    def __init__(self, n: int, behind: bool) -> None:
        self.left, self.behind = n, behind

    @property
    def reached(self) -> bool:
        return self.left < 0

    def __call__(self, change: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left != -1:
            return change(*arguments)
        if self.behind:
            change(*arguments)
        raise KeyboardInterrupt


def death() -> BaseException:
    return Death()


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def faults(n: int, torn: bool = False, error: Callable[[], BaseException] = death) -> Iterator[Faults]:
    """Faults from the n-th write on, within the block."""
    with _instead(Faults(n, torn, error)) as found:
        yield found


@contextmanager
def interrupt(n: int, behind: bool) -> Iterator[Interrupt]:
    """One interrupt at the n-th write, within the block."""
    with _instead(Interrupt(n, behind)) as found:
        yield found


@contextmanager
def _instead(found: Doing) -> Iterator[Doing]:
    before = atomic._do
    atomic._do = found
    try:
        yield found
    finally:
        atomic._do = before
