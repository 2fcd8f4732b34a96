"""The engine on a Ray cluster gives the numbers of the one in this process, whoever dies. `bash scripts/engines` runs
this, in an environment that has Ray."""

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
    **{name: partial(RecipeCase.algorithm, way) for name, way in (ALL_SILO_CASES | SIMULATION_ONLY_CASES).items()},
    **ALL_METHODS,
}
AWAY = {"coreset_proxies": 3}  # so many take part, so that others are stood in for


def made(name: str, engine: Any, **settings: Any) -> Federation:
    given = {"solver": Sgd(lr=0.1, steps=3, batch=4), "seed": 7, "attend": AWAY.get(name), **settings}
    method = METHODS[name]()
    if method.quorum is not None:  # who is first depends on the day, but for a virtual clock
        engine = VirtualClock({"0": 0.5}, engine=engine)
    return Federation(
        partial(network, torch.float32), partial(classification_parties, 6), method, engine=engine, **given
    )


@pytest.mark.parametrize("name", METHODS)
def test_ray_gives_the_same_hash_for_every_method(name: str, two: Ray) -> None:
    fed = made(name, two).fit(3, progress=False)
    assert not fed.rejections_
    assert fed.hash() == made(name, InProcess).fit(3, progress=False).hash()


@pytest.mark.parametrize("name", SOLVER_CASES)
def test_ray_gives_the_same_hash_for_every_solver(name: str, two: Ray) -> None:
    model, people, solver = SOLVER_CASES[name]
    hashes = set()
    for engine in (two, InProcess):
        fed = Federation(model, people, algorithms.FedAvgPlus(), solver=solver, seed=7, engine=engine)
        hashes.add(fed.fit(2, progress=False).hash())
        assert not fed.rejections_
    assert len(hashes) == 1


def test_memory_is_saved_and_goes_on_elsewhere(two: Ray, tmp_path: Path) -> None:
    for name in ("FedGeoMedPlus", "Ditto", "stragglers"):
        whole = made(name, InProcess, solver=ADAM).fit(4, progress=False)
        made(name, two, solver=ADAM).fit(2, progress=False).save(tmp_path / name)
        for engine in (two, InProcess):
            again = made(name, engine, solver=ADAM).load(tmp_path / name).fit(2, progress=False)
            assert again.hash() == whole.hash() and str(again.table()) == str(whole.table())


def test_a_study_shares_its_workers(two: Ray) -> None:
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.1, "steps": 2, "batch": 4, "progress": False}
    methods = [algorithms.FedAvg(), algorithms.FedAvgPlus()]
    ours = compare(methods, network, partial(classification_parties, 4), engine=two, **settings)
    assert str(ours.table()) == str(compare(methods, network, classification_parties(4), **settings).table())
    assert len(two._workers) == 2


def test_a_worker_that_dies_is_named_replaced_and_its_piece_repeated(two: Ray, tmp_path: Path) -> None:
    loss = partial(loss_killing_worker_once, kill_file=str(tmp_path / "die"))
    fed = made("FedAvgPlus", two, loss=loss, solver=ADAM).fit(1, progress=False)
    (tmp_path / "die").touch()
    with pytest.warns(DescantWarning, match=r"Ray worker \d died while it worked on '.*It is replaced"):
        fed.fit(2, progress=False)
    assert not (tmp_path / "die").exists() and not fed.rejections_
    assert fed.hash() == made("FedAvgPlus", InProcess, loss=loss, solver=ADAM).fit(3, progress=False).hash()


# ── what parties remember stays with the workers ──────────────────────────────────────────────────────────────────────


def heavy(engine: Any, **settings: Any) -> Federation:
    """Memories of 200 kB."""
    method = algorithms.FedGeoMedPlus()
    return Federation(
        wide_network, partial(classification_parties, 6), method, solver=ADAM, seed=7, engine=engine, **settings
    )


def here(fed: Federation) -> tuple[int, int]:
    """Bytes of memories in this process, and parties that have one anywhere."""
    memory: Any = fed.engine_.party_states
    return memory.held_bytes, len(memory.names())


@pytest.mark.parametrize("attend", [None, 4])
def test_large_memories_stay_with_the_workers(attend: int | None, two: Ray, tmp_path: Path) -> None:
    fed = heavy(two, attend=attend).fit(1, progress=False)
    assert here(fed)[0] > 4 * 200_000  # nobody knew yet that they are large
    fed.fit(5, progress=False)
    assert here(fed) == (0, 6) and not fed.rejections_
    whole = heavy(InProcess, attend=attend).fit(6, progress=False)
    assert fed.hash() == whole.hash() and str(fed.table()) == str(whole.table())
    assert here(fed) == (0, 6)  # looking at them leaves them where they are
    fed.save(tmp_path / "run")
    for engine in (two, InProcess):
        again = heavy(engine, attend=attend).load(tmp_path / "run").fit(2, progress=False)
        assert again.hash() == heavy(InProcess, attend=attend).fit(8, progress=False).hash()


def test_a_worker_that_dies_takes_no_memory_with_it(tmp_path: Path) -> None:
    engine = Ray(workers=2)
    loss = partial(loss_killing_worker_once, kill_file=str(tmp_path / "die"))
    fed = heavy(engine, loss=loss).fit(2, progress=False)
    assert here(fed) == (0, 6)
    (tmp_path / "die").touch()
    with pytest.warns(DescantWarning, match="It is replaced"):
        fed.fit(1, progress=False)
    for hand in engine._workers:  # those that made the memories
        sys.modules["ray"].kill(hand)
    with pytest.warns(DescantWarning, match="It is replaced"):
        fed.fit(1, progress=False)
    assert not fed.rejections_ and here(fed) == (0, 6)
    engine.close()
    assert fed.hash() == heavy(InProcess, loss=loss).fit(4, progress=False).hash()


def test_memories_go_with_their_federation(two: Ray) -> None:
    """At once: nobody else knows how much of Ray's memory they take."""
    engines = weakref.WeakSet[Any]()
    heavy(two).fit(1, progress=False)  # the first in a process stays longer: torch keeps what it first failed with
    gc.disable()
    try:
        fed = heavy(two).fit(3, progress=False)
        assert here(fed) == (0, 6)
        engines.add(fed.engine_)
        del fed
        assert not engines
    finally:
        gc.enable()


def test_pieces_are_small_where_what_parties_remember_would_not_fit(two: Ray) -> None:
    fed = heavy(two).fit(2, progress=False)
    engine: Any = fed.engine_
    assert engine._room > 2**20
    engine._room = 500_000  # two memories
    tasks = make_tasks(fed.plan_, fed.state, dict.fromkeys(fed.population, ADAM.hyper), kind="train", index=3)
    engine.submit(list(tasks))
    assert [len(part.tasks) for part in engine._owed.pieces.values()] == [2, 2, 1, 1]
    fed.fit(2, progress=False)
    assert here(fed) == (0, 6) and fed.hash() == heavy(InProcess).fit(4, progress=False).hash()


def test_a_cluster_that_was_left_is_not_started_again_to_look_for_what_was_there(tmp_path: Path) -> None:
    code = (
        "from test_ray_engine import *\nif __name__ == '__main__':\n"
        "    two = Ray(workers=2)\n    fed = heavy(two).fit(3, progress=False)\n    import ray; ray.shutdown()\n"
        "    for ask in (fed.hash, partial(fed.fit, 1)):\n        try:\n            ask()\n"
        "        except EngineError as error:\n            print(error)\n"
        "    assert not ray.is_initialized()\n"
        "    assert heavy(two).fit(2, progress=False).hash() == heavy(InProcess).fit(2, progress=False).hash()\n"
    )
    (tmp_path / "left.py").write_text(code)
    given = environment(tmp_path)
    given["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    command = [sys.executable, str(tmp_path / "left.py")]
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Go on from the last save.*\n.*These workers have been closed", ended.stdout)


def test_memories_stay_on_their_machine_and_one_that_goes_with_them_is_said(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("two_machine_cluster.py"))]
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["workers"] == 3  # as many as the cluster has cores, whatever this machine has
    first, *later = found["seen"]
    assert all(len(machines) == 1 for machines in first) and len({machine for (machine,) in first}) == 2
    assert all(again == first for again in later)
    assert [found["second"]] in first
    assert re.match(r"What parties remember was on a machine .* that is gone. Go on from the last save", found["said"])


def test_a_party_that_kills_every_worker_is_lost_and_the_others_go_on() -> None:
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
    with pytest.warns(DescantWarning) as told:
        (round,) = fed.rounds(1)
    assert round.round.accepted == ("0", "2")
    (refusal,) = fed.rejections_
    assert refusal.party == "1" and "lost: Ray worker 0 died" in refusal.reason
    assert any("1 of 3 reports were refused" in str(warning.message) for warning in told)
    engine.close()


def test_a_worker_that_hangs_is_given_up_at_the_deadline_and_replaced() -> None:
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


def test_a_worker_that_hangs_for_one_federation_does_not_keep_another_waiting() -> None:
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


def test_workers_that_were_closed_say_so() -> None:
    engine = Ray(workers=1)
    fed = made("FedAvg", engine).fit(1, progress=False)
    engine.close()
    with pytest.raises(EngineError, match="These workers have been closed"):
        fed.fit(1, progress=False)
    again = made("FedAvg", engine).fit(2, progress=False)  # another federation starts new ones
    assert again.hash() == made("FedAvg", InProcess).fit(2, progress=False).hash()
    engine.close()


def test_a_cluster_that_is_not_the_one_asked_for_is_refused(two: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    made("FedAvg", two).fit(1, progress=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    with pytest.raises(EngineError, match=r"part of the Ray cluster at .* already, and 10.0.0.5:6379 was asked for"):
        made("FedAvg", Ray(workers=1, address="10.0.0.5:6379")).fit(1, progress=False)


def test_ray_that_was_imported_too_early_says_what_to_do() -> None:
    code = (
        "import ray; from functools import partial; from descant import Federation, algorithms; "
        "from descant.engines import Ray; from toy_problems import classification_parties, network; "
        "Federation(network, partial(classes, 2), algorithms.FedAvg(), engine=Ray(1)).fit(1, progress=False)"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given["PYTHONPATH"] = str(Path(__file__).parents[1] / "helpers")
    ended = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, timeout=120)
    assert ended.returncode == 1 and b"Set RAY_AUTH_MODE=token in the environment" in ended.stderr


def test_what_makes_model_and_parties_must_do_so_there(two: Ray) -> None:
    with pytest.raises(
        EngineError, match=r"(?s)could not make the federation.*in network_failing_in_workers.*ZeroDivisionError"
    ):
        Federation(network_failing_in_workers, partial(classification_parties, 4), algorithms.FedAvg(), engine=two).fit(
            1, progress=False
        )
    with pytest.raises(EngineError, match=r"other parties than this process.*seed what it draws"):
        Federation(network, parties_differing_in_workers, algorithms.FedAvg(), engine=two).fit(1, progress=False)
    with pytest.raises(SettingError, match=r"The model cannot go .*lambda"):
        Federation(lambda: network(), partial(classification_parties, 4), algorithms.FedAvg(), engine=two).fit(
            1, progress=False
        )


def test_nobody_without_the_token_reaches_the_cluster(two: Ray) -> None:
    import ray

    made("FedAvg", two).fit(1, progress=False)
    address = ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print(len(ray.nodes()))"
    given = {**os.environ, "RAY_AUTH_MODE": "token"}
    for token, reached in ((os.environ["RAY_AUTH_TOKEN"], True), ("0" * 64, False)):
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env={**given, "RAY_AUTH_TOKEN": token}, capture_output=True, timeout=120)
        assert (ended.returncode == 0) == reached, ended.stderr.decode()[-500:]
    assert not ray.worker._global_node.webui_url


def test_no_process_of_a_cluster_that_is_started_here_reports_to_anybody(two: Ray) -> None:
    """Where Ray reports to is told even that nothing is reported, unless it is another place."""
    made("FedAvg", two).fit(1, progress=False)
    looked = list[str]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            told = process.environ()
            if "PATH" in told:  # Ray's agents write their title over theirs; it is the raylet's, which starts them
                assert told["RAY_USAGE_STATS_ENABLED"] == "0", process.cmdline()
                assert told["RAY_USAGE_STATS_REPORT_URL"] == "http://127.0.0.1:9/", process.cmdline()
                looked.append(process.name())
    assert {"gcs_server", "raylet"} <= set(looked)


# ── by the command, on a cluster that others have started ─────────────────────────────────────────────────────────────

RECIPE = (
    '[run]\nseed = 5\nrounds = 2\n[parties]\npopulation = "toy_problems:classification_parties"\n'
    + MODEL_AND_METHOD_TABLES
)
ASKED = """
import atexit, os, sys
from descant.cli import main

def told():
    from ray._common.usage import usage_lib
    print("reports to others:", usage_lib.usage_stats_enabled(), os.environ["RAY_USAGE_STATS_ENABLED"], file=sys.stderr)

if "--address" in sys.argv:
    atexit.register(told)
main()
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of a user who has set nothing of Ray's."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**given, "HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path[1:]), **more}


def descant(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ASKED, *arguments]
    given = environment(folder, **more)
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=300)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A cluster in processes of its own: its address, and its token."""
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


def test_the_command_runs_on_a_cluster_and_reports_to_nobody(cluster: tuple[str, str], tmp_path: Path) -> None:
    address, token = cluster
    (tmp_path / "recipe.toml").write_text(RECIPE.format(method="fedgeomed+"))
    here = descant(tmp_path, "run", "recipe.toml", "--out", "here", "--json")
    assert here.returncode == 0, here.stderr
    asked = ("run", "recipe.toml", "--out", "there", "--json", "--engine", "ray", "--address", address)
    there = descant(tmp_path, *asked, RAY_AUTH_TOKEN=token)
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["hash"] == json.loads(here.stdout)["hash"]
    assert "reports to others: False 0" in there.stderr


def test_the_command_refuses_a_cluster_elsewhere_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(method="fedavg"))
    ended = descant(tmp_path, "run", "recipe.toml", "--engine", "ray", "--address", "10.0.0.5:6379")
    assert ended.returncode == 1 and "there is no token for it" in " ".join(ended.stderr.split())
