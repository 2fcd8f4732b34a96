"""`descant server start` without Flower: its address, its restarts, and the recipes that it rejects at once."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from typer.testing import CliRunner

from descant.cli import app
from descant.config import Recipe, read_recipe
from descant.core.timeouts import WaitLimits
from descant.deployment.flower.flower_connection import PeerUnavailable
from descant.deployment.nginx_proxy import Proxy, find_nginx
from descant.deployment.pki.federation_setup import FederationTerms
from descant.deployment.pki.roster import Roster
from descant.deployment.server import serve as serving
from descant.deployment.server.serve import AccessMonitor, FederationServer
from descant.deployment.silo.handshake_reply import training_part
from descant.errors import DescantError, EngineError, SettingError, StateError, VaultError
from descant.privacy.gaussian_mechanism import epsilon
from descant.storage import atomic
from descant.storage.event_log import EventLog
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.storage.vault.vault_location import VaultLocation
from recipe_matrix import ALL_SILO_CASES

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
algorithm = "fedavg"
"""


class Stop(Exception):
    """Ends a start that has passed all checks."""


def federation(folder: Path, host: str = "localhost", port: int = 8443, recipe: str = RECIPE) -> Roster:
    (folder / "recipe.toml").write_text(recipe)
    return Roster.create(folder / "lab", folder / "recipe.toml", FederationTerms(hosts=(host,), port=port))


@pytest.mark.parametrize(
    ("host", "listens"),
    {
        "localhost": "127.0.0.1:8443",
        "LocalHost": "127.0.0.1:8443",
        "127.0.0.1": "127.0.0.1:8443",
        "127.0.0.9": "127.0.0.9:8443",
        "10.0.0.5": "10.0.0.5:8443",
        "::1": "[::1]:8443",
        "2001:db8::5": "[2001:db8::5]:8443",
        "0.0.0.0": "0.0.0.0:8443",
        "::": "[::]:8443",
        "fl.example.org": "0.0.0.0:8443",
    }.items(),
)
def test_server_listens_on_its_address_and_on_all_only_for_a_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, listens: str
) -> None:
    found = list[Proxy]()

    def start(proxy: Proxy, folder: Path) -> None:
        found.append(proxy)
        raise Stop

    federation(tmp_path, host)
    monkeypatch.setattr(Proxy, "start", start)
    with pytest.raises(Stop):
        FederationServer(tmp_path / "lab", WaitLimits(), lambda text: None).run_to_completion()
    [line] = [line for line in found[0].configuration().splitlines() if " listen " in line]
    assert line.strip() == f"listen {listens} ssl;"


def test_server_on_an_ipv6_address_answers_only_there(tmp_path: Path) -> None:
    try:
        find_nginx()
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
            port = tried.getsockname()[1]
    except (EngineError, OSError) as why:
        pytest.skip(str(why))
    roster = federation(tmp_path, "::1", port)
    with (
        Proxy.for_address(1, roster.address).start(roster.folder),
        socket.create_connection(("::1", port), 5.0),
        pytest.raises(ConnectionRefusedError),
    ):
        socket.create_connection(("127.0.0.1", port), 5.0)


CENTRAL = RECIPE + 'wrap = [{wrapper = "central_dp", clip = 1.0, noise = 1.0}]\n'
LOCAL = CENTRAL.replace("central", "local")
SAMPLES = RECIPE.replace("lr =", 'solver = "dp_sgd"\nclip = 1.0\nnoise = 1.0\nbatch = 4\nlr =')


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise Stop where the proxy would start."""

    def start(proxy: Proxy, folder: Path) -> None:
        raise Stop

    monkeypatch.setattr(Proxy, "start", start)


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize(
    ("recipe", "quorum", "why"),
    [
        (CENTRAL, 2, "is not private with a quorum.*Leave --quorum out"),
        (CENTRAL, None, ""),
        (LOCAL, 2, ""),
        (SAMPLES, 2, ""),
        (RECIPE, 2, ""),
    ],
    ids=["central, quorum", "central, all parties", "local", "samples", "not private"],
)
def test_quorum_is_rejected_with_central_dp(tmp_path: Path, recipe: str, quorum: int | None, why: str) -> None:
    federation(tmp_path, recipe=recipe)
    server = FederationServer(tmp_path / "lab", WaitLimits(quorum=quorum), lambda text: None)
    with pytest.raises(SettingError, match=why) if why else pytest.raises(Stop):
        server.run_to_completion()


def wrapped(*wraps: str, method: str = "fedavg") -> str:
    wrap = ", ".join(f"{{{one}}}" for one in wraps)
    return RECIPE.replace('"fedavg"', f'"{method}"') + f"wrap = [{wrap}]\n"


UNSERVABLE: dict[str, tuple[str, str]] = {
    "secure, then central": (
        wrapped('wrapper = "secure"', 'wrapper = "central_dp"'),
        "FedAvg+SecAgg+DP cannot use secure aggregation: CentralDP clips every single change",
    ),
    "central, then secure": (
        wrapped('wrapper = "central_dp"', 'wrapper = "secure"'),
        "SecureAggregation cannot wrap FedAvg+DP: CentralDP clips every single change",
    ),
    "a budget for no round": (wrapped('wrapper = "central_dp", budget = 0.01'), "ends the run after 0 rounds"),
    "private twice": (
        SAMPLES + 'wrap = [{wrapper = "local_dp"}]\n',
        "DpSgd cannot hide samples in FedAvg+LDP: it hides whole parties",
    ),
    "samples and terms": (SAMPLES.replace('"fedavg"', '"fedprox"'), "the loss term 'proximal' belongs"),
    "no validation set": (wrapped('wrapper = "adaptive"'), "AdaptiveHyper needs the server's own validation set"),
    "steps and epochs": (RECIPE.replace("steps = 2", "steps = 2\nepochs = 1"), "Give Sgd steps or epochs, not both"),
    "unknown optimizer": (RECIPE.replace("lr =", 'optimizer = "Adm"\nlr ='), "There is no optimizer 'Adm'"),
    "nothing to share": (wrapped(method="fedper") + 'layers = ["*"]\n', "nothing is left to share"),
    "agents without samples": (
        wrapped('wrapper = "adaptive", lr = [0.1, 0.2], reward = "clients", loss_samples = 4').replace(
            "lr", 'solver = "dqn"\nlr', 1
        ),
        "measures the loss on own samples of the parties, and agents and desks have none",
    ),
    "code for parties": (
        wrapped('wrapper = "descant.algorithms:SecureAggregation"'),
        "names 'descant.algorithms:SecureAggregation': code and files of the server are not used here",
    ),
    "speeds": (
        RECIPE.replace("rounds = 2", "rounds = 2\nspeeds = {a = 2.0}"),
        "The 'speeds' of [run] of recipe is for",
    ),
    "a metric of its own": (
        RECIPE.replace("inputs", 'metric = "torch.nn.functional:mse_loss"\ninputs'),
        "The 'metric' of [model] of recipe is for simulations: silos evaluate by the metric of their loss",
    ),
    "byzantine": (wrapped('wrapper = "byzantine"', method="rfa"), "The wrap 'byzantine' of recipe is for simulations"),
    "byzantine, by [[wrap]]": (
        RECIPE + '[[wrap]]\nwrapper = "byzantine"\n',
        "The wrap 'byzantine' of recipe is for simulations",
    ),
    "a sweep": (RECIPE + "[sweep.training]\nlr = [0.1, 0.2]\n", "[sweep] of recipe is for simulations: one federation"),
    **{
        f"{key}, in {table}": (
            RECIPE.replace(f"[{table}]", f"[{table}]\n{key} = {value}"),
            f"The {key!r} of [{table}] of recipe is for simulations: silos come and go",
        )
        for table in ("training", "method")
        for key, value in {
            "participation_probability": "0.5",
            "redraw_every": "2",
            "participation_interval": "2",
            "first_rounds": "{a = 1}",
            "last_rounds": "{a = 1}",
            "schedule": '[{party = "a", from = 1}]',
        }.items()
    },
    "unknown net": (RECIPE.replace('"mlp"', '"mpl"'), "There is no net 'mpl'"),
    "no rounds": (RECIPE.replace("rounds = 2", "rounds = 0"), "'rounds' of [run] must be a whole number >= 1"),
}


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize("case", UNSERVABLE)
def test_init_and_start_reject_recipes_that_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Before a folder exists or anything starts, with the messages of a simulation."""
    text, why = UNSERVABLE[case]
    (tmp_path / "recipe.toml").write_text(text)
    done = CliRunner().invoke(app, ["server", "init", str(tmp_path / "new"), str(tmp_path / "recipe.toml")])
    assert done.exit_code == 1 and why in " ".join(done.output.split()) and not (tmp_path / "new").exists()
    federation(tmp_path, recipe=text)
    with pytest.raises(DescantError, match=re.escape(why)):
        FederationServer(tmp_path / "lab", WaitLimits(), lambda text: None).run_to_completion()


SIMULATION_RECIPE = (
    RECIPE.replace("rounds = 2", 'rounds = 2\nseeds = 3\nengine = "processes"')
    + """
[parties]
population = "digits"
count = 3
[[methods]]
algorithm = "fedavg"
[quick.run]
rounds = 1
"""
)


@pytest.mark.usefixtures("stopping")
def test_simulation_recipe_is_served_and_unused_settings_are_listed(tmp_path: Path) -> None:
    """Settings that are used, such as the participation, are not listed."""
    (tmp_path / "recipe.toml").write_text(
        SIMULATION_RECIPE.replace("lr = 0.1", "lr = 0.1\nparticipation = 2\nstragglers = 0.5")
    )
    (tmp_path / "plain.toml").write_text(RECIPE)

    def made(recipe: str, *more: str) -> str:
        place = [str(tmp_path / f"{recipe}{len(more)}"), str(tmp_path / f"{recipe}.toml")]
        done = CliRunner().invoke(app, ["server", "init", *place, *more])
        assert done.exit_code == 0, done.output
        return done.output

    output = made("recipe")
    for what in ("[parties]", "[[methods]]", "[quick]", "The 'seeds' of [run]", "The 'engine' of [run]"):
        assert f"\n{what} is not used: " in output
    assert output.count("is not used") == 5 == len(json.loads(made("recipe", "--json"))["unused"])
    assert "not used" not in made("plain")
    with pytest.raises(Stop):
        FederationServer(tmp_path / "recipe0", WaitLimits(), lambda text: None).run_to_completion()


@pytest.mark.usefixtures("stopping")
def test_server_operator_may_use_own_model_code_that_parties_do_not_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(4, 2)\n")
    text = RECIPE.replace('net = "mlp"\ninputs = 4\noutputs = 2\n', 'net = "mine.py:net"\n')
    Path("recipe.toml").write_text(text)
    done = CliRunner().invoke(app, ["server", "init", "lab", "recipe.toml"])
    assert done.exit_code == 0, done.output
    with pytest.raises(Stop):
        FederationServer(Path("lab"), WaitLimits(), lambda text: None).run_to_completion()
    assert "mine.py" not in json.dumps(training_part(read_recipe(text).tables))


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize("text", [CENTRAL, LOCAL, SAMPLES], ids=["central", "local", "samples"])
def test_private_training_needs_the_privacy_accountant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    federation(tmp_path, recipe=text)
    with pytest.raises(SettingError, match=r"pip install 'descant\[dp\]'"):
        FederationServer(tmp_path / "lab", WaitLimits(), lambda text: None).run_to_completion()
    done = CliRunner().invoke(app, ["server", "init", str(tmp_path / "new"), str(tmp_path / "recipe.toml")])
    assert done.exit_code == 1 and "descant[dp]" in done.output and not (tmp_path / "new").exists()


@pytest.mark.usefixtures("stopping")
def test_start_rejects_too_few_parties_for_secure_aggregation(tmp_path: Path) -> None:
    roster = federation(tmp_path, recipe=wrapped('wrapper = "secure"'))
    server = FederationServer(tmp_path / "lab", WaitLimits(), lambda text: None)
    for name in ("north", "south"):
        roster.invite(name, tmp_path / f"{name}.invite")
    with pytest.raises(SettingError, match="needs sums of at least 3 parties, and there are 2"):
        server.run_to_completion()
    roster.invite("west", tmp_path / "west.invite")
    with pytest.raises(Stop):
        server.run_to_completion()


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize("name", ALL_SILO_CASES)
def test_every_silo_case_passes_init_and_start(tmp_path: Path, name: str) -> None:
    text = ALL_SILO_CASES[name].recipe_text
    sealed = name == "coreset_proxies"
    if sealed:
        key = PrivateKey.new()
        key.write(tmp_path / "vault.key")
        Vault.create(tmp_path / "vault", key)
    (tmp_path / "recipe.toml").write_text(text + ('[vault]\nfolder = "vault"\nkey = "vault.key"\n' if sealed else ""))
    done = CliRunner().invoke(app, ["server", "init", str(tmp_path / "lab"), str(tmp_path / "recipe.toml")])
    assert done.exit_code == 0, done.output
    with pytest.raises(Stop):
        FederationServer(tmp_path / "lab", WaitLimits(), lambda text: None).run_to_completion()


SEEN = {
    name: {"presence": now, "last_seen": ""}
    for name, now in {"north": "connected", "south": "left", "west": "disconnected"}.items()
}


@pytest.fixture
def serve_with_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[bool]], dict[str, object]]:
    """Serve with a SuperLink that dies repeatedly, each time after a completed round or before one."""

    def serve(rounds_completed: Sequence[bool]) -> dict[str, object]:
        deaths = iter(rounds_completed)
        place = federation(tmp_path).run_folder / "training"
        atomic.make_folder(place)
        log = EventLog(place / "events.jsonl")

        def drive(*_: Any, **named: Any) -> dict[str, object]:
            reconnecting.append(named["reconnecting"])
            (place.parent / "presence.json").write_text(json.dumps(SEEN if len(reconnecting) == 1 else {}))
            for has_round in deaths:
                if has_round:
                    log.add("round", round=log.last_written.number + 1)
                    log.flush()
                raise PeerUnavailable("it has died")
            return {"rounds": log.last_written.number}

        monkeypatch.setattr(Proxy, "start", lambda proxy, folder: nullcontext())
        monkeypatch.setattr(serving, "run_superlink", lambda *_: nullcontext())
        monkeypatch.setattr(FederationServer, "_drive", drive)
        monkeypatch.setattr(serving, "_RESTART_DELAYS", (0.0, 0.0, 0.0))
        reconnecting = list[set[str]]()
        found = FederationServer(tmp_path / "lab", WaitLimits(), lambda text: None).run_to_completion()
        return {**found, "reconnecting": reconnecting}

    return serve


def test_superlink_may_die_any_number_of_times_while_rounds_complete(
    serve_with_deaths: Callable[[Sequence[bool]], dict[str, object]],
) -> None:
    assert serve_with_deaths([True, False, False] * 5)["rounds"] == 5


def test_server_waits_for_connected_parties_after_a_superlink_death(
    serve_with_deaths: Callable[[Sequence[bool]], dict[str, object]],
) -> None:
    assert serve_with_deaths([True, False])["reconnecting"] == [set(), {"north"}, {"north"}]


def test_server_ends_when_the_superlink_keeps_dying_before_a_round(
    serve_with_deaths: Callable[[Sequence[bool]], dict[str, object]],
) -> None:
    with pytest.raises(EngineError, match="restarted 3 times in a row, and died before a round was done"):
        serve_with_deaths([True, False, False, False])


def test_dead_nginx_makes_the_server_unavailable(tmp_path: Path) -> None:
    """Found dead by a check or during a reload; keys that nginx cannot load end the server."""
    roster = federation(tmp_path)
    transport = SimpleNamespace(set_parties=len)

    def refresh(alive: bool, reload_if_revoked: Callable[[], bool]) -> None:
        proxy = SimpleNamespace(is_alive=alive, reload_if_revoked=reload_if_revoked, folder=tmp_path)
        cast(Any, AccessMonitor)(proxy, roster, transport).refresh()

    def dies() -> bool:
        raise EngineError("nginx did not reload its keys")

    refresh(True, lambda: True)
    for case in (lambda: True, dies):
        with pytest.raises(PeerUnavailable, match="nginx has ended"):
            refresh(False, case)
    with pytest.raises(EngineError, match="did not reload its keys") as error:
        refresh(True, dies)
    assert not isinstance(error.value, PeerUnavailable)


@pytest.mark.parametrize("killed", ["the master", "both"])
def test_port_is_free_after_nginx_was_killed(tmp_path: Path, killed: str) -> None:
    """A worker whose master was killed continues and holds the port."""
    try:
        find_nginx()
    except EngineError as why:
        pytest.skip(str(why))
    roster = federation(tmp_path, port=serving.free_port())
    for _ in range(3):
        with Proxy.for_address(1, roster.address).start(roster.folder) as running:
            master = psutil.Process(running._child.pid)
            workers = master.children() if killed == "both" else []
            for process in (master, *workers):
                process.kill()
            while running.is_alive:
                time.sleep(0.01)


PROXY_RECIPE = (
    RECIPE
    + 'wrap = [{wrapper = "coreset_proxies", share = 0.2}]\n[vault]\nfolder = "sealed/vault"\nkey = "vault.key"\n'
)


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vault named relative to its recipe, read from another working folder."""
    place = tmp_path / "operator"
    (place / "sealed").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    key = PrivateKey.new()
    key.write(place / "vault.key")
    Vault.create(place / "sealed" / "vault", key)
    (place / "recipe.toml").write_text(PROXY_RECIPE)
    return place


def init(code: int = 0) -> str:
    done = CliRunner().invoke(app, ["server", "init", "lab", "../operator/recipe.toml"])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_vault_is_found_relative_to_the_recipe_and_not_copied(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[VaultLocation]()

    def drive(server: FederationServer, roster: Roster, recipe: Recipe, settings: dict[str, Any], **_: Any) -> None:
        found.append(settings["vault"])
        raise Stop

    init()
    monkeypatch.setattr(Proxy, "start", lambda proxy, folder: nullcontext())
    monkeypatch.setattr(serving, "run_superlink", lambda *_: nullcontext())
    monkeypatch.setattr(FederationServer, "_drive", drive)
    with pytest.raises(Stop):
        FederationServer(Path("lab"), WaitLimits(), lambda text: None).run_to_completion()
    assert [one.with_key.folder for one in found] == [vault / "sealed" / "vault"]
    secret = (vault / "vault.key").read_bytes().split()[-1]
    files = [file.read_bytes() for file in Path("lab").rglob("*") if file.is_file()]
    assert len(files) > 5 and not any(secret in one for one in files)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no vault": (lambda place: shutil.rmtree(place / "sealed"), "holds no vault"),
    "neither": (lambda place: [shutil.rmtree(place / "sealed"), BAD["no key"][0](place)], "holds no vault"),
    "no key": (lambda place: (place / "vault.key").unlink(), "vault.key cannot be read"),
    "another key": (lambda place: replace_key(place / "vault.key"), "was created with the key of"),
    "a key for all to read": (lambda place: (place / "vault.key").chmod(0o644), "chmod 600"),
}


def replace_key(file: Path) -> None:
    file.unlink()
    PrivateKey.new().write(file)


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize("case", BAD)
def test_init_and_start_report_an_unusable_vault(vault: Path, case: str) -> None:
    spoil, why = BAD[case]
    init()
    spoil(vault)
    with pytest.raises((StateError, VaultError), match=why):
        FederationServer(Path("lab"), WaitLimits(), lambda text: None).run_to_completion()
    shutil.rmtree("lab")
    assert why in init(1) and not Path("lab").exists()


@pytest.mark.usefixtures("stopping")
def test_init_rejects_coreset_proxies_without_a_vault(vault: Path) -> None:
    (vault / "recipe.toml").write_text(PROXY_RECIPE.partition("[vault]")[0])
    assert "Coreset proxies need a [vault]" in init(1) and not Path("lab").exists()


@pytest.mark.usefixtures("stopping")
def test_start_needs_the_vault_key_and_init_does_not(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (vault / "recipe.toml").write_text(PROXY_RECIPE.replace('key = "vault.key"\n', ""))
    init()
    server = FederationServer(Path("lab"), WaitLimits(), lambda text: None)
    with pytest.raises(VaultError, match="DESCANT_VAULT_KEY"):
        server.run_to_completion()
    monkeypatch.setenv("DESCANT_VAULT_KEY", (vault / "vault.key").read_text())
    with pytest.raises(Stop):
        server.run_to_completion()
