"""Faults between a server and its silos, each with its outcome; docs/faults.md lists them all."""

from __future__ import annotations

import importlib.metadata
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import descant
from descant import DescantWarning, Federation
from descant.algorithms import Timetable
from descant.config import read_recipe
from descant.core.messages import Reply, Task
from descant.core.timeouts import WaitLimits
from descant.deployment.flower.flower_connection import (
    FLOWER_ENVIRONMENT,
    ConnectionRejected,
    PeerUnavailable,
    SessionInUse,
    require_flower,
)
from descant.deployment.pki.roster import Roster
from descant.deployment.server import HandshakeTransport
from descant.deployment.server.row_erasure import erase_rows, vault_location
from descant.deployment.server.serve import revoked_parties
from descant.deployment.server.training_session import TrainingSession, round_summary
from descant.deployment.server.vault_settings import checked_vault_settings
from descant.deployment.silo import SiloFile, TaskHandler, console_messages, join
from descant.deployment.silo.join import run_silo
from descant.deployment.silo.silo_worker import SiloWorker
from descant.engines.remote import UndeliveredError
from descant.errors import EngineError, StateError
from descant.models.flat import Net
from descant.parties import from_arrays
from descant.serialization.references import address_of
from descant.serialization.wire import MessageBytes, pack, unpack
from descant.storage import atomic
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import Run, is_run, read_run
from silo_file_templates import LEAKING_SILO_FILE, MODEL_AND_METHOD_TABLES, ROWS_SILO_FILE, canary_bytes
from test_deployment_in_memory import (
    PARTY_NAMES,
    InMemoryTransport,
    assert_same_models,
    deployed_federation,
    recipe_for,
    silo_handlers,
    simulated_federation,
)
from toy_problems import classification_parties, network
from write_faults import SimulatedCrash, disk_full_error, inject_faults

ROUNDS = 2
TWO = PARTY_NAMES[:2]


@pytest.fixture
def fast_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: a killed process, unlike a machine, loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_flipped_bit_anywhere_in_a_reply_is_rejected(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    payloads = list[bytes]()
    draw = random.Random(0)

    def corrupt(task: Task, payload: bytes) -> bytes:
        if task.party != "1" or task.kind != "train":
            return payload
        payloads.append(payload)
        return flipped(payload, draw.randrange(8 * len(payload)))

    transport.corrupt_reply = corrupt
    with pytest.warns(DescantWarning, match="rejected"):
        fed = deployed_federation(transport, recipe_for("fedavg")).fit(2, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1", "1"]
    for at in draw.sample(range(8 * len(payloads[0])), 2000):
        with pytest.raises(EngineError, match="not a Reply"):
            unpack(flipped(payloads[0], at), Reply)


def test_packing_a_task_is_deterministic() -> None:
    """A silo recognizes a repeated task by its bytes."""
    task = Task(
        "0",
        1,
        "train",
        arrays={"personal": torch.ones(2), "global_model": torch.zeros(3)},
        settings={"seed": 1, "execution_mode": "looped"},
    )
    assert len({pack(task) for _ in range(50)}) == 1


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def make_handshakes(transport: InMemoryTransport, log_lines: list[str]) -> HandshakeTransport:
    loss = address_of(torch.nn.functional.cross_entropy)
    return HandshakeTransport(
        transport, recipe_for(), "lab", net=Net.from_model(network, 0), loss=loss, log=log_lines.append
    )


def test_the_wait_for_returning_parties_has_a_timeout(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    handshakes = make_handshakes(transport, [])
    looks = count()
    original = transport.connected_parties
    transport.unreachable = {"1", "2"}

    def connected_parties() -> Any:
        transport.unreachable -= {"1"} if next(looks) > 3 else set()
        return original()

    transport.connected_parties = connected_parties  # type: ignore[method-assign]
    handshakes.wait_for(["0", "1"], 600.0)
    assert transport.unreachable == {"2"} and next(looks) < 20
    handshakes.wait_for(["0", "2"], 0.3)
    assert transport.unreachable == {"2"}


def test_a_silo_with_another_version_is_rejected_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    older_task = [
        pack(Task("0", 0, "handshake", arrays={}, settings={"recipe": {}, "federation": "lab", "version": "0.0.1"}))
    ]
    reply = unpack(transport.handlers["0"]().answer(older_task[0]), Reply)
    assert reply.status == "declined" and "'0.0.1'" in reply.reason and descant.__version__ in reply.reason

    def corrupt(task: Task, payload: bytes) -> bytes:
        reply = unpack(payload, Reply)
        lie = {"version": "0.0.1"} if task.party == "0" else {}
        return pack(replace(reply, metrics={**reply.metrics, **lie}))

    transport.corrupt_reply = corrupt
    assert make_handshakes(transport, log_lines).wait_for_quorum(3).keys() == {"1", "2", "3"}
    assert any("0 has connected and cannot take part: its version is '0.0.1'" in text for text in log_lines)


@pytest.mark.parametrize("version", ["1.41.0", "1.41.7", "1.41", "1.40.9", "1.42.0", "1.410.0", "2.41.0", ""])
def test_only_tested_flower_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Telemetry and downloads are off before any module of Flower is imported."""

    def installed_version(name: str) -> str:
        if not version:
            raise PackageNotFoundError(name)
        return version

    for name in FLOWER_ENVIRONMENT:
        monkeypatch.setenv(name, "as the machine has it")
    monkeypatch.setattr(importlib.metadata, "version", installed_version)
    if f"{version}.".startswith("1.41."):
        require_flower()
    else:
        message = f"made for flwr 1.41, and {version} is installed. pip install" if version else "pip install"
        with pytest.raises(EngineError, match=re.escape(message)):
            require_flower()
    assert {name: os.environ[name] for name in FLOWER_ENVIRONMENT} == FLOWER_ENVIRONMENT


def test_a_silo_with_another_model_is_rejected_with_both_fingerprints(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    other = ROWS_SILO_FILE.format(name="0").replace("return network()", "import torch; return torch.nn.Linear(6, 3)")
    (tmp_path / "team0.py").write_text(other)
    assert make_handshakes(transport, log_lines).wait_for_quorum(3).keys() == {"1", "2", "3"}
    [connection] = [text for text in log_lines if "cannot take part" in text]
    ours, theirs = (Net.from_model(model, 0).layout.digest for model in (network, lambda: torch.nn.Linear(6, 3)))
    assert f"this party is {theirs} (weight, bias: 21 parameters)" in connection
    assert f"the federation's {ours} (0.weight, 0.bias, 2.weight, 2.bias: 53 parameters)" in connection


class FakeConnection:
    """A silo's connection that delivers some tasks and then nothing."""

    def __init__(self, packed_tasks: list[bytes], stop: threading.Event) -> None:
        self.payloads = packed_tasks
        self.stop = stop
        self.answers = list[bytes]()

    def session(self) -> Any:
        return nullcontext()

    def pull(self) -> tuple[str, bytes] | None:
        if not self.payloads:
            self.stop.set()
            return None
        return "", self.payloads.pop(0)

    def push(self, request: str, payload: bytes) -> None:
        self.answers.append(payload)


def test_a_second_machine_does_not_learn_the_machine_id_of_the_first(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path, ("0",)))
    log_lines = list[str]()
    (tmp_path / "recipe.toml").write_text("")
    roster = Roster.create(tmp_path / "lab", tmp_path / "recipe.toml")
    roster.invite("0", tmp_path / "0.invite")
    roster.record_join("0", "the mark of the first")
    loss = address_of(torch.nn.functional.cross_entropy)
    handshakes = HandshakeTransport(
        transport,
        recipe_for(),
        "lab",
        net=Net.from_model(network, 0),
        loss=loss,
        log=log_lines.append,
        record_join=roster.record_join,
    )
    assert not handshakes.connected_parties()
    assert any("used in two places" in text for text in log_lines)
    [(_, packed_task)] = transport.messages.values()
    assert "another machine" in unpack(packed_task, Task).settings["reason"] and b"the mark" not in packed_task


def test_a_rejected_silo_logs_the_reason_and_ends(tmp_path: Path) -> None:
    """The goodbye to a rejected party reaches the silo's own command."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    transport.corrupt_reply = lambda task, payload: pack(replace(unpack(payload, Reply), metrics={}))
    handshakes = make_handshakes(transport, [])
    handshakes.connected_parties()
    [packed_task] = [packed_task for party, packed_task in transport.messages.values() if party == "0"]
    worker = SiloWorker(tmp_path / "team0.py", "0", tmp_path / "at", log=lambda text: None)
    stop = threading.Event()
    with pytest.raises(ConnectionRejected, match="cannot take part: its layout is None, and the federation's is"):
        run_silo(FakeConnection([packed_task], stop), worker, stop, log=lambda text: None)


def test_an_internal_server_error_reveals_no_file_names(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path, ("0",)))

    def damaged(party: str, machine: str) -> None:
        raise StateError("lab/audit.jsonl is damaged")

    loss = address_of(torch.nn.functional.cross_entropy)
    handshakes = HandshakeTransport(
        transport,
        recipe_for(),
        "lab",
        net=Net.from_model(network, 0),
        loss=loss,
        log=lambda text: None,
        record_join=damaged,
    )
    assert not handshakes.connected_parties()
    [(_, packed_task)] = transport.messages.values()
    assert (
        "internal error of the server" in unpack(packed_task, Task).settings["reason"] and b"audit" not in packed_task
    )


def test_silos_end_in_order_when_the_training_is_finished(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path, ("0",)))
    log_lines = list[str]()
    make_handshakes(transport, []).send_goodbyes(transport.connected_parties(), 7)
    [(_, packed_task)] = transport.messages.values()
    worker = SiloWorker(tmp_path / "team0.py", "0", tmp_path / "at", log=log_lines.append)
    stop = threading.Event()
    run_silo(FakeConnection([packed_task], stop), worker, stop, log=log_lines.append)
    assert log_lines[-1] == "The training is finished after 7 rounds."


def test_a_party_at_its_daily_limit_disconnects_until_the_next_day(tmp_path: Path) -> None:
    """So a federation whose silos all pause waits for them and does not use up its rounds."""
    (tmp_path / "team0.py").write_text(ROWS_SILO_FILE.format(name="0") + 'policy = {"rounds_a_day": 1}\n')
    handler = TaskHandler(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at", lambda text: None)
    log_lines = list[str]()
    stop = RecordingEvent()
    layout = Net.from_model(network, 0).layout
    handshake = {"recipe": {**recipe_for().tables, "model": {}}, "federation": "lab", "layout": layout.digest}
    settings = {"seed": 5, "execution_mode": "looped", "layout": layout.digest, "lr": 0.1, "work": 1, "accepted": 0}
    arrays = {"global_model": torch.zeros(layout.width), "personal": torch.zeros(layout.width)}
    packed_tasks = [pack(Task("0", 0, "handshake", arrays={}, settings=handshake))]
    packed_tasks += [pack(Task("0", round, "train", arrays=arrays, settings=settings)) for round in (1, 2, 3)]
    connection = FakeConnection(packed_tasks, stop)
    run_silo(connection, handler, stop, log=log_lines.append)
    assert stop.waited and 0 < stop.waited[-1] <= 24 * 3600 and "Reconnecting in" in log_lines[-1]
    assert len(connection.payloads) == 1


class RecordingEvent(threading.Event):
    """An event that records the first timeout waited for, and is set by it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        self.set()
        return True


class OutageConnection(FakeConnection):
    """A connection to a server that is down for some seconds of a clock, and then sends nothing."""

    def __init__(self, stop: threading.Event, clock: list[float], reasons: dict[float, str]) -> None:
        super().__init__([], stop)
        self.clock = clock
        self.reasons = reasons

    def session(self) -> Any:
        for end, why in self.reasons.items():
            if self.clock[0] < end:
                raise PeerUnavailable(why)
        return super().session()


@pytest.mark.parametrize(
    ("reasons", "log_times"),
    [
        ({3000.0: "It is not ready"}, [0, 31, 151, 751, 1351, 1951, 2551]),  # it retries every 30 s at most
        ({70.0: "It is not ready", 3000.0: "It is dead"}, [0, 31, 91, 691, 1291, 1891, 2491]),
    ],
    ids=["one reason", "another one meanwhile"],
)
def test_a_long_outage_is_logged_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, reasons: dict[float, str], log_times: list[float]
) -> None:
    clock = [0.0]
    log_lines = list[tuple[float, str]]()
    stop = threading.Event()
    monkeypatch.setattr(console_messages.time, "monotonic", lambda: clock[0])

    def wait(timeout: float | None = None) -> bool:
        clock[0] += timeout or 0.0
        return stop.is_set()

    stop.wait = wait  # type: ignore[method-assign]
    run_silo(
        OutageConnection(stop, clock, reasons),
        SiloWorker(Path(), "0", Path()),
        stop,
        log=lambda text: log_lines.append((clock[0], text)),
    )
    assert [at for at, _ in log_lines[:-1]] == log_times
    assert [text.partition(".")[0] for _, text in log_lines[:3:2]] == [*reasons.values()] * (2 // len(reasons))
    assert "Away for 31 s" in log_lines[1][1]
    assert log_lines[-1][1].startswith("Joined. The server was away for 50 min. Waiting for work")


@pytest.mark.parametrize(
    ("why", "is_ended"), [(SessionInUse("It is taken"), True), (PeerUnavailable("It is not known"), False)]
)
def test_a_silo_ends_when_its_session_stays_in_use_and_waits_when_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, why: PeerUnavailable, is_ended: bool
) -> None:
    """A party's own previous session expires within 20 s; the clock advances by a second per attempt."""
    clock = [0.0]
    stop = threading.Event()
    monkeypatch.setattr(join.time, "monotonic", lambda: clock[0])

    def kept_out() -> Any:
        clock[0] += 1
        if clock[0] == 20:
            raise PeerUnavailable("The server is not ready")  # so the session in use may have been our own
        stop.set() if clock[0] > 300 else None
        raise why

    stop.wait = lambda timeout=None: stop.is_set()  # type: ignore[method-assign]
    connection = SimpleNamespace(session=kept_out)
    with pytest.raises(ConnectionRejected, match=r"in use in another place.*silo leave") if is_ended else nullcontext():
        assert not run_silo(cast(Any, connection), SiloWorker(Path(), "0", Path()), stop, log=lambda text: None)
    assert clock == [62.0 if is_ended else 301.0]


DYING_SILO_FILE = ROWS_SILO_FILE.format(name="0") + "\nimport os, pathlib\n"
DYING_SILO_FILE += "if not (mark := pathlib.Path(__file__ + '.mark')).exists(): mark.touch(); os._exit(9)\n"


def test_a_worker_that_dies_in_the_handshake_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    )
    (tmp_path / "team0.py").write_text(DYING_SILO_FILE)
    log_lines: list[str] = []
    worker = SiloWorker(tmp_path / "team0.py", "0", tmp_path / "at", log=log_lines.append)
    tables = {**recipe_for().tables, "model": {}}
    handshake = {"recipe": tables, "federation": "lab", "layout": Net.from_model(network, 0).layout.digest}
    try:
        reply = unpack(worker.answer(pack(Task("0", 0, "handshake", arrays={}, settings=handshake))), Reply)
    finally:
        worker.close()
    assert reply.status == "ok", reply.reason
    assert len(log_lines) == 1 and "exited with 9" in log_lines[0]


def serve(folder: Path, transport: InMemoryTransport | None = None) -> Federation:
    """Start or continue a run up to its last round, as `descant server start` does, with new handlers."""
    fed = deployed_federation(
        transport or InMemoryTransport(silo_handlers(folder / "silos", TWO)), recipe_for("fedgeomed+")
    )
    folder = folder / "run"
    with Run.resume(folder, fed) if is_run(folder) else Run.start(folder, fed, "", "always") as run:
        for _ in run.rounds(ROUNDS - run.round, score_every=1):
            pass
    return fed


@pytest.mark.usefixtures("fast_io")
def test_a_kill_at_any_write_leads_to_the_same_models(tmp_path: Path) -> None:
    """Kill driver and silos together at every other write, or during it; single writes have their own tests."""
    twin = simulated_federation(recipe_for(), ROUNDS, TWO)
    hashes = set[str]()
    kills = 0
    for n in count(0, 2):
        folder = tmp_path / str(n)
        (folder / "silos").mkdir(parents=True)
        with inject_faults(n, tear_write=bool(n % 4)) as found, suppress(SimulatedCrash):
            serve(folder)
        fed = serve(folder)
        assert_same_models(fed, twin, TWO)
        hashes.add(fed.hash())
        assert read_run(folder / "run").numbers.rounds.tolist() == [1, 2]
        shutil.rmtree(folder)
        if not found.reached:
            break
        kills += 1
    assert kills > 50 and len(hashes) == 1


class FullDiskHandler(TaskHandler):
    """A handler whose disk is full after some writes."""

    writes = 0

    def answer(self, payload: bytes) -> bytes:
        with inject_faults(self.writes, tear_write=True, error=disk_full_error) as fault:
            payload = super().answer(payload)
        assert fault.reached
        return payload


@pytest.mark.parametrize("writes", [0, 2, 5, 8])
def test_a_full_disk_at_a_silo_costs_only_that_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    monkeypatch.setattr(FullDiskHandler, "writes", writes)
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    sound = transport.handlers["1"]
    file = SiloFile(tmp_path / "team1.py", "1")
    fed = deployed_federation(transport, recipe_for("fedavg")).fit(1, progress=False)
    transport.handlers["1"] = lambda: FullDiskHandler(file, tmp_path / "at-1", log_lines.append)
    with pytest.warns(DescantWarning, match="rejected"):
        fed.fit(1, progress=False)
    [rejection] = fed.rejections_
    assert rejection.party == "1" and "StateError" in rejection.reason and str(tmp_path) not in rejection.reason
    assert any("No space left" in text and "free some space" in text for text in log_lines)
    transport.handlers["1"] = sound
    for round in fed.rounds(2):
        assert len(round.round.accepted) == 4 and not round.round.metrics["1"].get("state_reset")


@pytest.mark.usefixtures("fast_io")
@pytest.mark.parametrize("n", [0, 7, 20, 40, 55])
def test_a_full_disk_at_the_server_is_reported_and_the_same_command_continues(tmp_path: Path, n: int) -> None:
    (tmp_path / "silos").mkdir()
    transport = InMemoryTransport(silo_handlers(tmp_path / "silos", TWO))
    sound = atomic._do
    answering = transport.fetch_replies

    def fetch(numbers: Collection[str], most: int) -> dict[str, MessageBytes | UndeliveredError]:
        before = atomic._do  # silos have their own disks, which are not full
        atomic._do = sound
        try:
            return answering(numbers, most)
        finally:
            atomic._do = before

    transport.fetch_replies = fetch  # type: ignore[method-assign]
    with (
        inject_faults(n, tear_write=True, error=disk_full_error) as found,
        pytest.raises(StateError, match=r"No space left.*free some space"),
    ):
        serve(tmp_path, transport)
    assert found.reached
    assert_same_models(serve(tmp_path), simulated_federation(recipe_for(), ROUNDS, TWO), TWO)


class DelayedTransport(InMemoryTransport):
    """A transport where party 1 replies on every sixth poll; the server's clock jumps at every poll."""

    def __init__(self, makers: dict[str, Callable[[], TaskHandler]], jump: Callable[[], None]) -> None:
        super().__init__(makers)
        self.jump = jump
        self.looks = 0

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        self.looks += 1
        self.jump()
        held = [number for number in message_ids if self.messages.get(number, ("",))[0] != "1" or self.looks % 6 == 0]
        return super().fetch_replies(held, max_bytes)


@pytest.mark.parametrize("jump", [-3e7, 3e7], ids=["back", "ahead"])
def test_a_clock_jump_of_a_year_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Deadlines use a monotonic clock: a jump of the wall clock ends no wait."""
    true = time.time
    jumps = count(1)
    transport = DelayedTransport(
        silo_handlers(tmp_path),
        lambda: monkeypatch.setattr(time, "time", partial(shifted_time, true, next(jumps) * jump)),
    )
    fed = deployed_federation(transport, recipe_for(), WaitLimits(deadline=60, quorum=3)).fit(3, progress=False)
    assert next(jumps) > 6 and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


def test_a_deadline_passes_while_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = time.time
    polls = count(1)

    def back() -> None:
        poll = next(polls)
        assert poll < 30, "the deadline must have passed"
        monkeypatch.setattr(time, "time", partial(shifted_time, true, -3e7 * poll))

    transport = DelayedTransport(silo_handlers(tmp_path), back)
    fed = deployed_federation(transport, recipe_for(), WaitLimits(deadline=0.3, quorum=3))
    transport.corrupt_reply = lambda task, payload: None if task.party == "1" else payload
    with pytest.warns(DescantWarning, match="went on without it"):
        assert [round.round.accepted for round in fed.rounds(1)] == [("0", "2", "3")]


def shifted_time(true: Callable[[], float], seconds: float) -> float:
    return true() + seconds


def federation_with_vault(
    folder: Path, transport: InMemoryTransport, log: Callable[[str], None] = len
) -> tuple[Roster, Federation]:
    """Return a federation with coreset proxies and a vault, as `descant server start` builds it."""
    key = PrivateKey.new()
    key.write(folder / "key")
    Vault.create(folder / "vault", key, "lab")
    text = "[run]\nseed = 5\nrounds = 9\n" + MODEL_AND_METHOD_TABLES.format(method="fedavg")
    text += '[[wrap]]\nwrapper = "coreset_proxies"\nshare = 0.4\n'
    text += f"[vault]\nfolder = '{folder / 'vault'}'\nkey = '{folder / 'key'}'\n"
    (folder / "recipe.toml").write_text(text)
    roster = Roster.create(folder / "lab", folder / "recipe.toml")
    recipe = read_recipe(folder / "recipe.toml")
    for name in PARTY_NAMES:
        roster.invite(name, folder / f"{name}.invite")
    loss = address_of(torch.nn.functional.cross_entropy)
    forget = partial(erase_rows, vault_location(recipe))
    handshakes = HandshakeTransport(
        transport,
        recipe,
        "lab",
        net=Net.from_model(network, 0),
        loss=loss,
        log=log,
        record_join=roster.record_join,
        erase_rows=forget,
    )
    handshakes.wait_for_quorum(len(PARTY_NAMES))
    settings = checked_vault_settings(recipe, with_key=True)
    training = TrainingSession(
        roster.run_folder,
        recipe,
        handshakes,
        limits=WaitLimits(grace=0),
        log=log,
        excluded=partial(revoked_parties, roster),
        vault_settings=settings,
    )
    return roster, training._build_federation(training._initial_descriptions(lambda: PARTY_NAMES))


def silos_with_row_policy(folder: Path) -> dict[str, Callable[[], TaskHandler]]:
    """Return handlers of silos that share up to half of their rows as a coreset."""
    found = silo_handlers(folder)
    for name in PARTY_NAMES:
        with (folder / f"team{name}.py").open("a") as file:
            file.write('\npolicy = {"share": 0.5}\n')
    return found


AWAY = {3: {"1"}, 4: {"1", "2"}, 6: {"0"}}  # the unreachable parties by round


def test_deployed_coreset_proxies_equal_the_simulation(tmp_path: Path) -> None:
    """Proxies train for absent parties; with the same timetable the simulation gives the same models."""
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    _, fed = federation_with_vault(tmp_path, transport)
    for round in fed.rounds(7):
        transport.unreachable = AWAY.get(round.index + 1, set())
    assert not fed.rejections_
    assert [entry["presence"] for entry in fed.history_] == ["pppp", "pppp", "pspp", "pssp", "pppp", "sppp", "pppp"]
    payloads = [
        {"party": name, "from": n, "to": n} for n in range(1, 8) for name in PARTY_NAMES if name not in AWAY.get(n, ())
    ]
    population = from_arrays(
        {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(PARTY_NAMES).items()}
    )
    algorithm = read_recipe(tmp_path / "recipe.toml").algorithm()
    solver = recipe_for().solver()
    twin = Federation(
        network, population, algorithm, participation=Timetable.from_records(payloads), solver=solver, seed=5
    )
    assert_same_models(fed, twin.fit(7, progress=False))


def test_a_reply_may_be_as_long_as_model_and_agreed_coreset(tmp_path: Path) -> None:
    """A vault does not allow more bytes than the requested rows need."""
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))

    def corrupt(task: Task, payload: bytes) -> bytes:
        reply = unpack(payload, Reply)
        long = task.party == "1" and task.kind == "train"
        return pack(replace(reply, encrypted_coreset=bytes(2**22))) if long else payload

    transport.corrupt_reply = corrupt
    _, fed = federation_with_vault(tmp_path, transport)
    with pytest.warns(DescantWarning, match=r"its reply has \d+ bytes, and the limit is 1\d{6}\."):
        fed.fit(1, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1"]


@pytest.mark.parametrize("how", ["revoked", "forgotten"])
def test_no_proxy_trains_for_a_revoked_or_forgotten_party(tmp_path: Path, how: str) -> None:
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    roster, fed = federation_with_vault(tmp_path, transport)
    fed.fit(1, progress=False)
    transport.unreachable = {"1"}
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pspp"
    if how == "revoked":
        roster.revoke("1")
    else:
        Vault(tmp_path / "vault").forget("1")
    with pytest.warns(DescantWarning, match=f"party '1': .*{how}"):
        fed.fit(1, progress=False)
    assert fed.history_[-1]["presence"] == "papp" and fed.history_[-1]["change"] > 0


class SlowTransport(InMemoryTransport):
    """A transport that holds back the replies of slow parties and records the tasks of party 3."""

    slow: Collection[str] = ()

    def __init__(self, makers: dict[str, Callable[[], TaskHandler]]) -> None:
        super().__init__(makers)
        self.sent: list[tuple[str, str, int]] = []

    def send(self, party: str, payload: bytes, ttl: float) -> str:
        task = unpack(payload, Task)
        self.sent += [(party, task.kind, task.round)] if party == "3" else []
        return super().send(party, payload, ttl)

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        return super().fetch_replies(
            [one for one in message_ids if self.messages.get(one, ("",))[0] not in self.slow], max_bytes
        )


BUFFERED = "[run]\nseed = 5\n" + MODEL_AND_METHOD_TABLES.format(method="fedbuff") + "buffer_size = 3\n"


@pytest.mark.parametrize("evaluated_rounds", [(), (1,), (2,), (3,)], ids=str)
def test_fedbuff_continues_without_slow_parties_and_counts_them_later(
    tmp_path: Path, evaluated_rounds: Collection[int]
) -> None:
    """FedBuff: a pending task is not sent twice, and its reply counts with its staleness.

    An evaluation in between changes nothing.
    """
    transport = SlowTransport(silo_handlers(tmp_path))
    fed = deployed_federation(transport, read_recipe(BUFFERED))
    stale = list[dict[str, float]]()
    transport.slow = {"3"}
    for round in fed.rounds(4, evaluated_rounds):
        stale.append({name: metrics["staleness"] for name, metrics in round.round.metrics.items()})
        transport.slow = {"3"} if round.index < 2 else set()
    assert [sorted(one) for one in stale] == [["0", "1", "2"], ["0", "1", "2"], [*PARTY_NAMES], [*PARTY_NAMES]]
    assert stale[2]["3"] == 2.0 and stale[3]["3"] == 0.0 and not fed.rejections_
    assert transport.sent == [("3", "handshake", 0), ("3", "train", 1), ("3", "train", 4)]


class SlowerTransport(SlowTransport):
    """A transport that releases the replies of slow parties after all others."""

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        found = super().fetch_replies(message_ids, max_bytes)
        self.slow = self.slow if found else ()
        return found


@pytest.mark.parametrize("answers", [True, False])
def test_with_a_quorum_one_party_can_decide_whether_another_counts(tmp_path: Path, answers: bool) -> None:
    """Central differential privacy refuses a quorum for this: one party moves the aggregate by two updates."""
    transport = SlowerTransport(silo_handlers(tmp_path))
    fed = deployed_federation(transport, recipe_for("fedavg"), WaitLimits(deadline=0.01, quorum=3))
    transport.slow = {"2"}
    transport.corrupt_reply = lambda task, payload: payload if answers or task.party != "1" else None
    with pytest.warns(DescantWarning, match="rejected"):
        [round] = fed.rounds(1)
    assert round.round.accepted == (("0", "1", "3") if answers else ("0", "2", "3"))


def test_fedbuff_without_slow_parties_equals_the_simulation(tmp_path: Path) -> None:
    recipe = read_recipe(BUFFERED)
    assert_same_models(
        deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), recipe).fit(3, progress=False),
        simulated_federation(recipe, 3),
    )


def test_the_server_holds_no_row_and_no_output_of_silo_code(tmp_path: Path) -> None:
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    payloads = list[bytes]()
    log_lines = list[str]()
    silo_lines = list[str]()
    summaries = list[str]()
    file = tmp_path / "team1.py"
    file.write_text(LEAKING_SILO_FILE.format(name="1") + 'policy = {"share": 0.5}\n')
    transport.handlers["1"] = lambda: TaskHandler(SiloFile(file, "1"), tmp_path / "at-1", silo_lines.append)

    def corrupt(task: Task, payload: bytes) -> bytes:
        payloads.append(payload)
        return payload

    transport.corrupt_reply = corrupt
    _, fed = federation_with_vault(tmp_path, transport, log_lines.append)
    folder = tmp_path / "lab" / "run" / "training"
    with (
        Run.start(folder, fed, "", "always") as run,
        pytest.warns(DescantWarning, match="party '1': error: ValueError"),
    ):
        for round in run.rounds(4, score_every=1):
            transport.unreachable = {"1"} if round.index == 1 else set()
            (tmp_path / "team1.py.mark").touch() if round.index == 2 else None
            log_lines.append(str(round.round))
            summaries.append(round_summary(round.round))
    assert [", and coreset proxies of 1" in text for text in summaries] == [False, True, False, False]
    assert ", 3 parties, and" in summaries[1] and summaries[2].endswith(
        "without 1: error: ValueError. The party's own log says more"
    )
    assert [entry["presence"] for entry in fed.history_] == ["pppp", "pspp", "papp", "pppp"]
    assert any("4711-0815" in text for text in silo_lines)
    held = SiloFile(file, "1").party_data.x.numpy().tobytes()
    assert sum(canary in held for canary in canary_bytes()) > 20  # the canaries are in the party's own data
    files = [file for part in ("lab", "vault") for file in (tmp_path / part).rglob("*") if file.is_file()]
    everything = b"\n".join([*(file.read_bytes() for file in files), *payloads, "\n".join(log_lines).encode()])
    assert len(files) > 15 and b"descant sealed" in everything
    assert not [canary for canary in canary_bytes() if canary in everything]
