"""Fault injection for the atomic writer: a crash at the n-th write, a full disk, or one interrupt."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from descant.storage import atomic

WriteHook = TypeVar("WriteHook", bound=Callable[..., Any])


class SimulatedCrash(BaseException):
    """A crash: no code catches it, and nothing is written after it."""


class FaultInjector:
    """Let ``n`` writes through and raise at the next one, which is lost or, with ``tear_write``, half done."""

    def __init__(self, n: int, tear_write: bool, error: Callable[[], BaseException]) -> None:
        self.remaining = n
        self.tear_write = tear_write
        self.error = error
        self.tore_write = False
        self.reached = False

    def __call__(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.remaining -= 1
        if self.remaining >= 0:
            return operation(*arguments)
        if not self.reached and self.tear_write:
            self.tore_write = write_half(operation, arguments)
        self.reached = True
        raise self.error()


def write_half(operation: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Do half of a write and return True; other operations are not divisible."""
    if operation is os.write:
        os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
    elif isinstance(operation, partial):  # safetensors
        operation(*arguments)
        os.truncate(arguments[0], arguments[0].stat().st_size // 2)
    return operation is os.write or isinstance(operation, partial)


class InterruptInjector:
    """Raise one KeyboardInterrupt before or after the n-th write; all other writes happen."""

    def __init__(self, n: int, after_write: bool) -> None:
        self.remaining = n
        self.after_write = after_write

    @property
    def reached(self) -> bool:
        return self.remaining < 0

    def __call__(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.remaining -= 1
        if self.remaining != -1:
            return operation(*arguments)
        if self.after_write:
            operation(*arguments)
        raise KeyboardInterrupt


def crash_error() -> BaseException:
    return SimulatedCrash()


def disk_full_error() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def inject_faults(
    n: int, tear_write: bool = False, error: Callable[[], BaseException] = crash_error
) -> Iterator[FaultInjector]:
    """Inject faults from the n-th write on, within the block."""
    with _patched_writes(FaultInjector(n, tear_write, error)) as injector:
        yield injector


@contextmanager
def inject_interrupt(n: int, after_write: bool) -> Iterator[InterruptInjector]:
    """Inject one interrupt at the n-th write, within the block."""
    with _patched_writes(InterruptInjector(n, after_write)) as injector:
        yield injector


@contextmanager
def _patched_writes(hook: WriteHook) -> Iterator[WriteHook]:
    before = atomic._do
    atomic._do = hook
    try:
        yield hook
    finally:
        atomic._do = before
