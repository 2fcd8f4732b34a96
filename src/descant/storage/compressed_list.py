"""An append-only list that keeps its older entries as compressed JSON.

Saving a run after each round therefore needs no memory or encoding for earlier rounds, only the writing of their bytes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, overload

from .event_log import replace_non_finite

T = TypeVar("T")

_BLOCK_SIZE = 32  # entries
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class _Block:
    """A block of entries as compressed JSON without its brackets."""

    exact: bytes  # with nan and infinities
    finite_json: bytes  # as :meth:`CompressedList.json_chunks` gives them
    sorted_json: bytes  # the same with sorted keys

    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            b"[" + zlib.decompress(self.exact) + b"]", parse_constant=_NOT_FINITE.__getitem__
        )
        return found


class CompressedList(Sequence[T]):
    """A list of entries; `encode` turns an entry into a mapping for JSON, and `decode` inverts it.

    >>> entries = CompressedList([{"round": 1, "loss": math.inf}], dict, dict)
    >>> entries.append({"round": 2, "loss": 0.5})
    >>> entries[-1]["round"], len(entries), b"".join(entries.json_chunks())
    (2, 2, b'[{"round": 1, "loss": null}, {"round": 2, "loss": 0.5}]')
    """

    def __init__(
        self, entries: Iterable[T], encode: Callable[[T], Mapping[str, Any]], decode: Callable[[dict[str, Any]], T]
    ) -> None:
        self._encode = encode
        self._decode = decode
        # One tuple, replaced in one assignment, so that an interrupt leaves the list consistent.
        self._blocks_and_tail: tuple[list[_Block], list[T]] = ([], list(entries))

    def __copy__(self) -> CompressedList[T]:
        copy = CompressedList[T]((), self._encode, self._decode)
        copy._blocks_and_tail = (self._blocks_and_tail[0], [*self._blocks_and_tail[1]])
        return copy

    def append(self, entry: T) -> None:
        self._blocks_and_tail[1].append(entry)

    def extend(self, entries: Iterable[T]) -> None:
        self._blocks_and_tail[1].extend(entries)

    def json_chunks(self, sort_keys: bool = False) -> Iterator[bytes]:
        """Yield the list as one JSON array, in pieces; numbers that are not finite become null."""
        blocks, entries = self._blocks_and_tail
        found = (zlib.decompress(block.sorted_json if sort_keys else block.finite_json) for block in blocks)
        between = b"["
        for piece in chain(found, [self._json_text(entries, sort_keys)] if entries else []):
            yield between + piece
            between = b", "
        yield b"]" if blocks or entries else b"[]"

    def compress(self) -> None:
        """Compress all but the last entries; reading a compressed entry then gives a copy."""
        blocks, entries = self._blocks_and_tail
        compressible = (len(entries) - 1) // _BLOCK_SIZE * _BLOCK_SIZE
        if compressible > 0:
            made = [self._compress_block(entries[at : at + _BLOCK_SIZE]) for at in range(0, compressible, _BLOCK_SIZE)]
            self._blocks_and_tail = ([*blocks, *made], entries[compressible:])

    def _compress_block(self, entries: Sequence[T]) -> _Block:
        exact = json.dumps([*map(self._encode, entries)])[1:-1].encode()
        texts = (exact, self._json_text(entries), self._json_text(entries, sort_keys=True))
        small = {
            text: zlib.compress(text) for text in texts
        }  # where all numbers are finite, two of the texts are equal
        return _Block(*(small[text] for text in texts))

    def _json_text(self, entries: Sequence[T], sort_keys: bool = False) -> bytes:
        finite = replace_non_finite([*map(self._encode, entries)])
        return json.dumps(finite, sort_keys=sort_keys, allow_nan=False)[1:-1].encode()

    def __len__(self) -> int:
        blocks, entries = self._blocks_and_tail
        return len(blocks) * _BLOCK_SIZE + len(entries)

    def __iter__(self) -> Iterator[T]:
        blocks, entries = self._blocks_and_tail
        for block in blocks:
            yield from map(self._decode, block.entries())
        yield from entries

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return self._select(range(len(self))[at])
        blocks, entries = self._blocks_and_tail
        block, place = divmod(range(len(self))[at], _BLOCK_SIZE)
        if block >= len(blocks):
            return entries[range(len(self))[at] - len(blocks) * _BLOCK_SIZE]
        return self._decode(blocks[block].entries()[place])

    def _select(self, indices: Sequence[int]) -> list[T]:
        """Return these entries without decompressing the blocks before them."""
        blocks, entries = self._blocks_and_tail
        first = min(min(indices, default=len(self)) // _BLOCK_SIZE, len(blocks))
        found = [*(self._decode(one) for block in blocks[first:] for one in block.entries()), *entries]
        return [found[place - first * _BLOCK_SIZE] for place in indices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompressedList | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def manifest_chunks(manifest: Mapping[str, Any], sort_keys: bool = False) -> Iterator[bytes]:
    """Yield a mapping as JSON, in pieces, including its compressed lists.

    >>> b"".join(manifest_chunks({"b": 1, "a": CompressedList([], dict, dict)}, sort_keys=True))
    b'{"a": [], "b": 1}'
    """
    separator = "{"
    for key in sorted(manifest) if sort_keys else manifest:
        yield f"{separator}{json.dumps(key)}: ".encode()
        value = manifest[key]
        if isinstance(value, CompressedList):
            yield from value.json_chunks(sort_keys)
        else:
            yield json.dumps(value, sort_keys=sort_keys, allow_nan=False).encode()
        separator = ", "
    yield b"}"
