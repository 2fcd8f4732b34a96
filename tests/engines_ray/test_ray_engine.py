"""The Ray engine gives the same results as one process, also after deaths of workers.

`bash scripts/engines` runs these tests in an environment with Ray.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import torch

from descant import DescantWarning, Federation, Sgd, algorithms, compare
from descant.deployment.server.serve import free_port
from descant.engines import InProcess, Ray, VirtualClock
from descant.errors import EngineError, SettingError
from descant.rounds.dispatch import iterate_replies, make_tasks
from failing_workers import (
    dropout_network,
    loss_hanging_workers,
    loss_killing_worker_once,
    loss_killing_workers,
    network_failing_in_workers,
    parties_differing_in_workers,
    parties_with_worker_killer,
)
from recipe_matrix import ALL_SILO_CASES, SIMULATION_ONLY_CASES, SOLVER_CASES, RecipeCase
from silo_file_templates import MODEL_AND_METHOD_TABLES
from toy_problems import ALL_METHODS, classification_parties, network, wide_network

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
ADAM = Sgd(lr=0.05, epochs=2, batch=4, optimizer="Adam")


@pytest.fixture(scope="module")
def two() -> Iterator[Ray]:
    engine = Ray(workers=2)
    yield engine
    engine.close()


METHODS = {
    **{name: partial(RecipeCase.algorithm, case) for name, case in (ALL_SILO_CASES | SIMULATION_ONLY_CASES).items()},
    **ALL_METHODS,
}
PARTICIPATION = {"coreset_proxies": 3}  # parties per round, so that the others get coreset proxies


def make_federation(name: str, engine: Any, **settings: Any) -> Federation:
    given = {"solver": Sgd(lr=0.1, steps=3, batch=4), "seed": 7, "participation": PARTICIPATION.get(name), **settings}
    method = METHODS[name]()
    if method.quorum is not None:  # only a virtual clock makes the order of replies reproducible
        engine = VirtualClock({"0": 0.5}, engine=engine)
    return Federation(
        partial(network, torch.float32), partial(classification_parties, 6), method, engine=engine, **given
    )


@pytest.mark.parametrize("name", METHODS)
def test_ray_gives_the_same_hash_for_every_method(name: str, two: Ray) -> None:
    fed = make_federation(name, two).fit(3, progress=False)
    assert not fed.rejections_
    assert fed.hash() == make_federation(name, InProcess).fit(3, progress=False).hash()


@pytest.mark.parametrize("name", SOLVER_CASES)
def test_ray_gives_the_same_hash_for_every_solver(name: str, two: Ray) -> None:
    model, people, solver = SOLVER_CASES[name]
    hashes = set()
    for engine in (two, InProcess):
        fed = Federation(model, people, algorithms.FedAvgPlus(), solver=solver, seed=7, engine=engine)
        hashes.add(fed.fit(2, progress=False).hash())
        assert not fed.rejections_
    assert len(hashes) == 1


def test_saved_run_continues_on_another_engine(two: Ray, tmp_path: Path) -> None:
    for name in ("FedGeoMedPlus", "Ditto", "stragglers"):
        whole = make_federation(name, InProcess, solver=ADAM).fit(4, progress=False)
        make_federation(name, two, solver=ADAM).fit(2, progress=False).save(tmp_path / name)
        for engine in (two, InProcess):
            again = make_federation(name, engine, solver=ADAM).load(tmp_path / name).fit(2, progress=False)
            assert again.hash() == whole.hash() and str(again.table()) == str(whole.table())


def test_comparison_shares_its_workers(two: Ray) -> None:
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.1, "steps": 2, "batch": 4, "progress": False}
    methods = [algorithms.FedAvg(), algorithms.FedAvgPlus()]
    ours = compare(methods, network, partial(classification_parties, 4), engine=two, **settings)
    assert str(ours.table()) == str(compare(methods, network, classification_parties(4), **settings).table())
    assert len(two._workers) == 2


def test_dead_worker_is_named_and_replaced_and_its_piece_repeated(two: Ray, tmp_path: Path) -> None:
    loss = partial(loss_killing_worker_once, kill_file=str(tmp_path / "die"))
    fed = make_federation("FedAvgPlus", two, loss=loss, solver=ADAM).fit(1, progress=False)
    (tmp_path / "die").touch()
    with pytest.warns(DescantWarning, match=r"Ray worker \d died while it worked on '.*It is replaced"):
        fed.fit(2, progress=False)
    assert not (tmp_path / "die").exists() and not fed.rejections_
    assert fed.hash() == make_federation("FedAvgPlus", InProcess, loss=loss, solver=ADAM).fit(3, progress=False).hash()


def make_wide_federation(engine: Any, **settings: Any) -> Federation:
    """A federation whose party states have 200 kB each."""
    method = algorithms.FedGeoMedPlus()
    return Federation(
        wide_network, partial(classification_parties, 6), method, solver=ADAM, seed=7, engine=engine, **settings
    )


def state_counts(fed: Federation) -> tuple[int, int]:
    """Return the bytes of party states in this process, and the number of parties that have one anywhere."""
    memory: Any = fed.engine_.party_states
    return memory.held_bytes, len(memory.names())


@pytest.mark.parametrize("participation", [None, 4])
def test_large_party_states_stay_with_the_workers(participation: int | None, two: Ray, tmp_path: Path) -> None:
    fed = make_wide_federation(two, participation=participation).fit(1, progress=False)
    assert state_counts(fed)[0] > 4 * 200_000  # their size was not known in the first round
    fed.fit(5, progress=False)
    assert state_counts(fed) == (0, 6) and not fed.rejections_
    whole = make_wide_federation(InProcess, participation=participation).fit(6, progress=False)
    assert fed.hash() == whole.hash() and str(fed.table()) == str(whole.table())
    assert state_counts(fed) == (0, 6)  # reading them does not move them
    fed.save(tmp_path / "run")
    for engine in (two, InProcess):
        again = make_wide_federation(engine, participation=participation).load(tmp_path / "run").fit(2, progress=False)
        assert (
            again.hash() == make_wide_federation(InProcess, participation=participation).fit(8, progress=False).hash()
        )


def test_dead_worker_loses_no_party_state(tmp_path: Path) -> None:
    engine = Ray(workers=2)
    loss = partial(loss_killing_worker_once, kill_file=str(tmp_path / "die"))
    fed = make_wide_federation(engine, loss=loss).fit(2, progress=False)
    assert state_counts(fed) == (0, 6)
    (tmp_path / "die").touch()
    with pytest.warns(DescantWarning, match="It is replaced"):
        fed.fit(1, progress=False)
    for worker in engine._workers:  # they made the party states
        sys.modules["ray"].kill(worker)
    with pytest.warns(DescantWarning, match="It is replaced"):
        fed.fit(1, progress=False)
    assert not fed.rejections_ and state_counts(fed) == (0, 6)
    engine.close()
    assert fed.hash() == make_wide_federation(InProcess, loss=loss).fit(4, progress=False).hash()


def test_party_states_are_freed_with_their_federation(two: Ray) -> None:
    """At once: Ray counts their memory until then."""
    engines = weakref.WeakSet[Any]()
    make_wide_federation(two).fit(
        1, progress=False
    )  # the first in a process stays longer, because torch keeps an early exception
    gc.disable()
    try:
        fed = make_wide_federation(two).fit(3, progress=False)
        assert state_counts(fed) == (0, 6)
        engines.add(fed.engine_)
        del fed
        assert not engines
    finally:
        gc.enable()


def test_pieces_are_small_when_party_states_would_not_fit(two: Ray) -> None:
    fed = make_wide_federation(two).fit(2, progress=False)
    engine: Any = fed.engine_
    assert engine._piece_state_bytes > 2**20
    engine._piece_state_bytes = 500_000  # two party states
    tasks = make_tasks(fed.plan_, fed.state, dict.fromkeys(fed.population, ADAM.hyper), kind="train", index=3)
    engine.submit(list(tasks))
    assert [len(piece.tasks) for piece in engine._queue.pieces.values()] == [2, 2, 1, 1]
    fed.fit(2, progress=False)
    assert state_counts(fed) == (0, 6) and fed.hash() == make_wide_federation(InProcess).fit(4, progress=False).hash()


def test_cluster_that_was_left_is_not_restarted_to_fetch_states(tmp_path: Path) -> None:
    code = (
        "from test_ray_engine import *\nif __name__ == '__main__':\n"
        "    two = Ray(workers=2)\n    fed = make_wide_federation(two).fit(3, progress=False)\n"
        "    import ray; ray.shutdown()\n"
        "    for ask in (fed.hash, partial(fed.fit, 1)):\n        try:\n            ask()\n"
        "        except EngineError as error:\n            print(error)\n"
        "    assert not ray.is_initialized()\n"
        "    restarted, expected = (make_wide_federation(e).fit(2, progress=False) for e in (two, InProcess))\n"
        "    assert restarted.hash() == expected.hash()\n"
    )
    (tmp_path / "left.py").write_text(code)
    given = environment(tmp_path)
    given["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    command = [sys.executable, str(tmp_path / "left.py")]
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Go on from the last checkpoint.*\n.*These workers have been closed", ended.stdout)


def test_party_states_stay_on_their_machine_and_their_loss_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("two_machine_cluster.py"))]
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["workers"] == 3  # as many as the cluster has cores, whatever this machine has
    first, *later = found["machines"]
    assert all(len(machines) == 1 for machines in first) and len({machine for (machine,) in first}) == 2
    assert all(again == first for again in later)
    assert [found["second"]] in first
    assert re.match(
        r"The party states were on a machine that has left the cluster. Go on from the last", found["error"]
    )


def test_party_that_kills_every_worker_is_lost_and_others_continue() -> None:
    engine = Ray(workers=1)
    fed = Federation(
        dropout_network,
        parties_with_worker_killer,
        algorithms.FedAvg(),
        loss=loss_killing_workers,
        lr=0.1,
        steps=1,
        engine=engine,
    )
    with pytest.warns(DescantWarning) as caught:
        (round,) = fed.rounds(1)
    assert round.round.accepted == ("0", "2")
    (rejection,) = fed.rejections_
    assert rejection.party == "1" and "lost: Ray worker 0 died" in rejection.reason
    assert any("1 of 3 replies were rejected" in str(warning.message) for warning in caught)
    engine.close()


def test_hanging_worker_is_given_up_at_the_deadline_and_replaced() -> None:
    engine = Ray(workers=1)
    fed = Federation(
        network,
        partial(classification_parties, 2),
        algorithms.FedAvg(),
        loss=loss_hanging_workers,
        lr=0.1,
        steps=1,
        engine=engine,
    )
    tasks = [
        replace(task, deadline=3.0)
        for task in make_tasks(fed.plan_, fed.state, {"0": Sgd().hyper}, kind="train", index=1)
    ]
    assert [report.status for report in iterate_replies(fed.engine_, tasks)] == ["lost"]
    with pytest.warns(DescantWarning, match="died while it worked on '0'"):
        (report,) = iterate_replies(fed.engine_, [replace(tasks[0], kind="evaluate", deadline=50.0)])
    assert report.status == "ok"
    engine.close()


def test_hanging_worker_does_not_block_another_federation() -> None:
    engine = Ray(workers=1)
    people = partial(classification_parties, 2)
    fed = Federation(network, people, algorithms.FedAvg(), loss=loss_hanging_workers, lr=0.1, steps=1, engine=engine)
    tasks = [
        replace(task, deadline=3.0)
        for task in make_tasks(fed.plan_, fed.state, {"0": Sgd().hyper}, kind="train", index=1)
    ]
    list(iterate_replies(fed.engine_, tasks))
    other = Federation(network, people, algorithms.FedAvg(), lr=0.1, steps=1, engine=engine).fit(1, progress=False)
    alone = Federation(network, people, algorithms.FedAvg(), lr=0.1, steps=1).fit(1, progress=False)
    assert other.hash() == alone.hash()
    engine.close()


def test_closed_workers_are_an_error() -> None:
    engine = Ray(workers=1)
    fed = make_federation("FedAvg", engine).fit(1, progress=False)
    engine.close()
    with pytest.raises(EngineError, match="These workers have been closed"):
        fed.fit(1, progress=False)
    again = make_federation("FedAvg", engine).fit(2, progress=False)  # another federation starts new ones
    assert again.hash() == make_federation("FedAvg", InProcess).fit(2, progress=False).hash()
    engine.close()


def test_connection_to_another_cluster_is_an_error(two: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    make_federation("FedAvg", two).fit(1, progress=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    with pytest.raises(
        EngineError, match=r"already connected to the Ray cluster at .*, and 10.0.0.5:6379 was requested"
    ):
        make_federation("FedAvg", Ray(workers=1, address="10.0.0.5:6379")).fit(1, progress=False)


def test_early_import_of_ray_gets_advice() -> None:
    code = (
        "import ray; from functools import partial; from descant import Federation, algorithms; "
        "from descant.engines import Ray; from toy_problems import classification_parties, network; "
        "parties = partial(classification_parties, 2); "
        "Federation(network, parties, algorithms.FedAvg(), engine=Ray(1)).fit(1, progress=False)"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given["PYTHONPATH"] = str(Path(__file__).parents[1] / "helpers")
    ended = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, timeout=120)
    assert ended.returncode == 1 and b"Set RAY_AUTH_MODE=token in the environment" in ended.stderr


def test_factories_must_work_the_same_in_workers(two: Ray) -> None:
    with pytest.raises(
        EngineError, match=r"(?s)could not make the federation.*in network_failing_in_workers.*ZeroDivisionError"
    ):
        Federation(network_failing_in_workers, partial(classification_parties, 4), algorithms.FedAvg(), engine=two).fit(
            1, progress=False
        )
    with pytest.raises(EngineError, match=r"other parties than this process.*seed what it draws"):
        Federation(network, parties_differing_in_workers, algorithms.FedAvg(), engine=two).fit(1, progress=False)
    with pytest.raises(SettingError, match=r"The model cannot be sent .*lambda"):
        Federation(lambda: network(), partial(classification_parties, 4), algorithms.FedAvg(), engine=two).fit(
            1, progress=False
        )


def test_cluster_is_closed_to_clients_without_the_token(two: Ray) -> None:
    import ray

    make_federation("FedAvg", two).fit(1, progress=False)
    address = ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print(len(ray.nodes()))"
    given = {**os.environ, "RAY_AUTH_MODE": "token"}
    for token, reached in ((os.environ["RAY_AUTH_TOKEN"], True), ("0" * 64, False)):
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env={**given, "RAY_AUTH_TOKEN": token}, capture_output=True, timeout=120)
        assert (ended.returncode == 0) == reached, ended.stderr.decode()[-500:]
    assert not ray.worker._global_node.webui_url


def test_started_cluster_sends_no_usage_reports(two: Ray) -> None:
    """Ray reports even that reports are off, unless its report URL is changed."""
    make_federation("FedAvg", two).fit(1, progress=False)
    checked = list[str]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            variables = process.environ()
            if "PATH" in variables:  # Ray's agents overwrite theirs with a title; the raylet starts them with its own
                assert variables["RAY_USAGE_STATS_ENABLED"] == "0", process.cmdline()
                assert variables["RAY_USAGE_STATS_REPORT_URL"] == "http://127.0.0.1:9/", process.cmdline()
                checked.append(process.name())
    assert {"gcs_server", "raylet"} <= set(checked)


RECIPE = (
    '[run]\nseed = 5\nrounds = 2\n[parties]\npopulation = "toy_problems:classification_parties"\n'
    + MODEL_AND_METHOD_TABLES
)
MAIN = """
import atexit, os, sys
from descant.cli import main

def print_usage_reports():
    from ray._common.usage import usage_lib
    print("usage reports:", usage_lib.usage_stats_enabled(), os.environ["RAY_USAGE_STATS_ENABLED"], file=sys.stderr)

if "--address" in sys.argv:
    atexit.register(print_usage_reports)
main()
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user without Ray variables."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**given, "HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path[1:]), **more}


def descant(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, *arguments]
    given = environment(folder, **more)
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=300)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address and the token of a cluster in separate processes."""
    token = "a" * 64
    port = free_port()
    log = tmp_path / "ray.log"
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--include-dashboard=false"]
    given = environment(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_USAGE_STATS_ENABLED="0")
    with TemporaryDirectory(prefix="ray") as short, log.open("w") as said:  # its sockets may not have long names
        command += [f"--port={port}", "--num-cpus=2", f"--temp-dir={short}"]
        head = subprocess.Popen(command, env=given, stdout=said, stderr=said)
        try:
            end = time.monotonic() + 300
            while "Ray runtime started" not in log.read_text():
                assert head.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.2)
            yield f"127.0.0.1:{port}", token
        finally:
            for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait()


def test_run_command_uses_a_cluster_and_sends_no_usage_reports(cluster: tuple[str, str], tmp_path: Path) -> None:
    address, token = cluster
    (tmp_path / "recipe.toml").write_text(RECIPE.format(method="fedgeomed+"))
    here = descant(tmp_path, "run", "recipe.toml", "--out", "here", "--json")
    assert here.returncode == 0, here.stderr
    asked = ("run", "recipe.toml", "--out", "there", "--json", "--engine", "ray", "--address", address)
    there = descant(tmp_path, *asked, RAY_AUTH_TOKEN=token)
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["hash"] == json.loads(here.stdout)["hash"]
    assert "usage reports: False 0" in there.stderr


def test_run_command_rejects_a_remote_cluster_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(method="fedavg"))
    ended = descant(tmp_path, "run", "recipe.toml", "--engine", "ray", "--address", "10.0.0.5:6379")
    assert ended.returncode == 1 and "there is no token for it" in " ".join(ended.stderr.split())
