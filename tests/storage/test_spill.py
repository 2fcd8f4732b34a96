"""Stacks beyond the memory budget lie in unnamed files, with the same numbers and no remains."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from descant import Federation, Sgd, algorithms
from descant.core.messages import Reply
from descant.errors import EngineError, StateError
from descant.serialization.wire import pack, pack_or_spill, unpack
from descant.storage import PartyStore, spill
from descant.storage.spill import SpillFile, spill_buffer
from test_deployment_in_memory import (
    PARTY_NAMES,
    InMemoryTransport,
    assert_same_models,
    deployed_federation,
    recipe_for,
    silo_handlers,
    simulated_federation,
    to_spill_file,
)
from toy_problems import METHODS, classification_parties, network

EXTRA_METHODS = {"late": lambda: algorithms.FedBuff(2), "over all": lambda: METHODS["FedPlus, over all"]()}


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Record the size of each mapped file, and put temporary files in a separate folder."""
    sizes: list[int] = []

    def counting(descriptor: int, size: int) -> None:
        sizes.append(size)
        reserve(descriptor, size)

    reserve = spill.reserve
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(spill, "reserve", counting)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return sizes


@pytest.mark.parametrize("method", ["fedavg", "comed", "rfa", "fedgeomed+"])
def test_replies_beyond_the_budget_go_to_files_and_change_nothing(
    tmp_path: Path, mapped: list[int], method: str
) -> None:
    fed = deployed_federation(InMemoryTransport(silo_handlers(tmp_path / "silos")), recipe_for(method))
    fed.memory_budget = 0
    for _ in fed.rounds(3):
        named = [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
        assert not [path for path in named if path.suffix != ".safetensors"]  # those are what parties keep
    model = fed.plan_.net.layout.width * 4
    first, *tried = mapped[:-4]
    padded = {4 * -(-model // 64) * 16 * rows for rows in (1, 2)}
    assert first == model and set(tried) <= {model, *padded}  # a copy to be tried, and how it is computed
    assert mapped[-4:] == [
        2 * model,
        *[len(PARTY_NAMES) * model] * 3,
    ]  # two to rehearse with, and the stack of every round
    assert_same_models(fed, simulated_federation(recipe_for(method), 3))


@pytest.mark.parametrize("name", [*METHODS, *EXTRA_METHODS])
def test_spilled_stacks_give_the_same_hash_for_every_method(mapped: list[int], name: str) -> None:
    def hashed(budget: int) -> str:
        make = {**METHODS, **EXTRA_METHODS}[name]
        solver = Sgd(lr=0.05, steps=2, batch=4)
        return (
            Federation(network(), classification_parties(5), make(), solver=solver, memory_budget=budget)
            .fit(2, progress=False)
            .hash()
        )

    assert hashed(2**30) == hashed(0) and mapped


def test_kill_leaves_no_spill_file(tmp_path: Path) -> None:
    fill = "from descant.storage.spill import spill_buffer; spill_buffer((2**20,), torch.float32, 0).fill_(1)"
    command = [sys.executable, "-c", f"import os, torch; {fill}; os.kill(os.getpid(), 9)"]
    where = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(tmp_path.iterdir())


def test_party_state_beyond_the_budget_is_staged_and_copied_in_files(mapped: list[int]) -> None:
    rows = {name: torch.randn(2**18 + 1) for name in "abc"}  # a little over 1 MB each
    size = rows["a"].nbytes
    roomy = PartyStore(2**30)
    small = PartyStore(size)
    for store in (roomy, small):
        for name, row in rows.items():
            store.stage(name, {"model": row})
        store.commit(1, list(rows))
    assert mapped == [size]  # the third, when the first two were already too many
    for name, row in rows.items():
        given = small.get(name)["model"]
        assert given.equal(row) and roomy.get(name)["model"].equal(row)
        given.zero_()  # a copy
        assert small.get(name)["model"].equal(row)
    assert mapped == [size] * 7


@pytest.mark.parametrize("place", [True, False], ids=["mapped", "read"])
def test_message_in_a_file_unpacks_equal_and_outlives_the_file(monkeypatch: pytest.MonkeyPatch, place: bool) -> None:
    if not place:  # a system that gives its files no names by their numbers
        monkeypatch.setattr(SpillFile, "path", None)
    arrays = {"w": torch.randn(300, 7), "b": torch.arange(5.0).double(), "none": torch.empty(0, 3)}
    report = Reply("a", 3, "train", arrays=arrays, metrics={"loss": 1.5}, encrypted_coreset=b"closed")
    file = to_spill_file(pack(report))
    found = unpack(file, Reply)
    del file
    assert replace(found, arrays={}) == replace(report, arrays={}) and found.arrays.keys() == arrays.keys()
    assert all(found.arrays[name].equal(tensor) for name, tensor in arrays.items())


def test_message_file_damaged_at_any_byte_is_rejected() -> None:
    whole = pack(Reply("a", 3, "train", arrays={"w": torch.randn(30)}, metrics={"loss": 1.5}))
    for at in range(0, len(whole), 3):
        with pytest.raises(EngineError, match=f"These {at} bytes"):
            unpack(to_spill_file(whole[:at]), Reply)
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises(EngineError):
            unpack(to_spill_file(flipped), Reply)


def test_full_disk_while_a_message_is_spilled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    filed = SpillFile()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StateError, match=r"1 MB for models cannot be allocated in .*No space left.*TMPDIR"):
        filed.append(bytes(10**6))
    with pytest.raises(StateError, match=r"cannot be allocated in .*No space left.*TMPDIR"):
        pack_or_spill(0, Reply("a", 3, "train", arrays={"w": torch.randn(30)}))


def test_full_disk_is_an_error_before_a_buffer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(StateError, match=r"8 MB for models cannot be allocated in .*No space left.*TMPDIR"):
        spill_buffer((2, 10**6), torch.float32, 0)


def test_message_packed_into_a_file_has_the_same_bytes() -> None:
    whole = torch.randn(4, 6)
    arrays = {"0ß": whole[1], "1": whole.T, "half": torch.randn(3).half(), "wide": torch.randn(2, 2).double()}
    arrays |= {"none": torch.empty(0, 3), "one": torch.tensor(7), "yes": torch.tensor([True]), "again": whole[1]}
    arrays |= {"narrow": torch.randn(5).bfloat16(), "bytes": torch.arange(9, dtype=torch.uint8)}
    report = Reply(
        'Zoë "a"\n', 3, "train", arrays=arrays, metrics={"loss": 1.5}, encrypted_coreset=b"closed", reason="µ"
    )
    made = pack_or_spill(0, report)
    assert isinstance(made, SpillFile) and made[:] == made.memory_map()[:] == pack(report)
    assert pack_or_spill(2**20, report) == pack(report)


DRIVER = """
import sys, torch
from descant import Federation, Sgd, algorithms, models
from descant.core.messages import Reply, Task
from descant.engines.remote import Silos
from descant.parties.remote_parties import remote_population
from descant.tracking import Run
from descant.deployment.server.training_session import MEMORY_BUDGET
from descant.storage.party_store import release_memory_eagerly
from descant.serialization.wire import pack_or_spill, unpack

class EchoTransport:  # its parties return the global model; no task and no reply is in memory
    def __init__(self):
        self.replies = {}

    def connected_parties(self):
        return {"a": "first", "b": "first", "c": "first"}

    def departed_parties(self):
        return ()

    def send(self, party, payload, ttl):
        task = unpack(payload, Task)
        arrays = self.layout.split(task.arrays["global_model"])
        reply = Reply(party, task.round, "train", arrays=arrays, metrics={"samples": 8, "loss": 1.0})
        self.replies[party] = pack_or_spill(0, reply)
        return party

    def fetch_replies(self, message_ids, max_bytes):
        return {message_id: self.replies.pop(message_id) for message_id in message_ids}

    def discard(self, message_ids):
        pass

def train(width, folder):
    description = {"x": [width], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 8, "test_count": 0}
    transport = EchoTransport()
    population = remote_population(dict.fromkeys("abc", description))
    settings = {"solver": Sgd(steps=1, batch=2), "engine": Silos(transport, log=print), "memory_budget": MEMORY_BUDGET}
    fed = Federation(lambda: models.mlp(width, 10, (width,) * 4), population, algorithms.FedAvg(), **settings)
    transport.layout = fed.plan_.net.layout
    with Run.start(folder, fed, "", "always") as run:
        for _ in run.rounds(2):
            pass

release_memory_eagerly()
train(10, sys.argv[1] + "/small")  # late imports are done here
print("small", flush=True)
sys.stdin.readline()
train(1581, sys.argv[1] + "/large")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count of memory is read")
def test_server_holds_at_most_two_models_and_some_columns_in_memory(tmp_path: Path) -> None:
    """Of 40 MB each, from before the first to the last round: the global model and the next one."""
    model = 4 * (4 * 1581 * 1582 + 10 * 1582)
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        assert driver.stdout.readline() == "small\n"
        before = most = anonymous(driver.pid)
        driver.stdin.write("\n")
        driver.stdin.close()
        while driver.poll() is None:
            most = max(most, anonymous(driver.pid))
            time.sleep(0.002)
    assert driver.returncode == 0
    assert model < most - before < 2.75 * model


def anonymous(process: int) -> int:
    """Return the anonymous RSS of a process; 0 if it has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
