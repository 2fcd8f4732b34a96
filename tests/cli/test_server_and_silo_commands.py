"""`descant server` and `descant silo`, as far as they go without a network."""

from __future__ import annotations

import json
import re
import shutil
import socket
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from descant.cli import app
from descant.deployment.pki import invite
from descant.deployment.silo.console_messages import OutageReporter
from descant.storage.lock import FolderLock

RECIPE = """
[run]
rounds = 2
[model]
net = "mlp"
inputs = 4
outputs = 2
[training]
lr = 0.1
steps = 2
[method]
algorithm = "fedavg+"
"""
TEAM = """
import numpy as np
from descant.models import mlp

def model():
    return mlp(4, 2, ())

def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, 4)), rng.integers(0, 2, 40)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "team.py").write_text(TEAM)
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


def test_server_is_created_and_parties_are_invited_once(here: Path) -> None:
    made = json.loads(call("server", "init", "lab", "recipe.toml", "--port", "9", "--json"))
    assert made["address"] == "localhost:9" and len(made["fingerprint"]) == 64
    call("server", "invite", "lab", "north")
    assert stat.S_IMODE((here / "north.invite").stat().st_mode) == 0o600
    assert "invited on" in call("server", "invite", "lab", "north", "--out", "again", code=1)
    assert "name" in call("server", "invite", "lab", "../south", code=1)
    told = json.loads(call("server", "status", "lab", "--json"))
    assert [(party["name"], party["state"]) for party in told["parties"]] == [("north", "invited")]
    assert told["state"] == "not begun" and told["round"] == 0
    call("server", "revoke", "lab", "north")
    assert "revoked" in call("server", "status", "lab")
    assert "is unchanged" in call("server", "audit", "lab", "--verify")
    log = here / "lab" / "audit.jsonl"
    log.write_text(log.read_text().replace('"north"', '"south"'))
    assert "Line 2" in call("server", "audit", "lab", "--verify", code=1)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects fails, in this process."""

    def refused(*_: object) -> None:
        raise AssertionError("something would have been sent")

    for way in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, way, refused)


@pytest.mark.usefixtures("offline")
def test_dry_run_lists_what_would_leave_the_machine(here: Path) -> None:
    told = json.loads(call("silo", "check", "team.py", "--json"))
    assert told["parameters"] == 10 and told["bytes of an update"] == 40 and told["data"]["samples"] == 32
    assert told["tensors"] == {"1.weight": [2, 4], "1.bias": [2]}
    assert told["outgoing"]["after training"]["encrypted_coreset"] == "no row of its data"
    policy = {"share": 0.05, "columns_dropped": [3, 1], "rounds_a_day": 24}
    (here / "other.py").write_text(f"{TEAM}\npolicy = {policy}\n")
    leaves = call("silo", "check", "other.py")
    assert "1.weight [2, 4]" in leaves and "machine: " in leaves
    assert "at most 5.0% of its rows" in leaves and "columns 1, 3" in leaves and "at most 24 rounds a day" in leaves


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("del model", "model: a class or a function"),
        ("data = 7", "data: a function"),
        ("def data(): return [1.0]", "must return"),
        ("def data(): return 1, 2, 3", "Got tuple of 3."),
        ("import sys; sys.exit(3)", "line 12 of"),
        ("def data(): return np.full((9, 4), np.nan), np.zeros(9, int)", "finite"),
        ("def data(): return np.full((9, 4), 1e38), np.zeros(9, int)", "loss"),
        ("def data(): return np.ones((9, 3)), np.zeros(9, int)", "fails on a batch of x (7, 3)"),
        ("def data(): return np.ones((900, 4)), np.r_[np.zeros(899, int), 12]\ntest = 0.0", "fails on a batch of x"),
        ("def data(path): return path", "data of bad.py is called without arguments, but requires path"),
        ('loss = "mse"', "The loss of bad.py must be a function"),
        ('test = "20%"', "The test of bad.py must be a share from 0 up to 1"),
        ("test = 1.5", "The test of bad.py must be a share from 0 up to 1"),
        ('policy = {"shares": 1}', "policy"),
        ('policy = {"rounds_a_day": 0}', "'rounds_a_day' of policy"),
        ('policy = {"columns_dropped": 3}', "must be a list"),
        ('policy = {"columns_dropped": [4]}', "columns from 0 to 3"),
        ('policy = {"columns_dropped": [1.5]}', "a whole number >= 0"),
        (
            'policy = {"columns_dropped": [0]}\ndef data(): return np.ones((9, 2, 2)), np.zeros(9, int)',
            "leave 'columns_dropped' out",
        ),
    ],
)
def test_invalid_silo_file_is_rejected_with_a_reason(here: Path, more: str, why: str) -> None:
    (here / "bad.py").write_text(f"{TEAM}\n{more}\n")
    assert why in call("silo", "check", "bad.py", code=1)


def test_silo_file_imports_modules_beside_it(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As python itself lets it, whatever folder the command runs in."""
    (here / "beside_the_team.py").write_text(TEAM)
    (here / "thin.py").write_text("from beside_the_team import data, model")
    command = [sys.executable, "-m", "descant", "silo", "check", str(here / "thin.py")]
    place = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=place)
    assert done.returncode == 0 and "parameters:         10" in done.stdout, done.stderr


def test_silo_file_must_be_python(here: Path) -> None:
    assert "must be a Python file" in call("silo", "check", "recipe.toml", code=1)
    assert "must be a Python file" in call("silo", "check", "../" + here.name + "/recipe.toml", code=1)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (True, "To see whether joining helped: descant silo evaluate north.silo team.py"),
        (False, "Left. The same command joins again."),
        (KeyboardInterrupt, "Left. The same command joins again."),
    ],
    ids=["the training is over", "it leaves", "Ctrl-C"],
)
def test_silo_that_ends_prints_the_next_command(
    here: Path, monkeypatch: pytest.MonkeyPatch, how: bool | type[KeyboardInterrupt], told: str
) -> None:
    def ends(*_: object, **__: object) -> bool:
        if isinstance(how, bool):
            return how
        raise how

    monkeypatch.setattr("descant.deployment.silo.join.run_silo", ends)
    monkeypatch.setattr(
        "descant.deployment.flower.silo_transport.FlowerSiloTransport.from_credentials",
        lambda keys: SimpleNamespace(close=lambda: None),
    )
    monkeypatch.setattr("descant.deployment.silo.silo_worker.SiloWorker.check", lambda worker: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    call("server", "init", "lab", "recipe.toml", "--port", "9")
    call("server", "invite", "lab", "north")
    said = call("silo", "join", "north.invite", "team.py").splitlines()
    assert said[-1].endswith(told) and re.match(r"\d\d:\d\d:\d\d north joins", said[0])


def test_interrupted_server_says_how_to_continue(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("descant.deployment.server.serve.FederationServer.run_to_completion", interrupted)
    call("server", "init", "lab", "recipe.toml")
    assert "The same command continues." in call("server", "start", "lab", code=130)


@pytest.mark.parametrize("name", ["min_parties", "quorum", "deadline", "timeout"])
def test_server_rejects_wait_limits_of_zero(here: Path, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    assert option in call("server", "start", "--help")
    call("server", "init", "lab", "recipe.toml")
    assert f"The {name!r} of server start must be" in call("server", "start", "lab", option, "0", code=1)


def test_missing_files_and_folders_are_named(here: Path) -> None:
    assert "no file" in call("silo", "check", "nowhere.py", code=1)
    assert "There is no file nowhere." in call("silo", "join", "nowhere", "team.py", code=1)
    assert "there is no such folder" in call("report", "nowhere", code=1)
    assert "no folder" in call("silo", "forget", "nowhere", code=1)
    assert "No silo runs from" in call("silo", "leave", "nowhere", code=1)
    assert "server init" in call("server", "status", "nowhere", code=1)
    call("server", "init", "lab", "recipe.toml")
    assert "already" in call("server", "init", "lab", "recipe.toml", code=1)


def test_silo_that_never_joined_cannot_be_evaluated(here: Path) -> None:
    (here / "north.silo" / "state").mkdir(parents=True)
    assert "Join first" in call("silo", "evaluate", "north.silo", "team.py", code=1)


def test_non_invite_is_rejected_before_its_permissions_are_checked(here: Path) -> None:
    """Files that were exchanged by mistake hold no key that should have been guarded."""
    told = call("silo", "join", "team.py", "recipe.toml", code=1)
    assert "team.py is no invite" in told and "chmod" not in told


def test_method_without_an_algorithm_lists_its_keys(here: Path) -> None:
    (here / "recipe.toml").write_text(RECIPE.replace("algorithm", "algoritm"))
    told = call("server", "init", "lab", "recipe.toml", code=1)
    assert "[method] must have a key algorithm" in told and "Got 'algoritm'." in told


def test_outage_reason_ends_with_one_full_stop(capsys: pytest.CaptureFixture[str]) -> None:
    OutageReporter(print).report_failure("Server disconnected without sending a response.")
    assert "response. Retrying" in capsys.readouterr().out


def test_folder_runs_one_server_at_a_time(here: Path) -> None:
    call("server", "init", "lab", "recipe.toml")
    lock = FolderLock(here / "lab" / "run" / ".lock")
    assert "is in use by process" in call("server", "start", "lab", code=1)
    lock.release()


def test_port_in_use_is_reported_before_the_start(here: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        call("server", "init", "lab", "recipe.toml", "--port", str(other.getsockname()[1]))
        call("server", "invite", "lab", "north")
        told = call("server", "start", "lab", code=1)
    assert "another process listens there. Stop it" in told
    assert "give another port" not in told
    assert not (here / "lab" / "run" / "training").exists()


@pytest.mark.parametrize(("years", "why"), [(-3, "Set the clock"), (3, "has expired on")])
def test_invite_validity_is_checked_by_the_machine_clock(
    here: Path, monkeypatch: pytest.MonkeyPatch, years: int, why: str
) -> None:
    call("server", "init", "lab", "recipe.toml")
    call("server", "invite", "lab", "north")
    now = datetime.now(UTC) + timedelta(days=365 * years)
    monkeypatch.setattr(invite, "datetime", SimpleNamespace(now=lambda zone: now))
    told = call("silo", "join", "north.invite", "team.py", code=1)
    assert why in told and f"{now:%Y-%m-%d}" in told and not (here / "north.silo").exists()


def test_invite_is_valid_for_its_own_name_only(here: Path) -> None:
    call("server", "init", "lab", "recipe.toml")
    call("server", "invite", "lab", "north")
    file = here / "north.invite"
    file.write_text(file.read_text().replace('"north"', '"south"'))
    assert "was changed after it was made" in call("silo", "join", "north.invite", "team.py", code=1)


KEPT = ["state/daily_tasks.json", "state/machine", "state/shared_rows.safetensors"]


def kept_by_north(here: Path) -> list[str]:
    return sorted(str(file.relative_to(here / "north.silo")) for file in here.glob("north.silo/*/*"))


@pytest.fixture
def joined(here: Path) -> list[str]:
    """The files of a party that has taken part, whose server is not there any more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call("server", "init", "lab", "recipe.toml", "--port", str(port))
    call("server", "invite", "lab", "north")
    place = here / "north.silo"
    invite.Invite.read(here / "north.invite").unpack(place / "keys")
    (place / "state").mkdir()
    for file in (*KEPT, "state/memory-3.safetensors", "state/handshake.json"):
        (place / file).write_text('{"federation": "lab"}')
    return kept_by_north(here)


def test_forget_keeps_the_counters_of_the_policy(here: Path, joined: list[str]) -> None:
    told = call("silo", "forget", "north.silo", "--local")
    assert kept_by_north(here) == KEPT and len(joined) > 8
    assert "descant vault forget VAULT north" in told and all(name in told for name in joined)
    assert "always hold" in told and "was not asked" in told
    again = json.loads(call("silo", "forget", "north.silo", "--json"))
    assert again["removed"] == [] and again["kept"] == KEPT and "not asked" in again["server"]


@pytest.mark.parametrize("known_by", ["keys", "introduction", "both"])
@pytest.mark.parametrize("whose", ["party", "federation"])
def test_folder_of_another_party_or_federation_is_not_changed(
    here: Path, joined: list[str], whose: str, known_by: str
) -> None:
    """Whatever it is known by; nothing is written there, its keys least of all."""
    server, name = ("lab", "south") if whose == "party" else ("other", "north")
    federation = invite.Invite.read(here / "north.invite").federation
    if whose == "federation":
        call("server", "init", "other", "recipe.toml")
    call("server", "invite", server, name, "--out", "second.invite")
    place = here / "north.silo"
    (place / "state" / "handshake.json").write_text(json.dumps({"party": "north", "federation": federation}))
    if known_by == "keys":
        (place / "state" / "handshake.json").unlink()
    elif known_by == "introduction":
        shutil.rmtree(place / "keys")
    before = {file: file.is_file() and file.read_bytes() for file in place.rglob("*")}
    told = call("silo", "join", "second.invite", "team.py", "--folder", "north.silo", code=1)
    assert {file: file.is_file() and file.read_bytes() for file in place.rglob("*")} == before
    asked = name if whose == "party" else invite.Invite.read(here / "second.invite").federation
    assert ("'north'" if whose == "party" else federation) in told and asked in told and "--folder" in told


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"party": "north"}', '{"party": 7, "federation": []}'])
def test_folder_with_a_damaged_handshake_is_not_changed(here: Path, joined: list[str], text: str) -> None:
    file = here / "north.silo" / "state" / "handshake.json"
    file.write_text(text)
    told = call("silo", "join", "north.invite", "team.py", "--folder", "north.silo", code=1)
    assert "handshake.json is not as Descant wrote it" in told and "Restore it" in told and file.read_text() == text


def test_party_rejoins_from_its_folder(here: Path, joined: list[str]) -> None:
    federation = invite.Invite.read(here / "north.invite").federation
    held = {"party": "north", "federation": federation}
    (here / "north.silo" / "state" / "handshake.json").write_text(json.dumps(held))
    (here / "bad.py").write_text("x = 1")
    command = [sys.executable, "-m", "descant", "silo", "join", "north.invite", "bad.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "must define model" in done.stderr  # which comes next


def test_forget_removes_nothing_without_the_servers_confirmation(here: Path, joined: list[str]) -> None:
    told = call("silo", "forget", "north.silo", "--wait", "0.5", code=1)
    assert kept_by_north(here) == joined
    assert "nothing was removed" in told and "descant vault forget VAULT north" in told and "--local" in told


def test_invalid_silo_file_does_not_join(here: Path) -> None:
    call("server", "init", "lab", "recipe.toml", "--port", "9")
    call("server", "invite", "lab", "north")
    for text, why in {
        "x = 1": "must define model: a class or a function without arguments that XXX torch module, and data: ",
        f"{TEAM}\ndef data(): raise ValueError('of ours')": "failed: ValueError: of ours",
        "import os; os._exit(3)": "its process has exited with 3",
    }.items():
        (here / "bad.py").write_text(text)
        command = [sys.executable, "-m", "descant", "silo", "join", "north.invite", "bad.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and why in done.stderr and "joins" not in done.stdout


def test_invite_names_the_vault_that_coresets_are_encrypted_for(here: Path) -> None:
    vault = f"[vault]\nfolder = '{here / 'vault'}'\nkey = '{here / 'key'}'\n"
    (here / "recipe.toml").write_text(f"{RECIPE}wrap = [{{wrapper = 'coreset_proxies'}}]\n{vault}")
    known = json.loads(call("vault", "init", "vault", "--key", "key", "--json"))["fingerprint"]
    call("server", "init", "lab", "recipe.toml")
    (here / "vault").rename(here / "away")
    assert "does not exist, so" in call("server", "invite", "lab", "north")
    (here / "away").rename(here / "vault")
    assert known in call("server", "invite", "lab", "south")
    names = {name: invite.Invite.read(here / f"{name}.invite").vault for name in ("north", "south")}
    assert names == {"north": "", "south": known}
    file = here / "south.invite"
    file.write_text(file.read_text().replace(known, known[::-1]))
    assert "was changed after it was made" in call("silo", "join", "south.invite", "team.py", code=1)
    assert f"descant vault forget {here / 'vault'} north" in call("server", "revoke", "lab", "north")
