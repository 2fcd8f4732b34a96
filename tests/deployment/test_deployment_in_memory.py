"""The protocol between a server and its silos, over an in-memory transport, with faults and kills."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from descant import DescantWarning, Federation, algorithms
from descant.algorithms import Timetable
from descant.config import Recipe, read_recipe
from descant.core import seeds
from descant.core.messages import Reply, Task
from descant.core.metrics import sign_flip_p_value
from descant.core.timeouts import WaitLimits
from descant.deployment.server import HandshakeTransport, training_session
from descant.deployment.server.server_report import write_report
from descant.deployment.server.training_session import TrainingSession, first_rounds, read_descriptions, round_summary
from descant.deployment.server.training_status import training_status
from descant.deployment.silo import SiloFile, TaskHandler
from descant.deployment.silo.console_messages import reply_summary
from descant.deployment.silo.handshake_reply import training_part
from descant.deployment.silo.local_comparison import compare_with_local
from descant.deployment.silo.result_files import SiloResults
from descant.deployment.silo.silo_worker import SiloWorker
from descant.engines.remote import Silos, UndeliveredError
from descant.errors import PartyError, StateError
from descant.models.flat import Net
from descant.parties import Population, from_arrays
from descant.parties.party import SampleSpec
from descant.parties.remote_parties import remote_population
from descant.privacy.gaussian_mechanism import epsilon
from descant.rounds.checkpoint import digest_of_models
from descant.rounds.dispatch import make_tasks
from descant.rounds.plan import Plan
from descant.rounds.validation import Rejection
from descant.serialization.references import address_of
from descant.serialization.wire import MessageBytes, pack, unpack
from descant.storage import atomic
from descant.storage.vault import coreset_rows
from descant.storage.vault.coreset_rows import CoresetRows, ExpectedCoreset
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import read_run
from silo_file_templates import ADAM_TRAINING, MODEL_AND_METHOD_TABLES, ROWS_SILO_FILE
from test_forged_messages import FORGED_MESSAGES, to_spill_file
from toy_problems import classification_parties, network
from write_faults import SimulatedCrash, inject_faults

PARTY_NAMES = ("0", "1", "2", "3")
RECIPE = """
[run]
seed = 5
[parties]
population = "toy_problems:classification_parties"
"""
RECIPE += MODEL_AND_METHOD_TABLES
LAYOUT = Net.from_model(network, 0).layout


class InMemoryTransport:
    """A transport whose tasks are answered on fetch, by handlers that are built again for every task, as after a kill.

    Replies are files, as with Flower.
    """

    def __init__(self, handlers: dict[str, Callable[[], TaskHandler]]) -> None:
        self.handlers = handlers
        self.unreachable = set[str]()
        self.session_ids = dict[str, str]()
        self.departed = set[str]()
        self.messages: dict[str, tuple[str, bytes]] = {}
        self.pending = set[str]()
        self.corrupt_reply: Callable[[Task, bytes], bytes | UndeliveredError | None] = lambda task, payload: payload
        self.sent_count = 0

    def connected_parties(self) -> dict[str, str]:
        return {name: self.session_ids.get(name, "first") for name in self.handlers if name not in self.unreachable}

    def departed_parties(self) -> set[str]:
        return self.departed & self.unreachable

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        if party in self.unreachable:
            raise UndeliveredError("it is not connected")
        self.sent_count += 1
        self.messages[str(self.sent_count)] = (party, payload[:])
        if "rounds" in (task := unpack(payload, Task)).settings and task.kind == "goodbye":
            self.unreachable.add(party)
        self.pending.add(str(self.sent_count))
        return str(self.sent_count)

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        found: dict[str, MessageBytes | UndeliveredError] = {}
        for number in message_ids:
            party, packed_task = self.messages.pop(number, ("", b""))
            if party:
                payload = self.corrupt_reply(unpack(packed_task, Task), self.handlers[party]().answer(packed_task))
                if payload is not None:
                    found[number] = to_spill_file(payload) if isinstance(payload, bytes) else payload
        self.pending -= found.keys()
        return found

    def discard(self, message_ids: Collection[str]) -> None:
        self.pending -= set(message_ids)


class SimulatedKill(BaseException):
    """A kill: no cleanup code of the killed side runs."""


class RestartingTransport(InMemoryTransport):
    """A transport with handlers that stay alive between tasks; a killed one is built again and gets its task again."""

    def __init__(self, makers: dict[str, Callable[[], TaskHandler]]) -> None:
        self.live_handlers: dict[str, TaskHandler] = {}
        super().__init__({name: partial(self._live_handler, name, make) for name, make in makers.items()})

    def _live_handler(self, name: str, make: Callable[[], TaskHandler]) -> TaskHandler:
        if name not in self.live_handlers:
            self.live_handlers[name] = make()
        return self.live_handlers[name]

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        before = dict(self.messages)
        try:
            return super().fetch_replies(message_ids, max_bytes)
        except SimulatedKill:
            self.live_handlers = {}
            self.messages = before
            return super().fetch_replies(message_ids, max_bytes)


def silo_handlers(
    folder: Path,
    names: Collection[str] = PARTY_NAMES,
    log: Callable[[str], None] = lambda text: None,
    silo_file_template: str = ROWS_SILO_FILE,
) -> dict[str, Callable[[], TaskHandler]]:
    folder.mkdir(exist_ok=True)
    found: dict[str, Callable[[], TaskHandler]] = {}
    for name in names:
        file = folder / f"team{name}.py"
        file.write_text(silo_file_template.format(name=name))
        found[name] = lambda file=file, name=name: TaskHandler(SiloFile(file, name), folder / f"at-{name}", log)  # type: ignore[misc]
    return found


def recipe_for(method: str = "fedgeomed+") -> Recipe:
    return read_recipe(RECIPE.format(method=method))


def deployed_federation(
    transport: InMemoryTransport,
    recipe: Recipe,
    limits: WaitLimits = WaitLimits(),  # noqa: B008
    log: Callable[[str], None] = lambda text: None,
    excluded_parties: Callable[[], Mapping[str, str]] = dict,
) -> Federation:
    """Return a federation of all connected parties."""
    loss = address_of(torch.nn.functional.cross_entropy)
    handshakes = HandshakeTransport(
        transport, recipe, "lab", net=Net.from_model(network, 0), loss=loss, log=lambda text: None
    )
    population = remote_population(handshakes.wait_for_quorum(len(transport.connected_parties())))
    engine = Silos(handshakes, limits, log, excluded=excluded_parties)
    return Federation(network, population, recipe.algorithm(), solver=recipe.solver(), seed=5, engine=engine)


def simulated_federation(recipe: Recipe, rounds: int, names: Collection[str] = PARTY_NAMES, **more: Any) -> Federation:
    population = from_arrays(
        {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(names).items()}
    )
    settings = {"algorithm": recipe.algorithm(), "solver": recipe.solver(), "seed": 5, **more}
    return Federation(network, population, **settings).fit(rounds, progress=False)


def assert_same_models(one: Federation, other: Federation, names: Collection[str] = PARTY_NAMES) -> None:
    assert torch.equal(one.state.global_model, other.state.global_model)
    for name in names:
        mine, yours = (fed.state.personal_models.get(name) for fed in (one, other))
        assert mine.keys() == yours.keys() and all(torch.equal(mine[key], yours[key]) for key in mine)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedgeomed+", "ditto", "rfa"])
def test_deployment_equals_the_simulation_bit_for_bit(tmp_path: Path, method: str) -> None:
    fed = deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), recipe_for(method)).fit(3, progress=False)
    twin = simulated_federation(recipe_for(method), 3)
    assert_same_models(fed, twin)
    assert digest_of_models(fed.state) == digest_of_models(twin.state)
    np.testing.assert_array_equal(fed.scores().personal.values, twin.scores().personal.values)


EQUAL_TENSOR_MODELS = {
    "a custom layer": ("class Layer(torch.nn.Linear): pass\n", "Layer(6, 5), torch.nn.Tanh(), Layer(5, 3)"),
    "dropout": (
        "",
        "torch.nn.Linear(6, 5), torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5)), torch.nn.Linear(5, 3)",
    ),
}


@pytest.mark.parametrize("how", EQUAL_TENSOR_MODELS)
def test_a_model_with_equal_tensors_and_other_code_takes_part(tmp_path: Path, how: str) -> None:
    """The model has the federation's names and shapes, but does not support the requested execution mode."""
    handlers = silo_handlers(tmp_path)
    before, layers = EQUAL_TENSOR_MODELS[how]
    silo_file = f"import torch\n{before}" + ROWS_SILO_FILE.replace(
        "return network()", f"return torch.nn.Sequential({layers})"
    )
    (tmp_path / "team0.py").write_text(silo_file.format(name="0"))
    fed = deployed_federation(InMemoryTransport(handlers), recipe_for("fedavg"))
    assert fed.state.execution_mode == "stacked"
    fed.fit(2, progress=False)
    assert not fed.rejections_ and fed.scores().names == PARTY_NAMES
    assert set(SiloResults(tmp_path / "at-0").training_records()) == {1, 2}
    assert len(compare_with_local(handlers["0"]().file, tmp_path / "at-0").rows) == 1  # in the same execution mode


def count_survived_kills(folder: Path, run: Callable[[Path], None], every: int = 1) -> int:
    """Kill a handler at every `every`-th write, each in a run of its own; return the number of kills."""
    for kills in range(400):
        left = [kills * every]

        def dying(change: Callable[..., object], *arguments: object, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise SimulatedKill
            return change(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(atomic, "_do", dying)
            run(folder / str(kills))
        if left[0] >= 0:
            return kills
    raise AssertionError("the run never ends without a kill")


def count_kills_of_recipe(folder: Path, recipe: Recipe, every: int = 1) -> int:
    """Return the number of kills in runs of two rounds by a recipe."""
    two = PARTY_NAMES[:2]
    twin = simulated_federation(recipe, 2, two)

    def run(folder: Path) -> None:
        assert_same_models(
            deployed_federation(RestartingTransport(silo_handlers(folder, two)), recipe).fit(2, progress=False),
            twin,
            two,
        )

    return count_survived_kills(folder, run, every)


def test_a_silo_killed_at_any_write_gives_the_same_models(tmp_path: Path) -> None:
    assert count_kills_of_recipe(tmp_path, recipe_for()) > 50


ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
FAILING_SILO_FILE = """
import os, time
from toy_problems import classification_parties, network

def model():
    return network()

def data():
    party = classification_parties(5)["0"]
    return party.x, party.y

def limit():
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))  # 128 MB more than it has

def loss(output, target):
    mark = __file__ + ".mark"
    if os.path.exists(mark):
        what = open(mark).read()
        os.remove(mark)
        exec(what)
    return torch.nn.functional.cross_entropy(output, target)

import torch
"""


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise ValueError('a row: 4711')", "ValueError"),
        ("os._exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("time.sleep(600)", "was ended"),
        pytest.param("limit(); [bytearray(2**24) for _ in range(2**20)]", "MemoryError", marks=ONLY_LINUX),
    ],
    ids=["raises", "exits", "is killed", "hangs", "runs out of memory"],
)
def test_failing_silo_code_costs_one_round_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, reason: str
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    )
    file = tmp_path / "team0.py"
    file.write_text(FAILING_SILO_FILE)
    log_lines: list[str] = []
    worker = SiloWorker(file, "0", tmp_path / "at", log=log_lines.append)
    try:
        recipe = recipe_for()
        layout = Plan.create(
            network, classification_parties(5), recipe_for().algorithm(), 5, **_plan_settings()
        ).net.layout
        handshake = {"recipe": {**recipe.tables, "model": {}}, "federation": "lab", "layout": layout.digest}
        reply = unpack(worker.answer(pack(Task("0", 0, "handshake", arrays={}, settings=handshake))), Reply)
        assert reply.status == "ok", reply.reason
        center = torch.zeros(layout.width)
        settings = {"seed": 5, "execution_mode": "looped", "layout": layout.digest, "lr": 0.1, "work": 1, "accepted": 0}
        train = Task("0", 1, "train", arrays={"global_model": center, "personal": center}, settings=settings)
        Path(f"{file}.mark").write_text(action)
        reply = unpack(worker.answer(pack(replace(train, deadline=5.0 if "sleep" in action else 600.0))), Reply)
        assert reply.status == "error" and reason in reply.reason and "4711" not in reply.reason
        Path(f"{file}.mark").unlink(missing_ok=True)  # a slow machine may have ended the worker before it read this
        assert unpack(worker.answer(pack(train)), Reply).status == "ok"
    finally:
        worker.close()


def test_a_silo_logs_one_line_per_task(tmp_path: Path) -> None:
    log_lines = list[str]()
    transport = InMemoryTransport(silo_handlers(tmp_path, ["0"], log_lines.append))
    fed = deployed_federation(transport, recipe_for("fedavg")).fit(2, progress=False)
    scores = fed.scores()
    rows = classification_parties(5)["0"].samples
    lines = [text for text in log_lines if text.startswith("Round")]
    assert len(lines) == 3
    for round, text in enumerate(lines[:2], 1):
        loss = f"{fed.history_[round - 1]['loss']:.4f}"  # with one party the mean is its own loss
        assert re.fullmatch(rf"Round {round}: trained on {rows} samples in \d+\.\d s, loss {loss}\.", text), text
    personal, global_model = (f"{column.mean:.4f}" for column in (scores.personal, scores.global_model))
    scored = rf"Round 2: evaluated in \d+\.\d s, personal model {personal}, global model {global_model}\."
    assert re.fullmatch(scored, lines[2]), lines


def test_a_silo_logs_sent_coresets_and_repeated_tasks(tmp_path: Path) -> None:
    sent = Reply("0", 1, "train", metrics={"samples": 9, "loss": 1.0, "coreset": 4}, encrypted_coreset=b"rows")
    assert reply_summary(sent, 0.0).endswith("loss 1.0000, 4 rows encrypted and sent as a coreset.")
    log_lines = list[str]()
    transport = InMemoryTransport(silo_handlers(tmp_path, ["0"], log_lines.append))
    fed = deployed_federation(transport, recipe_for("fedavg"))
    transport.corrupt_reply = lambda task, payload: (
        transport.handlers["0"]().answer(pack(task)) if task.kind == "train" else payload
    )
    fed.fit(1, progress=False)
    again = "Round 1: the task came again; the stored reply is sent."
    assert [text for text in log_lines if text.startswith("Round")][1:] == [again]


def test_silo_log_lines_start_with_the_local_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    )
    (tmp_path / "team0.py").write_text(ROWS_SILO_FILE.format(name="0"))
    worker = SiloWorker(tmp_path / "team0.py", "0", tmp_path / "at")
    handshake = {"recipe": {**recipe_for().tables, "model": {}}, "federation": "lab", "layout": LAYOUT.digest}
    try:
        worker.answer(pack(Task("0", 0, "handshake", arrays={}, settings=handshake)))
    finally:
        worker.close()
    assert re.search(r"^\d\d:\d\d:\d\d Taking part with", capfd.readouterr().err, re.MULTILINE)


def _plan_settings() -> dict[str, object]:
    return {"solver": recipe_for().solver(), "loss": torch.nn.functional.cross_entropy, "metric": None}


def falsify_reply(payload: bytes, how: str) -> bytes:
    reply = unpack(payload, Reply)
    first = next(iter(reply.arrays))
    tensor = reply.arrays[first]
    other = {
        "nan": torch.full_like(tensor, torch.nan),
        "infinite": torch.full_like(tensor, torch.inf),
        "another shape": tensor.flatten()[:1],
        "a shape that broadcasts": tensor[:1],
        "another dtype": tensor.double(),
    }
    if how in other:
        return pack(replace(reply, arrays={**reply.arrays, first: other[how]}))
    arrays = dict(reply.arrays)
    metrics = dict(reply.metrics)
    if how == "a tensor missing":
        del arrays[first]
    elif how == "a tensor too many":
        arrays["backdoor"] = torch.zeros(2)
    elif how == "an absurd weight":
        metrics["samples"] = 1e30
    elif how == "no weight":
        del metrics["samples"]
    elif how == "a name for the terminal":
        arrays[TERMINAL_CODES] = torch.zeros(2)
    elif how == "a name in place of another":
        arrays[TERMINAL_CODES] = arrays.pop(first)
    status: Any = TERMINAL_CODES if how == "a status for the terminal" else reply.status
    return pack(replace(reply, status=status, arrays=arrays, metrics=metrics))


FALSE_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "too long": lambda payload: payload + bytes(2**23),
    "nothing": lambda payload: b"",
    "cut": lambda payload: payload[: len(payload) // 2],
    "a pickle": lambda payload: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "an npz bomb": lambda payload: _npz_bomb(2**26),
    "a flipped bit": lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]),
    "a header that lies": lambda payload: (2**62).to_bytes(8, "little") + payload[8:],
}
FALSE_REPLIES = ["nan", "infinite", "another shape", "a shape that broadcasts", "another dtype", "a tensor missing"]
FALSE_REPLIES += ["a tensor too many", "an absurd weight", "no weight", "a name for the terminal"]
FALSE_REPLIES += ["a name in place of another", "a status for the terminal"]
TERMINAL_CODES = "\x1b[2J" * 10**4  # a long terminal control sequence


def _npz_bomb(size: int) -> bytes:
    """Return a compressed NumPy file that is a thousand times larger once it is read."""
    file = io.BytesIO()
    np.savez_compressed(file, weights=np.zeros(size, np.uint8))
    return file.getvalue()


@pytest.mark.parametrize("how", [*FALSE_REPLIES, *FALSE_BYTES, *FORGED_MESSAGES])
def test_an_invalid_reply_is_rejected_and_the_others_continue(tmp_path: Path, how: str) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))

    def corrupt(task: Task, payload: bytes) -> bytes:
        if task.party != "1" or task.kind != "train":
            return payload
        return (
            FORGED_MESSAGES[how]()
            if how in FORGED_MESSAGES
            else FALSE_BYTES[how](payload)
            if how in FALSE_BYTES
            else falsify_reply(payload, how)
        )

    transport.corrupt_reply = corrupt
    fed = deployed_federation(transport, recipe_for("fedavg"))
    if how in FORGED_MESSAGES:
        fed.engine_._max_message_bytes = 2**40  # as for a large model: the size alone does not reveal a forged message
    with pytest.warns(DescantWarning, match="rejected"):
        fed.fit(2, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1", "1"]
    assert "it answered for" not in str(fed.rejections_[0])  # it names the requested party and round
    assert all(str(rejection).isprintable() and len(str(rejection)) < 800 for rejection in fed.rejections_)
    without = simulated_federation(recipe_for("fedavg"), 2, [name for name in PARTY_NAMES if name != "1"])
    assert torch.equal(fed.state.global_model, without.state.global_model)


@pytest.mark.parametrize("source", ["another party", "an old round"])
def test_a_reply_to_another_task_is_rejected(tmp_path: Path, source: str) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    replies = dict[tuple[str, int], bytes]()

    def corrupt(task: Task, payload: bytes) -> bytes:
        replies[task.party, task.round] = payload
        if task.party != "1" or task.round != 2 or task.kind != "train":
            return payload
        return replies["0", 2] if source == "another party" else replies["1", 1]

    transport.corrupt_reply = corrupt
    with pytest.warns(DescantWarning, match="rejected"):
        fed = deployed_federation(transport, recipe_for("fedavg")).fit(3, progress=False)
    [rejection] = fed.rejections_
    assert rejection.party == "1" and rejection.round == 2 and "was asked for" in rejection.reason


def test_a_silo_declines_invalid_tasks(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(transport, recipe_for("fedavg")).fit(2, progress=False)
    plan = fed.plan_
    handler = transport.handlers["0"]()

    def decline_reason(**changes: object) -> str:
        task = next(iter(make_tasks(plan, fed.state, {"0": plan.solver.hyper}, kind="train", index=3)))
        task = replace(task, settings={**task.settings, "accepted": 2, **changes.pop("settings", {})}, **changes)  # type: ignore[arg-type, dict-item]
        reply = unpack(handler.answer(pack(task)), Reply)
        assert reply.status in ("declined", "error") and not reply.arrays
        return reply.reason

    assert "'0'" in decline_reason(party="1")
    for kind in ("personal", "proxy"):
        assert "not answered here" in decline_reason(kind=kind)
    for accepted in (3, None):
        assert "cannot follow" in decline_reason(settings={"accepted": accepted})
    assert "Stale" in decline_reason(settings={"accepted": 0})
    assert "ModelError" in decline_reason(settings={"layout": "another"})
    assert "handshake" in unpack(handler.answer(b"no task"), Reply).kind


def test_a_party_without_an_accountant_declines_the_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_lines = list[str]()
    recipe = read_recipe(RECIPE.format(method="fedavg") + 'wrap = [{wrapper = "local_dp", noise = 4.0, budget = 9.0}]')
    [handler] = silo_handlers(tmp_path, ["0"], log_lines.append).values()
    handshake = {"recipe": training_part(recipe.tables), "federation": "lab", "layout": LAYOUT.digest}
    packed_task = pack(Task("0", 0, "handshake", arrays={}, settings=handshake))
    assert unpack(handler().answer(packed_task), Reply).status == "ok"
    epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert (
        unpack(handler().answer(packed_task), Reply).status == "declined"
        and "pip install 'descant[dp]'" in log_lines[-1]
    )


def test_a_loss_mismatch_does_not_reveal_the_path_of_the_server_file(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path, ["0"]))
    handshakes = HandshakeTransport(
        transport,
        recipe_for(),
        "lab",
        net=Net.from_model(network, 0),
        loss="/home/operator/secret/mine.py:loss",
        log=len,
    )
    assert not handshakes.connected_parties()
    [(_, packed_task)] = transport.messages.values()
    assert (
        "federation's is mine.py:loss" in unpack(packed_task, Task).settings["reason"]
        and b"operator" not in packed_task
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layout": "another"}, "model"),
        ({"federation": 7}, "federation"),
        ({"recipe": {"method": {"algorithm": "fedavg", "wrap": [{"wrapper": "os:system"}]}}}, "code"),
        ({"recipe": {"method": {"algorithm": "fedavg"}, "training": {"optimizer": "../x"}}}, "files"),
        ({"recipe": {"method": {"algorithm": "unheard"}}}, "unheard"),
    ],
)
def test_a_silo_declines_an_invalid_handshake(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    handler = silo_handlers(tmp_path)["0"]()
    handshake = {"recipe": recipe_for().tables, "federation": "lab", "layout": "", **changes}
    reply = unpack(handler.answer(pack(Task("0", 0, "handshake", arrays={}, settings=handshake))), Reply)
    assert reply.status == "declined" and why in reply.reason


def test_a_silo_in_the_folder_of_another_party_declines_and_writes_nothing(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    deployed_federation(transport, recipe_for("fedavg")).fit(1, progress=False)
    folder = tmp_path / "at-1"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    handler = TaskHandler(SiloFile(tmp_path / "team0.py", "0"), folder, lambda text: None)
    handshake = {"recipe": training_part(recipe_for("fedavg").tables), "federation": "lab", "layout": LAYOUT.digest}
    settings = {"seed": 5, "execution_mode": "looped", "layout": LAYOUT.digest, "lr": 0.1, "work": 1, "accepted": 1}
    center = {"global_model": torch.zeros(LAYOUT.width)}
    for task in (
        Task("0", 0, "handshake", arrays={}, settings=handshake),
        Task("0", 2, "train", arrays=center, settings=settings),
    ):
        reply = unpack(handler.answer(pack(task)), Reply)
        assert reply.status == "declined" and "'1'" in reply.reason and "'0'" in reply.reason
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


AGREED = RECIPE.format(method="fedavg")
OTHER = RECIPE.format(method="rfa")
MARKED = "\ufeff" + AGREED.replace("\n", "\r\n")  # as some editors write it


@pytest.mark.parametrize(
    ("agreed", "text", "done", "why"),
    [
        (AGREED, AGREED, AGREED, ""),
        (MARKED, MARKED, AGREED, ""),
        (AGREED, OTHER, OTHER, "another recipe needs another server"),
        (AGREED, "", AGREED, "another recipe needs another server"),
        (AGREED, AGREED, OTHER, "something else"),
    ],
    ids=["as agreed", "written elsewhere", "another", "none", "a lie"],
)
def test_a_silo_accepts_only_the_recipe_of_its_invite(
    tmp_path: Path, agreed: str, text: str, done: str, why: str
) -> None:
    silo_handlers(tmp_path)
    wanted, found = (sha256(one.encode()).hexdigest() for one in (agreed, text))
    handler = TaskHandler(
        SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at", lambda text: None, recipe_digest=wanted
    )
    handshake = {
        "recipe": training_part(read_recipe(done).tables),
        "federation": "lab",
        "layout": LAYOUT.digest,
        "text": text,
    }
    reply = unpack(handler.answer(pack(Task("0", 0, "handshake", arrays={}, settings=handshake))), Reply)
    assert (reply.status == "ok") == (not why) and why in reply.reason
    assert wanted == found or (wanted in reply.reason and found in reply.reason)


def test_a_round_with_a_quorum_continues_and_names_the_missing_party(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    transport.corrupt_reply = lambda task, payload: None if task.party == "1" and task.round == 2 else payload
    fed = deployed_federation(transport, recipe_for("fedavg"), WaitLimits(deadline=0.2, quorum=3))
    with pytest.warns(DescantWarning, match="went on without it"):
        fed.fit(3, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1"]
    twin = simulated_federation(recipe_for("fedavg"), 3)
    assert not torch.equal(fed.state.global_model, twin.state.global_model)


def test_overdue_tasks_are_discarded(tmp_path: Path) -> None:
    """The server keeps no message ids of parties that never reply."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    transport.corrupt_reply = lambda task, payload: None if task.party == "1" and task.kind == "train" else payload
    fed = deployed_federation(transport, recipe_for("fedavg"), WaitLimits(deadline=0.05, quorum=3))
    with pytest.warns(DescantWarning, match="went on without it"):
        for _ in fed.rounds(4):
            assert len(transport.pending) == 1
    assert fed.history_[-1]["presence"] == "p.pp"


def test_a_round_without_quorum_resends_the_task_on_reconnect(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    lost = [3]

    def corrupt(task: Task, payload: bytes) -> bytes | UndeliveredError:
        if task.party == "1" and task.round == 2 and lost[0]:
            lost[0] -= 1
            return UndeliveredError("its machine is off")
        return payload

    transport.corrupt_reply = corrupt
    fed = deployed_federation(transport, recipe_for()).fit(3, progress=False)
    assert not lost[0] and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


class ServerWaits(Exception):
    """The server waits for a party, and would wait forever."""


def stop_when_waiting(log_lines: list[str]) -> Callable[[str], None]:
    """Return a log function that keeps the lines and ends the test when the server waits."""

    def log(text: str) -> None:
        log_lines.append(text)
        if "Waiting" in text:
            raise ServerWaits(text)

    return log


LIMITS_BY_QUORUM = {
    None: WaitLimits(min_parties=4, grace=0),
    3: WaitLimits(min_parties=4, quorum=3, deadline=0.1, grace=0),
}


def timetable_without(name: str, since: int) -> Timetable:
    return Timetable.from_records([{"party": name, "to": since - 1}])


def test_later_rounds_start_with_a_quorum(tmp_path: Path) -> None:
    """`min_parties` holds for the first round: later rounds name an absent party and do not wait for it."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[3], stop_when_waiting(log_lines))
    for round in fed.rounds(4):
        transport.unreachable = {"1"} if round.index > 1 else set()
    assert [text for text in log_lines if "without" in text] == ["Round 3 begins without 1."]
    assert_same_models(fed, simulated_federation(recipe_for(), 4, participation=timetable_without("1", 3)))


def test_the_first_round_waits_for_min_parties(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[3], stop_when_waiting(log_lines))
    transport.unreachable = {"1"}
    with pytest.raises(ServerWaits, match=r"3 of 4 parties are connected. Waiting for 1."):
        fed.fit(1, progress=False)
    transport.unreachable = set()
    assert_same_models(fed.fit(2, progress=False), simulated_federation(recipe_for(), 2))


def test_without_a_quorum_every_round_waits_for_min_parties(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[None], stop_when_waiting(log_lines))
    fed.fit(1, progress=False)
    transport.unreachable = {"1"}
    with pytest.raises(ServerWaits, match=r"3 of 4 parties are connected. Waiting for 1."):
        fed.fit(1, progress=False)
    transport.unreachable = set()
    assert_same_models(fed.fit(1, progress=False), simulated_federation(recipe_for(), 2))


def test_evaluation_does_not_wait_for_a_party_that_left(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[None], stop_when_waiting(log_lines)).fit(
        2, progress=False
    )
    transport.unreachable = {"1"}
    with pytest.raises(ServerWaits, match=r"Waiting for 1\."):  # it fell silent and may come back
        fed.scores()
    transport.departed = {"1"}
    assert fed.scores().names == ("0", "2", "3")
    with pytest.raises(ServerWaits, match=r"Waiting for 1\."):
        fed.fit(1, progress=False)


def test_no_round_starts_below_the_quorum(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[3], stop_when_waiting(log_lines)).fit(
        1, progress=False
    )
    transport.unreachable = {"1", "2"}
    with pytest.raises(ServerWaits, match=r"2 of 3 parties are connected. Waiting for 1, 2."):
        fed.fit(1, progress=False)


@pytest.mark.parametrize("quorum", LIMITS_BY_QUORUM)
@pytest.mark.parametrize("begun", [0, 2], ids=["before the first round", "later"])
def test_no_round_waits_for_a_revoked_party(tmp_path: Path, quorum: int | None, begun: int) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    revoked = dict[str, str]()
    limits = replace(LIMITS_BY_QUORUM[quorum], quorum=quorum and 2)
    fed = deployed_federation(transport, recipe_for(), limits, stop_when_waiting(log_lines), lambda: revoked)
    for name in ("1", "2"):
        fed.fit(begun, progress=False)
        revoked[name] = "it was revoked"
    transport.unreachable = {"2"}  # party 1 is still connected: the proxy has not disconnected it yet
    fed.fit(2, progress=False)
    assert fed.history_[-1]["presence"] == ("paap" if begun else "p..p")


def test_revoked_parties_do_not_lower_the_quorum(tmp_path: Path) -> None:
    """Otherwise the global model could be that of a single party; connected parties can still be evaluated."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    revoked = dict[str, str]()
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[3], stop_when_waiting([]), lambda: revoked).fit(
        1, progress=False
    )
    revoked |= {"1": "it was revoked", "2": "it was forgotten"}
    with pytest.raises(ServerWaits, match=r"2 of 3 parties are connected. Waiting for new invites.*smaller --quorum"):
        fed.fit(1, progress=False)
    assert fed.scores().names == ("0", "3") and fed.state.round == 1


def test_a_lost_task_of_a_revoked_party_is_dropped(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    revoked = dict[str, str]()

    def corrupt(task: Task, payload: bytes) -> bytes | UndeliveredError:
        if task.party != "1" or task.round != 2:
            return payload
        transport.unreachable = {"1"}
        revoked["1"] = "it was revoked"
        return UndeliveredError("its machine is off")

    transport.corrupt_reply = corrupt
    fed = deployed_federation(
        transport, recipe_for(), WaitLimits(min_parties=4, timeout=20), excluded_parties=lambda: revoked
    )
    with pytest.warns(DescantWarning, match="party '1': lost: it was revoked"):
        fed.fit(3, progress=False)
    assert_same_models(
        fed, simulated_federation(recipe_for(), 3, participation=timetable_without("1", 2)), ["0", "2", "3"]
    )


@pytest.mark.parametrize("outcome", [UndeliveredError("it has gone"), None], ids=["with an error", "silently"])
def test_a_round_does_not_wait_for_a_party_that_left_during_it(
    tmp_path: Path, outcome: UndeliveredError | None
) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))

    def corrupt(task: Task, true: bytes) -> bytes | UndeliveredError | None:
        if task.party != "1" or task.round != 2:
            return true
        transport.unreachable = {"1"}
        transport.departed = {"1"}
        return outcome

    transport.corrupt_reply = corrupt
    fed = deployed_federation(transport, recipe_for(), WaitLimits(min_parties=3, timeout=20))
    with pytest.warns(DescantWarning, match="party '1': lost: it has left"):
        fed.fit(3, progress=False)
    assert_same_models(
        fed, simulated_federation(recipe_for(), 3, participation=timetable_without("1", 2)), ["0", "2", "3"]
    )


def test_a_party_that_left_and_reconnected_gets_its_task_again(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    times = [0]

    def corrupt(task: Task, true: bytes) -> bytes | None:
        times[0] += (first := task.party == "1" and task.round == 2 and not times[0])
        if first:
            transport.departed, transport.session_ids["1"] = {"1"}, "again"
        return None if first else true

    transport.corrupt_reply = corrupt
    fed = deployed_federation(transport, recipe_for(), WaitLimits(timeout=20)).fit(3, progress=False)
    assert times == [1] and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


def test_an_error_reply_counts_toward_the_quorum(tmp_path: Path) -> None:
    """One party fails and one is dead: the round continues with the two others and does not wait for the dead one."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()

    def corrupt(task: Task, payload: bytes) -> bytes | None:
        if task.round != 2 or task.party not in "12":
            return payload
        return None if task.party == "2" else pack(Reply("1", 2, "train", status="error", reason="KeyError."))

    transport.corrupt_reply = corrupt
    fed = deployed_federation(
        transport, recipe_for(), replace(LIMITS_BY_QUORUM[3], timeout=20), stop_when_waiting(log_lines)
    )
    with pytest.warns(DescantWarning, match="2 of 4 replies were rejected"):
        fed.fit(2, progress=False)
    assert fed.history_[-1]["presence"] == "paap"
    assert {rejection.party: rejection.reason for rejection in fed.rejections_}["2"].endswith(
        "the round went on without it"
    )


def test_a_round_without_quorum_at_its_deadline_names_the_missing_parties(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    transport.corrupt_reply = lambda task, payload: None if task.party in "12" and task.round == 2 else payload
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[3], stop_when_waiting(log_lines))
    needs = "2 of its quorum of 3 replies after 0.1 s"
    with pytest.raises(ServerWaits, match=f"Round 2 has {needs}. Waiting for 1, 2."):
        fed.fit(2, progress=False)


def test_evaluation_waits_for_no_party_after_the_deadline(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    transport.corrupt_reply = lambda task, payload: None if task.party in "12" and task.kind == "evaluate" else payload
    fed = deployed_federation(transport, recipe_for(), LIMITS_BY_QUORUM[3], stop_when_waiting(log_lines)).fit(
        1, progress=False
    )
    with pytest.warns(DescantWarning, match="could not be evaluated.*no reply within 0.1 s"):
        own = fed.scores().personal.values
    assert np.isnan(own).tolist() == [False, True, True, False]


@pytest.mark.parametrize("lie", [10**400, "high", [1.0], None], ids=["too large", "a word", "a list", "nothing"])
def test_an_invalid_score_is_recorded_as_nan(tmp_path: Path, lie: object) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))

    def corrupt(task: Task, payload: bytes) -> bytes:
        if task.party != "1" or task.kind != "evaluate":
            return payload
        return pack(replace(reply := unpack(payload, Reply), metrics={**reply.metrics, "personal": lie}))

    transport.corrupt_reply = corrupt
    atomic.make_folder(tmp_path / "run")
    run_training(tmp_path / "run", transport, "fedavg", PARTY_NAMES, lambda text: None, limits=LIMITS_BY_QUORUM[None])
    own = read_run(tmp_path / "run" / "training").numbers.scores["personal"][-1]
    assert np.isnan(own).tolist() == [False, True, False, False]


def test_secure_aggregation_waits_for_its_min_parties(tmp_path: Path) -> None:
    """Otherwise all rounds would be used up, each of them void."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    recipe = read_recipe(RECIPE.format(method="fedavg") + 'wrap = [{wrapper = "secure"}]')
    fed = deployed_federation(transport, recipe, WaitLimits(quorum=2, deadline=0.1), stop_when_waiting(log_lines)).fit(
        1, progress=False
    )
    transport.unreachable = {"1"}
    fed.fit(1, progress=False)
    transport.unreachable = {"1", "2"}
    with pytest.raises(ServerWaits, match=r"2 of 3 parties are connected. Waiting for 1, 2."):
        fed.fit(1, progress=False)


def test_a_party_that_lost_its_state_starts_again_and_reports_it(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    resets = list[float]()
    fed = deployed_federation(transport, recipe_for()).fit(2, progress=False)
    for file in (tmp_path / "at-1").glob("*"):
        if file.name != "handshake.json":
            file.unlink()
    for round in fed.rounds(2):
        resets.append(round.round.metrics["1"].get("state_reset", 0.0))
    assert resets == [1.0, 0.0] and not fed.rejections_


def test_no_round_is_accepted_below_the_quorum(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    lost = dict.fromkeys(("1", "2"), 4)

    def corrupt(task: Task, payload: bytes) -> bytes | UndeliveredError:
        if task.round == 2 and lost.get(task.party):
            lost[task.party] -= 1
            return UndeliveredError("its machine is off")
        return payload

    transport.corrupt_reply = corrupt
    fed = deployed_federation(transport, recipe_for("fedavg"), WaitLimits(deadline=0.01, quorum=3))
    for round in fed.rounds(3):
        assert len(round.round.accepted) >= 3


def test_a_party_with_a_new_session_gets_its_task_again(tmp_path: Path) -> None:
    """Flower does not report a short disconnection: a task fetched before it is never answered."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    swallowed = [1]

    def corrupt(task: Task, payload: bytes) -> bytes | None:
        if task.party == "1" and task.round == 2 and task.kind == "train" and swallowed[0]:
            swallowed[0] -= 1
            transport.session_ids["1"] = "second"
            return None
        return payload

    transport.corrupt_reply = corrupt
    fed = deployed_federation(transport, recipe_for()).fit(3, progress=False)
    assert not swallowed[0] and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


FALSE_DESCRIPTIONS: list[dict[str, object]] = [{"samples": 10**12}, {"samples": 0}, {"test_count": -1}]
FALSE_DESCRIPTIONS += [{"x": [10**12]}, {"x": [3]}, {"x": []}, {"x_dtype": "object"}, {"x_dtype": "float64"}]
FALSE_DESCRIPTIONS += [{"y": [7]}, {"y_dtype": "float16"}]


class Flattening(torch.nn.Sequential):
    """An equal model on which torch raises an IndexError for rows of too few dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("lie", FALSE_DESCRIPTIONS, ids=str)
def test_a_party_with_a_false_data_description_is_rejected(tmp_path: Path, lie: dict[str, object]) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()

    def corrupt(task: Task, payload: bytes) -> bytes:
        if task.party != "0" or task.kind != "handshake":
            return payload
        reply = unpack(payload, Reply)
        return pack(
            replace(reply, metrics={**reply.metrics, "data_description": {**reply.metrics["data_description"], **lie}})
        )

    transport.corrupt_reply = corrupt
    loss = address_of(torch.nn.functional.cross_entropy)
    handshakes = HandshakeTransport(
        transport, recipe_for(), "lab", net=Net(Flattening(*network())), loss=loss, log=log_lines.append
    )
    assert handshakes.wait_for_quorum(3).keys() == {"1", "2", "3"}
    assert any("0 has connected and cannot take part" in text for text in log_lines)


@pytest.mark.parametrize(
    ("raises", "kind"),
    [
        ("ast.literal_eval('account 4711')", "SyntaxError"),
        ("error = ValueError(); error.add_note('account 4711'); raise error", "ValueError"),
        ("raise AccountError('4711')", "AccountError"),
    ],
)
def test_only_the_type_of_an_error_leaves_the_silo(tmp_path: Path, raises: str, kind: str) -> None:
    """Python prints some texts before the type of the error, some after it without a colon, and also file names."""
    odd = (
        ROWS_SILO_FILE
        + f"\nclass AccountError(ValueError): pass\n\ndef loss(output, target):\n    import ast\n    {raises}\n"
    )
    file = tmp_path / "team.py"
    file.write_text(ROWS_SILO_FILE.format(name="0"))
    made = [SiloFile(file, "0"), SiloFile(tmp_path / "odd.py", "0")]
    transport = InMemoryTransport({"0": lambda: TaskHandler(made[0], tmp_path / "at", lambda text: None)})
    replies = list[Reply]()
    fed = deployed_federation(transport, recipe_for())
    (tmp_path / "odd.py").write_text(odd.format(name="0"))
    made[0] = made[1]

    def record(task: Task, payload: bytes) -> bytes:
        replies.append(unpack(payload, Reply))
        return payload

    transport.corrupt_reply = record
    with pytest.warns(DescantWarning):
        fed.fit(1, progress=False)
    assert replies[0].reason == f"{kind}. The party's own log says more."


@pytest.mark.parametrize("lie", [{"x": [2**28]}, {"y": [2**28]}], ids=str)
def test_an_absurd_sample_shape_is_rejected_before_allocation(lie: dict[str, object]) -> None:
    description = {"x": [6], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 3, "test_count": 1}
    with pytest.raises(PartyError, match="is invalid"):
        remote_population({"a": {**description, **lie}})


def test_an_undeliverable_handshake_is_not_repeated(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    asked = list[str]()

    def corrupt(task: Task, payload: bytes) -> bytes | UndeliveredError:
        asked.extend([task.party] if task.kind == "handshake" else [])
        return UndeliveredError("its answer has more than 65536 bytes", is_final=True) if task.party == "0" else payload

    transport.corrupt_reply = corrupt
    loss = address_of(torch.nn.functional.cross_entropy)
    handshakes = HandshakeTransport(
        transport, recipe_for(), "lab", net=Net.from_model(network, 0), loss=loss, log=log_lines.append
    )
    for _ in range(3):
        assert handshakes.connected_parties().keys() == {"1", "2", "3"}
    assert asked.count("0") == 1
    assert "0 has connected and cannot take part: its answer has more than 65536 bytes" in log_lines


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+", "ditto"])
def test_silo_evaluation_equals_the_table_of_the_simulation(tmp_path: Path, method: str) -> None:
    """A silo computes its row of the simulation's table itself, and sends nothing."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(transport, recipe_for(method)).fit(3, progress=False)
    twin = simulated_federation(recipe_for(method), 3)
    fed.scores()
    sent_before = transport.sent_count
    rows = {row["party"]: row for row in twin.table().to_json_rows()}
    for name in PARTY_NAMES:
        table = compare_with_local(SiloFile(tmp_path / f"team{name}.py", name), tmp_path / f"at-{name}")
        [row] = table.to_json_rows()
        for column in ("personal", "global_model", "local", "majority", "gain", "rounds"):
            assert row[column] == rows[name][column]
        model = network()
        model.load_state_dict(load_file(tmp_path / f"at-{name}" / "personal_model.safetensors"))
        whole = twin.models_[name].state_dict()
        assert all(torch.equal(tensor, whole[key]) for key, tensor in model.state_dict().items())
        assert f"{row['personal']:.3f}" in table.verdict
        assert table.verdict.startswith("No significant difference on 3 test samples: ")  # three samples never suffice
    assert transport.sent_count == sent_before


@pytest.mark.parametrize(
    ("silo_file", "reason"),
    [
        (ROWS_SILO_FILE.format(name="1"), "The data of .* are not those that took part: majority class was"),
        (
            ROWS_SILO_FILE.format(name="0").replace("[:3]", "[:2]"),
            "test_samples was 3 on their test set and is 2 on this one",
        ),
        (
            ROWS_SILO_FILE.format(name="0").replace("return network()", "return network()[:1]"),
            "The model of .* took part",
        ),
    ],
    ids=["rows of another", "another test set", "another model"],
)
def test_evaluation_rejects_a_file_that_did_not_take_part(tmp_path: Path, silo_file: str, reason: str) -> None:
    """Otherwise the verdict would silently compare models on different rows."""
    deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), recipe_for("fedgeomed+")).fit(
        3, progress=False
    ).scores()
    other = tmp_path / "other.py"
    other.write_text(silo_file)
    with pytest.raises(StateError, match=rf"(?s){reason}.*Give the file with which it joined"):
        compare_with_local(SiloFile(other, "0"), tmp_path / "at-0")


ONE_LABEL_SILO_FILE = """
import torch
from toy_problems import network as model

def data():
    drawn = torch.Generator().manual_seed(7)
    y = torch.arange(400) % 2
    x = torch.randn(400, 6, generator=drawn) + 2.0 * y[:, None]
    mine = y == {label}
    return x[mine][:40], y[mine][:40], x[{tested}], y[{tested}]
"""


@pytest.mark.parametrize("loss", ["", "def loss(output, y): return torch.nn.functional.cross_entropy(output, y)\n"])
@pytest.mark.parametrize(
    ("tested", "verdict"),
    [
        ("100:400", "Joining helped: "),
        ("100:400:2", "Joining did not help: "),
        ("100:101", "No significant difference on 1 test sample: "),
    ],
    ids=["on labels that others have", "on labels of its own", "on a sample"],
)
def test_the_verdict_needs_a_significant_difference(tmp_path: Path, tested: str, verdict: str, loss: str) -> None:
    """A party with one label gains on tests with both labels and loses on tests with its own label."""
    handlers = silo_handlers(tmp_path, ("0", "1"))
    for name in ("0", "1"):
        (tmp_path / f"team{name}.py").write_text(ONE_LABEL_SILO_FILE.format(label=name, tested=tested) + loss)
    fed = deployed_federation(InMemoryTransport(handlers), recipe_for("fedavg"))
    fed.fit(3, progress=False).scores()
    table = compare_with_local(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0")
    assert table.verdict.startswith(verdict), table.verdict


def test_two_failing_models_do_not_differ(tmp_path: Path) -> None:
    handlers = silo_handlers(tmp_path, ("0", "1"))
    failing = "def loss(output, y): return torch.nn.functional.cross_entropy(output, y) * (torch.nan if {} else 1)\n"
    for name in ("0", "1"):
        text = ONE_LABEL_SILO_FILE.format(label=name, tested="100:400") + failing.format("(y == 2).all()")
        (tmp_path / f"team{name}.py").write_text(text.replace("y[100:400]", "0 * y[100:400] + 2"))
    deployed_federation(InMemoryTransport(handlers), recipe_for("fedavg")).fit(3, progress=False).scores()
    table = compare_with_local(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0")
    assert table.verdict.startswith("No significant difference on 300 test samples: loss inf"), table.verdict


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (5, 0), (6, 0), (12, 5), (14, 3), (40, 40), (260, 200)])
def test_the_sign_flip_test_of_accuracy_is_mcnemars_exact_test(won: int, lost: int) -> None:
    differences = torch.tensor([1.0] * won + [-1.0] * lost + [0.0] * 500)
    tail = sum(math.comb(won + lost, k) for k in range(max(won, lost), won + lost + 1)) / 2 ** (won + lost)
    exact = min(1.0, 2 * tail) if won != lost else 1.0
    assert abs(sign_flip_p_value(differences) - exact) < 4 * math.sqrt(exact * (1 - exact) / 999) + 0.002
    assert sign_flip_p_value(differences) == sign_flip_p_value(0.25 * differences) == sign_flip_p_value(-differences)


def test_local_training_repeats_only_the_rounds_that_were_answered(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(transport, recipe_for("fedavg"))
    for round in fed.rounds(4):
        transport.unreachable = {"1"} if round.index in (1, 2) else set()
    fed.scores()
    there = Timetable.from_records([{"party": "1", "from": 1, "to": 1}, {"party": "1", "from": 4}])
    twin = simulated_federation(recipe_for(), 4, participation=there, algorithm=algorithms.Local())
    [row] = compare_with_local(SiloFile(tmp_path / "team1.py", "1"), tmp_path / "at-1").to_json_rows()
    assert row["rounds"] == 2
    assert row["local"] == twin.scores().personal.values[1]


def test_the_training_log_survives_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path, PARTY_NAMES[:2]))
    deployed_federation(transport, recipe_for("fedavg")).fit(2, progress=False).scores()
    file = tmp_path / "at-0" / "training_log.jsonl"
    file.write_text(file.read_text() + '\n{"round": 3, "l')
    result = SiloResults(tmp_path / "at-0")
    assert list(result.training_records()) == [1, 2]
    result.record_task(Task("0", 3, "train", arrays={}, settings={"lr": 0.1, "work": 1, "execution_mode": "looped"}))
    assert list(result.training_records()) == [1, 2, 3]


def silo_with_policy(
    folder: Path, policy: str, state_folder_name: str = "at", log: Callable[[str], None] = len, vault: str = ""
) -> TaskHandler:
    """Return a handler with a policy, after the handshake with a server that asks for coresets."""
    folder.mkdir(exist_ok=True)
    file = folder / "team0.py"
    file.write_text(ROWS_SILO_FILE.format(name="0") + f"policy = {policy}\n")
    handler = TaskHandler(SiloFile(file, "0"), folder / state_folder_name, log, vault_fingerprint=vault)
    tables = {**recipe_for("fedavg").tables, "wrap": [{"wrapper": "coreset_proxies", "share": 0.2}]}
    handshake = {"recipe": tables, "federation": "lab", "layout": LAYOUT.digest}
    assert unpack(handler.answer(pack(Task("0", 0, "handshake", arrays={}, settings=handshake))), Reply).status == "ok"
    return handler


def packed_train_task(
    round: int = 1, seed: int = 5, vault: Vault | None = None, accepted: int = 0, global_value: float = 0.0
) -> bytes:
    """Return a packed task that asks for training and, with a vault, for a coreset."""
    settings = {
        "seed": seed,
        "execution_mode": "looped",
        "layout": LAYOUT.digest,
        "lr": 0.1,
        "work": 1,
        "accepted": accepted,
    }
    if vault is not None:
        public, generation = vault.invite("0")
        settings["coreset"] = {"public": public.hex(), "generation": generation, "run": "r"}
    return pack(
        Task("0", round, "train", arrays={"global_model": torch.full((LAYOUT.width,), global_value)}, settings=settings)
    )


@pytest.mark.parametrize("global_model", [0.0, math.nan], ids=["finite model", "model without a usable update"])
def test_a_server_never_gets_more_rows_than_the_policy_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, global_model: float
) -> None:
    handler = silo_with_policy(tmp_path, '{"share": 0.3}')
    vault = Vault.create(tmp_path / "vault", PrivateKey.new(), "r")
    own = classification_parties(5)["0"].x
    record = set[int]()

    def record_rows(rows: CoresetRows) -> bytes:
        record.update(k for row in rows.x for k in range(len(own)) if torch.equal(own[k], row))
        return pack_rows(rows)

    pack_rows = coreset_rows.pack_rows
    monkeypatch.setattr(coreset_rows, "pack_rows", record_rows)
    sealed = 0
    for seed in range(20):
        reply = unpack(handler.answer(packed_train_task(seed=seed, vault=vault, global_value=global_model)), Reply)
        assert reply.status == "ok"
        sealed += bool(reply.encrypted_coreset)
    rows = handler.state.shared_rows()
    assert sealed and rows is not None
    assert 0 < len(rows) <= math.ceil(0.3 * len(own)) and record == set(rows.tolist())


def test_dropped_columns_are_zero_in_the_coreset_and_others_unchanged(tmp_path: Path) -> None:
    own = classification_parties(5)["0"]
    opened = list[CoresetRows]()
    for name, policy in {"all": '{"share": 1}', "some": '{"share": 1, "columns_dropped": [4, 1]}'}.items():
        handler = silo_with_policy(tmp_path / name, policy)
        vault = Vault.create(tmp_path / name / "vault", PrivateKey.new(), "r")
        reply = unpack(handler.answer(packed_train_task(vault=vault)), Reply)
        expected = ExpectedCoreset(SampleSpec((6,), torch.float32, (), y_dtype=torch.int64), own.samples, 3)
        vault.store("0", reply.encrypted_coreset, expected)
        opened.append(vault.open("0", 1, expected))
    whole, held = opened
    assert whole.x[:, [1, 4]].all() and not held.x[:, [1, 4]].any()
    kept = [0, 2, 3, 5]
    assert torch.equal(whole.x[:, kept], held.x[:, kept])
    assert torch.equal(whole.y, held.y) and torch.equal(whole.weights, held.weights)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the day of all parties' clocks."""

    def show(day: int, year: int = 2026) -> None:
        monkeypatch.setattr("descant.deployment.silo.silo_state.today_in_utc", lambda: date(year, 2, day))

    show(27)
    return show


def test_the_daily_limit_holds_for_any_clock(tmp_path: Path, clock: Callable[..., None]) -> None:
    def decline_reason(packed_task: bytes) -> str:
        reply = unpack(silo_with_policy(tmp_path, '{"rounds_a_day": 2}').answer(packed_task), Reply)
        assert (reply.status == "ok") != bool(reply.reason) and (reply.status == "ok") == bool(reply.arrays)
        return reply.reason

    for packed_task in (packed_train_task(1), packed_train_task(1), packed_train_task(2), packed_train_task(2)):
        assert not decline_reason(packed_task)
    assert "2 rounds a day" in decline_reason(packed_train_task(3))
    assert "2026-02-28" in decline_reason(packed_train_task(2, seed=6))
    clock(26)
    assert "2026-02-28" in decline_reason(packed_train_task(3))
    clock(28)
    assert not decline_reason(packed_train_task(3)) and not decline_reason(packed_train_task(4))
    clock(27)
    assert "2026-03-01" in decline_reason(packed_train_task(5)) and not decline_reason(packed_train_task(4))


@pytest.mark.parametrize("before", [True, False], ids=["after rounds of its own day", "from the first round on"])
def test_a_clock_that_was_a_year_ahead_costs_at_most_one_day(
    tmp_path: Path, clock: Callable[..., None], before: bool
) -> None:
    """Each day that the clock shows has its rounds once, in any order of days."""
    rounds = iter(range(1, 100))

    def trained_rounds() -> int:
        handler = silo_with_policy(tmp_path, '{"rounds_a_day": 2}')
        packed_tasks = [packed_train_task(next(rounds)) for _ in range(4)]
        return [unpack(handler.answer(packed_task), Reply).status for packed_task in packed_tasks].count("ok")

    assert not before or trained_rounds() == 2
    clock(27, 2027)
    assert trained_rounds() == 2
    clock(27)
    assert trained_rounds() == 0
    clock(28)
    assert trained_rounds() == 2 and trained_rounds() == 0
    clock(26)
    assert trained_rounds() == 0
    clock(27, 2027)
    assert trained_rounds() == 0


def test_a_round_continues_without_a_party_at_its_daily_limit(tmp_path: Path, clock: Callable[..., None]) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    with (tmp_path / "team1.py").open("a") as file:
        file.write('policy = {"rounds_a_day": 1}\n')
    fed = deployed_federation(transport, recipe_for("fedavg"))
    with pytest.warns(DescantWarning, match="It continues on 2026-02-28"):
        fed.fit(2, progress=False)
    clock(28)
    fed.fit(1, progress=False)
    assert [(rejection.party, rejection.round) for rejection in fed.rejections_] == [("1", 2)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_during_counting_neither_adds_nor_costs_a_round(
    tmp_path: Path, clock: Callable[..., None], torn: bool
) -> None:
    for at in range(200):
        handler = silo_with_policy(tmp_path / str(at), '{"rounds_a_day": 1}')
        with inject_faults(at, torn) as found, suppress(SimulatedCrash):
            handler.answer(packed_train_task(1))
        again = TaskHandler(handler.file, handler.state.folder, lambda text: None)
        assert [unpack(again.answer(packed_train_task(round)), Reply).status for round in (1, 2)] == ["ok", "declined"]
        if not found.reached:
            break
    assert at > 10


def run_training(
    folder: Path,
    transport: InMemoryTransport,
    method: str,
    invited: Collection[str],
    log: Callable[[str], None],
    more: str = "",
    limits: WaitLimits = WaitLimits(min_parties=3, grace=0),  # noqa: B008
    excluded: Callable[[], Mapping[str, str]] = dict,
) -> dict[str, object]:
    """Run a training of four rounds from its folder; `log` gets the server's log lines."""
    recipe = read_recipe(RECIPE.format(method=method).replace("seed = 5", "seed = 5\nrounds = 4\npoints = 1") + more)
    net = Net.from_model(network, seeds.torch_seed(5, 0, seeds.ALL_PARTIES, "model"))
    handshakes = HandshakeTransport(
        transport, recipe, "lab", net=net, loss=address_of(torch.nn.functional.cross_entropy), log=log
    )
    return TrainingSession(folder, recipe, handshakes, limits=limits, log=log, excluded=excluded).run_to_completion(
        lambda: list(invited)
    )


def test_the_round_summary_names_accepted_and_rejected_updates(tmp_path: Path) -> None:
    [found] = deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), recipe_for("fedavg")).rounds(1)
    start = f"Round 1: loss {found.round.loss:.4f}, "
    assert round_summary(found.round) == f"{start}4 parties"
    lost = Rejection("2", 1, "lost: it has left")
    without_coreset = Rejection("0", 1, "It sent no coreset.", tensor="coreset")
    round = replace(found.round, accepted=("0",), rejections=(lost, without_coreset))
    assert round_summary(round) == f"{start}1 party; without 2: lost: it has left; 0: It sent no coreset"


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+"])
def test_the_server_prints_the_hash_of_the_simulation(tmp_path: Path, method: str) -> None:
    """`descant run` prints the same hash: party states, which the server does not have, are not part of it."""
    atomic.make_folder(tmp_path / "run")
    done = run_training(
        tmp_path / "run",
        InMemoryTransport(silo_handlers(tmp_path)),
        method,
        PARTY_NAMES,
        lambda text: None,
        limits=LIMITS_BY_QUORUM[None],
    )
    data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(PARTY_NAMES).items()}
    recipe = recipe_for(method)
    twin = Federation(network, from_arrays(data), recipe.algorithm(), solver=recipe.solver(), seed=5)
    assert done["hash"] == digest_of_models(twin.fit(4, progress=False).state)


def test_a_resumed_training_needs_only_the_quorum(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    listen = stop_when_waiting(log_lines)

    def kill_after_round_2(text: str) -> None:
        listen(text)
        if text.startswith("Round 2:"):
            transport.unreachable = {"1"}
            raise SimulatedKill

    atomic.make_folder(tmp_path / "run")
    with suppress(SimulatedKill):
        run_training(tmp_path / "run", transport, "fedavg", PARTY_NAMES, kill_after_round_2, limits=LIMITS_BY_QUORUM[3])
    run_training(tmp_path / "run", transport, "fedavg", PARTY_NAMES, listen, limits=LIMITS_BY_QUORUM[3])
    assert "Round 3 begins without 1." in log_lines and read_run(tmp_path / "run" / "training").round == 4


def test_a_newcomer_counts_while_a_round_waits(tmp_path: Path) -> None:
    """Two of the three required parties are connected, and one more that is not part of the training yet."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    transport.unreachable = {"3"}

    def on_log(text: str) -> None:
        log_lines.append(text)
        if text.startswith("Round 2:"):
            transport.unreachable = {"2", "3"}
        if "Waiting for 2" in text and "3" not in transport.unreachable:
            raise ServerWaits(text)
        if "Waiting for 2" in text:
            transport.unreachable = {"2"}

    atomic.make_folder(tmp_path / "run")
    run_training(tmp_path / "run", transport, "fedgeomed+", PARTY_NAMES[:3], on_log)
    assert "2 of 3 parties are connected. Waiting for 2." in log_lines
    assert first_rounds(tmp_path / "run") == {"0": 1, "1": 1, "2": 1, "3": 3}
    held = read_run(tmp_path / "run" / "training").numbers
    assert held.accepted[:, 2].tolist() == [True, True, False, False]
    assert held.accepted[:, 3].tolist() == [False, False, True, True]


def test_a_party_invited_before_the_first_round_is_included_from_the_start(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    invited = [*PARTY_NAMES[:3]]
    transport.unreachable = {"2", "3"}

    def on_log(text: str) -> None:
        if "Waiting" in text and "3" in invited:
            raise ServerWaits(text)
        if "Waiting" in text:
            invited.append("3")
            transport.unreachable = {"2"}

    atomic.make_folder(tmp_path / "run")
    run_training(tmp_path / "run", transport, "fedavg", invited, on_log)
    assert read_run(tmp_path / "run" / "training").numbers.accepted[0].tolist() == [True, True, False, True]
    assert first_rounds(tmp_path / "run") == dict.fromkeys(PARTY_NAMES, 1)


@pytest.mark.parametrize("again", [False, True], ids=["within the grace period", "after a restart of the server"])
def test_a_party_absent_at_the_end_gets_its_models_within_the_grace_period(tmp_path: Path, again: bool) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    folder = tmp_path / "run"

    def on_log(text: str) -> None:
        log_lines.append(text)
        if text.startswith("Round 2:"):
            transport.unreachable = {"1"}
        if text.startswith("The training is over."):
            transport.unreachable -= set(PARTY_NAMES) if again else {"1"}

    limits = replace(LIMITS_BY_QUORUM[3], grace=0 if again else 20)
    atomic.make_folder(folder)
    run_training(folder, transport, "fedgeomed+", PARTY_NAMES, on_log, limits=limits)
    if again:
        assert (
            transport.unreachable == set(PARTY_NAMES)
            and not (tmp_path / "at-1" / "personal_model.safetensors").exists()
        )
        run_training(folder, transport, "fedgeomed+", PARTY_NAMES, on_log, limits=replace(limits, grace=20))
    assert SiloResults(tmp_path / "at-1").scores()["round"] == 4 and transport.unreachable == set(PARTY_NAMES)
    held = [load_file(tmp_path / f"at-{name}" / "global_model.safetensors") for name in ("0", "1")]
    assert all(torch.equal(held[0][key], held[1][key]) for key in held[0])
    own = simulated_federation(recipe_for(), 4, participation=timetable_without("1", 3)).state.personal_models.get("1")[
        "model"
    ]
    mine = load_file(tmp_path / "at-1" / "personal_model.safetensors")
    assert all(torch.equal(mine[key], part) for key, part in LAYOUT.split(own).items())


def test_a_restarted_server_waits_only_for_parties_that_were_not_notified(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    folder = tmp_path / "run"

    def on_log(text: str) -> None:
        log_lines.append(text)
        if text.startswith("Round 3:"):
            transport.unreachable = {"1"}

    def again(grace: float) -> list[str]:
        log_lines.clear()
        limits = replace(LIMITS_BY_QUORUM[3], grace=grace)
        run_training(folder, transport, "fedavg", PARTY_NAMES, on_log, limits=limits)
        return [text for text in log_lines if text.startswith("The training is over.")]

    atomic.make_folder(folder)
    again(0)
    waits = "The training is over. Waiting 0.5 s for 1 to fetch their models."
    assert transport.unreachable == set(PARTY_NAMES) and again(0.5) == [
        waits
    ]  # though no other party is connected any more
    transport.unreachable -= {"1"}
    assert again(600) == [] == again(600) and SiloResults(tmp_path / "at-1").scores()["round"] == 4


class SilentTransport(InMemoryTransport):
    """A transport where some tasks are fetched and never answered, as by parties that left or hang."""

    def __init__(
        self, handlers: dict[str, Callable[[], TaskHandler]], swallows: Callable[[Task], UndeliveredError | None]
    ) -> None:
        super().__init__(handlers)
        self.swallows = swallows

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        for number in [number for number in message_ids if number in self.messages]:
            if why := self.swallows(unpack(self.messages[number][1], Task)):
                del self.messages[number]
                return {number: why} if why.args[0] else {}
        return super().fetch_replies(message_ids, max_bytes)


def test_a_party_that_leaves_during_the_last_evaluation_gets_its_models_later(tmp_path: Path) -> None:
    went: list[str] = []

    def goes(task: Task) -> UndeliveredError | None:
        if went or (task.party, task.kind, task.round) != ("1", "evaluate", 4):
            return None
        transport.unreachable = {"1"}
        went.append(task.party)
        return UndeliveredError("it has gone")

    transport = SilentTransport(silo_handlers(tmp_path), goes)
    folder = tmp_path / "run"
    atomic.make_folder(folder)
    reconnect = lambda text: transport.unreachable.discard("1") if text.startswith("The training is over.") else None  # noqa: E731
    with pytest.warns(DescantWarning, match="'1' could not be evaluated"):
        run_training(
            folder, transport, "fedgeomed+", PARTY_NAMES, reconnect, limits=replace(LIMITS_BY_QUORUM[3], grace=20)
        )
    assert went and SiloResults(tmp_path / "at-1").scores()["round"] == 4


def test_a_hanging_party_at_the_end_does_not_block_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A party that connects while the server waits for another one is in time."""
    monkeypatch.setattr(training_session, "_MIN_EVALUATION_TIMEOUT", 0.1)
    over: list[str] = []

    def hangs(task: Task) -> UndeliveredError | None:
        if not over or (task.party, task.kind) != ("0", "evaluate"):
            return None
        transport.unreachable.discard("1")
        return UndeliveredError("")

    def on_log(text: str) -> None:
        if text.startswith("Round 3:"):
            transport.unreachable = {"0", "1"}
        if text.startswith("The training is over."):
            transport.unreachable.discard("0")
            over.append(text)

    transport = SilentTransport(silo_handlers(tmp_path), hangs)
    folder = tmp_path / "run"
    atomic.make_folder(folder)
    limits = WaitLimits(min_parties=2, quorum=2, deadline=60, grace=1)
    with pytest.warns(DescantWarning, match="'0' could not be evaluated"):
        run_training(folder, transport, "fedgeomed+", PARTY_NAMES, on_log, limits=limits)
    assert SiloResults(tmp_path / "at-1").scores()["round"] == 4 and transport.unreachable == set(PARTY_NAMES)


def test_a_party_that_missed_the_goodbye_gets_it_on_reconnect(tmp_path: Path) -> None:
    """Its connection is down at the moment of the goodbye."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    folder = tmp_path / "run"
    down = [1]
    true = transport.send

    def send(party: str, packed_task: MessageBytes, seconds: float) -> str:
        if party == "1" and unpack(packed_task, Task).kind == "goodbye" and down.pop():
            down.append(0)
            raise UndeliveredError("it is not there")
        return true(party, packed_task, seconds)

    transport.send = send  # type: ignore[method-assign]
    atomic.make_folder(folder)
    run_training(
        folder, transport, "fedavg", PARTY_NAMES, lambda text: None, limits=replace(LIMITS_BY_QUORUM[None], grace=20)
    )
    assert transport.unreachable == set(PARTY_NAMES)


def test_the_first_round_does_not_wait_for_a_revoked_party(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    revoked = dict[str, str]()
    transport.unreachable = {"1"}

    def revoking(text: str) -> None:
        if "Waiting" in text and revoked:
            raise ServerWaits(text)
        if "Waiting" in text:
            revoked["1"] = "it was revoked"

    atomic.make_folder(tmp_path / "run")
    run_training(
        tmp_path / "run", transport, "fedavg", PARTY_NAMES, revoking, "", LIMITS_BY_QUORUM[None], lambda: revoked
    )
    assert revoked and read_run(tmp_path / "run" / "training").round == 4


TOTAL = 'normalize = "total"'
LATE = {
    "fedavg": ("fedavg", ""),
    "personal models": ("fedgeomed+", ""),
    "Ditto": ("ditto", ""),
    "over all": ("fedavg+", 'aggregate_over = "all"'),
    "of all samples": ("fedavg", TOTAL),
}


@pytest.mark.parametrize("late", ["1", "3"])
@pytest.mark.parametrize("case", LATE)
def test_a_late_party_counts_as_in_the_simulation_with_the_same_timetable(tmp_path: Path, case: str, late: str) -> None:
    """Its number of samples is known from its first round on. Before, it counts with one sample."""
    method, more = LATE[case]
    transport = InMemoryTransport(silo_handlers(tmp_path))
    folder = tmp_path / "run"
    transport.unreachable = {late}
    atomic.make_folder(folder)
    run_training(
        folder,
        transport,
        method,
        PARTY_NAMES,
        lambda log_lines: transport.unreachable.clear() if log_lines.startswith("Round 2:") else None,
        more,
    )
    recipe = read_recipe(RECIPE.format(method=method) + more)
    settings = {
        "participation": Timetable.from_records([{"party": late, "from": 3}]),
        "solver": recipe.solver(),
        "seed": 5,
    }
    data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(PARTY_NAMES).items()}
    population = from_arrays(data)
    if more == TOTAL:
        x, y, x_test, y_test = data[late]
        one = from_arrays({**data, late: (x[:1], y[:1], x_test[:0], y_test[:0])})
        known = Population(
            map(population._source, PARTY_NAMES), joined_after={late: 2}, placeholders={late: one._source(late)}
        )
        Federation(network, one, recipe.algorithm(), **settings).fit(2, progress=False).save(tmp_path / "two")
        twin = Federation(network, known, recipe.algorithm(), **settings).load(tmp_path / "two")
        twin.fit(2, progress=False)
    else:
        twin = Federation(network, population, recipe.algorithm(), **settings).fit(4, progress=False)
    [center] = (folder / "training" / "models" / f"{4:08}").glob("global_model*")
    assert torch.equal(load_file(center)["global_model"], twin.state.global_model)
    held = read_run(folder / "training").numbers
    np.testing.assert_array_equal(held.scores["personal"][-1], twin.scores().personal.values)
    assert dict(zip(held.parties, held.samples, strict=True)) == population.samples


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+", "ditto"])
def test_a_party_invited_later_equals_one_that_was_invited_first_and_came_late(
    tmp_path: Path, method: str, killed: bool
) -> None:
    hashes = []
    for case, invited in {"first": PARTY_NAMES, "later": PARTY_NAMES[:3]}.items():
        transport = InMemoryTransport(silo_handlers(tmp_path / case))
        folder = tmp_path / case / "run"
        transport.unreachable = {"3"}
        atomic.make_folder(folder)

        def reconnect(log_lines: str, transport: InMemoryTransport = transport) -> None:
            if log_lines.startswith("Round 2:"):
                transport.unreachable.clear()
            if killed and log_lines.endswith("part of it from now on: 3."):
                raise SimulatedKill

        with suppress(SimulatedKill):
            run_training(folder, transport, method, invited, reconnect)
        hashes.append(run_training(folder, transport, method, invited, reconnect)["hash"])
    assert hashes[0] == hashes[1]
    assert first_rounds(folder) == {"0": 1, "1": 1, "2": 1, "3": 3}
    held = read_run(folder / "training").numbers
    assert held.parties == PARTY_NAMES and held.accepted[:, 3].tolist() == [False, False, True, True]


def test_a_private_training_admits_no_newcomers(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    log_lines = list[str]()
    private = 'wrap = [{wrapper = "central_dp", clip = 1.0, noise = 1.0}]'
    run_training(tmp_path, transport, "fedavg", PARTY_NAMES[:3], log_lines.append, private)
    assert first_rounds(tmp_path).keys() == {"0", "1", "2"} and "4 parties" not in "".join(log_lines)


AFTER_4 = f"ε={epsilon(4.0, 4, 1e-5):.3g}"
SPENT = {
    "of a budget": (
        'wrap = [{wrapper = "central_dp", noise = 4.0, budget = 8.0}]',
        f"{AFTER_4} of a budget of 8 at δ=1e-05",
    ),
    "without one": ('wrap = [{wrapper = "local_dp", noise = 8.0}]', f"{AFTER_4} at δ=1e-05"),
    "without noise": ('wrap = [{wrapper = "central_dp", noise = 0}]', "no noise: nothing is hidden"),
}


@pytest.mark.parametrize("case", SPENT)
def test_round_lines_and_status_show_the_spent_privacy(tmp_path: Path, case: str) -> None:
    more, last = SPENT[case]
    log_lines = list[str]()
    assert training_status(tmp_path)["spent"] is None
    run_training(
        tmp_path,
        InMemoryTransport(silo_handlers(tmp_path)),
        "fedavg",
        PARTY_NAMES,
        log_lines.append,
        more,
        LIMITS_BY_QUORUM[None],
    )
    rounds = [text for text in log_lines if text.startswith("Round ")]
    assert len(rounds) == 4 and all("at δ" in text or "no noise" in text for text in rounds)
    assert rounds[-1].endswith(f"4 parties, {last}")
    assert training_status(tmp_path)["spent"]["text"] == f"Privacy of a party: {last}"


def test_a_training_ended_by_its_budget_is_evaluated_in_its_last_round(tmp_path: Path) -> None:
    """The budget ends it after two rounds of four, of which only the last was to be evaluated."""
    more = f'wrap = [{{wrapper = "central_dp", noise = 4.0, budget = {epsilon(4.0, 2, 1e-5) + 1e-6}}}]'
    for _ in range(2):  # the same command, given again, runs no more rounds
        transport = InMemoryTransport(silo_handlers(tmp_path))
        with pytest.warns(DescantWarning, match="ends the run after 2 rounds"):
            done = run_training(
                tmp_path, transport, "fedavg", PARTY_NAMES, lambda text: None, more, LIMITS_BY_QUORUM[None]
            )
        assert done["rounds"] == 2 and transport.unreachable == set(PARTY_NAMES)
        assert [row["evaluated"] for row in training_status(tmp_path)["scores"].values()] == [2] * 4
        assert {SiloResults(tmp_path / f"at-{name}").scores()["round"] for name in PARTY_NAMES} == {2}
    table, _ = write_report(tmp_path / "training")
    assert "After round 2, evaluated by 4 of 4 parties" in table.verdict


def test_a_training_without_privacy_reports_no_epsilon(tmp_path: Path) -> None:
    log_lines = list[str]()
    run_training(
        tmp_path,
        InMemoryTransport(silo_handlers(tmp_path)),
        "fedavg",
        PARTY_NAMES,
        log_lines.append,
        "",
        LIMITS_BY_QUORUM[None],
    )
    assert "ε" not in "".join(log_lines) and training_status(tmp_path)["spent"] is None


def test_the_status_shows_the_sample_privacy_of_dp_sgd(tmp_path: Path) -> None:
    log_lines = list[str]()
    solver = 'solver = "dp_sgd"\nlr = 0.05\nsteps = 1\nbatch = 1\nbudget = 99.0'
    text = (
        RECIPE.format(method="fedavg")
        .replace("seed = 5", "seed = 5\nrounds = 2")
        .replace(ADAM_TRAINING.strip(), solver)
    )
    recipe = read_recipe(text)
    transport = InMemoryTransport(silo_handlers(tmp_path))
    net = Net.from_model(network, seeds.torch_seed(5, 0, seeds.ALL_PARTIES, "model"))
    handshakes = HandshakeTransport(
        transport, recipe, "lab", net=net, loss=address_of(torch.nn.functional.cross_entropy), log=log_lines.append
    )
    TrainingSession(
        tmp_path, recipe, handshakes, limits=WaitLimits(min_parties=4, grace=0), log=log_lines.append
    ).run_to_completion(lambda: PARTY_NAMES)
    spent = training_status(tmp_path)["spent"]
    assert (
        0 < spent["epsilon"] < spent["budget"] == 99.0
        and spent["text"].removeprefix("Privacy of a sample: ") in log_lines[-1]
    )


def test_a_private_training_keeps_the_placeholder_of_a_late_party(tmp_path: Path) -> None:
    """One sample is the minimum: the privacy loss of a late party is never higher than computed."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    transport.unreachable = {"0"}
    more = 'wrap = [{wrapper = "local_dp", clip = 1.0, noise = 1.0}]'
    run_training(
        tmp_path,
        transport,
        "fedavg",
        PARTY_NAMES,
        lambda log_lines: transport.unreachable.clear() if "Round 2:" in log_lines else None,
        more,
    )
    assert read_descriptions(tmp_path)["0"]["samples"] == 1
    assert read_run(tmp_path / "training").numbers.accepted[:, 0].tolist() == [False, False, True, True]
