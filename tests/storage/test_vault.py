"""The vault: rows never appear in clear, faults are named and rejected, and forgetting is final."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import os
import pickle  # noqa: TID251 - to show that a key refuses it
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from descant.cli import app, typer
from descant.errors import DescantError, SettingError, StateError, VaultError
from descant.parties.party import SampleSpec
from descant.storage.vault.coreset_rows import (
    CoresetLimit,
    CoresetRows,
    ExpectedCoreset,
    check_coreset_limit,
    pack_rows,
    unpack_rows,
)
from descant.storage.vault.encryption import Invitation, decrypt_coreset, encrypt_coreset, read_coreset_header
from descant.storage.vault.private_keys import KEY_VARIABLE, PrivateKey, key_fingerprint, read_key
from descant.storage.vault.vault_folder import Vault
from write_faults import SimulatedCrash, disk_full_error, inject_faults

KEY = PrivateKey(bytes(range(32)))
FORM = SampleSpec((3,), torch.float32, (), y_dtype=torch.int64)
EXPECTED = ExpectedCoreset(FORM, max_rows=4, classes=10)


def rows(mark: float = 0.5) -> CoresetRows:
    """Return two rows with numbers that occur nowhere else."""
    x = torch.tensor([[12345.678, mark, 1.0], [98765.432, mark, 2.0]])
    return CoresetRows(x, torch.tensor([3, 7]), torch.tensor([10.0, 20.0], dtype=torch.float64))


CANARIES = [rows().x[i].numpy().tobytes()[:8] for i in (0, 1)] + [b"12345.6", b"98765.4"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: every sync is still a place to be killed at, and no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault.create(tmp_path / "vault", KEY, "run 7", "tester")


def encrypt_for(public: bytes, plain: bytes, run: str, party: str, generation: int) -> bytes:
    return encrypt_coreset(Invitation(public, generation), plain, run, party=party)


def encrypted_rows(vault: Vault, party: str, generation: int, what: CoresetRows | bytes | None = None) -> bytes:
    plain = what if isinstance(what, bytes) else pack_rows(what or rows())
    return encrypt_for(vault.invite(party).public_keys, plain, vault.run, party, generation)


def events(vault: Vault) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (vault.folder / "audit.jsonl").read_bytes().splitlines()]


def bytes_in(folder: Path) -> bytes:
    return b"\n".join(file.read_bytes() + str(file).encode() for file in sorted(folder.rglob("*")) if file.is_file())


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.binary(max_size=300), st.text(max_size=60), st.text(max_size=60), st.integers(0, 2**53))
def test_decryption_needs_both_keys(plain: bytes, run: str, party: str, generation: int) -> None:
    own = PrivateKey.new()
    ciphertext = encrypt_for(KEY.public + own.public, plain, run, party, generation)
    assert decrypt_coreset(ciphertext, KEY, own, run=run, party=party) == plain
    header = read_coreset_header(ciphertext)
    assert (header.run, header.party, header.generation, header.size) == (run, party, generation, len(plain))
    assert len(plain) < 4 or plain not in ciphertext


def test_encryption_follows_the_documented_formulas() -> None:
    """Decrypt by hand, with HKDF written out, from the formulas in the docstring of `encryption`."""
    own = PrivateKey.new()
    ciphertext = encrypt_for(KEY.public + own.public, b"some rows", "run", "north", 3)
    mark = ciphertext[:17]
    rest = ciphertext[17:]
    length = int.from_bytes(rest[:4], "big")
    front = ciphertext[: 21 + length]
    header = json.loads(rest[4 : 4 + length])
    body = rest[4 + length :]
    once = bytes.fromhex(header["once"])
    secret = b"".join(key._key.exchange(X25519PublicKey.from_public_bytes(once)) for key in (KEY, own))
    first = hmac.digest(bytes(32), secret, "sha256")
    info = mark + once + KEY.public + own.public
    k1 = hmac.digest(first, info + b"\1", "sha256")
    k2 = hmac.digest(first, k1 + info + b"\2", "sha256")
    assert AESGCM(k1).decrypt(bytes.fromhex(header["nonce"]), body, front) == b"some rows"
    assert header["digest"] == hmac.digest(k2, b"some rows", "sha256").hex()
    assert hashlib.sha256(b"some rows").hexdigest().encode() not in ciphertext  # or a guess could be tried


def test_no_nonce_and_no_ephemeral_key_is_used_twice() -> None:
    own = PrivateKey.new()
    headers = [
        read_coreset_header(encrypt_for(KEY.public + own.public, b"same", "run", "north", 1)) for _ in range(300)
    ]
    for part in ("nonce", "once", "digest"):
        assert len({getattr(header, part) for header in headers}) == 300


def test_every_changed_missing_or_added_byte_is_rejected() -> None:
    own = PrivateKey.new()
    ciphertext = encrypt_for(KEY.public + own.public, b"secret rows", "run", "north", 3)
    changed = [
        ciphertext[:i] + bytes([ciphertext[i] ^ 1 << i % 8]) + ciphertext[i + 1 :] for i in range(len(ciphertext))
    ]
    cut = [ciphertext[:i] for i in range(len(ciphertext))]
    for data in [*changed, *cut, ciphertext + b"\0", b"\0" + ciphertext, ciphertext + ciphertext]:
        with pytest.raises(VaultError) as found:
            decrypt_coreset(data, KEY, own, run="run", party="north")
        assert "secret rows" not in str(found.value)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("mark", "no encrypted coreset of this version"),
        ("run", "for run"),
        ("party", "of party"),
        ("digest", "was changed after encryption"),
    ]
    + [(place, "was changed") for place in ("generation", "nonce", "once", "body", "tag")]
    + [("vault", "for the vault"), ("key", "for the key"), ("size", "was truncated, or bytes were added")],
)
def test_changed_field_is_named(place: str, message: str) -> None:
    own = PrivateKey.new()
    ciphertext = encrypt_for(KEY.public + own.public, b"secret rows", "run", "north", 3)
    if place in ("mark", "body", "tag"):
        i = {"mark": 0, "body": len(ciphertext) - 17, "tag": len(ciphertext) - 1}[place]
        data = ciphertext[:i] + bytes([ciphertext[i] ^ 1]) + ciphertext[i + 1 :]
    else:
        length = int.from_bytes(ciphertext[17:21], "big")
        fields = json.loads(ciphertext[21 : 21 + length])
        value = fields[place]
        fields[place] = value + 1 if isinstance(value, int) else f"{int(value[0] == '0')}{value[1:]}"
        text = json.dumps(fields, separators=(",", ":")).encode()
        data = ciphertext[:17] + len(text).to_bytes(4, "big") + text + ciphertext[21 + length :]
    with pytest.raises(VaultError, match=message):
        decrypt_coreset(data, KEY, own, run="run", party="north")


def header_bytes(text: bytes, length: int | None = None) -> bytes:
    return b"descant sealed 1\n" + (len(text) if length is None else length).to_bytes(4, "big") + text


GOOD = {"run": "r", "party": "p", "generation": 1, "vault": "00" * 32, "key": "00" * 32, "once": "00" * 32}
GOOD |= {"nonce": "00" * 12, "digest": "00" * 32, "size": 0}


@pytest.mark.parametrize(
    "data",
    [b"", b"descant sealed 1\n", b"descant sealed 2\n" + bytes(99)]
    + [header_bytes(b"{}", length) for length in (0, 3, 4097, 2**32 - 1)]
    + [header_bytes(text) for text in (b"{}", b"[]", b"null", b"[" * 4000, b"1" * 4000, b"\xff\xfe", b'"' + b"x" * 9)]
    + [header_bytes(json.dumps(GOOD | change).encode()) for change in (
        {}, {"more": 1}, {"generation": -1}, {"generation": 1.0}, {"generation": True}, {"generation": 2**53 + 1},
        {"size": -16}, {"size": 2**40}, {"nonce": "00"}, {"once": None}, {"run": 1}, {"party": [1]}, {"key": "zz" * 32},
    )],
)  # fmt: skip
def test_invalid_headers_are_rejected_first(data: bytes) -> None:
    with pytest.raises(VaultError):
        read_coreset_header(data)


def test_header_is_read_up_to_its_maximum_size() -> None:
    text = json.dumps(GOOD).encode()
    assert read_coreset_header(header_bytes(text) + bytes(16)).party == "p"  # the one above passes with its tag
    assert read_coreset_header(header_bytes(text.ljust(4096)) + bytes(16)).party == "p"
    with pytest.raises(VaultError, match="At most 4096 are allowed"):
        read_coreset_header(header_bytes(text.ljust(4097)) + bytes(16))


def test_false_digest_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PrivateKey.new()
    with monkeypatch.context() as lie:
        lie.setattr("descant.storage.vault.encryption._digest", lambda check, plain: "00" * 32)
        ciphertext = encrypt_for(KEY.public + own.public, b"secret rows", "run", "north", 3)
    with pytest.raises(VaultError, match="does not match its header"):
        decrypt_coreset(ciphertext, KEY, own, run="run", party="north")


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little"), bytes(31)])
def test_public_key_with_a_constant_shared_secret_is_rejected(point: bytes) -> None:
    with pytest.raises(VaultError, match="not a valid public key"):
        KEY.exchange(point)


def test_unopenable_coresets_are_not_encrypted() -> None:
    invitation = KEY.public * 2
    for public, plain, run, generation, message in (
        (KEY.public, b"", "r", 1, "two keys of 32 bytes. Got 32 bytes"),
        (invitation, b"", "r" * 5000, 1, "too long for a header"),
        (invitation, b"", "r", -1, "a number from 0"),
        (bytes(64), b"", "r", 1, "not a valid public key"),
    ):
        with pytest.raises(VaultError, match=message):
            encrypt_for(public, plain, run, "p", generation)


def test_party_encrypts_only_for_the_expected_fingerprint(vault: Vault) -> None:
    fingerprint = key_fingerprint(KEY.public)
    invitation = vault.invite("north")
    encrypted = encrypt_coreset(invitation, b"rows", "run", party="north", expected_fingerprint=fingerprint)
    assert read_coreset_header(encrypted).vault == KEY.public.hex()
    swapped = invitation._replace(public_keys=PrivateKey.new().public + invitation.public_keys[32:])
    swapped_fingerprint = key_fingerprint(swapped.public_keys)
    with pytest.raises(
        VaultError, match=rf"asked to encrypt for vault {swapped_fingerprint}, and expects .*{fingerprint}"
    ):
        encrypt_coreset(swapped, b"rows", "run", party="north", expected_fingerprint=fingerprint)


def test_a_key_shows_nothing_of_itself(tmp_path: Path) -> None:
    secret = bytes(range(32)).hex()
    shown = [repr(KEY), str(KEY), f"{KEY}", repr([KEY]), repr(Vault.create(tmp_path / "v", KEY))]
    for refusing in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process") as found:
            refusing(KEY)
        shown.append(str(found.value))
    assert key_fingerprint(KEY.public) in shown[0]
    assert not any(secret[:16] in text or repr(bytes(range(16)))[2:-1] in text for text in shown)
    assert not hasattr(KEY, "__dict__")


def test_key_file_must_be_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    KEY.write(file)
    assert file.stat().st_mode & 0o777 == 0o600 and read_key(file).public == KEY.public
    with pytest.raises(FileExistsError):
        PrivateKey.new().write(file)
    for mode in (0o640, 0o604, 0o620, 0o660, 0o644, 0o601):
        file.chmod(mode)
        with pytest.raises(VaultError, match=rf"by others than its owner \(mode {mode:04o}\). .*chmod 600"):
            read_key(file)
    file.chmod(0o600)
    for text in ("", "descant-key-1:", f"descant-key-1:{'g' * 64}", bytes(range(32)).hex()[:-1], "ü" * 64, "7" * 9999):
        file.write_text(text)
        with pytest.raises(VaultError, match=r"holds no private key") as found:
            read_key(file)
        assert bytes(range(32)).hex()[:20] not in str(found.value)


def test_lost_key_error_names_what_is_lost_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", None)
    for file in (tmp_path / "gone", None):
        with pytest.raises(
            VaultError, match=r"no one can open its coresets: .* encrypted new ones .* models .* not lost"
        ):
            read_key(file)


def test_a_key_comes_from_the_environment_or_from_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"descant-key-1:{bytes(range(32)).hex()}"
    monkeypatch.setenv(KEY_VARIABLE, f"{text}\n")
    assert read_key().public == KEY.public
    monkeypatch.setenv(KEY_VARIABLE, "not a key at all")
    with pytest.raises(VaultError, match=KEY_VARIABLE) as found:
        read_key()
    assert "not a key at all" not in str(found.value)
    monkeypatch.delenv(KEY_VARIABLE)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115, PTH123
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: text)
    assert read_key().public == KEY.public
    sys.stdin.close()


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.integers(1, 4), st.sampled_from([torch.float32, torch.float16, torch.int64]), st.sampled_from([(), (3,), (2, 2)])
)
def test_rows_survive_encoding(m: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    encrypted_rows = CoresetRows(
        torch.randint(0, 9, (m, *shape)).to(dtype), torch.arange(m), torch.rand(m, dtype=torch.float64) + 0.1
    )
    found = unpack_rows(
        pack_rows(encrypted_rows), ExpectedCoreset(SampleSpec(shape, dtype, (), y_dtype=torch.int64), 4, 10), "north"
    )
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, encrypted_rows, strict=True))


def bad_rows() -> Iterator[tuple[str, bytes]]:
    x, y, weights = good = rows()
    for name, change in (
        ("not finite", {"x": x.where(x != 1, torch.nan)}),
        ("not finite", {"x": x.where(x != 2, torch.inf)}),
        ("not finite", {"weights": weights.log().log().sub(1).sqrt()}),
        ("labels that the model does not know", {"y": y + 3}),
        ("labels that the model does not know", {"y": y - 4}),
        ("below 0", {"weights": weights - 11}),
        ("none above", {"weights": weights * 0}),
        ("The model takes", {"x": x.double()}),
        ("The model takes", {"x": x[:, :2]}),
        ("The model takes", {"x": x[:1]}),
        ("The model takes", {"y": y.float()}),
        ("The model takes", {"y": y[:, None]}),
        ("The model takes", {"weights": weights.float()}),
        ("has 0 rows", {"x": x[:0], "y": y[:0], "weights": weights[:0]}),
        ("has 0 rows", {"weights": weights[0]}),
        ("has 5 rows", {"x": x[:1].repeat(5, 1), "y": y[:1].repeat(5), "weights": weights[:1].repeat(5)}),
        ("bytes", {"x": x.repeat(200, 1), "y": y.repeat(200), "weights": weights.repeat(200)}),
    ):
        yield name, pack_rows(good._replace(**change))
    yield "3 tensors|4 tensors", save({**good._asdict(), "more": x.clone()})
    yield "2 tensors", save({"x": x, "y": y})
    yield "does not hold tensors", b"no tensors"
    yield "does not hold tensors", (2**62).to_bytes(8, "little") + pack_rows(good)[8:]
    yield "does not hold tensors", pack_rows(good)[:-1]


@pytest.mark.parametrize(("message", "plain"), list(bad_rows()))
def test_unusable_rows_are_rejected_without_showing_them(vault: Vault, message: str, plain: bytes) -> None:
    ciphertext = encrypted_rows(vault, "north", 1, plain)
    with pytest.raises(VaultError, match=message) as found:
        vault.store("north", ciphertext, EXPECTED)
    assert events(vault)[-1]["event"] == "rejected" and vault.parties()[0].state == "invited"
    if "bytes" not in message:
        Vault(vault.folder).store("north", ciphertext)  # who has no key cannot know
        with pytest.raises(VaultError, match=message):
            vault.open("north", 5, EXPECTED)
        assert events(vault)[-1]["event"] == "rejected"
    else:
        with pytest.raises(VaultError, match=message):
            Vault(vault.folder).store("north", ciphertext, EXPECTED)
    assert not any(canary in bytes_in(vault.folder) + str(found.value).encode() for canary in CANARIES)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 10**6), st.floats(1e-6, 1), st.none() | st.integers(1, 10**6))
def test_coreset_limit_is_never_exceeded(samples: int, share: float, count: int | None) -> None:
    agreed = CoresetLimit(share, count)
    most = agreed.max_rows(samples)
    assert 1 <= most <= samples and most <= max(1, share * samples + 1) and (count is None or most <= count)
    check_coreset_limit("north", most, samples, coreset_limit=agreed)
    with pytest.raises(VaultError, match=rf"has {most + 1} of its {samples} rows\. Its limit is {most}\."):
        check_coreset_limit("north", most + 1, samples, coreset_limit=agreed)
    check_coreset_limit("north", 1, samples, coreset_limit=agreed, deposited_rows=most - 1)
    with pytest.raises(
        VaultError, match=rf"has 1 of .* not left before, besides {most} that have\. Its limit is {most}\."
    ):
        check_coreset_limit("north", 1, samples, coreset_limit=agreed, deposited_rows=most)


@pytest.mark.parametrize("agreed", [CoresetLimit(share=0), CoresetLimit(count=0), CoresetLimit(share=0, count=5)])
def test_coreset_limit_zero_allows_no_row(agreed: CoresetLimit) -> None:
    with pytest.raises(VaultError, match=r"has 1 of its 100 rows\. Its limit is 0"):
        check_coreset_limit("north", 1, 100, coreset_limit=agreed)


@pytest.mark.parametrize(
    "agreed", [CoresetLimit(-0.1), CoresetLimit(1.1), CoresetLimit(count=-1), CoresetLimit(count=2.5)]
)  # type: ignore[arg-type]
def test_invalid_coreset_limit_is_rejected(agreed: CoresetLimit) -> None:
    with pytest.raises(SettingError, match=r"of CoresetLimit must be"):
        check_coreset_limit("north", 1, 100, coreset_limit=agreed)


def test_stored_rows_are_opened_unchanged(vault: Vault) -> None:
    server = Vault(vault.folder)  # which has no key
    invitation = server.invite("north")
    assert invitation == vault.invite("north") and invitation != vault.invite("south")
    assert key_fingerprint(invitation.public_keys) == key_fingerprint(KEY.public)
    server.store("north", encrypt_coreset(invitation, pack_rows(rows()), vault.run, party="north"), EXPECTED)
    found = vault.open("north", 4, EXPECTED)
    assert all(torch.equal(a, b) for a, b in zip(found, rows(), strict=True))
    server.store("north", encrypted_rows(vault, "north", 5, rows(0.25)))
    assert vault.open("north", 6, EXPECTED).x[0, 1] == 0.25
    assert [event["event"] for event in events(vault)] == [
        "created", "invited", "invited", "sealed", "opened", "refreshed", "opened",
    ]  # fmt: skip
    assert {event["who"] for event in events(vault) if event["event"] in ("created", "opened")} == {"tester"}
    assert (server.invite("north").generation, server.invite("south").generation) == (6, 1)
    assert [(held.party, held.state, held.generation, held.opened) for held in server.parties()] == [
        ("north", "refreshed", 5, 2),
        ("south", "invited", None, 0),
    ]
    with pytest.raises(VaultError, match="without its private key"):
        server.open("north", 7, EXPECTED)
    assert vault.verify().coresets == 1 and server.verify().with_key is False


def test_rows_and_keys_are_in_no_file_and_no_message(
    vault: Vault, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    messages = []
    ciphertext = encrypted_rows(vault, "north", 1)
    vault.store("north", ciphertext)
    vault.open("north", 1, EXPECTED)
    for wrong in (
        ciphertext[:-1],
        ciphertext[:-1] + bytes([ciphertext[-1] ^ 1]),
        b"",
        encrypted_rows(vault, "south", 1),
        encrypted_rows(vault, "north", 0),
    ):
        with pytest.raises(VaultError) as found:
            vault.store("north", wrong)
        messages.append(repr(found.value))
    vault.verify()
    everything = bytes_in(vault.folder) + "".join([*messages, *capfd.readouterr(), caplog.text, repr(vault)]).encode()
    for canary in [*CANARIES, bytes(range(32)), bytes(range(32)).hex().encode()]:
        assert canary not in everything
    assert pack_rows(rows())[-16:] not in everything and b"north" in everything


def test_vault_files_are_readable_by_their_owner_only(vault: Vault) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    modes = {file.name: file.stat().st_mode & 0o777 for file in vault.folder.rglob("*")}
    assert modes["parties"] == 0o700 and modes["key"] == modes["coreset"] == modes["audit.head"] == 0o600
    key = next(vault.folder.rglob("key"))
    key.chmod(0o644)
    for what in (lambda: vault.open("north", 1, EXPECTED), vault.verify):
        with pytest.raises(VaultError, match="by others than its owner"):
            what()


def test_key_of_another_vault_is_rejected(vault: Vault) -> None:
    other = PrivateKey.new()
    with pytest.raises(
        VaultError, match=f"key of the vault {key_fingerprint(other.public)}, and .*{key_fingerprint(KEY.public)}"
    ):
        Vault(vault.folder, other)


def test_foreign_or_older_coresets_are_rejected_and_logged(vault: Vault, tmp_path: Path) -> None:
    second = Vault.create(tmp_path / "second", KEY, "run 8")  # the same key, another run
    foreign = Vault.create(tmp_path / "foreign", PrivateKey.new(), vault.run)
    first = encrypted_rows(vault, "north", 3)
    newer = encrypted_rows(vault, "north", 8)
    wrong_run = encrypt_for(vault.invite("north").public_keys, pack_rows(rows()), "run 8", "north", 9)
    vault.store("north", first)
    vault.store("north", first)  # a network may send it twice
    vault.store("north", newer)
    for ciphertext, message in (
        (first, r"of generation 3, and one of generation 8 was stored: an older one is not accepted"),
        (encrypted_rows(vault, "north", 8), r"of generation 8, and one of generation 8"),
        (encrypted_rows(vault, "south", 9), r"of party 'south', and 'north' was expected"),
        (encrypt_for(vault.invite("south").public_keys, pack_rows(rows()), vault.run, "north", 9), r"for the key"),
        (wrong_run, r"for run 'run 8', and 'run 7' was expected"),
        (encrypted_rows(second, "north", 9), r"for run 'run 8'"),
        (encrypted_rows(foreign, "north", 9), r"for the vault"),
    ):
        for keeper in (vault, Vault(vault.folder)):
            with pytest.raises(VaultError, match=message):
                keeper.store("north", ciphertext)
            last = events(vault)[-1]
            assert (last["event"], last["party"]) == ("rejected", "north") and len(last["digest"]) == 64
    with pytest.raises(VaultError, match="Party 'unknown' was not invited"):
        vault.store("unknown", first)
    assert vault.open("north", 9, EXPECTED).y.tolist() == [3, 7] and vault.parties()[0].generation == 8
    assert sum(event["event"] in ("sealed", "refreshed") for event in events(vault)) == 2


def test_forged_coreset_replaces_no_good_one_if_the_key_is_present(vault: Vault) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    forged = encrypted_rows(vault, "north", 2)
    forged = forged[:-1] + bytes([forged[-1] ^ 1])
    with pytest.raises(VaultError, match="was changed after encryption"):
        vault.store("north", forged)
    assert vault.open("north", 1, EXPECTED).y.tolist() == [3, 7]
    Vault(vault.folder).store("north", forged)  # without it this is only seen later
    with pytest.raises(VaultError, match="was changed after encryption"):
        vault.open("north", 2, EXPECTED)


def test_coreset_changed_or_restored_on_disk_is_detected(vault: Vault) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    file = next(vault.folder.rglob("coreset"))
    old = file.read_bytes()
    vault.store("north", encrypted_rows(vault, "north", 2))
    for wrong in (old, b"", b"rubbish"):
        file.write_bytes(wrong)
        for what in (lambda: vault.open("north", 1, EXPECTED), vault.verify, Vault(vault.folder).verify):
            with pytest.raises(VaultError, match=r"not the one of generation 2 that was stored"):
                what()
    file.unlink()
    with pytest.raises(VaultError, match=r"cannot be read: No such file"):
        vault.open("north", 1, EXPECTED)
    next(vault.folder.rglob("key")).unlink()
    with pytest.raises(VaultError, match=r"No one can open what the party has encrypted: forget the party"):
        vault.invite("north")


def test_restored_folder_is_detected_by_a_noted_line(vault: Vault, tmp_path: Path) -> None:
    shutil.copytree(vault.folder, tmp_path / "old")
    vault.store("north", encrypted_rows(vault, "north", 1))
    noted = vault.verify()
    assert Vault(vault.folder).verify(noted.lines, noted.chain_hash).lines == noted.lines + 1
    old = Vault(tmp_path / "old", KEY)
    old.verify()
    with pytest.raises(StateError, match=rf"Line {noted.lines} of .* is not the one that was noted"):
        old.verify(noted.lines, noted.chain_hash)
    shutil.copy(tmp_path / "old" / "audit.jsonl", vault.folder)
    shutil.copy(tmp_path / "old" / "audit.head", vault.folder)
    with pytest.raises(StateError, match=r"does not mention: one of them was restored"):  # and nothing was destroyed
        Vault(vault.folder).parties()
    assert list(vault.folder.rglob("coreset"))


def test_concurrent_users_of_a_vault_wait_for_each_other(vault: Vault) -> None:
    def use(name: str) -> None:
        mine = Vault(vault.folder, KEY)
        for generation in range(1, 5):
            mine.store(name, encrypted_rows(mine, name, generation), EXPECTED)
            mine.open(name, generation, EXPECTED)

    threads = [threading.Thread(target=use, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(held.generation, held.opened) for held in vault.parties()] == [(4, 4)] * 3
    assert vault.verify().lines == 1 + 3 * (1 + 4 + 4) + 1


@pytest.mark.parametrize("about", [b"", b"{}", b"[]", b'{"vault": 2, "run": "r", "public": "00"}', None])
def test_folder_without_a_valid_manifest_is_rejected(vault: Vault, about: bytes | None) -> None:
    file = vault.folder / "vault.json"
    file.unlink() if about is None else file.write_bytes(about)
    with pytest.raises(StateError, match=r"holds no vault|is damaged, or of another version"):
        Vault(vault.folder)


@pytest.mark.parametrize("what", ["run", "public"])
def test_manifest_with_another_run_or_key_is_rejected(vault: Vault, what: str) -> None:
    file = vault.folder / "vault.json"
    about = json.loads(file.read_bytes())
    file.write_text(json.dumps({**about, what: "run 8" if what == "run" else PrivateKey.new().public.hex()}))
    difference = (
        "the run 'run 8', and the first line of .* 'run 7'"
        if what == "run"
        else f"the vault .*{key_fingerprint(KEY.public)}"
    )
    with pytest.raises(StateError, match=f"vault.json names {difference}"):
        Vault(vault.folder)


@pytest.mark.parametrize("name", ["x", "key", "coreset.new", "parties/aaaa", "audit.head.new", ".lock"])
def test_nothing_is_written_through_a_link(vault: Vault, tmp_path: Path, name: str) -> None:
    """Not even by listing: a link in the folder may lead to any file of the user."""
    place = vault.folder / "parties" / ("a" * 32)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "key").write_text("precious")
    link = place / name if name in ("x", "key", "coreset.new") else vault.folder / name
    if name == "parties/aaaa":
        place.symlink_to(victim)
    else:
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(victim / "key")
    with pytest.raises(StateError, match=r"is a link|is not a file of the vault"):
        Vault(vault.folder).verify()
    assert (victim / "key").read_text() == "precious"


@pytest.mark.parametrize("what", ["a file", "a folder in a drawer"])
def test_foreign_files_among_the_entries_are_rejected(vault: Vault, what: str) -> None:
    place = vault.folder / "parties" / ("a" * 32)
    place.touch() if what == "a file" else (place / "key").mkdir(parents=True)
    with pytest.raises(StateError, match=r"a{32}.* is not a file of the vault"):
        vault.parties()
    assert place.exists()


def test_previous_coreset_is_kept_for_a_resumed_run(vault: Vault) -> None:
    known = []
    for generation in (1, 2, 3):
        ciphertext = encrypted_rows(vault, "north", generation, rows(float(generation)))
        vault.store("north", ciphertext)
        known.append((generation, hashlib.sha256(ciphertext).hexdigest()))
    assert [vault.open("north", 9, EXPECTED, *known[i]).x[0, 1] for i in (1, 2)] == [2, 3]
    assert events(vault)[-1]["digest"] == known[2][1] and vault.verify().coresets == 1
    for run, why in ((known[0], "has stored others since"), ((4, "0" * 64), "was restored from an older copy")):
        with pytest.raises(VaultError, match=f"is number 3, and not number {run[0]} of this run: the .* {why}"):
            vault.open("north", 9, EXPECTED, *run)
    file = next(vault.folder.rglob("coreset.old"))
    file.write_bytes(file.read_bytes()[:-1])
    for what in (vault.verify, lambda: vault.open("north", 9, EXPECTED, *known[1])):
        with pytest.raises(VaultError, match="not the one before generation 3 that was stored"):
            what()
    next(vault.folder.rglob("coreset")).write_bytes(b"damaged")
    vault.store("north", encrypted_rows(vault, "north", 4))  # nothing that is damaged is kept
    assert vault.verify().coresets == 1 and not list(vault.folder.rglob("coreset.old"))


def test_no_copy_of_a_forgotten_coreset_can_be_opened(vault: Vault) -> None:
    for party in ("north", "south"):
        vault.store(party, encrypted_rows(vault, party, 1))
    ciphertext = encrypted_rows(vault, "north", 2)
    vault.store("north", ciphertext)
    held = {file.name: file.read_bytes() for file in vault._entries._party_folder("north").iterdir()}
    assert set(held) == {"key", "coreset", "coreset.old"} and held["coreset"] == ciphertext
    Vault(vault.folder).forget("north")  # which needs no key
    left = bytes_in(vault.folder)
    secret = held["key"].strip().split(b":")[1]
    header = read_coreset_header(ciphertext)
    for gone in (ciphertext[-16:], ciphertext[-64:-32], header.nonce.encode(), secret, bytes.fromhex(secret.decode())):
        assert gone not in left
    last = events(vault)[-1]
    assert (last["event"], last["party"], last["generation"]) == ("forgotten", "north", 2)
    assert last["digest"] == hashlib.sha256(ciphertext).hexdigest()
    with pytest.raises(VaultError, match="holds no coreset of party 'north'"):
        vault.open("north", 3, EXPECTED)
    with pytest.raises(VaultError, match="was not invited, or was forgotten later"):
        vault.store("north", ciphertext)
    vault.invite("north")  # it comes back, with another key
    with pytest.raises(VaultError, match="the party was forgotten since"):
        vault.store("north", ciphertext)
    for own in (vault._entries.key("north"), vault._entries.key("south"), KEY):
        with pytest.raises(VaultError):  # all keys that there are, and a copy from a backup
            decrypt_coreset(ciphertext, KEY, own, run=vault.run, party="north")
        forced = ciphertext.replace(header.key.encode(), own.public.hex().encode())
        with pytest.raises(VaultError, match="was changed"):
            decrypt_coreset(forced, KEY, own, run=vault.run, party="north")
    assert vault.invite("north").generation == 3  # or a run that knew of the second would take this for an old copy
    with pytest.raises(VaultError, match="of generation 1, and one of generation 2 was stored"):
        vault.store("north", encrypted_rows(vault, "north", 1))
    vault.store("north", encrypted_rows(vault, "north", 3))
    assert vault.open("south", 3, EXPECTED).y.tolist() == [3, 7] and vault.verify().coresets == 2


def test_key_is_overwritten_before_its_file_is_removed(vault: Vault, tmp_path: Path) -> None:
    """A hard link to the same file holds only zeros afterwards."""
    vault.store("north", encrypted_rows(vault, "north", 1))
    for name in ("key", "coreset"):
        os.link(next(vault.folder.rglob(name)), tmp_path / name)
    vault.forget("north")
    assert set((tmp_path / "key").read_bytes()) == set((tmp_path / "coreset").read_bytes()) == {0}


def test_unknown_party_cannot_be_forgotten(vault: Vault) -> None:
    with pytest.raises(VaultError, match=r"Party 'north' is not in the vault .* which is empty"):
        vault.forget("north")
    vault.invite("north")
    with pytest.raises(DescantError, match=r"There is no party in this vault 'nort'. Did you mean 'north'"):
        vault.forget("nort")
    vault.forget("north")
    with pytest.raises(VaultError, match=r"Party 'north' was already forgotten, at 20"):
        vault.forget("north")
    assert vault.parties()[0].state == "forgotten"


@pytest.mark.parametrize("missing", ["key", "coreset", "both", "the drawer"])
def test_party_with_missing_files_can_be_forgotten(vault: Vault, missing: str) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    place = vault._entries._party_folder("north")
    for name in ("key", "coreset"):
        if missing != {"key": "coreset", "coreset": "key"}[name]:
            (place / name).unlink()
    if missing == "the drawer":
        place.rmdir()
    vault.forget("north")
    assert not place.exists() and vault.parties()[0].state == "forgotten"
    vault.store("north", encrypted_rows(vault, "north", 2))
    assert vault.verify().coresets == 1


def test_forgetting_is_logged_with_its_user_first(vault: Vault) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    place = vault._entries._party_folder("north")
    shutil.copy(place / "key", place / "key.gone")  # as a vault of old marked whom it was forgetting
    Vault(vault.folder, KEY, "worker").verify()
    assert vault.parties()[0].state == "sealed" and vault.open("north", 1, EXPECTED).y.tolist() == [3, 7]
    (place / "key.gone").unlink()
    with inject_faults(3), suppress(SimulatedCrash):  # two writes for its line, and one for the head
        Vault(vault.folder, None, "operator").forget("north")
    Vault(vault.folder, KEY, "worker").parties()
    logged = [(event["event"], event["who"]) for event in events(vault)]
    assert logged[-2:] == [("forgetting", "operator"), ("forgotten", "worker")]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_party_can_be_forgotten_although_the_log_is_damaged(vault: Vault, line: int) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    log = vault.folder / "audit.jsonl"
    good = log.read_bytes()
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(
        StateError, match=r"of party 'north' are destroyed, but the log could not record it. Line .* damaged"
    ):
        Vault(vault.folder).forget("north")
    assert not vault._entries._party_folder("north").exists()
    log.write_bytes(good)
    Vault(vault.folder).forget("north")
    assert vault.parties()[0].state == "forgotten" and vault.verify().parties == 0


def test_restored_copy_of_a_forgotten_entry_is_detected_and_destroyed(vault: Vault, tmp_path: Path) -> None:
    for party in ("north", "south", "east"):
        vault.store(party, encrypted_rows(vault, party, 1))
    shutil.copytree(vault.folder / "parties", tmp_path / "backup")
    vault.forget("north")
    vault.forget("south")
    shutil.copytree(tmp_path / "backup", vault.folder / "parties", dirs_exist_ok=True)
    for what in (vault.parties, vault.verify, lambda: vault.forget("east")):
        with pytest.raises(
            StateError, match=r"of party '(north|south)', which was forgotten at 20.* Forget the party "
        ):
            what()
    with pytest.raises(StateError, match="of party 'south', which was forgotten"):  # the other one is still there
        vault.forget("north")
    vault.forget("south")
    assert vault.verify().coresets == 1 and len(list((vault.folder / "parties").iterdir())) == 1
    logged = [(event["event"], event["party"]) for event in events(vault)[-5:-1]]
    assert logged == [(event, party) for party in ("north", "south") for event in ("forgetting", "forgotten")]


State = tuple[str, int | None, int]


def state(folder: Path) -> State:
    """Return the state that a new process finds, after checking that it is consistent."""
    vault = Vault(folder, KEY)
    vault.verify()
    held = {found.party: found for found in vault.parties()}["north"]
    if held.state in ("sealed", "refreshed"):
        assert vault.open("north", 1, EXPECTED).x[0, 1] == float(held.generation or 0)
    files = {file.name for file in vault._entries._party_folder("north").glob("*")}
    old = {"coreset.old"} if held.state == "refreshed" else set()
    assert files == {"invited": {"key"}, "forgotten": set()}.get(held.state, {"key", "coreset", *old})
    return held.state, held.generation, held.opened


ACTIONS: dict[str, tuple[Callable[[Vault, bytes], object], State, State]] = {
    "refresh": (lambda vault, ciphertext: vault.store("north", ciphertext), ("sealed", 1, 0), ("refreshed", 2, 0)),
    "open": (lambda vault, _: vault.open("north", 1, EXPECTED), ("sealed", 1, 0), ("sealed", 1, 1)),
    "forget": (lambda vault, _: vault.forget("north"), ("sealed", 1, 0), ("forgotten", 1, 0)),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("error", "torn"),
    [(SimulatedCrash, False), (SimulatedCrash, True), (disk_full_error, True)],
    ids=["kill", "torn", "full"],
)
def test_kill_or_full_disk_at_any_write_leaves_the_state_before_or_after(
    tmp_path: Path, action: str, error: Callable[[], BaseException], torn: bool
) -> None:
    do, before, after = ACTIONS[action]
    made = Vault.create(tmp_path / "made", KEY)
    made.store("north", encrypted_rows(made, "north", 1, rows(1.0)))
    newer = encrypted_rows(made, "north", 2, rows(2.0))
    found: list[State] = []
    for n in range(99):
        folder = tmp_path / str(n)
        shutil.copytree(made.folder, folder)
        vault = Vault(folder, KEY)
        with inject_faults(n, torn, error) as fault, suppress(SimulatedCrash, StateError):
            do(vault, newer)
        found.append(state(folder))
        with suppress(VaultError):  # forgotten already
            do(vault, newer)  # the same process, or another one, does it again
        assert state(folder)[:2] == after[:2]
        if not fault.reached:
            break
        shutil.rmtree(folder)
    assert not fault.reached and found == sorted(found, key=after.__eq__) and set(found) == {before, after}


@pytest.mark.parametrize("torn", [False, True], ids=["", "torn"])
def test_kill_while_a_vault_is_created_or_a_party_is_invited(tmp_path: Path, torn: bool) -> None:
    for n in range(99):
        folder = tmp_path / str(n)
        with inject_faults(n, torn) as fault, suppress(SimulatedCrash):
            Vault.create(folder, KEY).invite("north")
        vault = Vault(folder, KEY) if (folder / "vault.json").exists() else Vault.create(folder, KEY)
        vault.store("north", encrypted_rows(vault, "north", 1, rows(1.0)))
        assert state(folder) == ("sealed", 1, 0)
        assert len(list((folder / "parties").iterdir())) == 1
        if not fault.reached:
            break
    assert not fault.reached and n > 20


def test_no_rows_are_returned_without_a_log_line(vault: Vault) -> None:
    vault.store("north", encrypted_rows(vault, "north", 1))
    for n in range(3):
        with inject_faults(n, error=disk_full_error), pytest.raises(StateError, match="free some space"):
            vault.open("north", 1, EXPECTED)


def descant(*arguments: object) -> Result:
    return CliRunner().invoke(typer.main.get_command(app), ["vault", *map(str, arguments)])


def test_vault_commands_from_init_to_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    folder = tmp_path / "vault"
    key = tmp_path / "key"
    made = json.loads(descant("init", folder, "--key", key, "--run", "run 7", "--json").stdout)
    assert made == {"vault": str(folder), "run": "run 7", "fingerprint": made["fingerprint"], "key": str(key)}
    secret = key.read_text().strip().partition(":")[2]
    vault = Vault(folder, read_key(key))
    assert key_fingerprint(vault.public) == made["fingerprint"]
    vault.store("north", encrypted_rows(vault, "north", 1))
    (row,) = json.loads(descant("list", folder, "--json").stdout)
    assert (row["party"], row["state"], row["generation"], row["opened"]) == ("north", "sealed", 1, 0)
    verified = json.loads(descant("verify", folder, "--json").stdout)
    assert (verified["coresets"], verified["with_key"]) == (1, False)
    noted = f"{verified['lines']}:{verified['chain_hash']}"
    shown = descant("verify", folder, "--key", key, "--anchor", noted)
    assert shown.exit_code == 0 and "In order, checked with the vault's key." in shown.stdout
    monkeypatch.setenv(KEY_VARIABLE, key.read_text())
    assert "with the vault's key" in descant("verify", folder).stdout
    shown_all = [descant("list", folder).stdout, shown.stdout, descant("forget", folder, "north").stdout]
    assert "north  sealed" in shown_all[0] and "destroyed; the log says so" in shown_all[2]
    assert json.loads(descant("list", folder, "--json").stdout)[0]["state"] == "forgotten"
    assert not any(secret[:16] in text for text in shown_all)
    assert "No party was invited" in descant("list", Vault.create(tmp_path / "new", KEY).folder).stdout


def test_vault_command_errors_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    folder = tmp_path / "vault"
    key = tmp_path / "key"
    assert descant("init", folder, "--key", key).exit_code == 0
    (tmp_path / "open").write_text(key.read_text())
    (tmp_path / "open").chmod(0o644)
    PrivateKey.new().write(tmp_path / "other")
    for arguments, message in (
        (("init", folder, "--key", tmp_path / "stray"), "already holds a vault"),
        (("init", tmp_path / "new"), "Say where to put the private key: --key FILE"),
        (("init", tmp_path / "new", "--key", tmp_path / "new" / "key"), "must not be in the vault"),
        (("init", tmp_path / "new", "--key", tmp_path / "no" / "key"), "cannot be written"),
        (("init", tmp_path, "--key", tmp_path.parent / "k"), "Give a new or an empty folder"),
        (("list", tmp_path), "holds no vault: there is no vault.json in it"),
        (("verify", folder, "--key", tmp_path / "gone"), "no one can open its coresets"),
        (("verify", folder, "--key", tmp_path / "open"), "chmod 600"),
        (("verify", folder, "--key", tmp_path / "other"), "This is the key of the vault"),
        (("verify", folder, "--anchor", "7"), "--anchor must be LINE:SEAL"),
        (("verify", folder, "--anchor", "1:00"), "is not the one that was noted"),
        (("forget", folder, "north"), "Party 'north' is not in the vault"),
    ):
        shown = descant(*arguments)
        assert shown.exit_code == 1 and message in shown.stderr and shown.stdout == "", (arguments, shown.output)
    assert not (tmp_path / "stray").exists() and not (tmp_path / "new").exists()
    log = folder / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b"created", b"creates"))
    shown = descant("verify", folder)
    assert shown.exit_code == 1 and "Error: Line 1 of" in shown.stderr
