"""The engine on a Ray cluster gives the numbers of the one in this process, whoever dies. `bash scripts/engines` runs
this, in an environment that has Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from descant import DescantWarning, Federation, Sgd, algorithms, compare
from descant.engines import InProcess, Ray
from descant.errors import EngineError, SettingError
from descant.exchange import gather, tasks_for
from failing import deadly, fragile, looped, mostly_fine, nowhere, otherwise, slow
from problems import METHODS, classes, network

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
ADAM = Sgd(lr=0.05, epochs=2, batch=4, optimizer="Adam")


@pytest.fixture(scope="module")
def two() -> Iterator[Ray]:
    engine = Ray(workers=2)
    yield engine
    engine.close()


def made(name: str, engine: Any, **settings: Any) -> Federation:
    given = {"solver": Sgd(lr=0.1, steps=3, batch=4), "seed": 7, **settings}
    return Federation(
        partial(network, torch.float32), partial(classes, 6), METHODS[name](), engine=engine, **given
    )  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_ray_gives_the_same_hash_for_every_method(name: str, two: Ray) -> None:
    fed = made(name, two).fit(3, progress=False)
    assert not fed.refusals_
    assert fed.hash() == made(name, InProcess).fit(3, progress=False).hash()


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
    ours = compare(methods, network, partial(classes, 4), engine=two, **settings)
    assert str(ours.table()) == str(compare(methods, network, classes(4), **settings).table())
    assert len(two._hands) == 2


def test_a_worker_that_dies_is_named_replaced_and_its_piece_repeated(two: Ray, tmp_path: Path) -> None:
    loss = partial(fragile, order=str(tmp_path / "die"))
    fed = made("FedAvgPlus", two, loss=loss, solver=ADAM).fit(1, progress=False)
    (tmp_path / "die").touch()
    with pytest.warns(DescantWarning, match=r"Ray worker \d died while it worked on '.*It is replaced"):
        fed.fit(2, progress=False)
    assert not (tmp_path / "die").exists() and not fed.refusals_
    assert fed.hash() == made("FedAvgPlus", InProcess, loss=loss, solver=ADAM).fit(3, progress=False).hash()


def test_a_party_that_kills_every_worker_is_lost_and_the_others_go_on() -> None:
    engine = Ray(workers=1)
    fed = Federation(looped, mostly_fine, algorithms.FedAvg(), loss=deadly, lr=0.1, steps=1, engine=engine)
    with pytest.warns(DescantWarning) as told:
        (round,) = fed.rounds(1)
    assert round.round.accepted == ("0", "2")
    (refusal,) = fed.refusals_
    assert refusal.party == "1" and "lost: Ray worker 0 died" in refusal.reason
    assert any("1 of 3 reports were refused" in str(warning.message) for warning in told)
    engine.close()


def test_a_worker_that_hangs_is_given_up_at_the_deadline_and_replaced() -> None:
    engine = Ray(workers=1)
    fed = Federation(network, partial(classes, 2), algorithms.FedAvg(), loss=slow, lr=0.1, steps=1, engine=engine)
    tasks = [replace(task, deadline=3.0) for task in tasks_for(fed._plan, fed.state, {"0": Sgd().hyper}, "train", 1)]
    assert [report.status for report in gather(fed._engine, tasks)] == ["lost"]
    with pytest.warns(DescantWarning, match="died while it worked on '0'"):
        (report,) = gather(fed._engine, [replace(tasks[0], kind="evaluate", deadline=50.0)])
    assert report.status == "ok"
    engine.close()


def test_a_worker_that_hangs_for_one_federation_does_not_keep_another_waiting() -> None:
    engine = Ray(workers=1)
    people = partial(classes, 2)
    fed = Federation(network, people, algorithms.FedAvg(), loss=slow, lr=0.1, steps=1, engine=engine)
    tasks = [replace(task, deadline=3.0) for task in tasks_for(fed._plan, fed.state, {"0": Sgd().hyper}, "train", 1)]
    list(gather(fed._engine, tasks))
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
        "from descant.engines import Ray; from problems import classes, network; "
        "Federation(network, partial(classes, 2), algorithms.FedAvg(), engine=Ray(1)).fit(1, progress=False)"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given["PYTHONPATH"] = str(Path(__file__).parents[1])
    ended = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, timeout=120)
    assert ended.returncode == 1 and b"Set RAY_AUTH_MODE=token in the environment" in ended.stderr


def test_what_makes_model_and_parties_must_do_so_there(two: Ray) -> None:
    with pytest.raises(EngineError, match=r"(?s)could not make the federation.*in nowhere.*ZeroDivisionError"):
        Federation(nowhere, partial(classes, 4), algorithms.FedAvg(), engine=two).fit(1, progress=False)
    with pytest.raises(EngineError, match=r"other parties than this process.*seed what it draws"):
        Federation(network, otherwise, algorithms.FedAvg(), engine=two).fit(1, progress=False)
    with pytest.raises(SettingError, match=r"The model cannot go .*lambda"):
        Federation(lambda: network(), partial(classes, 4), algorithms.FedAvg(), engine=two).fit(1, progress=False)


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
