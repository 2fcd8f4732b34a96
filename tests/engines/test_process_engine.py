"""Worker processes give the same results as one process, and failures of workers are handled."""

from __future__ import annotations

import gc
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from descant import DescantError, DescantWarning, Federation, Sgd, algorithms, compare, parties
from descant.core.interfaces import Engine
from descant.core.messages import Task
from descant.engines import InProcess, Processes, Ray
from descant.engines.processes.engine_worker import RESULT_FILES, WORKER_ENV
from descant.engines.processes.process_engine import ProcessEngine, available_cores
from descant.engines.processes.shared_memory import SharedTensorFile
from descant.engines.processes.worker_pool import WorkerProcess
from descant.engines.ray.ray_worker import pack_for_ray, unpack_from_ray
from descant.engines.ray.task_payloads import RayTaskBatch
from descant.engines.work_queue import WorkQueue
from descant.errors import EngineError, SettingError
from descant.models.flat import bind
from descant.parties import Population
from descant.rounds.dispatch import iterate_replies, make_tasks
from descant.rounds.plan import Plan
from descant.serialization.references import address_of, decode, encode, resolve
from descant.serialization.wire import from_fields
from failing_workers import (
    dropout_network,
    loss_hanging_workers,
    loss_killing_worker_once,
    loss_killing_workers,
    network_failing_in_workers,
    parties_differing_in_workers,
    parties_with_worker_killer,
)
from toy_problems import ALL_METHODS, classification_parties, network

pytestmark = pytest.mark.filterwarnings("ignore:.*workers share:descant.errors.DescantWarning")  # on a small machine


class WaitingProcesses(Processes):
    """An engine that waits for its workers, so that every piece runs in one."""

    def __call__(self, plan: Plan) -> ProcessEngine:
        return super().__call__(plan).wait()


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    pool = WaitingProcesses(workers=2, threads=1)
    yield pool
    pool.close()


def make_federation(name: str, engine: Any, **settings: Any) -> Federation:
    solver = settings.pop("solver", Sgd(lr=0.1, steps=3, batch=4))
    model = partial(network, torch.float32)
    population = partial(classification_parties, 6)
    return Federation(model, population, ALL_METHODS[name](), solver=solver, seed=7, engine=engine, **settings)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_workers_give_the_same_hash_for_every_method(name: str, two: Processes) -> None:
    fed = make_federation(name, two).fit(3, progress=False)
    assert not fed.rejections_
    assert fed.hash() == make_federation(name, InProcess).fit(3, progress=False).hash()


@pytest.mark.parametrize("workers", [1, 3])
def test_number_of_workers_does_not_change_the_result(workers: int, tmp_path: Path) -> None:
    pool = WaitingProcesses(workers=workers, threads=1)
    adam = Sgd(lr=0.05, epochs=2, batch=4, optimizer="Adam")
    for name in ("FedGeoMedPlus", "Ditto", "stragglers"):
        whole = make_federation(name, InProcess, solver=adam).fit(4, progress=False)
        make_federation(name, pool, solver=adam).fit(2, progress=False).save(tmp_path / name)
        again = make_federation(name, pool, solver=adam).load(tmp_path / name).fit(2, progress=False)
        assert again.hash() == whole.hash()
        assert str(again.table()) == str(whole.table())
        resumed_in_process = make_federation(name, InProcess, solver=adam).load(tmp_path / name).fit(2, progress=False)
        assert resumed_in_process.hash() == whole.hash()
    pool.close()


def test_workers_start_only_after_long_local_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Processes(workers=2, threads=1)
    fed = make_federation("FedAvgPlus", pool).fit(2, progress=False)
    assert pool._pool is not None and not pool._pool.workers
    monkeypatch.setattr("descant.engines.processes.worker_pool._START_AFTER", 0.0)
    fed.fit(1, progress=False)  # it begins in this process while they start
    assert len(pool._pool.workers) == 2
    fed.engine_.wait()  # type: ignore[attr-defined]
    spent = pool._pool.local_seconds
    fed.fit(1, progress=False)
    assert pool._pool.local_seconds == spent  # all of it was done by workers
    assert fed.hash() == make_federation("FedAvgPlus", InProcess).fit(4, progress=False).hash()
    pool.close()


def test_comparison_shares_its_workers(two: Processes) -> None:
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.1, "steps": 2, "batch": 4, "progress": False}
    methods = [algorithms.FedAvg(), algorithms.FedAvgPlus()]
    ours = compare(methods, network, partial(classification_parties, 4), engine=two, **settings)
    assert str(ours.table()) == str(compare(methods, network, classification_parties(4), **settings).table())


def test_personal_models_are_available_from_workers(two: Processes) -> None:
    ours, theirs = (make_federation("FedPer", engine).fit(2, progress=False) for engine in (two, InProcess))
    for name in ours.population:
        pairs = zip(ours.models_[name].parameters(), theirs.models_[name].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_dead_worker_is_named_and_replaced_and_its_piece_repeated(tmp_path: Path) -> None:
    order = tmp_path / "die"
    loss = partial(loss_killing_worker_once, kill_file=str(order))
    pool = WaitingProcesses(workers=2, threads=1)
    adam = Sgd(lr=0.05, steps=2, batch=4, optimizer="Adam")
    fed = make_federation("FedAvgPlus", pool, loss=loss, solver=adam).fit(1, progress=False)
    order.touch()
    with pytest.warns(DescantWarning, match=r"worker \d \(process \d+\) was killed \(SIGKILL.*while it worked on '"):
        fed.fit(2, progress=False)
    assert not order.exists() and not fed.rejections_
    whole = make_federation("FedAvgPlus", InProcess, loss=loss, solver=adam).fit(3, progress=False)
    assert fed.hash() == whole.hash()
    pool.close()


def test_party_that_kills_every_worker_is_lost_and_others_continue() -> None:
    pool = WaitingProcesses(workers=1, threads=1)
    fed = Federation(
        dropout_network,
        parties_with_worker_killer,
        algorithms.FedAvg(),
        loss=loss_killing_workers,
        lr=0.1,
        steps=1,
        engine=pool,
    )
    with pytest.warns(DescantWarning) as caught:
        (round,) = fed.rounds(1)
    assert round.round.accepted == ("0", "2")
    (rejection,) = fed.rejections_
    assert rejection.party == "1"
    assert re.search("lost: worker 0 .* was killed .* Use fewer workers", rejection.reason)
    assert any("1 of 3 replies were rejected" in str(warning.message) for warning in caught)
    pool.close()


def test_factory_failing_in_a_worker_shows_its_traceback() -> None:
    pool = WaitingProcesses(workers=1)
    fed = Federation(network_failing_in_workers, partial(classification_parties, 4), algorithms.FedAvg(), engine=pool)
    with pytest.raises(
        EngineError, match=r"(?s)could not make the federation.*in network_failing_in_workers.*ZeroDivisionError"
    ):
        fed.fit(1, progress=False)
    pool.close()


def test_unseeded_factory_is_detected() -> None:
    pool = WaitingProcesses(workers=1)
    with pytest.raises(EngineError, match=r"other parties than this process.*seed what it draws"):
        Federation(network, parties_differing_in_workers, algorithms.FedAvg(), engine=pool).fit(1, progress=False)
    pool.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": nn.Linear(6, 3)},
            r"The model cannot be sent to a worker process. A Linear object .* give a function",
        ),
        ({"model": lambda: nn.Linear(6, 3)}, r"The model cannot be sent .*lambda.* cannot be found by another process"),
        ({"population": classification_parties(3)}, "The data cannot be sent to a worker process"),
        (
            {"loss": lambda output, y: nn.functional.cross_entropy(output, y)},
            "The loss cannot be sent to a worker process",
        ),
        ({"model": "toy_problems:net"}, "There is no 'net' in toy_problems"),
        ({"model": "problem:network"}, "There is no module 'problem'"),
        ({"model": "network"}, "An address looks like 'package.module:name'"),
    ],
)
def test_unsendable_settings_are_rejected_with_advice(settings: dict[str, Any], message: str) -> None:
    given = {
        "model": network,
        "population": partial(classification_parties, 3),
        "loss": nn.functional.cross_entropy,
        **settings,
    }
    pool = Processes(1)
    fed = Federation(given["model"], given["population"], algorithms.FedAvg(), loss=given["loss"], engine=pool)
    with pytest.raises(DescantError, match=message):
        fed.fit(1, progress=False)


@pytest.mark.parametrize("workers", [0, 2.5, True])
def test_invalid_number_of_workers_is_rejected(workers: Any) -> None:
    with pytest.raises(SettingError, match="The 'workers' of Processes must be a whole number >= 1"):
        make_federation("FedAvg", Processes(workers=workers)).fit(1, progress=False)


@pytest.mark.filterwarnings("default")
def test_more_workers_than_cores_warns_and_parties_bound_the_workers() -> None:
    pool = WaitingProcesses(workers=available_cores() + 5)
    fed = Federation(network, partial(classification_parties, 2), algorithms.FedAvg(), lr=0.1, steps=1, engine=pool)
    with pytest.warns(DescantWarning, match=f"{available_cores() + 5} workers share {available_cores()} cores"):
        fed.fit(1, progress=False)
    assert pool._pool is not None and len(pool._pool.workers) == 2  # one a party
    pool.close()


def test_interrupted_round_is_repeated(two: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = make_federation("FedAvgPlus", two).fit(1, progress=False)
    take_replies = WorkQueue.take_replies
    taken = []

    def interrupted(queue: WorkQueue[Any], party_states: Any) -> Any:
        taken.append(take_replies(queue, party_states))
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkQueue, "take_replies", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fed.fit(1, progress=False)
    monkeypatch.undo()
    assert fed.fit(2, progress=False).hash() == make_federation("FedAvgPlus", InProcess).fit(3, progress=False).hash()


def test_hanging_worker_is_given_up_at_the_deadline_and_replaced() -> None:
    pool = WaitingProcesses(workers=1, threads=1)
    fed = Federation(
        network,
        partial(classification_parties, 2),
        algorithms.FedAvg(),
        loss=loss_hanging_workers,
        lr=0.1,
        steps=1,
        engine=pool,
    )
    engine = fed.engine_

    tasks = [
        replace(task, deadline=1.0)
        for task in make_tasks(fed.plan_, fed.state, {"0": Sgd().hyper}, kind="train", index=1)
    ]
    assert [report.status for report in iterate_replies(engine, tasks)] == ["lost"]
    assert pool._pool is not None
    (hanging,) = pool._pool.workers
    with pytest.warns(DescantWarning, match="was killed"):
        list(iterate_replies(engine, [replace(tasks[0], kind="evaluate", deadline=20.0)]))
    assert hanging.process.poll() is not None
    pool.close()


def given_data(x: Tensor) -> Population:
    return parties.from_arrays([(x[:8], torch.arange(8) % 3), (x[8:], torch.arange(8) % 3)], test=0)


def drawn() -> Population:
    return given_data(torch.rand(16, 6, generator=torch.Generator().manual_seed(os.getpid())))


def test_workers_use_the_given_data_of_each_federation(two: Processes) -> None:
    for seed in range(2):
        x = torch.rand(16, 6, generator=torch.Generator().manual_seed(seed))
        settings: dict[str, Any] = {"lr": 0.1, "steps": 2, "batch": 4}
        ours = Federation(network, partial(given_data, x), algorithms.FedAvg(), engine=two, **settings)
        theirs = Federation(network, partial(given_data, x), algorithms.FedAvg(), **settings)
        assert ours.fit(1, progress=False).hash() == theirs.fit(1, progress=False).hash()
    with pytest.raises(EngineError, match="seed what it draws"):
        Federation(network, drawn, algorithms.FedAvg(), engine=two).fit(1, progress=False)


def test_federations_in_threads_share_the_workers(two: Processes) -> None:
    def run(name: str) -> str:
        return make_federation(name, two).fit(4, progress=False).hash()

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, ["FedAvgPlus", "Ditto", "FedAvg"]))
    assert found == [
        make_federation(name, InProcess).fit(4, progress=False).hash() for name in ("FedAvgPlus", "Ditto", "FedAvg")
    ]


def test_failure_is_reported_to_its_engine_only(two: Processes) -> None:
    good = make_federation("FedAvg", two)
    good.fit(1, progress=False)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        Federation(network_failing_in_workers, partial(classification_parties, 4), algorithms.FedAvg(), engine=two).fit(
            1, progress=False
        )
    assert good.fit(1, progress=False).hash() == make_federation("FedAvg", InProcess).fit(2, progress=False).hash()


def test_interrupt_while_receiving_results_loses_nothing(two: Processes) -> None:
    fed = make_federation("FedAvgPlus", two).fit(1, progress=False)
    receive = ProcessEngine.receive

    def interrupted(engine: ProcessEngine, piece: Any, message: Any) -> None:
        if not interrupts:
            interrupts.append(piece.number)
            raise KeyboardInterrupt
        receive(engine, piece, message)

    interrupts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessEngine, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fed.fit(1, progress=False)
        fed.fit(1, progress=False)
    assert interrupts and not fed.rejections_
    assert two._pool is not None and not any(member.assigned for member in two._pool.workers)
    assert fed.hash() == make_federation("FedAvgPlus", InProcess).fit(2, progress=False).hash()


def test_piece_that_never_reached_its_worker_is_repeated(two: Processes) -> None:
    fed = make_federation("FedAvgPlus", two).fit(1, progress=False)
    engine = fed.engine_
    send = WorkerProcess.send
    assert isinstance(engine, ProcessEngine)
    engine._max_piece_tasks = 1  # so that each worker has more than one piece

    def send_all_but_one(worker: WorkerProcess, message: Any) -> None:
        if "piece" in message and not unsent:
            unsent.append(message["piece"])  # as after an interrupt
        else:
            send(worker, message)

    unsent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "send", send_all_but_one)
        fed.fit(1, progress=False)
    assert unsent and not fed.rejections_
    assert fed.hash() == make_federation("FedAvgPlus", InProcess).fit(2, progress=False).hash()


def test_closing_the_pool_continues_the_work_locally() -> None:
    pool = WaitingProcesses(workers=1)
    fed = make_federation("FedAvgPlus", pool).fit(1, progress=False)
    pool.close()
    assert fed.fit(2, progress=False).hash() == make_federation("FedAvgPlus", InProcess).fit(3, progress=False).hash()
    assert pool._pool is not None and not pool._pool.workers


def test_deleted_engine_leaves_nothing_with_its_workers() -> None:
    pool = WaitingProcesses(workers=1)
    fed = make_federation("FedAvgPlus", pool).fit(1, progress=False)
    assert pool._pool is not None
    (member,) = pool._pool.workers
    assert len(member.plans) == 1 and list(pool._pool.folder.glob("tasks-*"))
    del fed
    gc.collect()
    assert not list(pool._pool.folder.glob("tasks-*"))
    other = make_federation("FedAvg", pool).fit(1, progress=False)
    assert list(member.plans) == [other.engine_.engine_id]  # type: ignore[attr-defined]
    pool.close()


def wrapped() -> nn.Module:
    return network()


def disguised() -> nn.Module:
    return nn.Linear(6, 3)


disguised.__qualname__ = "wrapped"


def test_object_with_a_false_address_is_rejected() -> None:
    with pytest.raises(SettingError, match="cannot be found by another process"):
        address_of(disguised)


def test_full_shared_memory_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"Cannot reserve 0 MB in .*: No space left on device. Make room there"):
        SharedTensorFile(tmp_path / "arrays").write({"w": torch.ones(3)})


def test_closed_pool_leaves_no_process_or_file() -> None:
    pool = WaitingProcesses(workers=2)
    make_federation("FedAvgPlus", pool).fit(2, progress=False)
    assert pool._pool is not None
    members = list(pool._pool.workers)
    folder = pool._pool.folder
    assert len(list(folder.iterdir())) <= 2 + 2 * RESULT_FILES  # the files are reused
    pool.close()
    assert all(member.process.poll() is not None for member in members) and not folder.exists()


SCRIPT = """
    import sys
    from functools import partial
    from torch import nn
    from descant import Federation, algorithms, parties
    from descant.engines import Processes

    print("loaded")  # a script's output must not mix with a worker's replies

    def net(width):
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def main():
        engine = Processes(workers=1)
        fed = Federation(partial(net, 8), partial(parties.digits, count=3), algorithms.FedAvg(), engine=engine)
        fed.engine_.wait()
        print(fed.fit(2, progress=False).history_[-1]["round"])

    {}
"""


def run_script(tmp_path: Path, last: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(last)))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)


def test_functions_of_a_script_are_sent_to_workers(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'if __name__ == "__main__":\n        main()')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["loaded", "2"]


def test_processes_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "processes.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


def test_script_without_main_guard_gets_advice(tmp_path: Path) -> None:
    done = run_script(tmp_path, "main()")
    assert done.returncode != 0
    assert "Put that part of it under `if __name__ == '__main__':`" in done.stderr


@pytest.mark.parametrize("name", ALL_METHODS)
def test_every_algorithm_is_encoded_and_decoded(name: str) -> None:
    algorithm = bind(ALL_METHODS[name](), Federation(network, classification_parties(3), algorithms.FedAvg()).plan_.net)
    arrays: dict[str, Tensor] = {}
    again = decode(encode(algorithm, arrays), arrays)
    assert repr(again) == repr(algorithm)
    assert type(again) is type(algorithm)


def test_addresses_resolve_to_their_objects() -> None:
    for thing in (network, nn.Linear, nn.functional.cross_entropy, Population.subset):
        assert resolve(address_of(thing)) is thing
    with pytest.raises(SettingError, match="cannot be found"):
        address_of(lambda: None)
    with pytest.raises(SettingError, match="There is no file"):
        resolve("nowhere.py:net")


def test_process_engine_satisfies_the_engine_protocol(two: Processes) -> None:
    engine: Engine = two(make_federation("FedAvg", two).plan_)
    assert list(engine.available_parties()) == list(classification_parties(6))
    assert engine.collect(0.0) == []


KINDS = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.float16])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.dictionaries(st.text(max_size=4), st.tuples(KINDS, SHAPES), max_size=4), min_size=1, max_size=3))
def test_shared_file_holds_the_last_written_arrays(
    writes: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = SharedTensorFile(Path(folder, "arrays"))
        theirs = SharedTensorFile(Path(folder, "arrays"))
        for wanted in writes:
            arrays = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in wanted.items()}
            ours.write(arrays)
            found = theirs.read()
            assert list(found) == list(arrays)
            assert all(
                torch.equal(found[name], array) and found[name].dtype == array.dtype for name, array in arrays.items()
            )


def test_shared_file_is_a_safetensors_file_and_damage_is_an_error(tmp_path: Path) -> None:
    shared = SharedTensorFile(tmp_path / "arrays")
    shared.write({"w": torch.arange(16.0)})
    assert torch.equal(load_file(shared.file)["w"], torch.arange(16.0))
    for damaged in (
        b"",
        b"\x10",
        (999).to_bytes(8, "little"),
        b"\x02" + bytes(7) + b"[]",
        b"\x08" + bytes(7) + b'{"w": 1}',
    ):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(EngineError, match="bad does not hold arrays"):
            SharedTensorFile(tmp_path / "bad").read()
    with pytest.raises(EngineError):
        SharedTensorFile(tmp_path / "nowhere").read()


def test_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"Ray is not installed.*descant\[ray\]"):
        make_federation("FedAvg", Ray()).fit(1, progress=False)


@pytest.mark.parametrize("address", ["10.0.0.5:6379", "ray://cluster.example:10001", "[2001:db8::1]:6379", "0.0.0.0:1"])
def test_remote_cluster_without_a_token_is_rejected(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match="anyone who reaches a cluster without a token can run code on it"):
        make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(EngineError, match="not installed"):
        make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "LOCALHOST:6379", "[::1]:6379", "ray://localhost:1", "auto"])
def test_local_cluster_needs_no_token(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match="not installed"):
        make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "[::1:1", ""]
)
def test_invalid_cluster_address_is_rejected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        SettingError, match=rf"address of a Ray cluster must be host:port.* Got {re.escape(repr(address))}"
    ):
        make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://localhost:{}"])
def test_unreachable_cluster_address_is_reported_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would retry for minutes."""

    def init(**settings: Any) -> None:
        raise ConnectionError(f"Ray was asked for {settings['address']}")

    failing = SimpleNamespace(RayError=ConnectionError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=bool, init=init, exceptions=failing))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = form.format(held.getsockname()[1])
        with pytest.raises(EngineError, match=f"Nothing answers at {address}: .*ray start --head"):
            make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)
        held.listen()
        with pytest.raises(EngineError, match=f"Ray was asked for {address}"):
            make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)


def test_worker_cannot_start_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_ENV, "1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match="Put that part of it under `if __name__"):
        make_federation("FedAvg", Ray()).fit(1, progress=False)


def test_generated_token_does_not_open_another_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("descant.engines.ray.ray_cluster._CREATED_TOKENS", ["1" * 64])
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    for address in ("10.0.0.5:6379", "auto"):
        with pytest.raises(SettingError, match="there is no token for it"):
            make_federation("FedAvg", Ray(address=address)).fit(1, progress=False)


def test_shared_arrays_are_sent_once() -> None:
    fed = make_federation("FedAvgPlus", InProcess)
    hypers = {name: Sgd().hyper for name in fed.population}
    tasks = list(make_tasks(fed.plan_, fed.state, hypers, kind="train", index=1))
    batch = RayTaskBatch(tasks, [{"moments": torch.ones(3)} for _ in tasks])
    shared = batch.shared_arrays
    assert batch.shared_keys == set(shared)
    model = tasks[0].arrays["global_model"]
    assert sum(array.numel() == model.numel() and torch.equal(array, model) for array in shared.values()) == 1
    for rows in (range(2), range(2, 6)):
        fields, own = unpack_from_ray(pack_for_ray(*batch.piece_payload(rows)))
        again = [from_fields(one, {**shared, **own}, Task) for one in fields["tasks"]]
        for task, other in zip(tasks[rows.start : rows.stop], again, strict=True):
            assert other.party == task.party and other.settings == task.settings
            assert all(torch.equal(other.arrays[name], array) for name, array in task.arrays.items())
        assert not set(own) & batch.shared_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_packed_arrays_are_unpacked_unchanged(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    whole = torch.arange(2 * math.prod(shape)).view(2, *shape).to(dtype)
    fields, arrays = unpack_from_ray(
        pack_for_ray({"a": [1, None]}, {"row": whole[1]})
    )  # it shares its storage with another row
    assert fields == {"a": [1, None]} and arrays["row"].dtype == dtype
    assert torch.equal(arrays["row"], whole[1])
    arrays["row"].zero_()
    assert torch.equal(whole[1], torch.arange(2 * math.prod(shape)).view(2, *shape).to(dtype)[1])
