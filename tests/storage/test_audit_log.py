"""The audit log detects every edited, removed, inserted, moved or cut line, and recovers from kills."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descant.errors import StateError
from descant.storage.audit_log import AUDIT_HEAD, AUDIT_LOG, AuditLog
from descant.storage.event_log import _HASH_FIELD_LENGTH, _chain_hash
from write_faults import SimulatedCrash, disk_full_error, inject_faults, inject_interrupt

SECRET = b"known to the vault's key alone.."
N = 9
SETTINGS = settings(
    deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: every sync is still a place to be killed at, and no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write_log(folder: Path, n: int = N) -> AuditLog:
    """Return a log of n lines, all but the first written without the key."""
    folder.mkdir(exist_ok=True)
    AuditLog(folder, SECRET).start("created", who="me")
    audit = AuditLog(folder, None)
    audit.catch_up()
    for i in range(2, n + 1):
        audit.add("opened", party="north", round=i, who="me")
    return audit


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("audit") / "log"
    write_log(folder)
    return {name: (folder / name).read_bytes() for name in (AUDIT_LOG, AUDIT_HEAD)}


def write_files(folder: Path, data: bytes, head: bytes) -> Path:
    (folder / AUDIT_LOG).write_bytes(data)
    (folder / AUDIT_HEAD).write_bytes(head)
    return folder


def read(folder: Path, secret: bytes | None = None) -> int:
    audit = AuditLog(folder, secret)
    audit.catch_up()
    return audit.last_line.number


def read_error(folder: Path, secret: bytes | None = None) -> str:
    with pytest.raises(StateError) as found:
        read(folder, secret)
    assert SECRET.hex() not in str(found.value) and "find out who, and compare with a copy" in str(found.value)
    return str(found.value)


def rehashed(lines: list[bytes]) -> bytes:
    """Return lines with recomputed numbers and chain hashes, as anybody could make them."""
    chain_hash = ""
    made = []
    for number, line in enumerate(lines, 1):
        fields = json.loads(line)
        del fields["chain_hash"]
        text = json.dumps({**fields, "n": number})
        chain_hash = _chain_hash(chain_hash, text)
        made.append(f'{text[:-1]},"chain_hash":"{chain_hash}"}}\n'.encode())
        assert len(made[-1]) == len(text) + _HASH_FIELD_LENGTH
    return b"".join(made)


def head_for(data: bytes, secret: str) -> bytes:
    last = json.loads(data.splitlines()[-1])
    return json.dumps({"n": last["n"], "chain_hash": last["chain_hash"], "secret": secret}).encode()


def test_log_reads_back_with_and_without_the_key(tmp_path: Path) -> None:
    audit = write_log(tmp_path)
    assert audit.last_line.number == read(tmp_path) == read(tmp_path, SECRET) == N
    assert audit.open_counts == {"north": N - 1}
    lines = [json.loads(line) for line in (tmp_path / AUDIT_LOG).read_bytes().splitlines()]
    assert [line["n"] for line in lines] == [*range(1, N + 1)] and all(line["at"].endswith("+00:00") for line in lines)
    assert (tmp_path / AUDIT_HEAD).stat().st_mode & 0o777 == 0o600
    assert read_error(tmp_path, b"x" * 32).startswith("Line 1 or 1 of")  # another key


def test_two_writers_in_turn_continue_each_others_log(tmp_path: Path) -> None:
    one = write_log(tmp_path)
    two = AuditLog(tmp_path, SECRET)
    for i in range(6):
        audit = (one, two)[i % 2]
        audit.catch_up()
        audit.add("sealed", party=str(i), digest="d")
    assert read(tmp_path, SECRET) == N + 6 and sorted(two.latest_events) == [*"012345"]


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    def held(audit: AuditLog) -> int:
        return sum(len(found) for found in vars(audit).values() if isinstance(found, list | tuple | dict))

    audit = write_log(tmp_path, 3)
    before = held(audit)
    for i in range(20):
        audit.add("opened", party="north", round=i)
    again = AuditLog(tmp_path, None)
    seals = again.catch_up()
    assert held(audit) == before == held(again) and len(seals) == 23 and seals[-1] == again.last_line.chain_hash
    assert audit.catch_up() == ()


@SETTINGS
@given(st.data())
def test_any_changed_byte_is_detected_and_its_line_named(
    original: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    log = bytearray(original[AUDIT_LOG])
    at = data.draw(st.integers(0, len(log) - 1))
    log[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != log[at]))
    line = original[AUDIT_LOG][:at].count(b"\n") + 1
    for secret in (None, SECRET):
        assert f"Line {line} of" in read_error(write_files(tmp_path, bytes(log), original[AUDIT_HEAD]), secret)


@SETTINGS
@given(st.sampled_from(["remove", "repeat", "swap", "forge", "cut"]), st.integers(0, N - 1), st.integers(0, N - 1))
def test_removed_inserted_moved_or_cut_lines_are_detected(
    original: dict[str, bytes], tmp_path: Path, how: str, i: int, j: int
) -> None:
    lines = original[AUDIT_LOG].splitlines(keepends=True)
    first = i + 1
    if how == "remove":
        del lines[i]
    elif how == "repeat":
        lines.insert(j, lines[i])
        first = j + 1 if i != j else i + 2
    elif how == "swap":
        lines[i], lines[j] = lines[j], lines[i]
        first = min(i, j) + 1
    elif how == "forge":
        lines[i] = lines[i].replace(b'"me"', b'"us"')
    else:
        del lines[i:]
    write_files(tmp_path, b"".join(lines), original[AUDIT_HEAD])
    if (how == "swap" and i == j) or first > N:  # nothing changed, or rubbish behind all lines
        assert read(tmp_path, SECRET) in (N, N + 1)
    else:
        message = read_error(tmp_path)
        assert f"Line {first} of" in message


@SETTINGS
@given(st.sampled_from(["edit", "remove", "insert"]), st.integers(0, N - 1))
def test_recomputed_hashes_are_detected_by_the_head_or_the_key(
    original: dict[str, bytes], tmp_path: Path, how: str, i: int
) -> None:
    lines = original[AUDIT_LOG].splitlines()
    if how == "edit":
        lines[i] = lines[i].replace(b'"me"', b'"us"')
    elif how == "remove":
        del lines[i]
    else:
        lines.insert(i, lines[i])
    forged = rehashed(lines)
    read_error(write_files(tmp_path, forged, original[AUDIT_HEAD]))
    write_files(tmp_path, forged, head_for(forged, json.loads(original[AUDIT_HEAD])["secret"]))
    assert read(tmp_path) == len(lines)  # without the key it cannot be seen any more
    message = read_error(tmp_path, SECRET)
    assert "was changed and its hash recomputed" in message
    assert any(f"Line {n} " in message or f"or {n} of" in message for n in (i, i + 1, i + 2)), message


@pytest.mark.parametrize("kept", range(1, N))
def test_log_and_head_cut_together_are_detected_with_the_key(
    original: dict[str, bytes], tmp_path: Path, kept: int
) -> None:
    cut = b"".join(original[AUDIT_LOG].splitlines(keepends=True)[:kept])
    write_files(tmp_path, cut, head_for(cut, json.loads(original[AUDIT_HEAD])["secret"]))
    assert read(tmp_path) == kept
    assert f"Line {kept} of" in read_error(tmp_path, SECRET)


def test_earlier_reader_detects_a_restored_log(original: dict[str, bytes], tmp_path: Path) -> None:
    audit = write_log(tmp_path)
    old = {name: (tmp_path / name).read_bytes() for name in (AUDIT_LOG, AUDIT_HEAD)}
    audit.add("opened", party="north")
    write_files(tmp_path, old[AUDIT_LOG], old[AUDIT_HEAD])
    with pytest.raises(StateError, match=r"have gone back from line 10 to 9"):
        audit.catch_up()
    assert read(tmp_path, SECRET) == N  # without the newer head, an older copy of all files looks valid
    os.truncate(tmp_path / AUDIT_LOG, 5)
    write_files(
        tmp_path,
        (tmp_path / AUDIT_LOG).read_bytes(),
        json.dumps({"n": 10, "chain_hash": "", "secret": "00" * 32}).encode(),
    )
    with pytest.raises(StateError, match=r"has lost lines"):
        audit.catch_up()


@pytest.mark.parametrize("head", [b"", b"{}", b"[1]", b'{"n":"9","chain_hash":"","secret":""}', b"[" * 100_000, None])
def test_damaged_head_is_an_error(original: dict[str, bytes], tmp_path: Path, head: bytes | None) -> None:
    write_files(tmp_path, original[AUDIT_LOG], head or b"")
    if head is None:
        (tmp_path / AUDIT_HEAD).unlink()
    assert "audit.head" in read_error(tmp_path)


@pytest.mark.parametrize("torn", [False, True])
def test_kill_at_any_write_leaves_a_whole_line_or_none(tmp_path: Path, torn: bool) -> None:
    reached = True
    left = set()
    for n in range(40):
        folder = tmp_path / str(n)
        audit = write_log(folder, 2)
        with inject_faults(n, torn) as found, suppress(SimulatedCrash):
            audit.add("opened", party="north")
        reached = found.reached
        count = read(folder, SECRET)
        left |= {json.loads(line)["event"] for line in (folder / AUDIT_LOG).read_bytes().splitlines()[2:]} or {
            "nothing"
        }
        again = AuditLog(folder, None)
        again.catch_up()
        again.add("opened", party="north")
        assert read(folder, SECRET) == again.last_line.number == count + 1 <= 4
        if not reached:
            break
    assert not reached and left == {"repaired" if torn else "nothing", "opened"}


@pytest.mark.parametrize(
    "make",
    [lambda n: inject_faults(n, True, disk_full_error), lambda n: inject_interrupt(n, True)],
    ids=["full", "ctrl-c"],
)
def test_same_process_continues_after_a_full_disk_or_an_interrupt(
    tmp_path: Path, make: Callable[[int], inject_faults]
) -> None:
    for n in range(8):
        folder = tmp_path / str(n)
        audit = write_log(folder, 2)
        with make(n), suppress(OSError, KeyboardInterrupt):
            audit.add("opened", party="north")
        audit.catch_up()
        audit.add("opened", party="south")
        assert audit.open_counts["south"] == 1 and read(folder, SECRET) == audit.last_line.number


@pytest.mark.parametrize("rubbish", [b"\0" * 40, b'{"n": 10, "at"', b"{}\n"])
def test_bytes_after_the_last_line_are_cut_off_and_logged(
    original: dict[str, bytes], tmp_path: Path, rubbish: bytes
) -> None:
    write_files(tmp_path, original[AUDIT_LOG] + rubbish, original[AUDIT_HEAD])
    assert read(tmp_path) == N + 1
    last = json.loads((tmp_path / AUDIT_LOG).read_bytes().splitlines()[-1])
    assert (last["event"], last["torn"]) == ("repaired", len(rubbish))
    assert read(tmp_path, SECRET) == N + 1


def test_line_beyond_the_head_counts_only_with_its_mark(original: dict[str, bytes], tmp_path: Path) -> None:
    lines = original[AUDIT_LOG].splitlines(keepends=True)
    forged = rehashed([*lines, lines[-1]])
    assert f"Line {N} or {N + 1} of" in read_error(write_files(tmp_path, forged, original[AUDIT_HEAD]))
    forged = rehashed([*lines, lines[-1], lines[-1]])
    assert f"Line {N + 1} of" in read_error(write_files(tmp_path, forged, original[AUDIT_HEAD]))
