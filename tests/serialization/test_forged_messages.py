"""Forged messages: each has a valid digest, so that only its form can reveal it."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.core.messages import Reply, Task
from descant.errors import EngineError
from descant.serialization.wire import MessageBytes, MessageLimits, pack, unpack
from descant.storage.spill import SpillFile

NAMES = ("weight", "bias")
LIMITS = MessageLimits.for_tensors(NAMES)
MEMORY_LIMIT = 64 * 2**20  # bytes of memory for a rejected message; a model may have gigabytes
SECONDS = 10.0
TYPES = {"F32": "torch.float32", "U8": "torch.uint8"}
Entries = dict[str, Any]


def to_spill_file(message: bytes) -> SpillFile:
    file = SpillFile()
    file.append(message)
    return file


MESSAGE_HOLDERS: dict[str, Callable[[bytes], MessageBytes]] = {"bytes": bytes, "a file": to_spill_file}


def entry(begin: int, end: int, shape: tuple[int, ...] | None = None, dtype: str = "F32") -> Entries:
    return {"dtype": dtype, "shape": list(shape or ((end - begin) // 4,)), "data_offsets": [begin, end]}


def fields(arrays: Mapping[str, str], **more: Any) -> dict[str, Any]:
    report = {"party": "1", "round": 1, "kind": "train", "status": "ok", "metrics": {"samples": 3}, "reason": ""}
    return {**report, "arrays": dict(arrays), "encrypted_coreset": "", **more}


def digest(text: str, entries: Entries, body: bytes) -> str:
    """Return the digest that a reader would compute if it trusted the entries."""
    found = hashlib.sha256(text.encode())
    for name, one in sorted(entries.items()):
        begin, end = one["data_offsets"]
        found.update(f"{name} {TYPES.get(one['dtype'], '')} {one['shape']}\n".encode() + body[begin:end])
    return found.hexdigest()


def forged(entries: Entries, body: bytes, message_fields: Any, padding: int = 0) -> bytes:
    text = message_fields if isinstance(message_fields, str) else json.dumps(message_fields)
    header = json.dumps({"__metadata__": {"descant": f"{digest(text, entries, body)} {text}"}, **entries}).encode()
    header += b" " * (padding + -len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


GOOD = {"0": entry(0, 24, (2, 3)), "1": entry(24, 32)}
BOTH = {"weight": "0", "bias": "1"}
BODY = bytes(range(32))


def forged_message(entries: Entries, size: int = 32, **more: Any) -> bytes:
    return forged(entries, bytes(size), fields(BOTH, **more))


def many_entries(count: int) -> Entries:
    return {**GOOD, **{f"x{at}": entry(32, 32) for at in range(count)}}


_FORGERIES: dict[str, Callable[[], bytes]] = {
    "200,000 arrays with references": lambda: forged(e := many_entries(200_000), bytes(32), fields({n: n for n in e})),
    "200,000 arrays without references": lambda: forged_message(many_entries(200_000)),
    "3,000 arrays without references": lambda: forged_message(many_entries(3_000)),
    "one array without a reference": lambda: forged_message(many_entries(1)),
    "one array over the limit": lambda: forged(e := many_entries(2), bytes(32), fields({n: n for n in e})),
    "a reference to a missing array": lambda: forged(GOOD, BODY, fields({**BOTH, "other": "2"})),
    "a header of spaces": lambda: forged(GOOD, BODY, fields(BOTH), padding=2**26),
    "lists in lists": lambda: forged_message(GOOD, metrics={"samples": 3, "x": [[]] * 3_000_000}),
    "a deep list": lambda: forged(GOOD, BODY, json.dumps(fields(BOTH)).replace("3", "[" * 10**5 + "]" * 10**5)),
    "a long reason": lambda: forged_message(GOOD, reason="x" * 2**25),
    "arrays that overlap": lambda: forged_message({**GOOD, "1": entry(16, 24)}, 24),
    "the same byte range twice": lambda: forged_message({"0": entry(0, 24), "1": entry(0, 24)}, 24),
    "a gap between arrays": lambda: forged_message({**GOOD, "1": entry(28, 36)}, 36),
    "bytes after the last array": lambda: forged_message(GOOD, 2**20),
    "a byte range after the end": lambda: forged_message({**GOOD, "1": entry(24, 2**40)}),
    "a reversed byte range": lambda: forged_message({**GOOD, "1": entry(32, 24, (2,))}),
    "a byte range before the start": lambda: forged_message({**GOOD, "1": entry(-8, 0)}),
    "a shape larger than its bytes": lambda: forged_message({**GOOD, "1": entry(24, 32, (2**40,))}),
    "a shape that overflows": lambda: forged_message({**GOOD, "1": entry(24, 32, (2**63, 2**63, 2))}),
    "an empty shape that overflows": lambda: forged_message({**GOOD, "1": entry(24, 24, (0, 2**31, 2**63 - 1))}, 24),
    "a negative shape": lambda: forged_message({**GOOD, "1": entry(24, 32, (-1, -2))}),
    "a fractional shape": lambda: forged_message({**GOOD, "1": {**entry(24, 32), "shape": [2.0]}}),
    "an unknown element type": lambda: forged_message({**GOOD, "1": entry(24, 32, (2,), "F31")}),
    "half bytes": lambda: forged_message({**GOOD, "1": entry(24, 32, (16,), "F4")}),
    "an array of objects": lambda: forged_message({**GOOD, "1": entry(24, 32, (1,), "O")}),
    "an encrypted coreset of floats": lambda: forged(GOOD, BODY, fields({"weight": "0"}, encrypted_coreset="1")),
    "an empty text": lambda: forged({}, b"", ""),
    "no header at all": lambda: (2**62).to_bytes(8, "little") + bytes(64),
}
FORGED_MESSAGES = {name: cache(forgery) for name, forgery in _FORGERIES.items()}  # some take seconds to make


@pytest.mark.parametrize("holder", MESSAGE_HOLDERS)
@pytest.mark.parametrize("forgery", FORGED_MESSAGES)
def test_forged_messages_are_rejected_with_little_memory(forgery: str, holder: str) -> None:
    message = MESSAGE_HOLDERS[holder](FORGED_MESSAGES[forgery]())
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match="not a Reply of this version"):
            unpack(message, Reply, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("holder", MESSAGE_HOLDERS)
def test_valid_messages_are_accepted(holder: str) -> None:
    """Otherwise the forgeries above could be rejected for the way they are made."""
    report = unpack(MESSAGE_HOLDERS[holder](forged(GOOD, BODY, fields(BOTH))), Reply, LIMITS)
    assert report.arrays.keys() == {"weight", "bias"} and report.arrays["weight"].shape == (2, 3)
    sealed = {**GOOD, "2": entry(32, 35, (3,), "U8")}
    assert (
        unpack(
            MESSAGE_HOLDERS[holder](forged(sealed, BODY + b"abc", fields(BOTH, encrypted_coreset="2"))), Reply, LIMITS
        ).encrypted_coreset
        == b"abc"
    )


@pytest.mark.parametrize("holder", MESSAGE_HOLDERS)
@pytest.mark.parametrize("names", [("w",), ["block." * 30 + str(at) for at in range(1000)], ["ü\n" * 99] * 9], ids=len)
def test_valid_replies_are_never_over_the_limits(names: list[str], holder: str) -> None:
    """For any tensor names and any size of the encrypted coreset."""
    arrays = {name: torch.ones(1, 2, 1, 1, 1) for name in names}
    report = Reply(
        "a", 1, "train", arrays=arrays, metrics={"samples": 3}, encrypted_coreset=bytes(2**22), reason="x" * 300
    )
    found = unpack(MESSAGE_HOLDERS[holder](pack(report)), Reply, MessageLimits.for_tensors(arrays))
    assert found.encrypted_coreset == report.encrypted_coreset and found.arrays.keys() == arrays.keys()
    assert unpack(pack(Reply("a", 1, "evaluate")), Reply, MessageLimits.for_tensors(())).encrypted_coreset == b""


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.sampled_from([2**63, 2**64, -(2**63)])
)
VALUES = st.recursive(
    SCALARS, lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=9), some, max_size=4)
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


def changed(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    if not at:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], to)
    return copy


def check_rejected_or_read(message: bytes) -> None:
    for holder in MESSAGE_HOLDERS.values():
        for kind in (Reply, Task):
            with suppress(EngineError):
                assert isinstance(unpack(holder(message), kind, LIMITS), kind)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_changed_header_fields_raise_only_engine_errors(data: st.DataObject) -> None:
    """The digest is valid where one can be computed."""
    message_fields = fields(BOTH)
    entries = GOOD
    for _ in range(data.draw(st.integers(1, 3))):
        whole = {"message_fields": message_fields, "entries": entries}
        at = data.draw(st.sampled_from(places(whole)[2:]))
        whole = changed(whole, at, data.draw(VALUES))
        message_fields = whole["message_fields"]
        entries = whole["entries"]
    try:
        message = forged(entries, BODY, message_fields)
    except (ValueError, TypeError, AttributeError, KeyError):
        header = json.dumps({"__metadata__": {"descant": f"0 {json.dumps(message_fields)}"}, "more": entries}).encode()
        message = len(header).to_bytes(8, "little") + header + BODY
    check_rejected_or_read(message)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_changed_header_bytes_raise_only_engine_errors(data: st.DataObject) -> None:
    message = forged(GOOD, BODY, fields(BOTH))
    begin = data.draw(st.integers(0, len(message)))
    end = data.draw(st.integers(begin, min(len(message), begin + 20)))
    check_rejected_or_read(message[:begin] + data.draw(st.binary(max_size=20)) + message[end:])
