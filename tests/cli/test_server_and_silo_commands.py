"""`descant server` and `descant silo` without a network."""

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
SILO_FILE = """
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
    (tmp_path / "team.py").write_text(SILO_FILE)
    return tmp_path


def run_command(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


def test_server_is_created_and_parties_are_invited_once(here: Path) -> None:
    made = json.loads(run_command("server", "init", "lab", "recipe.toml", "--port", "9", "--json"))
    assert made["address"] == "localhost:9" and len(made["fingerprint"]) == 64
    run_command("server", "invite", "lab", "north")
    assert stat.S_IMODE((here / "north.invite").stat().st_mode) == 0o600
    assert "invited on" in run_command("server", "invite", "lab", "north", "--out", "again", code=1)
    assert "name" in run_command("server", "invite", "lab", "../south", code=1)
    output = json.loads(run_command("server", "status", "lab", "--json"))
    assert [(party["name"], party["state"]) for party in output["parties"]] == [("north", "invited")]
    assert output["state"] == "not begun" and output["round"] == 0
    run_command("server", "revoke", "lab", "north")
    assert "revoked" in run_command("server", "status", "lab")
    assert "is unchanged" in run_command("server", "audit", "lab", "--verify")
    log = here / "lab" / "audit.jsonl"
    log.write_text(log.read_text().replace('"north"', '"south"'))
    assert "Line 2" in run_command("server", "audit", "lab", "--verify", code=1)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every connection of this process fail."""

    def fail(*_: object) -> None:
        raise AssertionError("something would have been sent")

    for method in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, method, fail)


@pytest.mark.usefixtures("offline")
def test_dry_run_lists_what_would_leave_the_machine(here: Path) -> None:
    output = json.loads(run_command("silo", "check", "team.py", "--json"))
    assert output["parameters"] == 10 and output["bytes of an update"] == 40 and output["data"]["samples"] == 32
    assert output["tensors"] == {"1.weight": [2, 4], "1.bias": [2]}
    assert output["outgoing"]["after training"]["encrypted_coreset"] == "no row of its data"
    policy = {"share": 0.05, "columns_dropped": [3, 1], "rounds_a_day": 24}
    (here / "other.py").write_text(f"{SILO_FILE}\npolicy = {policy}\n")
    leaves = run_command("silo", "check", "other.py")
    assert "1.weight [2, 4]" in leaves and "machine: " in leaves
    assert "at most 5.0% of its rows" in leaves and "columns 1, 3" in leaves and "at most 24 rounds a day" in leaves


@pytest.mark.parametrize(
    ("addition", "reason"),
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
def test_invalid_silo_file_is_rejected_with_a_reason(here: Path, addition: str, reason: str) -> None:
    (here / "bad.py").write_text(f"{SILO_FILE}\n{addition}\n")
    assert reason in run_command("silo", "check", "bad.py", code=1)


def test_silo_file_imports_modules_beside_it(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It imports them from any working folder, as Python does."""
    (here / "beside_the_team.py").write_text(SILO_FILE)
    (here / "thin.py").write_text("from beside_the_team import data, model")
    command = [sys.executable, "-m", "descant", "silo", "check", str(here / "thin.py")]
    folder = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0 and "parameters:         10" in done.stdout, done.stderr


def test_silo_file_must_be_python(here: Path) -> None:
    assert "must be a Python file" in run_command("silo", "check", "recipe.toml", code=1)
    assert "must be a Python file" in run_command("silo", "check", "../" + here.name + "/recipe.toml", code=1)


@pytest.mark.parametrize(
    ("ending", "output"),
    [
        (True, "To see whether joining helped: descant silo evaluate north.silo team.py"),
        (False, "Left. The same command joins again."),
        (KeyboardInterrupt, "Left. The same command joins again."),
    ],
    ids=["the training is over", "it leaves", "Ctrl-C"],
)
def test_silo_that_ends_prints_the_next_command(
    here: Path, monkeypatch: pytest.MonkeyPatch, ending: bool | type[KeyboardInterrupt], output: str
) -> None:
    def ends(*_: object, **__: object) -> bool:
        if isinstance(ending, bool):
            return ending
        raise ending

    monkeypatch.setattr("descant.deployment.silo.join.run_silo", ends)
    monkeypatch.setattr(
        "descant.deployment.flower.silo_transport.FlowerSiloTransport.from_credentials",
        lambda keys: SimpleNamespace(close=lambda: None),
    )
    monkeypatch.setattr("descant.deployment.silo.silo_worker.SiloWorker.check", lambda worker: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run_command("server", "init", "lab", "recipe.toml", "--port", "9")
    run_command("server", "invite", "lab", "north")
    lines = run_command("silo", "join", "north.invite", "team.py").splitlines()
    assert lines[-1].endswith(output) and re.match(r"\d\d:\d\d:\d\d north joins", lines[0])


def test_interrupted_server_says_how_to_continue(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("descant.deployment.server.serve.FederationServer.run_to_completion", interrupted)
    run_command("server", "init", "lab", "recipe.toml")
    assert "The same command continues." in run_command("server", "start", "lab", code=130)


@pytest.mark.parametrize("name", ["min_parties", "quorum", "deadline", "timeout"])
def test_server_rejects_wait_limits_of_zero(here: Path, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    assert option in run_command("server", "start", "--help")
    run_command("server", "init", "lab", "recipe.toml")
    assert f"The {name!r} of server start must be" in run_command("server", "start", "lab", option, "0", code=1)


def test_missing_files_and_folders_are_named(here: Path) -> None:
    assert "no file" in run_command("silo", "check", "nowhere.py", code=1)
    assert "There is no file nowhere." in run_command("silo", "join", "nowhere", "team.py", code=1)
    assert "there is no such folder" in run_command("report", "nowhere", code=1)
    assert "no folder" in run_command("silo", "forget", "nowhere", code=1)
    assert "No silo runs from" in run_command("silo", "leave", "nowhere", code=1)
    assert "server init" in run_command("server", "status", "nowhere", code=1)
    run_command("server", "init", "lab", "recipe.toml")
    assert "already" in run_command("server", "init", "lab", "recipe.toml", code=1)


def test_silo_that_never_joined_cannot_be_evaluated(here: Path) -> None:
    (here / "north.silo" / "state").mkdir(parents=True)
    assert "Join first" in run_command("silo", "evaluate", "north.silo", "team.py", code=1)


def test_non_invite_is_rejected_before_its_permissions_are_checked(here: Path) -> None:
    """Swapped files contain no key, so the message does not ask for stricter permissions."""
    output = run_command("silo", "join", "team.py", "recipe.toml", code=1)
    assert "team.py is no invite" in output and "chmod" not in output


def test_method_without_an_algorithm_lists_its_keys(here: Path) -> None:
    (here / "recipe.toml").write_text(RECIPE.replace("algorithm", "algoritm"))
    output = run_command("server", "init", "lab", "recipe.toml", code=1)
    assert "[method] must have a key algorithm" in output and "Got 'algoritm'." in output


def test_outage_reason_ends_with_one_full_stop(capsys: pytest.CaptureFixture[str]) -> None:
    OutageReporter(print).report_failure("Server disconnected without sending a response.")
    assert "response. Retrying" in capsys.readouterr().out


def test_folder_runs_one_server_at_a_time(here: Path) -> None:
    run_command("server", "init", "lab", "recipe.toml")
    lock = FolderLock(here / "lab" / "run" / ".lock")
    assert "is in use by process" in run_command("server", "start", "lab", code=1)
    lock.release()


def test_port_in_use_is_reported_before_the_start(here: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        run_command("server", "init", "lab", "recipe.toml", "--port", str(other.getsockname()[1]))
        run_command("server", "invite", "lab", "north")
        output = run_command("server", "start", "lab", code=1)
    assert "another process listens there. Stop it" in output
    assert "give another port" not in output
    assert not (here / "lab" / "run" / "training").exists()


@pytest.mark.parametrize(("years", "reason"), [(-3, "Set the clock"), (3, "has expired on")])
def test_invite_validity_is_checked_by_the_machine_clock(
    here: Path, monkeypatch: pytest.MonkeyPatch, years: int, reason: str
) -> None:
    run_command("server", "init", "lab", "recipe.toml")
    run_command("server", "invite", "lab", "north")
    now = datetime.now(UTC) + timedelta(days=365 * years)
    monkeypatch.setattr(invite, "datetime", SimpleNamespace(now=lambda zone: now))
    output = run_command("silo", "join", "north.invite", "team.py", code=1)
    assert reason in output and f"{now:%Y-%m-%d}" in output and not (here / "north.silo").exists()


def test_invite_is_valid_for_its_own_name_only(here: Path) -> None:
    run_command("server", "init", "lab", "recipe.toml")
    run_command("server", "invite", "lab", "north")
    file = here / "north.invite"
    file.write_text(file.read_text().replace('"north"', '"south"'))
    assert "was changed after it was made" in run_command("silo", "join", "north.invite", "team.py", code=1)


KEPT = ["state/daily_tasks.json", "state/machine", "state/shared_rows.safetensors"]


def kept_by_north(here: Path) -> list[str]:
    return sorted(str(file.relative_to(here / "north.silo")) for file in here.glob("north.silo/*/*"))


@pytest.fixture
def joined(here: Path) -> list[str]:
    """Return the files of a party that has taken part and whose server is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_command("server", "init", "lab", "recipe.toml", "--port", str(port))
    run_command("server", "invite", "lab", "north")
    folder = here / "north.silo"
    invite.Invite.read(here / "north.invite").unpack(folder / "keys")
    (folder / "state").mkdir()
    for file in (*KEPT, "state/memory-3.safetensors", "state/handshake.json"):
        (folder / file).write_text('{"federation": "lab"}')
    return kept_by_north(here)


def test_forget_keeps_the_counters_of_the_policy(here: Path, joined: list[str]) -> None:
    output = run_command("silo", "forget", "north.silo", "--local")
    assert kept_by_north(here) == KEPT and len(joined) > 8
    assert "descant vault forget VAULT north" in output and all(name in output for name in joined)
    assert "always hold" in output and "was not asked" in output
    again = json.loads(run_command("silo", "forget", "north.silo", "--json"))
    assert again["removed"] == [] and again["kept"] == KEPT and "not asked" in again["server"]


@pytest.mark.parametrize("known_by", ["keys", "handshake", "both"])
@pytest.mark.parametrize("owner", ["party", "federation"])
def test_folder_of_another_party_or_federation_is_not_changed(
    here: Path, joined: list[str], owner: str, known_by: str
) -> None:
    """Nothing is written there, whether its owner is known by keys or by the handshake."""
    server, name = ("lab", "south") if owner == "party" else ("other", "north")
    federation = invite.Invite.read(here / "north.invite").federation
    if owner == "federation":
        run_command("server", "init", "other", "recipe.toml")
    run_command("server", "invite", server, name, "--out", "second.invite")
    folder = here / "north.silo"
    (folder / "state" / "handshake.json").write_text(json.dumps({"party": "north", "federation": federation}))
    if known_by == "keys":
        (folder / "state" / "handshake.json").unlink()
    elif known_by == "handshake":
        shutil.rmtree(folder / "keys")
    before = {file: file.is_file() and file.read_bytes() for file in folder.rglob("*")}
    output = run_command("silo", "join", "second.invite", "team.py", "--folder", "north.silo", code=1)
    assert {file: file.is_file() and file.read_bytes() for file in folder.rglob("*")} == before
    requested = name if owner == "party" else invite.Invite.read(here / "second.invite").federation
    assert ("'north'" if owner == "party" else federation) in output and requested in output and "--folder" in output


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"party": "north"}', '{"party": 7, "federation": []}'])
def test_folder_with_a_damaged_handshake_is_not_changed(here: Path, joined: list[str], text: str) -> None:
    file = here / "north.silo" / "state" / "handshake.json"
    file.write_text(text)
    output = run_command("silo", "join", "north.invite", "team.py", "--folder", "north.silo", code=1)
    assert "handshake.json is not as Descant wrote it" in output and "Restore it" in output and file.read_text() == text


def test_party_rejoins_from_its_folder(here: Path, joined: list[str]) -> None:
    federation = invite.Invite.read(here / "north.invite").federation
    held = {"party": "north", "federation": federation}
    (here / "north.silo" / "state" / "handshake.json").write_text(json.dumps(held))
    (here / "bad.py").write_text("x = 1")
    command = [sys.executable, "-m", "descant", "silo", "join", "north.invite", "bad.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "must define model" in done.stderr  # which comes next


def test_forget_removes_nothing_without_the_servers_confirmation(here: Path, joined: list[str]) -> None:
    output = run_command("silo", "forget", "north.silo", "--wait", "0.5", code=1)
    assert kept_by_north(here) == joined
    assert "nothing was removed" in output and "descant vault forget VAULT north" in output and "--local" in output


def test_invalid_silo_file_does_not_join(here: Path) -> None:
    run_command("server", "init", "lab", "recipe.toml", "--port", "9")
    run_command("server", "invite", "lab", "north")
    for text, reason in {
        "x = 1": "must define model: a class or a function without arguments that returns the torch module, and data: ",
        f"{SILO_FILE}\ndef data(): raise ValueError('of ours')": "failed: ValueError: of ours",
        "import os; os._exit(3)": "its process has exited with 3",
    }.items():
        (here / "bad.py").write_text(text)
        command = [sys.executable, "-m", "descant", "silo", "join", "north.invite", "bad.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and reason in done.stderr and "joins" not in done.stdout


def test_invite_names_the_vault_that_coresets_are_encrypted_for(here: Path) -> None:
    vault = f"[vault]\nfolder = '{here / 'vault'}'\nkey = '{here / 'key'}'\n"
    (here / "recipe.toml").write_text(f"{RECIPE}wrap = [{{wrapper = 'coreset_proxies'}}]\n{vault}")
    known = json.loads(run_command("vault", "init", "vault", "--key", "key", "--json"))["fingerprint"]
    run_command("server", "init", "lab", "recipe.toml")
    (here / "vault").rename(here / "away")
    assert "does not exist, so" in run_command("server", "invite", "lab", "north")
    (here / "away").rename(here / "vault")
    assert known in run_command("server", "invite", "lab", "south")
    names = {name: invite.Invite.read(here / f"{name}.invite").vault for name in ("north", "south")}
    assert names == {"north": "", "south": known}
    file = here / "south.invite"
    file.write_text(file.read_text().replace(known, known[::-1]))
    assert "was changed after it was made" in run_command("silo", "join", "south.invite", "team.py", code=1)
    assert f"descant vault forget {here / 'vault'} north" in run_command("server", "revoke", "lab", "north")
