"""A record that only grows. What was written of it once is kept small, and as it was written: to save a run again after
each of its rounds takes neither memory nor work for the rounds before, but that of putting their bytes there.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, overload

from .event_log import plain

T = TypeVar("T")

_TOGETHER = 32  # entries
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class _Block:
    """Entries as JSON without its brackets, compressed."""

    exact: bytes  # with nan and infinities
    written: bytes  # as :meth:`Kept.json` has them
    ordered: bytes  # and the same by their keys

    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            b"[" + zlib.decompress(self.exact) + b"]", parse_constant=_NOT_FINITE.__getitem__
        )
        return found


class Kept(Sequence[T]):
    """Reads like a list. `packed` makes an entry a mapping that JSON has, but for numbers; `opened` is its inverse.

    >>> kept = Kept([{"round": 1, "loss": math.inf}], dict, dict)
    >>> kept.append({"round": 2, "loss": 0.5})
    >>> kept[-1]["round"], len(kept), b"".join(kept.json())
    (2, 2, b'[{"round": 1, "loss": null}, {"round": 2, "loss": 0.5}]')
    """

    def __init__(
        self, entries: Iterable[T], packed: Callable[[T], Mapping[str, Any]], opened: Callable[[dict[str, Any]], T]
    ) -> None:
        self._packed, self._opened = packed, opened
        self._held: tuple[list[_Block], list[T]] = ([], list(entries))  # replaced whole, for whoever interrupts

    def __copy__(self) -> Kept[T]:
        copy = Kept[T]((), self._packed, self._opened)
        copy._held = (self._held[0], [*self._held[1]])
        return copy

    def append(self, entry: T) -> None:
        self._held[1].append(entry)

    def extend(self, entries: Iterable[T]) -> None:
        self._held[1].extend(entries)

    def json(self, ordered: bool = False) -> Iterator[bytes]:
        """All of it as one JSON array, in pieces; where a number is not finite there is none."""
        blocks, entries = self._held
        found = (zlib.decompress(block.ordered if ordered else block.written) for block in blocks)
        between = b"["
        for piece in chain(found, [self._text(entries, ordered)] if entries else []):
            yield between + piece
            between = b", "
        yield b"]" if blocks or entries else b"[]"

    def shrink(self) -> None:
        """Keep all but the last entries small. Whoever changes one that was kept so changes a copy; never the last."""
        blocks, entries = self._held
        whole = (len(entries) - 1) // _TOGETHER * _TOGETHER
        if whole > 0:
            made = [self._block(entries[at : at + _TOGETHER]) for at in range(0, whole, _TOGETHER)]
            self._held = ([*blocks, *made], entries[whole:])

    def _block(self, entries: Sequence[T]) -> _Block:
        exact = json.dumps([*map(self._packed, entries)])[1:-1].encode()
        texts = (exact, self._text(entries), self._text(entries, ordered=True))
        small = {text: zlib.compress(text) for text in texts}  # mostly all numbers are finite, and two are one
        return _Block(*(small[text] for text in texts))

    def _text(self, entries: Sequence[T], ordered: bool = False) -> bytes:
        return json.dumps(plain([*map(self._packed, entries)]), sort_keys=ordered, allow_nan=False)[1:-1].encode()

    def __len__(self) -> int:
        blocks, entries = self._held
        return len(blocks) * _TOGETHER + len(entries)

    def __iter__(self) -> Iterator[T]:
        blocks, entries = self._held
        for block in blocks:
            yield from map(self._opened, block.entries())
        yield from entries

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return self._some(range(len(self))[at])
        blocks, entries = self._held
        block, place = divmod(range(len(self))[at], _TOGETHER)
        if block >= len(blocks):
            return entries[range(len(self))[at] - len(blocks) * _TOGETHER]
        return self._opened(blocks[block].entries()[place])

    def _some(self, places: Sequence[int]) -> list[T]:
        """These entries; no block before them is opened."""
        blocks, entries = self._held
        first = min(min(places, default=len(self)) // _TOGETHER, len(blocks))
        found = [*(self._opened(one) for block in blocks[first:] for one in block.entries()), *entries]
        return [found[place - first * _TOGETHER] for place in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def pieces(manifest: Mapping[str, Any], ordered: bool = False) -> Iterator[bytes]:
    """A mapping as JSON, in pieces, with all that is kept in it.

    >>> b"".join(pieces({"b": 1, "a": Kept([], dict, dict)}, ordered=True))
    b'{"a": [], "b": 1}'
    """
    between = "{"
    for key in sorted(manifest) if ordered else manifest:
        yield f"{between}{json.dumps(key)}: ".encode()
        value = manifest[key]
        if isinstance(value, Kept):
            yield from value.json(ordered)
        else:
            yield json.dumps(value, sort_keys=ordered, allow_nan=False).encode()
        between = ", "
    yield b"}"
