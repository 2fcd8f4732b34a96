"""Every method of a recipe over a real federation, and repeated kills of every kind of process.

`bash scripts/engines --long` runs this and stores the results in docs/engines.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from descant.algorithms import Timetable
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import read_run
from recipe_matrix import ARRIVAL_ORDER_CASES, CORESET_PROXY_CASE, SILO_CASES
from test_flower_deployment import ROUNDS, SILO_NAMES, LocalDeployment, assert_equals_simulation, lab  # noqa: F401


@pytest.mark.parametrize("name", SILO_CASES)
def test_every_deployed_method_equals_the_simulation(lab: Callable[..., LocalDeployment], name: str) -> None:  # noqa: F811
    deployment = lab(SILO_CASES[name])
    deployment.start_all()
    assert_equals_simulation(deployment)


@pytest.mark.parametrize("name", ARRIVAL_ORDER_CASES)
def test_asynchronous_methods_finish_after_a_kill_of_the_driver(
    lab: Callable[..., LocalDeployment],  # noqa: F811
    name: str,
) -> None:
    """Arrival order is not repeatable, but every round is recorded once, changes the model and has its quorum."""
    deployment = lab(ARRIVAL_ORDER_CASES[name], 8)
    deployment.start_all()
    deployment.wait_for_round(2)
    restart_driver(deployment)
    assert deployment.final_global_model().isfinite().all()
    found = read_run(deployment.run_folder)
    algorithm = ARRIVAL_ORDER_CASES[name].recipe.algorithm()
    assert found.state == "finished" and found.numbers.rounds.tolist() == list(range(1, 9))
    assert (found.numbers.metrics["change"] > 0).all()
    assert (found.numbers.accepted.sum(1) >= algorithm.quorum).all() and found.numbers.accepted.any(0).all()


def test_coreset_proxies_in_a_real_federation_equal_the_simulation(
    lab: Callable[..., LocalDeployment],  # noqa: F811
    tmp_path: Path,
) -> None:
    """North shares half of its rows as a coreset and is gone after a restart; the timetable is read from the run."""
    key = PrivateKey.new()
    vault = f"[vault]\nfolder = '{tmp_path / 'vault'}'\nkey = '{tmp_path / 'key'}'\n"
    key.write(tmp_path / "key")
    Vault.create(tmp_path / "vault", key, "lab")
    deployment = lab(CORESET_PROXY_CASE, 6, vault, 'policy = {"share": 0.5}\n')
    deployment.start_all()
    deployment.wait_for_round(1)
    deployment.kill("server")
    deployment.run_command("silo", "leave", "north.silo")
    assert deployment.processes["north"].wait(300) == 0
    deployment.start_server(min_parties=2)
    deployment.final_global_model()
    found = read_run(deployment.run_folder).numbers
    assert found.proxied[:, 0].any() and not found.proxied[:, 1:].any()
    there = [
        {"party": name, "from": round, "to": round}
        for round, came in zip(found.rounds.tolist(), found.accepted, strict=True)
        for name, accepted in zip(found.parties, came, strict=True)
        if accepted
    ]
    assert_equals_simulation(deployment, absent=["north"], participation=Timetable.from_records(there))


CLOCK = """
import os, pathlib, sys, time
from datetime import timedelta

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
from flwr.supercore import date

mark, time_of_day, flowers = pathlib.Path(__file__).with_name("seconds"), time.time, date.now

def off():
    return float(mark.read_text()) if mark.exists() else 0.0

def moment():
    return flowers() + timedelta(seconds=off())

time.time = lambda: time_of_day() + off()
for module in [module for module in sys.modules.values() if getattr(module, "now", None) is flowers]:
    module.now = moment
"""


@pytest.mark.parametrize("seconds", [3600, -3600], ids=["ahead", "back"])
def test_a_clock_jump_at_the_server_ends_the_silos_and_the_same_commands_continue(
    lab: Callable[..., LocalDeployment],  # noqa: F811
    seconds: int,
) -> None:
    """The clock of the SuperLink, which accepts no signature of another time, and of its driver."""
    deployment = lab(SILO_CASES["FedGeoMedPlus"], 8)
    (deployment.folder / "clock").mkdir()
    (deployment.folder / "clock" / "sitecustomize.py").write_text(CLOCK)
    deployment.python_paths["server"] = str(deployment.folder / "clock")
    deployment.start_all()
    deployment.wait_for_round(1)
    (deployment.folder / "clock" / "seconds").write_text(str(seconds))
    for name in SILO_NAMES:
        assert deployment.processes[name].wait(300) == 1
        assert "the clock of this machine is 3" in deployment.log_text(name) and "Set the clock" in deployment.log_text(
            name
        )
    (deployment.folder / "clock" / "seconds").unlink()
    for name in SILO_NAMES:
        deployment.start_silo(name)
    assert_equals_simulation(deployment)


def kill_superlink(deployment: LocalDeployment) -> None:
    deployment.child_process("server", "flower-superlink").kill()


def restart_silo(deployment: LocalDeployment) -> None:
    deployment.kill("south")
    deployment.start_silo("south")


def restart_driver(deployment: LocalDeployment) -> None:
    deployment.kill("server")
    time.sleep(1)
    deployment.start_server()


@pytest.mark.parametrize("kill", [kill_superlink, restart_silo, restart_driver], ids=["superlink", "silo", "driver"])
def test_a_kill_in_every_round_leads_to_the_same_models(
    lab: Callable[..., LocalDeployment],  # noqa: F811
    kill: Callable[[LocalDeployment], None],
) -> None:
    deployment = lab(SILO_CASES["FedGeoMedPlus"])
    deployment.start_all()
    for round in range(1, ROUNDS):
        deployment.wait_for_round(round)
        kill(deployment)
    assert_equals_simulation(deployment)
