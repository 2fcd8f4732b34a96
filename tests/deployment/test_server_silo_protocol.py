"""Parties on machines of their own, without the machines: a post in memory, desks with folders, and what dies."""

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
from descant.coresets import proxy_training
from descant.deployment.server import HandshakeTransport, training_session
from descant.deployment.server.server_report import write_report
from descant.deployment.server.training_session import TrainingSession, first_rounds, read_descriptions, round_summary
from descant.deployment.server.training_status import training_status
from descant.deployment.silo import SiloFile, TaskHandler
from descant.deployment.silo.console_messages import reply_summary
from descant.deployment.silo.handshake_reply import training_part
from descant.deployment.silo.result_files import SiloResults
from descant.deployment.silo.silo_evaluation import compare_with_local
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
from descant.storage.vault.coreset_rows import CoresetRows, ExpectedCoreset
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import read_run as recorded
from silo_file_templates import ADAM_TRAINING, MODEL_AND_METHOD_TABLES, ROWS_SILO_FILE
from test_wire import FORGED_MESSAGES, to_spill_file
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
    """Letters are answered when they are asked for, by desks that are made anew for every letter, as after a kill.

    Answers are files, as Flower's are.
    """

    def __init__(self, handlers: dict[str, Callable[[], TaskHandler]]) -> None:
        self.handlers = handlers
        self.unreachable = set[str]()
        self.session_ids = dict[str, str]()
        self.departed = set[str]()
        self.messages: dict[str, tuple[str, bytes]] = {}
        self.pending = set[str]()
        self.corrupt_reply: Callable[[Task, bytes], bytes | UndeliveredError | None] = lambda task, answer: answer
        self.sent_count = 0

    def connected_parties(self) -> dict[str, str]:
        return {name: self.session_ids.get(name, "first") for name in self.handlers if name not in self.unreachable}

    def departed_parties(self) -> set[str]:
        return self.departed & self.unreachable

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        if party in self.unreachable:
            raise UndeliveredError("nobody is there")
        self.sent_count += 1
        self.messages[str(self.sent_count)] = (party, payload[:])
        if "rounds" in (task := unpack(payload, Task)).settings and task.kind == "goodbye":
            self.unreachable.add(party)
        self.pending.add(str(self.sent_count))
        return str(self.sent_count)

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        found: dict[str, MessageBytes | UndeliveredError] = {}
        for number in message_ids:
            party, letter = self.messages.pop(number, ("", b""))
            if party:
                answer = self.corrupt_reply(unpack(letter, Task), self.handlers[party]().answer(letter))
                if answer is not None:
                    found[number] = to_spill_file(answer) if isinstance(answer, bytes) else answer
        self.pending -= found.keys()
        return found

    def discard(self, message_ids: Collection[str]) -> None:
        self.pending -= set(message_ids)


class SimulatedKill(BaseException):
    """What dies here does not tidy up behind itself."""


class RestartingTransport(InMemoryTransport):
    """Desks that live on from letter to letter; one that is killed over a letter is made anew, and given it again."""

    def __init__(self, makers: dict[str, Callable[[], TaskHandler]]) -> None:
        self.live_handlers: dict[str, TaskHandler] = {}
        super().__init__({name: partial(self._live_handler, name, make) for name, make in makers.items()})

    def _live_handler(self, name: str, make: Callable[[], TaskHandler]) -> TaskHandler:
        return (
            self.live_handlers.setdefault(name, make()) if name not in self.live_handlers else self.live_handlers[name]
        )

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
    patience: WaitLimits = WaitLimits(),  # noqa: B008
    say: Callable[[str], None] = lambda text: None,
    excluded_parties: Callable[[], Mapping[str, str]] = dict,
) -> Federation:
    """A federation of whoever is there."""
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = HandshakeTransport(
        transport, recipe, "lab", net=Net.from_model(network, 0), loss=loss, log=lambda text: None
    )
    people = remote_population(meeting.wait_for_quorum(len(transport.connected_parties())))
    engine = Silos(meeting, patience, say, excluded=excluded_parties)
    return Federation(network, people, recipe.algorithm(), solver=recipe.solver(), seed=5, engine=engine)


def simulated_federation(recipe: Recipe, rounds: int, names: Collection[str] = PARTY_NAMES, **more: Any) -> Federation:
    people = from_arrays(
        {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(names).items()}
    )
    settings = {"algorithm": recipe.algorithm(), "solver": recipe.solver(), "seed": 5, **more}
    return Federation(network, people, **settings).fit(rounds, progress=False)


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


OTHERWISE = {
    "a layer of its own": ("class Layer(torch.nn.Linear): pass\n", "Layer(6, 5), torch.nn.Tanh(), Layer(5, 3)"),
    "dropout": (
        "",
        "torch.nn.Linear(6, 5), torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5)), torch.nn.Linear(5, 3)",
    ),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_model_with_equal_tensors_and_other_code_takes_part(tmp_path: Path, how: str) -> None:
    """Its model has the federation's names and shapes, and is not computed by the way that the server has tried."""
    people, (before, layers) = silo_handlers(tmp_path), OTHERWISE[how]
    written = f"import torch\n{before}" + ROWS_SILO_FILE.replace(
        "return network()", f"return torch.nn.Sequential({layers})"
    )
    (tmp_path / "team0.py").write_text(written.format(name="0"))
    fed = deployed_federation(InMemoryTransport(people), recipe_for("fedavg"))
    assert fed.state.execution_mode == "stacked"
    fed.fit(2, progress=False)
    assert not fed.rejections_ and fed.scores().names == PARTY_NAMES
    assert set(SiloResults(tmp_path / "at-0").training_records()) == {1, 2}
    assert len(compare_with_local(people["0"]().file, tmp_path / "at-0").rows) == 1  # it trains alone by the same way


def count_survived_kills(folder: Path, run: Callable[[Path], None], every: int = 1) -> int:
    """At how many of their writes desks died, each time in another run; they are asked again, and nothing differs."""
    for died in range(400):
        left = [died * every]

        def dying(change: Callable[..., object], *arguments: object, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise SimulatedKill
            return change(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(atomic, "_do", dying)
            run(folder / str(died))
        if left[0] >= 0:
            return died
    raise AssertionError("there is always one write more")


def count_kills_of_recipe(folder: Path, recipe: Recipe, every: int = 1) -> int:
    """The same in runs of two rounds by a recipe."""
    two = PARTY_NAMES[:2]
    twin = simulated_federation(recipe, 2, two)

    def run(place: Path) -> None:
        assert_same_models(
            deployed_federation(RestartingTransport(silo_handlers(place, two)), recipe).fit(2, progress=False),
            twin,
            two,
        )

    return count_survived_kills(folder, run, every)


def test_a_silo_killed_at_any_write_gives_the_same_models(tmp_path: Path) -> None:
    assert count_kills_of_recipe(tmp_path, recipe_for()) > 50


ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much a process has")
SLY = """
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
    ("does", "told"),
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    )
    file = tmp_path / "team0.py"
    file.write_text(SLY)
    said: list[str] = []
    worker = SiloWorker(file, "0", tmp_path / "at", log=said.append)
    try:
        chosen = recipe_for()
        layout = Plan.create(network, classification_parties(5), recipe_for().algorithm(), 5, **_rest()).net.layout
        hello = {"recipe": {**chosen.tables, "model": {}}, "federation": "lab", "layout": layout.digest}
        report = unpack(worker.answer(pack(Task("0", 0, "handshake", arrays={}, settings=hello))), Reply)
        assert report.status == "ok", report.reason
        center = torch.zeros(layout.width)
        settings = {"seed": 5, "execution_mode": "looped", "layout": layout.digest, "lr": 0.1, "work": 1, "accepted": 0}
        train = Task("0", 1, "train", arrays={"global_model": center, "personal": center}, settings=settings)
        Path(f"{file}.mark").write_text(does)
        report = unpack(worker.answer(pack(replace(train, deadline=5.0 if "sleep" in does else 600.0))), Reply)
        assert report.status == "error" and told in report.reason and "4711" not in report.reason
        Path(f"{file}.mark").unlink(missing_ok=True)  # a slow machine may have ended it before it read that
        assert unpack(worker.answer(pack(train)), Reply).status == "ok"
    finally:
        worker.close()


def test_a_silo_logs_one_line_per_task(tmp_path: Path) -> None:
    said = list[str]()
    post = InMemoryTransport(silo_handlers(tmp_path, ["0"], said.append))
    fed = deployed_federation(post, recipe_for("fedavg")).fit(2, progress=False)
    scores = fed.scores()
    rows = classification_parties(5)["0"].samples
    told = [text for text in said if text.startswith("Round")]
    assert len(told) == 3
    for round, text in enumerate(told[:2], 1):
        loss = f"{fed.history_[round - 1]['loss']:.4f}"  # of one party the mean is its own
        assert re.fullmatch(rf"Round {round}: trained on {rows} samples in \d+\.\d s, loss {loss}\.", text), text
    own, center = (f"{column.mean:.4f}" for column in (scores.personal, scores.global_model))
    assert re.fullmatch(rf"Round 2: judged in \d+\.\d s, its own model {own}, the common one {center}\.", told[2]), told


def test_a_silo_logs_sent_coresets_and_repeated_tasks(tmp_path: Path) -> None:
    sent = Reply("0", 1, "train", metrics={"samples": 9, "loss": 1.0, "coreset": 4}, encrypted_coreset=b"rows")
    assert reply_summary(sent, 0.0).endswith("loss 1.0000, 4 rows sealed and sent, by which it is stood in for.")
    said = list[str]()
    post = InMemoryTransport(silo_handlers(tmp_path, ["0"], said.append))
    fed = deployed_federation(post, recipe_for("fedavg"))
    post.corrupt_reply = lambda task, answer: (
        post.handlers["0"]().answer(pack(task)) if task.kind == "train" else answer
    )
    fed.fit(1, progress=False)
    again = "Round 1: it was asked again, and answers as before."
    assert [text for text in said if text.startswith("Round")][1:] == [again]


def test_silo_log_lines_start_with_the_local_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    )
    (tmp_path / "team0.py").write_text(ROWS_SILO_FILE.format(name="0"))
    worker = SiloWorker(tmp_path / "team0.py", "0", tmp_path / "at")
    hello = {"recipe": {**recipe_for().tables, "model": {}}, "federation": "lab", "layout": LAYOUT.digest}
    try:
        worker.answer(pack(Task("0", 0, "handshake", arrays={}, settings=hello)))
    finally:
        worker.close()
    assert re.search(r"^\d\d:\d\d:\d\d Taking part by", capfd.readouterr().err, re.MULTILINE)


def _rest() -> dict[str, object]:
    return {"solver": recipe_for().solver(), "loss": torch.nn.functional.cross_entropy, "metric": None}


def falsified(letter: Task, answer: bytes, how: str) -> bytes:
    report = unpack(answer, Reply)
    first = next(iter(report.arrays))
    tensor = report.arrays[first]
    other = {
        "nan": torch.full_like(tensor, torch.nan),
        "infinite": torch.full_like(tensor, torch.inf),
        "another shape": tensor.flatten()[:1],
        "a shape that broadcasts": tensor[:1],
        "another dtype": tensor.double(),
    }
    if how in other:
        return pack(replace(report, arrays={**report.arrays, first: other[how]}))
    arrays = dict(report.arrays)
    metrics = dict(report.metrics)
    if how == "a tensor missing":
        del arrays[first]
    elif how == "a tensor too many":
        arrays["backdoor"] = torch.zeros(2)
    elif how == "an absurd weight":
        metrics["samples"] = 1e30
    elif how == "no weight":
        del metrics["samples"]
    elif how == "a name for the terminal":
        arrays[CLEARS] = torch.zeros(2)
    elif how == "a name in place of another":
        arrays[CLEARS] = arrays.pop(first)
    status: Any = CLEARS if how == "a status for the terminal" else report.status
    return pack(replace(report, status=status, arrays=arrays, metrics=metrics))


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "too long": lambda answer: answer + bytes(2**23),
    "nothing": lambda answer: b"",
    "cut": lambda answer: answer[: len(answer) // 2],
    "a pickle": lambda answer: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "an npz bomb": lambda answer: _bomb(2**26),
    "a flipped bit": lambda answer: answer[:-1] + bytes([answer[-1] ^ 1]),
    "a header that lies": lambda answer: (2**62).to_bytes(8, "little") + answer[8:],
}
REPORTS = ["nan", "infinite", "another shape", "a shape that broadcasts", "another dtype", "a tensor missing"]
REPORTS += ["a tensor too many", "an absurd weight", "no weight", "a name for the terminal"]
REPORTS += ["a name in place of another", "a status for the terminal"]
CLEARS = "\x1b[2J" * 10**4  # what a terminal obeys, and long


def _bomb(size: int) -> bytes:
    """A file of numpy that is a thousand times as large as its bytes once it is read."""
    file = io.BytesIO()
    np.savez_compressed(file, weights=np.zeros(size, np.uint8))
    return file.getvalue()


@pytest.mark.parametrize("how", [*REPORTS, *BYTES, *FORGED_MESSAGES])
def test_an_invalid_reply_is_rejected_and_the_others_continue(tmp_path: Path, how: str) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party != "1" or task.kind != "train":
            return answer
        return (
            FORGED_MESSAGES[how]()
            if how in FORGED_MESSAGES
            else BYTES[how](answer)
            if how in BYTES
            else falsified(task, answer, how)
        )

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for("fedavg"))
    if how in FORGED_MESSAGES:
        fed.engine_._max_message_bytes = 2**40  # as where the model is large: its size does not give a letter away
    with pytest.warns(DescantWarning, match="refused"):
        fed.fit(2, progress=False)
    assert [refusal.party for refusal in fed.rejections_] == ["1", "1"]
    assert "it answered for" not in str(fed.rejections_[0])  # it says the party and the round that were asked
    assert all(str(refusal).isprintable() and len(str(refusal)) < 800 for refusal in fed.rejections_)
    without = simulated_federation(recipe_for("fedavg"), 2, [name for name in PARTY_NAMES if name != "1"])
    assert torch.equal(fed.state.global_model, without.state.global_model)


@pytest.mark.parametrize("whose", ["another party's", "an old round's"])
def test_a_reply_to_another_task_is_rejected(tmp_path: Path, whose: str) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    kept = dict[tuple[str, int], bytes]()

    def spoil(task: Task, answer: bytes) -> bytes:
        kept[task.party, task.round] = answer
        if task.party != "1" or task.round != 2 or task.kind != "train":
            return answer
        return kept["0", 2] if whose == "another party's" else kept["1", 1]

    post.corrupt_reply = spoil
    with pytest.warns(DescantWarning, match="refused"):
        fed = deployed_federation(post, recipe_for("fedavg")).fit(3, progress=False)
    [refusal] = fed.rejections_
    assert refusal.party == "1" and refusal.round == 2 and "was asked for" in refusal.reason


def test_a_silo_declines_invalid_tasks(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(post, recipe_for("fedavg")).fit(2, progress=False)
    plan = fed.plan_
    desk = post.handlers["0"]()

    def said(**changes: object) -> str:
        task = next(iter(make_tasks(plan, fed.state, {"0": plan.solver.hyper}, kind="train", index=3)))
        task = replace(task, settings={**task.settings, "accepted": 2, **changes.pop("settings", {})}, **changes)  # type: ignore[arg-type, dict-item]
        report = unpack(desk.answer(pack(task)), Reply)
        assert report.status in ("declined", "error") and not report.arrays
        return report.reason

    assert "'0'" in said(party="1")
    assert "not answered here" in said(kind="personal") and "not answered here" in said(kind="proxy")
    assert "cannot follow" in said(settings={"accepted": 3}) and "cannot follow" in said(settings={"accepted": None})
    assert "Stale" in said(settings={"accepted": 0})
    assert "ModelError" in said(settings={"layout": "another"})
    assert "handshake" in unpack(desk.answer(b"no letter"), Reply).kind


def test_a_party_without_an_accountant_declines_the_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    chosen = read_recipe(RECIPE.format(method="fedavg") + 'wrap = [{wrapper = "local_dp", noise = 4.0, budget = 9.0}]')
    [desk] = silo_handlers(tmp_path, ["0"], said.append).values()
    hello = {"recipe": training_part(chosen.tables), "federation": "lab", "layout": LAYOUT.digest}
    letter = pack(Task("0", 0, "handshake", arrays={}, settings=hello))
    assert unpack(desk().answer(letter), Reply).status == "ok"
    epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert unpack(desk().answer(letter), Reply).status == "declined" and "pip install 'descant[dp]'" in said[-1]


def test_a_loss_mismatch_does_not_reveal_the_path_of_the_server_file(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path, ["0"]))
    meeting = HandshakeTransport(
        post, recipe_for(), "lab", net=Net.from_model(network, 0), loss="/home/organiser/secret/mine.py:loss", log=len
    )
    assert not meeting.connected_parties()
    [(_, letter)] = post.messages.values()
    assert "federation's is mine.py:loss" in unpack(letter, Task).settings["reason"] and b"organiser" not in letter


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"layout": "another"}, "model"),
        ({"federation": 7}, "federation"),
        ({"recipe": {"method": {"algorithm": "fedavg", "wrap": [{"wrapper": "os:system"}]}}}, "code"),
        ({"recipe": {"method": {"algorithm": "fedavg"}, "training": {"optimizer": "../x"}}}, "files"),
        ({"recipe": {"method": {"algorithm": "unheard"}}}, "unheard"),
    ],
)
def test_a_silo_declines_an_invalid_handshake(tmp_path: Path, said: dict[str, object], why: str) -> None:
    desk = silo_handlers(tmp_path)["0"]()
    hello = {"recipe": recipe_for().tables, "federation": "lab", "layout": "", **said}
    report = unpack(desk.answer(pack(Task("0", 0, "handshake", arrays={}, settings=hello))), Reply)
    assert report.status == "declined" and why in report.reason


def test_a_silo_in_the_folder_of_another_party_declines_and_writes_nothing(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    deployed_federation(post, recipe_for("fedavg")).fit(1, progress=False)
    place = tmp_path / "at-1"
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    desk = TaskHandler(SiloFile(tmp_path / "team0.py", "0"), place, lambda text: None)
    hello = {"recipe": training_part(recipe_for("fedavg").tables), "federation": "lab", "layout": LAYOUT.digest}
    settings = {"seed": 5, "execution_mode": "looped", "layout": LAYOUT.digest, "lr": 0.1, "work": 1, "accepted": 1}
    center = {"global_model": torch.zeros(LAYOUT.width)}
    for task in (
        Task("0", 0, "handshake", arrays={}, settings=hello),
        Task("0", 2, "train", arrays=center, settings=settings),
    ):
        report = unpack(desk.answer(pack(task)), Reply)
        assert report.status == "declined" and "'1'" in report.reason and "'0'" in report.reason
    assert {file: file.read_bytes() for file in place.rglob("*") if file.is_file()} == before


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
    desk = TaskHandler(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at", lambda text: None, recipe_digest=wanted)
    hello = {
        "recipe": training_part(read_recipe(done).tables),
        "federation": "lab",
        "layout": LAYOUT.digest,
        "text": text,
    }
    report = unpack(desk.answer(pack(Task("0", 0, "handshake", arrays={}, settings=hello))), Reply)
    assert (report.status == "ok") == (not why) and why in report.reason
    assert wanted == found or (wanted in report.reason and found in report.reason)


def test_a_round_with_a_quorum_continues_and_names_the_missing_party(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    post.corrupt_reply = lambda task, answer: None if task.party == "1" and task.round == 2 else answer
    fed = deployed_federation(post, recipe_for("fedavg"), WaitLimits(deadline=0.2, quorum=3))
    with pytest.warns(DescantWarning, match="went on without it"):
        fed.fit(3, progress=False)
    assert [refusal.party for refusal in fed.rejections_] == ["1"]
    twin = simulated_federation(recipe_for("fedavg"), 3)
    assert not torch.equal(fed.state.global_model, twin.state.global_model)


def test_overdue_tasks_are_discarded(tmp_path: Path) -> None:
    """A server whose parties do not answer, or cannot take part, keeps no number of their letters for ever."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    post.corrupt_reply = lambda task, answer: None if task.party == "1" and task.kind == "train" else answer
    fed = deployed_federation(post, recipe_for("fedavg"), WaitLimits(deadline=0.05, quorum=3))
    with pytest.warns(DescantWarning, match="went on without it"):
        for _ in fed.rounds(4):
            assert len(post.pending) == 1
    assert fed.history_[-1]["presence"] == "p.pp"


def test_a_round_without_quorum_resends_the_task_on_reconnect(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    lost = [3]

    def spoil(task: Task, answer: bytes) -> bytes | UndeliveredError:
        if task.party == "1" and task.round == 2 and lost[0]:
            lost[0] -= 1
            return UndeliveredError("its machine is off")
        return answer

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for()).fit(3, progress=False)
    assert not lost[0] and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


class Waits(Exception):
    """The server waits for somebody, and would do so for ever."""


def listening(said: list[str]) -> Callable[[str], None]:
    """Keeps what the server says; where it waits, the test ends."""

    def hear(text: str) -> None:
        said.append(text)
        if "Waiting" in text:
            raise Waits(text)

    return hear


QUORUM = {None: WaitLimits(min_parties=4, grace=0), 3: WaitLimits(min_parties=4, quorum=3, deadline=0.1, grace=0)}


def without(name: str, since: int) -> Timetable:
    return Timetable.from_records([{"party": name, "to": since - 1}])


def test_later_rounds_start_with_a_quorum(tmp_path: Path) -> None:
    """`gather` is for the first round: who is gone later is waited for by nobody, and named."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    fed = deployed_federation(post, recipe_for(), QUORUM[3], listening(said))
    for round in fed.rounds(4):
        post.unreachable = {"1"} if round.index > 1 else set()
    assert [text for text in said if "without" in text] == ["Round 3 begins without 1."]
    assert_same_models(fed, simulated_federation(recipe_for(), 4, participation=without("1", 3)))


def test_the_first_round_waits_for_min_parties(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    fed = deployed_federation(post, recipe_for(), QUORUM[3], listening(said))
    post.unreachable = {"1"}
    with pytest.raises(Waits, match=r"3 of 4 parties are connected. Waiting for 1."):
        fed.fit(1, progress=False)
    post.unreachable = set()
    assert_same_models(fed.fit(2, progress=False), simulated_federation(recipe_for(), 2))


def test_without_a_quorum_every_round_waits_for_min_parties(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    fed = deployed_federation(post, recipe_for(), QUORUM[None], listening(said))
    fed.fit(1, progress=False)
    post.unreachable = {"1"}
    with pytest.raises(Waits, match=r"3 of 4 parties are connected. Waiting for 1."):
        fed.fit(1, progress=False)
    post.unreachable = set()
    assert_same_models(fed.fit(1, progress=False), simulated_federation(recipe_for(), 2))


def test_evaluation_does_not_wait_for_a_party_that_left(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    fed = deployed_federation(post, recipe_for(), QUORUM[None], listening(said)).fit(2, progress=False)
    post.unreachable = {"1"}
    with pytest.raises(Waits, match=r"Waiting for 1\."):  # it fell silent, and comes back
        fed.scores()
    post.departed = {"1"}
    assert fed.scores().names == ("0", "2", "3")
    with pytest.raises(Waits, match=r"Waiting for 1\."):
        fed.fit(1, progress=False)


def test_no_round_starts_below_the_quorum(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    fed = deployed_federation(post, recipe_for(), QUORUM[3], listening(said)).fit(1, progress=False)
    post.unreachable = {"1", "2"}
    with pytest.raises(Waits, match=r"2 of 3 parties are connected. Waiting for 1, 2."):
        fed.fit(1, progress=False)


@pytest.mark.parametrize("quorum", QUORUM)
@pytest.mark.parametrize("begun", [0, 2], ids=["before the first round", "later"])
def test_no_round_waits_for_a_revoked_party(tmp_path: Path, quorum: int | None, begun: int) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    revoked = dict[str, str]()
    patience = replace(QUORUM[quorum], quorum=quorum and 2)
    fed = deployed_federation(post, recipe_for(), patience, listening(said), lambda: revoked)
    for name in ("1", "2"):
        fed.fit(begun, progress=False)
        revoked[name] = "it was revoked"
    post.unreachable = {"2"}  # and 1 is there still, as one is whom the proxy has not cut off yet
    fed.fit(2, progress=False)
    assert fed.history_[-1]["presence"] == ("paap" if begun else "p..p")


def test_revoked_parties_do_not_lower_the_quorum(tmp_path: Path) -> None:
    """Or the common model could be that of the one party which is left; those who are there can still be judged."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    revoked = dict[str, str]()
    fed = deployed_federation(post, recipe_for(), QUORUM[3], listening([]), lambda: revoked).fit(1, progress=False)
    revoked |= {"1": "it was revoked", "2": "it was forgotten"}
    with pytest.raises(Waits, match=r"2 of 3 parties are connected. Waiting for new invites.*smaller --quorum"):
        fed.fit(1, progress=False)
    assert fed.scores().names == ("0", "3") and fed.state.round == 1


def test_a_lost_task_of_a_revoked_party_is_dropped(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    revoked = dict[str, str]()

    def spoil(task: Task, answer: bytes) -> bytes | UndeliveredError:
        if task.party != "1" or task.round != 2:
            return answer
        post.unreachable = {"1"}
        revoked["1"] = "it was revoked"
        return UndeliveredError("its machine is off")

    post.corrupt_reply = spoil
    fed = deployed_federation(
        post, recipe_for(), WaitLimits(min_parties=4, timeout=20), excluded_parties=lambda: revoked
    )
    with pytest.warns(DescantWarning, match="party '1': lost: it was revoked"):
        fed.fit(3, progress=False)
    assert_same_models(fed, simulated_federation(recipe_for(), 3, participation=without("1", 2)), ["0", "2", "3"])


@pytest.mark.parametrize("answer", [UndeliveredError("it has gone"), None], ids=["that is told", "that nobody tells"])
def test_a_round_does_not_wait_for_a_party_that_left_during_it(tmp_path: Path, answer: UndeliveredError | None) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))

    def spoil(task: Task, true: bytes) -> bytes | UndeliveredError | None:
        if task.party != "1" or task.round != 2:
            return true
        post.unreachable = {"1"}
        post.departed = {"1"}
        return answer

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for(), WaitLimits(min_parties=3, timeout=20))
    with pytest.warns(DescantWarning, match="party '1': lost: it has left"):
        fed.fit(3, progress=False)
    assert_same_models(fed, simulated_federation(recipe_for(), 3, participation=without("1", 2)), ["0", "2", "3"])


def test_a_party_that_left_and_reconnected_gets_its_task_again(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    times = [0]

    def spoil(task: Task, true: bytes) -> bytes | None:
        times[0] += (first := task.party == "1" and task.round == 2 and not times[0])
        if first:
            post.departed, post.session_ids["1"] = {"1"}, "again"
        return None if first else true

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for(), WaitLimits(timeout=20)).fit(3, progress=False)
    assert times == [1] and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


def test_an_error_reply_counts_toward_the_quorum(tmp_path: Path) -> None:
    """One fails and one is dead: the round goes on with the two others, and does not wait for the dead one."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()

    def spoil(task: Task, answer: bytes) -> bytes | None:
        if task.round != 2 or task.party not in "12":
            return answer
        return None if task.party == "2" else pack(Reply("1", 2, "train", status="error", reason="KeyError."))

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for(), replace(QUORUM[3], timeout=20), listening(said))
    with pytest.warns(DescantWarning, match="2 of 4 reports were refused"):
        fed.fit(2, progress=False)
    assert fed.history_[-1]["presence"] == "paap"
    assert {refusal.party: refusal.reason for refusal in fed.rejections_}["2"].endswith("the round went on without it")


def test_a_round_without_quorum_at_its_deadline_names_the_missing_parties(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    post.corrupt_reply = lambda task, answer: None if task.party in "12" and task.round == 2 else answer
    fed = deployed_federation(post, recipe_for(), QUORUM[3], listening(said))
    needs = "2 of its quorum of 3 replies after 0.1 s"
    with pytest.raises(Waits, match=f"Round 2 has {needs}. Waiting for 1, 2."):
        fed.fit(2, progress=False)


def test_evaluation_waits_for_no_party_after_the_deadline(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    post.corrupt_reply = lambda task, answer: None if task.party in "12" and task.kind == "evaluate" else answer
    fed = deployed_federation(post, recipe_for(), QUORUM[3], listening(said)).fit(1, progress=False)
    with pytest.warns(DescantWarning, match="could not be evaluated.*no reply within 0.1 s"):
        own = fed.scores().personal.values
    assert np.isnan(own).tolist() == [False, True, True, False]


@pytest.mark.parametrize("lie", [10**400, "high", [1.0], None], ids=["too large", "a word", "a list", "nothing"])
def test_an_invalid_score_is_recorded_as_nan(tmp_path: Path, lie: object) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party != "1" or task.kind != "evaluate":
            return answer
        return pack(replace(report := unpack(answer, Reply), metrics={**report.metrics, "personal": lie}))

    post.corrupt_reply = spoil
    atomic.make_folder(tmp_path / "run")
    trained(tmp_path / "run", post, "fedavg", PARTY_NAMES, lambda text: None, patience=QUORUM[None])
    own = recorded(tmp_path / "run" / "training").numbers.scores["personal"][-1]
    assert np.isnan(own).tolist() == [False, True, False, False]


def test_secure_aggregation_waits_for_its_min_parties(tmp_path: Path) -> None:
    """Else all rounds would be used up, each of them void."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    chosen = read_recipe(RECIPE.format(method="fedavg") + 'wrap = [{wrapper = "secure"}]')
    fed = deployed_federation(post, chosen, WaitLimits(quorum=2, deadline=0.1), listening(said)).fit(1, progress=False)
    post.unreachable = {"1"}
    fed.fit(1, progress=False)
    post.unreachable = {"1", "2"}
    with pytest.raises(Waits, match=r"2 of 3 parties are connected. Waiting for 1, 2."):
        fed.fit(1, progress=False)


def test_a_party_that_lost_its_state_starts_again_and_reports_it(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    told = list[float]()
    fed = deployed_federation(post, recipe_for()).fit(2, progress=False)
    for file in (tmp_path / "at-1").glob("*"):
        if file.name != "handshake.json":
            file.unlink()
    for round in fed.rounds(2):
        told.append(round.round.metrics["1"].get("state_reset", 0.0))
    assert told == [1.0, 0.0] and not fed.rejections_


def test_no_round_is_accepted_below_the_quorum(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    lost = dict.fromkeys(("1", "2"), 4)

    def spoil(task: Task, answer: bytes) -> bytes | UndeliveredError:
        if task.round == 2 and lost.get(task.party):
            lost[task.party] -= 1
            return UndeliveredError("its machine is off")
        return answer

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for("fedavg"), WaitLimits(deadline=0.01, quorum=3))
    for round in fed.rounds(3):
        assert len(round.round.accepted) >= 3


def test_a_party_with_a_new_session_gets_its_task_again(tmp_path: Path) -> None:
    """Flower tells of nobody who was away for a moment only: what it had fetched is never answered."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    swallowed = [1]

    def spoil(task: Task, answer: bytes) -> bytes | None:
        if task.party == "1" and task.round == 2 and task.kind == "train" and swallowed[0]:
            swallowed[0] -= 1
            post.session_ids["1"] = "second"
            return None
        return answer

    post.corrupt_reply = spoil
    fed = deployed_federation(post, recipe_for()).fit(3, progress=False)
    assert not swallowed[0] and not fed.rejections_
    assert_same_models(fed, simulated_federation(recipe_for(), 3))


LIED: list[dict[str, object]] = [{"samples": 10**12}, {"samples": 0}, {"tested": -1}]
LIED += [{"x": [10**12]}, {"x": [3]}, {"x": []}, {"x_dtype": "object"}, {"x_dtype": "float64"}]
LIED += [{"y": [7]}, {"y_dtype": "float16"}]


class Flattening(torch.nn.Sequential):
    """The same model; on rows of too few dimensions torch raises an IndexError."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("lie", LIED, ids=str)
def test_a_party_with_a_false_data_description_is_rejected(tmp_path: Path, lie: dict[str, object]) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party != "0" or task.kind != "handshake":
            return answer
        report = unpack(answer, Reply)
        return pack(
            replace(
                report, metrics={**report.metrics, "data_description": {**report.metrics["data_description"], **lie}}
            )
        )

    post.corrupt_reply = spoil
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = HandshakeTransport(post, recipe_for(), "lab", net=Net(Flattening(*network())), loss=loss, log=said.append)
    assert meeting.wait_for_quorum(3).keys() == {"1", "2", "3"}
    assert any("0 has come, and cannot take part" in text for text in said)


@pytest.mark.parametrize(
    ("raises", "kind"),
    [
        ("ast.literal_eval('account 4711')", "SyntaxError"),
        ("error = ValueError(); error.add_note('account 4711'); raise error", "ValueError"),
        ("raise AccountError('4711')", "AccountError"),
    ],
)
def test_only_the_type_of_an_error_leaves_the_silo(tmp_path: Path, raises: str, kind: str) -> None:
    """Python shows some texts before it names the error, some behind it without a colon, and names the file, too."""
    odd = (
        ROWS_SILO_FILE
        + f"\nclass AccountError(ValueError): pass\n\ndef loss(output, target):\n    import ast\n    {raises}\n"
    )
    file = tmp_path / "team.py"
    file.write_text(ROWS_SILO_FILE.format(name="0"))
    made = [SiloFile(file, "0"), SiloFile(tmp_path / "odd.py", "0")]
    post = InMemoryTransport({"0": lambda: TaskHandler(made[0], tmp_path / "at", lambda text: None)})
    answers = list[Reply]()
    fed = deployed_federation(post, recipe_for())
    (tmp_path / "odd.py").write_text(odd.format(name="0"))
    made[0] = made[1]

    def seen(task: Task, answer: bytes) -> bytes:
        answers.append(unpack(answer, Reply))
        return answer

    post.corrupt_reply = seen
    with pytest.warns(DescantWarning):
        fed.fit(1, progress=False)
    assert answers[0].reason == f"{kind}. The party's own log says more."


@pytest.mark.parametrize("lie", [{"x": [2**28]}, {"y": [2**28]}], ids=str)
def test_an_absurd_sample_shape_is_rejected_before_allocation(lie: dict[str, object]) -> None:
    said = {"x": [6], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 3, "tested": 1}
    with pytest.raises(PartyError, match="is not understood"):
        remote_population({"a": {**said, **lie}})


def test_an_undeliverable_handshake_is_not_repeated(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    asked = list[str]()

    def spoil(task: Task, answer: bytes) -> bytes | UndeliveredError:
        asked.extend([task.party] if task.kind == "handshake" else [])
        return UndeliveredError("its answer has more than 65536 bytes", is_final=True) if task.party == "0" else answer

    post.corrupt_reply = spoil
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = HandshakeTransport(post, recipe_for(), "lab", net=Net.from_model(network, 0), loss=loss, log=said.append)
    for _ in range(3):
        assert meeting.connected_parties().keys() == {"1", "2", "3"}
    assert asked.count("0") == 1
    assert "0 has come, and cannot take part: its answer has more than 65536 bytes" in said


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+", "ditto"])
def test_silo_evaluation_equals_the_table_of_the_simulation(tmp_path: Path, method: str) -> None:
    """What the simulation's table says of each party, a team finds out by itself, and nobody else hears of it."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(post, recipe_for(method)).fit(3, progress=False)
    twin = simulated_federation(recipe_for(method), 3)
    fed.scores()
    sent = post.sent_count
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
        assert table.verdict.startswith("No difference that 3 test samples could show: ")  # three never can
    assert post.sent_count == sent


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (ROWS_SILO_FILE.format(name="1"), "The data of .* are not those that took part: majority class was"),
        (
            ROWS_SILO_FILE.format(name="0").replace("[:3]", "[:2]"),
            "test_samples was 3 on their test set, and is 2 on this one",
        ),
        (
            ROWS_SILO_FILE.format(name="0").replace("return network()", "return network()[:1]"),
            "The model of .* took part",
        ),
    ],
    ids=["rows of another", "another test set", "another model"],
)
def test_evaluation_rejects_a_file_that_did_not_take_part(tmp_path: Path, now: str, told: str) -> None:
    """Else a verdict would compare models on different rows, without a word."""
    deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), recipe_for("fedgeomed+")).fit(
        3, progress=False
    ).scores()
    other = tmp_path / "other.py"
    other.write_text(now)
    with pytest.raises(StateError, match=rf"(?s){told}.*Give the file with which it joined"):
        compare_with_local(SiloFile(other, "0"), tmp_path / "at-0")


LONELY = """
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
    ("tested", "told"),
    [
        ("100:400", "Joining helped: "),
        ("100:400:2", "Joining did not help: "),
        ("100:101", "No difference that 1 test sample could show: "),
    ],
    ids=["on labels that others have", "on labels of its own", "on a sample"],
)
def test_the_verdict_needs_a_significant_difference(tmp_path: Path, tested: str, told: str, loss: str) -> None:
    """Who has seen one label is better off together where both are asked for, and worse off where its own is."""
    people = silo_handlers(tmp_path, ("0", "1"))
    for name in ("0", "1"):
        (tmp_path / f"team{name}.py").write_text(LONELY.format(label=name, tested=tested) + loss)
    fed = deployed_federation(InMemoryTransport(people), recipe_for("fedavg"))
    fed.fit(3, progress=False).scores()
    table = compare_with_local(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0")
    assert table.verdict.startswith(told), table.verdict


def test_two_failing_models_do_not_differ(tmp_path: Path) -> None:
    people = silo_handlers(tmp_path, ("0", "1"))
    failing = "def loss(output, y): return torch.nn.functional.cross_entropy(output, y) * (torch.nan if {} else 1)\n"
    for name in ("0", "1"):
        text = LONELY.format(label=name, tested="100:400") + failing.format("(y == 2).all()")
        (tmp_path / f"team{name}.py").write_text(text.replace("y[100:400]", "0 * y[100:400] + 2"))
    deployed_federation(InMemoryTransport(people), recipe_for("fedavg")).fit(3, progress=False).scores()
    table = compare_with_local(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0")
    assert table.verdict.startswith("No difference that 300 test samples could show: loss inf"), table.verdict


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (5, 0), (6, 0), (12, 5), (14, 3), (40, 40), (260, 200)])
def test_the_sign_flip_test_of_accuracy_is_mcnemars_exact_test(won: int, lost: int) -> None:
    differences = torch.tensor([1.0] * won + [-1.0] * lost + [0.0] * 500)
    tail = sum(math.comb(won + lost, k) for k in range(max(won, lost), won + lost + 1)) / 2 ** (won + lost)
    exact = min(1.0, 2 * tail) if won != lost else 1.0
    assert abs(sign_flip_p_value(differences) - exact) < 4 * math.sqrt(exact * (1 - exact) / 999) + 0.002
    assert sign_flip_p_value(differences) == sign_flip_p_value(0.25 * differences) == sign_flip_p_value(-differences)


def test_local_training_repeats_only_the_rounds_that_were_answered(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(post, recipe_for("fedavg"))
    for round in fed.rounds(4):
        post.unreachable = {"1"} if round.index in (1, 2) else set()
    fed.scores()
    there = Timetable.from_records([{"party": "1", "from": 1, "to": 1}, {"party": "1", "from": 4}])
    twin = simulated_federation(recipe_for(), 4, participation=there, algorithm=algorithms.Local())
    [row] = compare_with_local(SiloFile(tmp_path / "team1.py", "1"), tmp_path / "at-1").to_json_rows()
    assert row["rounds"] == 2
    assert row["local"] == twin.scores().personal.values[1]


def test_the_training_log_survives_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path, PARTY_NAMES[:2]))
    deployed_federation(post, recipe_for("fedavg")).fit(2, progress=False).scores()
    file = tmp_path / "at-0" / "training_log.jsonl"
    file.write_text(file.read_text() + '\n{"round": 3, "l')
    result = SiloResults(tmp_path / "at-0")
    assert list(result.training_records()) == [1, 2]
    result.record_task(Task("0", 3, "train", arrays={}, settings={"lr": 0.1, "work": 1, "execution_mode": "looped"}))
    assert list(result.training_records()) == [1, 2, 3]


def silo_with_policy(
    folder: Path, policy: str, state_folder_name: str = "at", log: Callable[[str], None] = len, vault: str = ""
) -> TaskHandler:
    """A desk with a policy, introduced to a server that asks for coresets."""
    folder.mkdir(exist_ok=True)
    file = folder / "team0.py"
    file.write_text(ROWS_SILO_FILE.format(name="0") + f"policy = {policy}\n")
    desk = TaskHandler(SiloFile(file, "0"), folder / state_folder_name, log, vault_fingerprint=vault)
    tables = {**recipe_for("fedavg").tables, "wrap": [{"wrapper": "coreset_proxies", "share": 0.2}]}
    hello = {"recipe": tables, "federation": "lab", "layout": LAYOUT.digest}
    assert unpack(desk.answer(pack(Task("0", 0, "handshake", arrays={}, settings=hello))), Reply).status == "ok"
    return desk


def packed_train_task(
    round: int = 1, seed: int = 5, vault: Vault | None = None, accepted: int = 0, global_value: float = 0.0
) -> bytes:
    """A letter that asks for training and, where there is a vault, for a coreset."""
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


@pytest.mark.parametrize("global_model", [0.0, math.nan], ids=["by a model", "by one that no work comes of"])
def test_a_server_never_gets_more_rows_than_the_policy_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, global_model: float
) -> None:
    desk = silo_with_policy(tmp_path, '{"share": 0.3}')
    vault = Vault.create(tmp_path / "vault", PrivateKey.new(), "r")
    own = classification_parties(5)["0"].x
    seen = set[int]()

    def noted(rows: CoresetRows) -> bytes:
        seen.update(k for row in rows.x for k in range(len(own)) if torch.equal(own[k], row))
        return packed(rows)

    packed = proxy_training.pack
    monkeypatch.setattr(proxy_training, "pack", noted)
    sealed = 0
    for seed in range(20):
        report = unpack(desk.answer(packed_train_task(seed=seed, vault=vault, global_value=global_model)), Reply)
        assert report.status == "ok"
        sealed += bool(report.encrypted_coreset)
    rows = desk.state.shared_rows()
    assert sealed and rows is not None
    assert 0 < len(rows) <= math.ceil(0.3 * len(own)) and seen == set(rows.tolist())


def test_dropped_columns_are_zero_in_the_coreset_and_others_unchanged(tmp_path: Path) -> None:
    own = classification_parties(5)["0"]
    opened = list[CoresetRows]()
    for name, policy in {"all": '{"share": 1}', "some": '{"share": 1, "columns_dropped": [4, 1]}'}.items():
        desk = silo_with_policy(tmp_path / name, policy)
        vault = Vault.create(tmp_path / name / "vault", PrivateKey.new(), "r")
        report = unpack(desk.answer(packed_train_task(vault=vault)), Reply)
        expected = ExpectedCoreset(SampleSpec((6,), torch.float32, (), y_dtype=torch.int64), own.samples, 3)
        vault.store("0", report.encrypted_coreset, expected)
        opened.append(vault.open("0", 1, expected))
    whole, held = opened
    assert whole.x[:, [1, 4]].all() and not held.x[:, [1, 4]].any()
    kept = [0, 2, 3, 5]
    assert torch.equal(whole.x[:, kept], held.x[:, kept])
    assert torch.equal(whole.y, held.y) and torch.equal(whole.weights, held.weights)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the day of all parties' clocks."""

    def show(day: int, year: int = 2026) -> None:
        monkeypatch.setattr("descant.deployment.silo.silo_state.today_in_utc", lambda: date(year, 2, day))

    show(27)
    return show


def test_the_daily_limit_holds_for_any_clock(tmp_path: Path, clock: Callable[..., None]) -> None:
    def said(letter: bytes) -> str:
        report = unpack(silo_with_policy(tmp_path, '{"rounds_a_day": 2}').answer(letter), Reply)
        assert (report.status == "ok") != bool(report.reason) and (report.status == "ok") == bool(report.arrays)
        return report.reason

    for letter in (packed_train_task(1), packed_train_task(1), packed_train_task(2), packed_train_task(2)):
        assert not said(letter)
    assert "2 rounds a day" in said(packed_train_task(3)) and "2026-02-28" in said(packed_train_task(2, seed=6))
    clock(26)
    assert "2026-02-28" in said(packed_train_task(3))
    clock(28)
    assert not said(packed_train_task(3)) and not said(packed_train_task(4))
    clock(27)
    assert "2026-03-01" in said(packed_train_task(5)) and not said(packed_train_task(4))


@pytest.mark.parametrize("before", [True, False], ids=["after rounds of its own day", "from the first round on"])
def test_a_clock_that_was_a_year_ahead_costs_at_most_one_day(
    tmp_path: Path, clock: Callable[..., None], before: bool
) -> None:
    """Each day that the clock shows has its rounds once, in whatever order they come."""
    rounds = iter(range(1, 100))

    def trains() -> int:
        """How many rounds it trains before it rests."""
        desk = silo_with_policy(tmp_path, '{"rounds_a_day": 2}')
        letters = [packed_train_task(next(rounds)) for _ in range(4)]
        return [unpack(desk.answer(letter), Reply).status for letter in letters].count("ok")

    assert not before or trains() == 2
    clock(27, 2027)
    assert trains() == 2
    clock(27)
    assert trains() == 0
    clock(28)
    assert trains() == 2 and trains() == 0
    clock(26)
    assert trains() == 0
    clock(27, 2027)
    assert trains() == 0


def test_a_round_continues_without_a_party_at_its_daily_limit(tmp_path: Path, clock: Callable[..., None]) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    with (tmp_path / "team1.py").open("a") as file:
        file.write('policy = {"rounds_a_day": 1}\n')
    fed = deployed_federation(post, recipe_for("fedavg"))
    with pytest.warns(DescantWarning, match="It goes on at 2026-02-28"):
        fed.fit(2, progress=False)
    clock(28)
    fed.fit(1, progress=False)
    assert [(refusal.party, refusal.round) for refusal in fed.rejections_] == [("1", 2)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_during_counting_neither_adds_nor_costs_a_round(
    tmp_path: Path, clock: Callable[..., None], torn: bool
) -> None:
    for at in range(200):
        desk = silo_with_policy(tmp_path / str(at), '{"rounds_a_day": 1}')
        with inject_faults(at, torn) as found, suppress(SimulatedCrash):
            desk.answer(packed_train_task(1))
        again = TaskHandler(desk.file, desk.state.folder, lambda text: None)
        assert [unpack(again.answer(packed_train_task(round)), Reply).status for round in (1, 2)] == ["ok", "declined"]
        if not found.reached:
            break
    assert at > 10


def trained(
    folder: Path,
    post: InMemoryTransport,
    method: str,
    invited: Collection[str],
    at: Callable[[str], None],
    more: str = "",
    patience: WaitLimits = WaitLimits(min_parties=3, grace=0),  # noqa: B008
    barred: Callable[[], Mapping[str, str]] = dict,
) -> dict[str, object]:
    """A training of four rounds, from its folder; `at` hears what the server says."""
    chosen = read_recipe(RECIPE.format(method=method).replace("seed = 5", "seed = 5\nrounds = 4\npoints = 1") + more)
    net = Net.from_model(network, seeds.torch_seed(5, 0, seeds.ALL_PARTIES, "model"))
    meeting = HandshakeTransport(
        post, chosen, "lab", net=net, loss=address_of(torch.nn.functional.cross_entropy), log=at
    )
    return TrainingSession(folder, chosen, meeting, limits=patience, log=at, excluded=barred).run_to_completion(
        lambda: list(invited)
    )


def test_the_round_summary_names_accepted_and_rejected_updates(tmp_path: Path) -> None:
    [found] = deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), recipe_for("fedavg")).rounds(1)
    told = f"Round 1: loss {found.round.loss:.4f}, "
    assert round_summary(found.round) == f"{told}4 parties"
    lost = Rejection("2", 1, "lost: it has left")
    kept = Rejection("0", 1, "It left no coreset.", tensor="coreset")
    round = replace(found.round, accepted=("0",), rejections=(lost, kept))
    assert round_summary(round) == f"{told}1 party; without 2: lost: it has left; 0: It left no coreset"


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+"])
def test_the_server_prints_the_hash_of_the_simulation(tmp_path: Path, method: str) -> None:
    """As `descant run` prints it for the same rounds: the memories that a server does not have are no part of it."""
    atomic.make_folder(tmp_path / "run")
    done = trained(
        tmp_path / "run",
        InMemoryTransport(silo_handlers(tmp_path)),
        method,
        PARTY_NAMES,
        lambda text: None,
        patience=QUORUM[None],
    )
    data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(PARTY_NAMES).items()}
    chosen = recipe_for(method)
    twin = Federation(network, from_arrays(data), chosen.algorithm(), solver=chosen.solver(), seed=5)
    assert done["hash"] == digest_of_models(twin.fit(4, progress=False).state)


def test_a_resumed_training_needs_only_the_quorum(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    listen = listening(said)

    def dies(text: str) -> None:
        listen(text)
        if text.startswith("Round 2:"):
            post.unreachable = {"1"}
            raise SimulatedKill

    atomic.make_folder(tmp_path / "run")
    with suppress(SimulatedKill):
        trained(tmp_path / "run", post, "fedavg", PARTY_NAMES, dies, patience=QUORUM[3])
    trained(tmp_path / "run", post, "fedavg", PARTY_NAMES, listen, patience=QUORUM[3])
    assert "Round 3 begins without 1." in said and recorded(tmp_path / "run" / "training").round == 4


def test_a_newcomer_counts_while_a_round_waits(tmp_path: Path) -> None:
    """Two of the three who are to gather are there, and one more is, who is no part of the training yet."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    post.unreachable = {"3"}

    def hears(text: str) -> None:
        said.append(text)
        if text.startswith("Round 2:"):
            post.unreachable = {"2", "3"}
        if "Waiting for 2" in text and "3" not in post.unreachable:
            raise Waits(text)
        if "Waiting for 2" in text:
            post.unreachable = {"2"}

    atomic.make_folder(tmp_path / "run")
    trained(tmp_path / "run", post, "fedgeomed+", PARTY_NAMES[:3], hears)
    assert "2 of 3 parties are connected. Waiting for 2." in said
    assert first_rounds(tmp_path / "run") == {"0": 1, "1": 1, "2": 1, "3": 3}
    held = recorded(tmp_path / "run" / "training").numbers
    assert held.accepted[:, 2].tolist() == [True, True, False, False]
    assert held.accepted[:, 3].tolist() == [False, False, True, True]


def test_a_party_invited_before_the_first_round_is_included_from_the_start(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    invited = [*PARTY_NAMES[:3]]
    post.unreachable = {"2", "3"}

    def hears(text: str) -> None:
        if "Waiting" in text and "3" in invited:
            raise Waits(text)
        if "Waiting" in text:
            invited.append("3")
            post.unreachable = {"2"}

    atomic.make_folder(tmp_path / "run")
    trained(tmp_path / "run", post, "fedavg", invited, hears)
    assert recorded(tmp_path / "run" / "training").numbers.accepted[0].tolist() == [True, True, False, True]
    assert first_rounds(tmp_path / "run") == dict.fromkeys(PARTY_NAMES, 1)


@pytest.mark.parametrize("again", [False, True], ids=["it comes in time", "the server is started again"])
def test_a_party_absent_at_the_end_gets_its_models_within_the_grace_period(tmp_path: Path, again: bool) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    folder = tmp_path / "run"

    def hears(text: str) -> None:
        said.append(text)
        if text.startswith("Round 2:"):
            post.unreachable = {"1"}
        if text.startswith("The training is over."):
            post.unreachable -= set(PARTY_NAMES) if again else {"1"}

    patience = replace(QUORUM[3], grace=0 if again else 20)
    atomic.make_folder(folder)
    trained(folder, post, "fedgeomed+", PARTY_NAMES, hears, patience=patience)
    if again:
        assert post.unreachable == set(PARTY_NAMES) and not (tmp_path / "at-1" / "personal_model.safetensors").exists()
        trained(folder, post, "fedgeomed+", PARTY_NAMES, hears, patience=replace(patience, grace=20))
    assert SiloResults(tmp_path / "at-1").scores()["round"] == 4 and post.unreachable == set(PARTY_NAMES)
    held = [load_file(tmp_path / f"at-{name}" / "global_model.safetensors") for name in ("0", "1")]
    assert all(torch.equal(held[0][key], held[1][key]) for key in held[0])
    own = simulated_federation(recipe_for(), 4, participation=without("1", 3)).state.personal_models.get("1")["model"]
    mine = load_file(tmp_path / "at-1" / "personal_model.safetensors")
    assert all(torch.equal(mine[key], part) for key, part in LAYOUT.split(own).items())


def test_a_restarted_server_waits_only_for_parties_that_were_not_notified(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    folder = tmp_path / "run"

    def hears(text: str) -> None:
        said.append(text)
        if text.startswith("Round 3:"):
            post.unreachable = {"1"}

    def again(farewell: float) -> list[str]:
        said.clear()
        patience = replace(QUORUM[3], grace=farewell)
        trained(folder, post, "fedavg", PARTY_NAMES, hears, patience=patience)
        return [text for text in said if text.startswith("The training is over.")]

    atomic.make_folder(folder)
    again(0)
    waits = "The training is over. Waiting 0.5 s for 1 to come for their models."
    assert post.unreachable == set(PARTY_NAMES) and again(0.5) == [waits]  # though nobody else is there any more
    post.unreachable -= {"1"}
    assert again(600) == [] == again(600) and SiloResults(tmp_path / "at-1").scores()["round"] == 4


class Silent(InMemoryTransport):
    """Some letters are fetched and never answered: their parties have gone, or hang."""

    def __init__(
        self, desks: dict[str, Callable[[], TaskHandler]], swallows: Callable[[Task], UndeliveredError | None]
    ) -> None:
        super().__init__(desks)
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
        post.unreachable = {"1"}
        went.append(task.party)
        return UndeliveredError("it has gone")

    post = Silent(silo_handlers(tmp_path), goes)
    folder = tmp_path / "run"
    atomic.make_folder(folder)
    comes = lambda text: post.unreachable.discard("1") if text.startswith("The training is over.") else None  # noqa: E731
    with pytest.warns(DescantWarning, match="'1' could not be evaluated"):
        trained(folder, post, "fedgeomed+", PARTY_NAMES, comes, patience=replace(QUORUM[3], grace=20))
    assert went and SiloResults(tmp_path / "at-1").scores()["round"] == 4


def test_a_hanging_party_at_the_end_does_not_block_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is waited for to be shown its models another comes: it is in time."""
    monkeypatch.setattr(training_session, "_MIN_EVALUATION_TIMEOUT", 0.1)
    over: list[str] = []

    def hangs(task: Task) -> UndeliveredError | None:
        if not over or (task.party, task.kind) != ("0", "evaluate"):
            return None
        post.unreachable.discard("1")
        return UndeliveredError("")

    def hears(text: str) -> None:
        if text.startswith("Round 3:"):
            post.unreachable = {"0", "1"}
        if text.startswith("The training is over."):
            post.unreachable.discard("0")
            over.append(text)

    post = Silent(silo_handlers(tmp_path), hangs)
    folder = tmp_path / "run"
    atomic.make_folder(folder)
    patience = WaitLimits(min_parties=2, quorum=2, deadline=60, grace=1)
    with pytest.warns(DescantWarning, match="'0' could not be evaluated"):
        trained(folder, post, "fedgeomed+", PARTY_NAMES, hears, patience=patience)
    assert SiloResults(tmp_path / "at-1").scores()["round"] == 4 and post.unreachable == set(PARTY_NAMES)


def test_a_party_that_missed_the_goodbye_gets_it_on_reconnect(tmp_path: Path) -> None:
    """Its line is down at the moment of the goodbye."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    folder = tmp_path / "run"
    down = [1]
    true = post.send

    def send(party: str, letter: MessageBytes, seconds: float) -> str:
        if party == "1" and unpack(letter, Task).kind == "goodbye" and down.pop():
            down.append(0)
            raise UndeliveredError("it is not there")
        return true(party, letter, seconds)

    post.send = send  # type: ignore[method-assign]
    atomic.make_folder(folder)
    trained(folder, post, "fedavg", PARTY_NAMES, lambda text: None, patience=replace(QUORUM[None], grace=20))
    assert post.unreachable == set(PARTY_NAMES)


def test_the_first_round_does_not_wait_for_a_revoked_party(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    revoked = dict[str, str]()
    post.unreachable = {"1"}

    def revoking(text: str) -> None:
        if "Waiting" in text and revoked:
            raise Waits(text)
        if "Waiting" in text:
            revoked["1"] = "it was revoked"

    atomic.make_folder(tmp_path / "run")
    trained(tmp_path / "run", post, "fedavg", PARTY_NAMES, revoking, "", QUORUM[None], lambda: revoked)
    assert revoked and recorded(tmp_path / "run" / "training").round == 4


TOTAL = 'normalize = "total"'
LATE = {
    "fedavg": ("fedavg", ""),
    "own models": ("fedgeomed+", ""),
    "Ditto": ("ditto", ""),
    "over all": ("fedavg+", 'aggregate_over = "all"'),
    "of all samples": ("fedavg", TOTAL),
}


@pytest.mark.parametrize("late", ["1", "3"])
@pytest.mark.parametrize("case", LATE)
def test_a_late_party_counts_as_in_the_simulation_with_the_same_timetable(tmp_path: Path, case: str, late: str) -> None:
    """How many samples it has is known from then on. Before, nobody can know: it is taken to have one."""
    method, more = LATE[case]
    post = InMemoryTransport(silo_handlers(tmp_path))
    folder = tmp_path / "run"
    post.unreachable = {late}
    atomic.make_folder(folder)
    trained(
        folder,
        post,
        method,
        PARTY_NAMES,
        lambda said: post.unreachable.clear() if said.startswith("Round 2:") else None,
        more,
    )
    chosen = read_recipe(RECIPE.format(method=method) + more)
    settings = {
        "participation": Timetable.from_records([{"party": late, "from": 3}]),
        "solver": chosen.solver(),
        "seed": 5,
    }
    data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(5).subset(PARTY_NAMES).items()}
    people = from_arrays(data)
    if more == TOTAL:
        x, y, x_test, y_test = data[late]
        one = from_arrays({**data, late: (x[:1], y[:1], x_test[:0], y_test[:0])})
        known = Population(
            map(people._source, PARTY_NAMES), joined_after={late: 2}, placeholders={late: one._source(late)}
        )
        Federation(network, one, chosen.algorithm(), **settings).fit(2, progress=False).save(tmp_path / "two")
        twin = Federation(network, known, chosen.algorithm(), **settings).load(tmp_path / "two")
        twin.fit(2, progress=False)
    else:
        twin = Federation(network, people, chosen.algorithm(), **settings).fit(4, progress=False)
    [center] = (folder / "training" / "models" / f"{4:08}").glob("center*")
    assert torch.equal(load_file(center)["global_model"], twin.state.global_model)
    held = recorded(folder / "training").numbers
    np.testing.assert_array_equal(held.scores["personal"][-1], twin.scores().personal.values)
    assert dict(zip(held.parties, held.samples, strict=True)) == people.samples


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+", "ditto"])
def test_a_party_invited_later_equals_one_that_was_invited_first_and_came_late(
    tmp_path: Path, method: str, killed: bool
) -> None:
    hashes = []
    for case, invited in {"first": PARTY_NAMES, "later": PARTY_NAMES[:3]}.items():
        post = InMemoryTransport(silo_handlers(tmp_path / case))
        folder = tmp_path / case / "run"
        post.unreachable = {"3"}
        atomic.make_folder(folder)

        def comes(said: str, post: InMemoryTransport = post) -> None:
            if said.startswith("Round 2:"):
                post.unreachable.clear()
            if killed and said.endswith("part of it from now on: 3."):
                raise SimulatedKill

        with suppress(SimulatedKill):
            trained(folder, post, method, invited, comes)
        hashes.append(trained(folder, post, method, invited, comes)["hash"])
    assert hashes[0] == hashes[1]
    assert first_rounds(folder) == {"0": 1, "1": 1, "2": 1, "3": 3}
    held = recorded(folder / "training").numbers
    assert held.parties == PARTY_NAMES and held.accepted[:, 3].tolist() == [False, False, True, True]


def test_a_private_training_admits_no_newcomers(tmp_path: Path) -> None:
    post = InMemoryTransport(silo_handlers(tmp_path))
    said = list[str]()
    private = 'wrap = [{wrapper = "central_dp", clip = 1.0, noise = 1.0}]'
    trained(tmp_path, post, "fedavg", PARTY_NAMES[:3], said.append, private)
    assert first_rounds(tmp_path).keys() == {"0", "1", "2"} and "4 parties" not in "".join(said)


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
    said = list[str]()
    assert training_status(tmp_path)["spent"] is None
    trained(
        tmp_path, InMemoryTransport(silo_handlers(tmp_path)), "fedavg", PARTY_NAMES, said.append, more, QUORUM[None]
    )
    rounds = [text for text in said if text.startswith("Round ")]
    assert len(rounds) == 4 and all("at δ" in text or "no noise" in text for text in rounds)
    assert rounds[-1].endswith(f"4 parties, {last}")
    assert training_status(tmp_path)["spent"]["told"] == f"Privacy of a party: {last}"


def test_a_training_ended_by_its_budget_is_evaluated_in_its_last_round(tmp_path: Path) -> None:
    """After two rounds of four, of which only the last was to be judged."""
    more = f'wrap = [{{wrapper = "central_dp", noise = 4.0, budget = {epsilon(4.0, 2, 1e-5) + 1e-6}}}]'
    for _ in range(2):  # the same command, given again, does no round more
        post = InMemoryTransport(silo_handlers(tmp_path))
        with pytest.warns(DescantWarning, match="ends the run after 2 rounds"):
            done = trained(tmp_path, post, "fedavg", PARTY_NAMES, lambda text: None, more, QUORUM[None])
        assert done["rounds"] == 2 and post.unreachable == set(PARTY_NAMES)
        assert [row["evaluated"] for row in training_status(tmp_path)["scores"].values()] == [2] * 4
        assert {SiloResults(tmp_path / f"at-{name}").scores()["round"] for name in PARTY_NAMES} == {2}
    table, _ = write_report(tmp_path / "training")
    assert "After round 2, as judged by 4 of 4 parties" in table.verdict


def test_a_training_without_privacy_reports_no_epsilon(tmp_path: Path) -> None:
    said = list[str]()
    trained(tmp_path, InMemoryTransport(silo_handlers(tmp_path)), "fedavg", PARTY_NAMES, said.append, "", QUORUM[None])
    assert "ε" not in "".join(said) and training_status(tmp_path)["spent"] is None


def test_the_status_shows_the_sample_privacy_of_dp_sgd(tmp_path: Path) -> None:
    said = list[str]()
    solver = 'solver = "dp_sgd"\nlr = 0.05\nsteps = 1\nbatch = 1\nbudget = 99.0'
    text = (
        RECIPE.format(method="fedavg")
        .replace("seed = 5", "seed = 5\nrounds = 2")
        .replace(ADAM_TRAINING.strip(), solver)
    )
    chosen = read_recipe(text)
    post = InMemoryTransport(silo_handlers(tmp_path))
    net = Net.from_model(network, seeds.torch_seed(5, 0, seeds.ALL_PARTIES, "model"))
    meeting = HandshakeTransport(
        post, chosen, "lab", net=net, loss=address_of(torch.nn.functional.cross_entropy), log=said.append
    )
    TrainingSession(
        tmp_path, chosen, meeting, limits=WaitLimits(min_parties=4, grace=0), log=said.append
    ).run_to_completion(lambda: PARTY_NAMES)
    spent = training_status(tmp_path)["spent"]
    assert (
        0 < spent["epsilon"] < spent["budget"] == 99.0
        and spent["told"].removeprefix("Privacy of a sample: ") in said[-1]
    )


def test_a_private_training_keeps_the_placeholder_of_a_late_party(tmp_path: Path) -> None:
    """One sample is the least that a party has: of nobody is more told than was reckoned with."""
    post = InMemoryTransport(silo_handlers(tmp_path))
    post.unreachable = {"0"}
    more = 'wrap = [{wrapper = "local_dp", clip = 1.0, noise = 1.0}]'
    trained(
        tmp_path,
        post,
        "fedavg",
        PARTY_NAMES,
        lambda said: post.unreachable.clear() if "Round 2:" in said else None,
        more,
    )
    assert read_descriptions(tmp_path)["0"]["samples"] == 1
    assert recorded(tmp_path / "training").numbers.accepted[:, 0].tolist() == [False, False, True, True]
