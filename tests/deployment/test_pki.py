"""PKI: only certificates of the authority are accepted, and the log decides which parties may take part."""

from __future__ import annotations

import copy
import json
import os
import pickle  # noqa: TID251 - to show that an authority refuses it
import shutil
import stat
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.deployment.pki.certificates import (
    AUTHORITY_NAME,
    REVOCATION_FILE,
    SERVER_NAME,
    Authority,
    fingerprint,
    new_node_key,
    public_node_key,
    serial,
)
from descant.deployment.pki.invite import Invite
from descant.deployment.pki.name_checks import check_hosts, check_name, join_address, parse_address
from descant.deployment.pki.roster import FederationTerms, Roster
from descant.errors import DescantError, PartyError, SettingError, StateError, TrustError, VaultError
from descant.storage.audit_log import AUDIT_HEAD, AUDIT_LOG
from write_faults import SimulatedCrash, disk_full_error, inject_faults

OPENSSL = shutil.which("openssl")
SSH_KEYGEN = shutil.which("ssh-keygen")
NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the waits of fsync; each call is still a place for a simulated crash."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text('[run]\nrounds = 3\n[method]\nalgorithm = "fedavg"\n')
    return file


@pytest.fixture
def roster(tmp_path: Path, recipe: Path) -> Roster:
    return Roster.create(
        tmp_path / "server", recipe, FederationTerms(hosts=("fl.example.org", "10.0.0.5"), port=9443), "tester"
    )


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def openssl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if OPENSSL is None:
        pytest.skip("there is no openssl to ask for a second opinion")
    return subprocess.run([OPENSSL, *map(str, arguments)], capture_output=True, text=True, check=False)


def verdict(keys: Path, one: bytes, purpose: str, folder: Path, *more: str | Path) -> str:
    """Return openssl's verdict on a certificate by the strict rules."""
    (folder / "one.crt").write_bytes(one)
    asked = ("verify", "-x509_strict", "-purpose", purpose, "-CAfile", keys / "ca.crt", *more, folder / "one.crt")
    done = openssl(*asked)
    return "OK" if done.returncode == 0 else done.stdout + done.stderr


def test_openssl_accepts_each_certificate_for_its_purpose_only(roster: Roster, tmp_path: Path) -> None:
    party = roster.authority.issue_party_certificate("north", 9).certificate
    server = (roster.keys_folder / f"{SERVER_NAME}.crt").read_bytes()
    assert verdict(roster.keys_folder, party, "sslclient", tmp_path) == "OK"
    assert verdict(roster.keys_folder, server, "sslserver", tmp_path) == "OK"
    assert "unsuitable" in verdict(roster.keys_folder, server, "sslclient", tmp_path)
    assert "unsuitable" in verdict(roster.keys_folder, party, "sslserver", tmp_path)


def test_certificate_of_another_authority_is_rejected_even_with_the_same_name(roster: Roster, tmp_path: Path) -> None:
    other, _ = Authority.new(f"descant {roster.federation}", 9)
    outcome = verdict(roster.keys_folder, other.issue_party_certificate("north", 9).certificate, "sslclient", tmp_path)
    assert outcome != "OK" and "verification failed" in outcome


def test_party_certificate_cannot_sign_others(roster: Roster) -> None:
    own = x509.load_pem_x509_certificate(roster.authority.issue_party_certificate("north", 9).certificate)
    for found, authority in ((own, False), (roster.authority.certificate, True)):
        basic = found.extensions.get_extension_for_class(x509.BasicConstraints)
        usage = found.extensions.get_extension_for_class(x509.KeyUsage)
        assert basic.critical and usage.critical and basic.value.ca is authority
        assert usage.value.key_cert_sign is usage.value.crl_sign is authority


def test_certificate_expires_after_its_days_and_never_after_the_authority() -> None:
    authority, _ = Authority.new("a", 30)
    short, long = (
        x509.load_pem_x509_certificate(authority.issue_party_certificate("n", days).certificate) for days in (7, 700)
    )
    assert abs(short.not_valid_after_utc - datetime.now(UTC) - timedelta(days=7)) < timedelta(minutes=5)
    assert long.not_valid_after_utc == authority.expires
    assert short.not_valid_before_utc < NOW < short.not_valid_after_utc


def test_no_two_certificates_have_the_same_serial(roster: Roster) -> None:
    made = [
        x509.load_pem_x509_certificate(roster.authority.issue_party_certificate("north", 9).certificate)
        for _ in range(50)
    ]
    assert len({serial(one) for one in made}) == len({fingerprint(one) for one in made}) == 50


def test_server_certificate_is_valid_for_its_hosts_and_loopback(roster: Roster, tmp_path: Path) -> None:
    server = (roster.keys_folder / f"{SERVER_NAME}.crt").read_bytes()
    for flag, host in (("-verify_hostname", "fl.example.org"), ("-verify_hostname", "localhost")):
        assert verdict(roster.keys_folder, server, "sslserver", tmp_path, flag, host) == "OK"
    for host in ("10.0.0.5", "127.0.0.1", "::1"):
        assert verdict(roster.keys_folder, server, "sslserver", tmp_path, "-verify_ip", host) == "OK"
    assert "mismatch" in verdict(
        roster.keys_folder, server, "sslserver", tmp_path, "-verify_hostname", "evil.example.org"
    )


def test_openssl_rejects_revoked_certificates(roster: Roster, tmp_path: Path) -> None:
    kept, gone = (roster.authority.issue_party_certificate(name, 9).certificate for name in ("kept", "gone"))
    file = tmp_path / "list.pem"
    file.write_bytes(roster.authority.revocation_list({serial(x509.load_pem_x509_certificate(gone)): NOW}))
    by = ("-crl_check_all", "-CRLfile", file)
    assert verdict(roster.keys_folder, kept, "sslclient", tmp_path, *by) == "OK"
    assert "revoked" in verdict(roster.keys_folder, gone, "sslclient", tmp_path, *by)
    until = x509.load_pem_x509_crl(file.read_bytes()).next_update_utc
    assert until == roster.authority.expires  # an expired list would lock out every party
    assert Authority.new("other", 9)[0].read_revoked_serials(file) is None


class YearAhead(datetime):
    """A clock that is a year ahead."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) + timedelta(days=365)


def test_server_clock_ahead_at_a_revocation_locks_out_no_other_party(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is valid only from next year on would reject every party until then."""
    kept, gone = (roster.authority.issue_party_certificate(name, 9).certificate for name in ("kept", "gone"))
    file = tmp_path / "list.pem"
    with monkeypatch.context() as ahead:
        ahead.setattr("descant.deployment.pki.certificates.datetime", YearAhead)
        file.write_bytes(
            roster.authority.revocation_list({serial(x509.load_pem_x509_certificate(gone)): YearAhead.now(UTC)})
        )
    by = ("-crl_check_all", "-CRLfile", file)
    assert verdict(roster.keys_folder, kept, "sslclient", tmp_path, *by) == "OK"
    assert "revoked" in verdict(roster.keys_folder, gone, "sslclient", tmp_path, *by)


def test_node_key_has_the_form_of_ssh_keygen(tmp_path: Path) -> None:
    private = new_node_key()
    key = serialization.load_ssh_private_key(private, None)
    assert public_node_key(private).startswith("ecdsa-sha2-nistp384 ") and getattr(key, "key_size", 0) == 384
    if SSH_KEYGEN is None:
        pytest.skip("there is no ssh-keygen to ask for a second opinion")
    (tmp_path / "node").write_bytes(private)
    (tmp_path / "node").chmod(0o600)
    done = subprocess.run([SSH_KEYGEN, "-y", "-f", tmp_path / "node"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == public_node_key(private)


def test_authority_does_not_expose_its_key(roster: Roster) -> None:
    assert repr(roster.authority) == f"Authority({roster.fingerprint[:32]})"
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="stays in its process"):
            take(roster.authority)
    assert (
        len({roster.authority.derive(b"a"), roster.authority.derive(b"b"), Authority.new("a", 9)[0].derive(b"a")}) == 3
    )


@pytest.mark.parametrize("what", ["missing", "empty", "other", "open"])
def test_damaged_authority_is_reported(roster: Roster, what: str) -> None:
    key = roster.keys_folder / f"{AUTHORITY_NAME}.key"
    if what == "missing":
        key.unlink()
    elif what == "open":
        key.chmod(0o644)
    else:
        key.write_bytes(Authority.new("other", 9)[1].key if what == "other" else b"")
    message = {"missing": "cannot be read", "open": "chmod 600"}.get(what, "is damaged")
    with pytest.raises((StateError, VaultError), match=message):
        Roster(roster.folder)


def test_replaced_authority_is_rejected(roster: Roster) -> None:
    Authority.new("other", 9)[1].write(roster.keys_folder, AUTHORITY_NAME)
    with pytest.raises(StateError, match="another authority"):
        Roster(roster.folder)


BAD = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "a\\b",
    "-rf",
    ".hidden",
    "a b",
    "a\n",
    "a\0",
    "\x1b[2J",
    "é",
    "a" * 65,
    "a\u202eb",
]


@pytest.mark.parametrize("name", BAD)
def test_unsafe_party_names_are_rejected(roster: Roster, tmp_path: Path, name: str) -> None:
    with pytest.raises(PartyError, match="The name of a party has 1 to 64") as found:
        roster.invite(name, tmp_path / "invite")
    assert str(found.value).isprintable() and not (tmp_path / "invite").exists() and roster.parties() == []


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.text(max_size=70))
def test_accepted_names_are_one_file_and_one_common_name(name: str) -> None:
    with suppress(PartyError):
        check_name(name)
        assert name.isascii() and name.isprintable() and Path(name).name == name and 1 <= len(name) <= 64


@pytest.mark.parametrize("host", ["", "a b", "a;b", "a:1", "*.example.org", "-a", "a-", "a..b", "a" * 64, "fe80::1%lo"])
def test_invalid_hosts_are_rejected(host: str) -> None:
    with pytest.raises(SettingError):
        check_hosts([host])


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.5", "::1", "localhost"])
def test_addresses_are_parsed_as_joined(host: str) -> None:
    assert parse_address(join_address(host, 8443)) == (host, 8443)
    for wrong in (host, f"{host}:", f"{host}:0x1", f"{host}:70000", f"{host}:٣"):
        with pytest.raises(SettingError):
            parse_address(wrong if host != "::1" else f"[{wrong}")


@pytest.fixture
def file(roster: Roster, tmp_path: Path) -> Path:
    roster.invite("north", tmp_path / "north.invite")
    return tmp_path / "north.invite"


def changed(file: Path, **values: Any) -> Path:
    """Write the invite with other values, or without those that are None."""
    found = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return file


def read_error(file: Path, now: datetime | None = None) -> str:
    with pytest.raises(TrustError) as found:
        Invite.read(file, now)
    assert "PRIVATE KEY" not in str(found.value) and str(file) in str(found.value)
    return str(found.value)


def test_invite_is_read_as_written(roster: Roster, file: Path) -> None:
    invite = Invite.read(file)
    assert (invite.party, invite.address) == ("north", "fl.example.org:9443")
    assert (invite.federation, invite.recipe) == (roster.federation, roster.recipe)
    assert invite.fingerprint == roster.fingerprint
    (held,) = roster.parties()
    own = x509.load_pem_x509_certificate(invite.certificate.encode())
    assert (held.serial, held.fingerprint) == (serial(own), fingerprint(own))
    assert held.node_key == public_node_key(invite.node_key.encode())
    assert datetime.fromisoformat(held.expires) == invite.expires


def test_private_keys_of_a_party_are_only_in_its_invite(roster: Roster, file: Path) -> None:
    invite = Invite.read(file)
    kept = b"".join(one.read_bytes() for one in roster.folder.rglob("*") if one.is_file())
    for secret in (invite.key, invite.node_key):
        assert secret.splitlines()[1].encode() not in kept and secret.splitlines()[1] not in repr(invite)


def test_secret_files_are_readable_by_their_owner_only(roster: Roster, file: Path, tmp_path: Path) -> None:
    unpacked = Invite.read(file).unpack(tmp_path / "silo" / "keys")
    for folder in (roster.folder, roster.keys_folder, roster.run_folder, unpacked.folder):
        assert mode(folder) == 0o700
    for one in (file, unpacked.key, unpacked.node_key, *roster.keys_folder.glob("*.key"), roster.folder / AUDIT_HEAD):
        assert mode(one) == 0o600
    file.chmod(0o640)
    assert "chmod 600" in read_error(file)


@pytest.mark.parametrize(
    "key", ["party", "address", "federation", "recipe", "authority", "certificate", "key", "node_key"]
)
def test_changed_invite_fields_are_detected(roster: Roster, file: Path, tmp_path: Path, key: str) -> None:
    other = Roster.create(tmp_path / "other", tmp_path / "mine.toml", FederationTerms(hosts=("evil.example.org",)))
    other.invite("east", tmp_path / "east.invite")
    changed(file, **{key: json.loads((tmp_path / "east.invite").read_text())[key]})
    if key == "recipe":
        changed(file, recipe="0" * 64)  # both invites have the same one
    assert "is rejected" in read_error(file)


def test_flipped_or_cut_invites_are_rejected(file: Path) -> None:
    whole = file.read_bytes()
    same = Invite.read(file)
    for i in range(0, len(whole), 7):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with suppress(TrustError):
            assert Invite.read(file) == same  # white space, or the Descant version
        file.write_bytes(whole[:i])
        read_error(file)


@pytest.mark.parametrize(
    "value", [None, 5, [], {}, "", "\ud800", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize(
    "key", ["party", "authority", "certificate", "key", "node_key", "address", "signature", "extra"]
)
def test_malformed_invites_are_rejected(file: Path, key: str, value: Any) -> None:
    if (key, value) != ("extra", None):
        assert "is rejected" in read_error(changed(file, **{key: value}))


def test_invite_of_another_version_is_reported(file: Path) -> None:
    for version in (2, True, "1", 10**30):
        assert f"of version {version!r:.20}" in read_error(changed(file, invite=version))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 60_000, b'{"invite": ', b"x" * 2**17])
def test_files_that_are_no_invite_are_reported(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    assert "is no invite" in read_error(file)
    file.unlink()
    assert "cannot be read" in read_error(file)


def test_invite_expires_after_its_days(roster: Roster, tmp_path: Path) -> None:
    invite = roster.invite("south", tmp_path / "south", days=3)
    assert abs(invite.expires - datetime.now(UTC) - timedelta(days=3)) < timedelta(minutes=5)
    Invite.read(tmp_path / "south", NOW + timedelta(days=2))
    assert "has expired on" in read_error(tmp_path / "south", NOW + timedelta(days=4))
    assert "Set the clock" in read_error(tmp_path / "south", NOW - timedelta(days=1))
    for days in (0, -1, 1.5, True):
        with pytest.raises(SettingError, match="invite_days"):
            roster.invite("west", tmp_path / "west", days=days)  # type: ignore[arg-type]


def test_forged_authority_has_another_fingerprint(roster: Roster, file: Path, tmp_path: Path) -> None:
    """Anyone who can change the file on its way can pose as the server; comparing fingerprints reveals it."""
    forger, _ = Authority.new(f"descant {roster.federation}", 9)
    pair = forger.issue_party_certificate("north", 9)
    pem = forger.certificate.public_bytes(serialization.Encoding.PEM).decode()
    true = Invite.read(file)
    false = Invite(
        "north",
        true.address,
        true.federation,
        recipe=true.recipe,
        authority=pem,
        certificate=pair.certificate.decode(),
        key=pair.key.decode(),
        node_key=true.node_key,
    )
    false.write(tmp_path / "forged", forger)
    assert Invite.read(tmp_path / "forged").fingerprint != roster.fingerprint


def states(roster: Roster) -> dict[str, str]:
    return {entry.name: entry.state for entry in roster.parties()}


def test_party_goes_from_invited_to_joined_to_revoked(roster: Roster, tmp_path: Path) -> None:
    roster.invite("north", tmp_path / "1")
    roster.invite("south", tmp_path / "2")
    assert states(roster) == {"north": "invited", "south": "invited"}
    first = roster.record_join("north", "machine 1")
    assert roster.record_join("north", "machine 1") == first and first.machine == "machine 1"
    assert roster.revoke("south").state == "revoked"
    assert states(Roster(roster.folder)) == {"north": "joined", "south": "revoked"}
    with pytest.raises(PartyError, match="needs a new invite"):
        roster.record_join("south", "machine 2")
    with pytest.raises(PartyError, match="already"):
        roster.revoke("south")
    for act in (roster.revoke, lambda name: roster.record_join(name, "m")):
        with pytest.raises(SettingError, match=r"There is no party 'nort'\. Did you mean 'north'"):
            act("nort")


def test_party_is_invited_again_only_after_revocation(roster: Roster, tmp_path: Path) -> None:
    old = roster.invite("north", tmp_path / "1")
    for join in (False, True):
        if join:
            roster.record_join("north", "m")
        with pytest.raises(PartyError, match="was already invited on"):
            roster.invite("north", tmp_path / "2")
    assert not (tmp_path / "2").exists()
    roster.revoke("north")
    new = roster.invite("north", tmp_path / "2")
    assert new.key != old.key and new.node_key != old.node_key
    assert roster.record_join("north", "another machine").state == "joined"


def test_all_revoked_certificates_of_a_party_stay_on_the_list(roster: Roster, tmp_path: Path) -> None:
    lost = set()
    for i in range(3):
        roster.invite("north", tmp_path / str(i))
        (entry,) = roster.parties()
        assert roster.authority.read_revoked_serials(roster.keys_folder / REVOCATION_FILE) == lost
        roster.record_join("north", f"machine {i}")
        roster.revoke("north")
        lost.add(entry.serial)
    assert roster.authority.read_revoked_serials(roster.keys_folder / REVOCATION_FILE) == lost and len(lost) == 3


def test_invite_used_in_two_places_is_rejected_and_logged(roster: Roster, tmp_path: Path) -> None:
    roster.invite("north", tmp_path / "1")
    roster.record_join("north", "here")
    with pytest.raises(PartyError, match="used in two places"):
        roster.record_join("north", "there")
    last = json.loads((roster.folder / AUDIT_LOG).read_bytes().splitlines()[-1])
    assert (last["event"], last["party"], last["machine"]) == ("rejected", "north", "there")
    assert roster.record_join("north", "here").machine == "here"
    for machine in ("", "a\nb", "x" * 129):
        with pytest.raises(SettingError, match="printable"):
            roster.record_join("north", machine)


def test_audit_log_has_every_change_and_detects_edits(roster: Roster, tmp_path: Path) -> None:
    noted = roster.verify()
    roster.invite("north", tmp_path / "1")
    roster.record_join("north", "m")
    roster.revoke("north")
    found = [json.loads(line)["event"] for line in (roster.folder / AUDIT_LOG).read_bytes().splitlines()]
    assert found == ["created", "verified", "invited", "joined", "revoked"]
    assert roster.verify(noted.lines, noted.seal).parties == 1
    with pytest.raises(StateError, match="not the one that was noted"):
        roster.verify(2, "0" * 32)
    whole = (roster.folder / AUDIT_LOG).read_bytes()
    for wrong in (whole.replace(b'"revoked"', b'"invited"', 1), whole.replace(b'"m"', b'"n"', 1), whole[:-400]):
        (roster.folder / AUDIT_LOG).write_bytes(wrong)
        with pytest.raises(StateError, match="No party can be invited, join or be revoked until it is restored"):
            Roster(roster.folder).verify()
    (roster.folder / AUDIT_LOG).write_bytes(whole)
    assert Roster(roster.folder).verify().lines == 7


def test_edited_roster_table_or_revocation_list_is_restored(roster: Roster, tmp_path: Path) -> None:
    roster.invite("north", tmp_path / "1")
    roster.revoke("north")
    table = roster.folder / "roster.json"
    listed = roster.keys_folder / REVOCATION_FILE
    original = table.read_text()
    assert json.loads(original)["parties"][0]["state"] == "revoked"
    other, _ = Authority.new("other", 9)
    for data in (None, b"", roster.authority.revocation_list({}), other.revocation_list({"1": NOW})):
        table.write_text(original.replace("revoked", "joined"))
        listed.unlink() if data is None else listed.write_bytes(data)
        assert states(Roster(roster.folder)) == {"north": "revoked"} and table.read_text() == original
        assert roster.authority.read_revoked_serials(listed) == {roster.parties()[0].serial}


def test_changed_recipe_is_detected(roster: Roster, recipe: Path, tmp_path: Path) -> None:
    copied = roster.folder / "recipe.toml"
    assert copied.read_bytes() == recipe.read_bytes()
    copied.write_text("[run]\nrounds = 4\n")
    for act in (roster.verify, lambda: roster.invite("north", tmp_path / "1")):
        with pytest.raises(StateError, match="was changed after the federation was made"):
            act()
    assert roster.parties() == [] and not (tmp_path / "1").exists()


def test_server_is_created_once_and_only_in_a_new_folder(roster: Roster, recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds a server already"):
        Roster.create(roster.folder, recipe)
    with pytest.raises(StateError, match="did not write"):
        Roster.create(tmp_path, recipe)
    with pytest.raises(StateError, match="descant server init"):
        Roster(tmp_path / "nowhere")
    with pytest.raises(StateError, match="cannot be read"):
        Roster.create(tmp_path / "new", tmp_path / "nothing.toml")
    for terms in (
        FederationTerms(hosts=()),
        FederationTerms(hosts=("a;b",)),
        FederationTerms(port=0),
        FederationTerms(days=0),
        FederationTerms(invite_days=10**6),
    ):
        with pytest.raises(SettingError):
            Roster.create(tmp_path / "new", recipe, terms)
    assert not (tmp_path / "new").exists()


def test_invite_needs_a_new_file_in_an_existing_folder(roster: Roster, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "there").write_text("mine")
    for place in (tmp_path / "link", tmp_path / "there", tmp_path / "no" / "such"):
        with pytest.raises(StateError, match="must be a new file"):
            roster.invite("north", place)
    assert roster.parties() == [] and (tmp_path / "there").read_text() == "mine"


def test_invite_that_could_not_be_written_is_revoked(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise disk_full_error()

    monkeypatch.setattr(Invite, "write", fail)
    with pytest.raises(StateError, match="free some space"):
        roster.invite("north", tmp_path / "1")
    assert states(roster) == {"north": "revoked"}


@pytest.mark.parametrize("act", ["invite", "joined", "revoke"])
@pytest.mark.parametrize("torn", [False, True])
def test_kill_at_any_write_leaves_roster_changes_whole(recipe: Path, tmp_path: Path, act: str, torn: bool) -> None:
    begun = Roster.create(tmp_path / "begun", recipe)
    begun.invite("south", tmp_path / "south")
    seen = set()
    reached = True
    for n in range(80):
        folder = tmp_path / f"server {n}"
        shutil.copytree(begun.folder, folder)
        roster = Roster(folder)
        with inject_faults(n, torn) as found, suppress(SimulatedCrash):
            if act == "invite":
                roster.invite("north", tmp_path / f"{n}")
            else:
                roster.record_join("south", "m") if act == "joined" else roster.revoke("south")
        again = Roster(folder)
        seen.add(json.dumps(states(again), sort_keys=True))
        (south,) = (entry for entry in again.parties() if entry.name == "south")
        assert again.authority.read_revoked_serials(again.keys_folder / REVOCATION_FILE) == (
            {south.serial} if south.state == "revoked" else set()
        )
        assert {e["name"]: e["state"] for e in json.loads((folder / "roster.json").read_text())["parties"]} == states(
            again
        )
        again.verify()
        reached = found.reached
        if not reached:
            break
    assert not reached and len(seen) == 2


@pytest.mark.parametrize("torn", [False, True])
def test_kill_during_creation_leaves_a_server_or_a_folder_to_retry(recipe: Path, tmp_path: Path, torn: bool) -> None:
    made = []
    for n in range(120):
        folder = tmp_path / f"server {n}"
        with inject_faults(n, torn) as found, suppress(SimulatedCrash):
            Roster.create(folder, recipe)
        try:
            again = Roster(folder)
            made.append(True)
        except DescantError:
            again = Roster.create(folder, recipe)
            made.append(False)
        again.invite("north", tmp_path / f"invite {n}")
        Invite.read(tmp_path / f"invite {n}")
        again.verify()
        if not found.reached:
            break
    assert not found.reached and {True, False} == set(made) and made == sorted(made)
