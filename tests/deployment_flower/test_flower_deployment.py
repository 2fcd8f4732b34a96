"""A real federation on this machine: nginx, a SuperLink and three silos, each in its own process, with kills.

`bash scripts/engines` runs this, in an environment that has Flower.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flwr.supercore.inflatable import inflatable_protobuf_utils
from flwr.supernode import node_auth_http_interceptor as interceptor
from safetensors.torch import load_file

import descant
from descant import Federation
from descant.config import read_recipe
from descant.core.timeouts import WaitLimits
from descant.deployment.flower import driver_transport, flower_connection
from descant.deployment.flower.driver_transport import FlowerServerTransport
from descant.deployment.flower.flower_connection import (
    HEARTBEAT_INTERVAL,
    ConnectionRejected,
    PeerUnavailable,
    SessionInUse,
)
from descant.deployment.flower.silo_transport import FlowerSiloTransport
from descant.deployment.flower.superlink_process import SuperLinkCredentials, run_superlink
from descant.deployment.nginx_proxy import Proxy, find_nginx
from descant.deployment.pki.roster import Roster
from descant.deployment.server.serve import FederationServer, free_port
from descant.deployment.silo import SiloFile
from descant.deployment.silo.silo_state import SiloState
from descant.engines.remote import UndeliveredError
from descant.errors import EngineError
from descant.rounds.checkpoint import digest_of_models
from descant.serialization.wire import MessageBytes
from descant.storage.spill import SpillFile
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import Run, read_run
from recipe_matrix import SILO_CASES, RecipeCase
from silo_file_templates import LEAKING_SILO_FILE, canary_bytes, simulated_population

try:
    find_nginx()
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

SILO_NAMES = ("north", "south", "west")
ROUNDS = 4
MAX_REPLY_BYTES = 2**30
PATIENCE = 900.0  # seconds: a machine may be busy
RUN = """
[run]
rounds = {rounds}
seed = 5
points = 1
"""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]),
}


class LocalDeployment:
    """A federation in a folder, with its processes."""

    def __init__(
        self, folder: Path, recipe_case: RecipeCase, rounds: int = ROUNDS, extra_recipe_text: str = "", policy: str = ""
    ) -> None:
        self.folder = folder
        self.rounds = rounds
        self.silo_file_template = recipe_case.silo_file_template
        self.policy = policy
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.python_paths: dict[str, str] = {}  # by process: a folder whose modules it finds first
        (folder / "recipe.toml").write_text(RUN.format(rounds=rounds) + recipe_case.recipe_text + extra_recipe_text)
        self.run_command("server", "init", "lab", "recipe.toml", "--port", str(free_port()))
        for at, name in enumerate(SILO_NAMES):
            self.invite(name, at)

    def invite(self, name: str, at: int) -> None:
        self.run_command("server", "invite", "lab", name)
        (self.folder / f"{name}.py").write_text(self.silo_file_template.format(name=str(at)) + self.policy)

    def run_command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "descant", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "descant", *arguments]
        path = self.python_paths.get(name, "")
        given = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([path, ENVIRONMENT["PYTHONPATH"]])}
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, env=given, stdout=log, stderr=log)

    def start_server(self, *patience: str, min_parties: int = len(SILO_NAMES)) -> None:
        self.start("server", "server", "start", "lab", "--min-parties", str(min_parties), *patience)

    def start_silo(self, name: str) -> None:
        self.start(name, "silo", "join", f"{name}.invite", f"{name}.py")

    def start_all(self, *patience: str) -> None:
        self.start_server(*patience)
        for name in SILO_NAMES:
            self.start_silo(name)

    def log_text(self, name: str = "server") -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(
                f"{name}:\n{self.log_text(name)[-2000:]}" for name in self.processes
            )
            time.sleep(0.1)

    def wait_for_round(self, round: int) -> None:
        self.wait_until(lambda: f"Round {round}:" in self.log_text() or self.processes["server"].poll() is not None)
        assert f"Round {round}:" in self.log_text(), self.log_text()

    @property
    def run_folder(self) -> Path:
        return self.folder / "lab" / "run" / "training"

    def final_global_model(self) -> torch.Tensor:
        """Return the global model after the last round."""
        self.wait_until(lambda: self.processes["server"].poll() is not None)
        assert self.processes["server"].returncode == 0, self.log_text()
        [file] = (self.run_folder / "models" / f"{self.rounds:08}").glob("global_model*")
        return load_file(file)["global_model"]

    def child_process(self, name: str, word: str) -> psutil.Process:
        """Return a process that another one has started."""
        found = psutil.Process(self.processes[name].pid).children(recursive=True)
        return next(process for process in found if any(word in part for part in process.cmdline()))

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def rejoin_waits_for_session(self, name: str) -> bool:
        """Kill a silo and let it join at once; return True if its previous session was still held."""
        self.kill(name)
        before = self.log_text(name)
        self.start_silo(name)
        messages = ("Joined.", "still holds our previous session")
        self.wait_until(lambda: any(text in self.log_text(name).removeprefix(before) for text in messages))
        return messages[1] in self.log_text(name).removeprefix(before)

    def terminate(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., LocalDeployment]]:
    made: list[LocalDeployment] = []

    def make(*arguments: Any) -> LocalDeployment:
        made.append(LocalDeployment(tmp_path, *arguments))
        return made[-1]

    yield make
    for deployment in made:
        deployment.terminate()


def simulated_deployment(deployment: LocalDeployment, **more: Any) -> Federation:
    """Run the same training in one process, recorded beside the lab."""
    recipe = read_recipe(deployment.folder / "recipe.toml")
    files = [SiloFile(deployment.folder / f"{name}.py", name) for name in SILO_NAMES]
    fed = Federation(
        recipe.model(), simulated_population(files), recipe.algorithm(), solver=recipe.solver(), seed=5, **more
    )
    with Run.start(deployment.folder / "simulated", fed) as run:
        for _ in run.rounds(deployment.rounds, deployment.rounds):
            pass
    return fed


def assert_equals_simulation(deployment: LocalDeployment, absent: Collection[str] = (), **more: Any) -> Federation:
    """Assert that global model, recorded numbers, personal models and party states equal the simulation."""
    center = deployment.final_global_model()
    twin = simulated_deployment(deployment, **more)
    assert torch.equal(center, twin.state.global_model)
    ours, theirs = (read_run(place).numbers for place in (deployment.run_folder, deployment.folder / "simulated"))
    assert ours.scores.keys() == theirs.scores.keys() and ours.metrics.keys() == theirs.metrics.keys()
    here = [name not in absent for name in ours.parties]
    for name in theirs.scores:
        np.testing.assert_array_equal(ours.scores[name][:, here], theirs.scores[name][:, here], name)
    for name in theirs.metrics.keys() - {"seconds"}:
        np.testing.assert_array_equal(ours.metrics[name], theirs.metrics[name], name)
    for name in [name for name in SILO_NAMES if name not in absent]:
        state = deployment.folder / f"{name}.silo" / "state"
        assert_equal_tensors(load_file(state / "personal_model.safetensors"), twin.models_[name].state_dict())
        sent = ("coreset.rows", "coreset.weights")  # a silo encrypts them; a simulation without a vault keeps them
        expected = {key: tensor for key, tensor in twin.engine_.party_states.get(name).items() if key not in sent}
        assert_equal_tensors(SiloState(state).load_party_state(deployment.rounds), expected)
    return twin


def assert_equal_tensors(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", ["FedAvg", "FedGeoMedPlus", "RFA", "matching", "FedAvg, secure", "FedRL, DQN"])
def test_deployment_equals_the_simulation(lab: Callable[..., LocalDeployment], name: str) -> None:
    deployment = lab(SILO_CASES[name])
    deployment.start_all()
    twin = assert_equals_simulation(deployment)
    assert digest_of_models(twin.state) in deployment.log_text()
    status = json.loads(deployment.run_command("server", "status", "lab", "--json"))
    assert status["round"] == ROUNDS and [party["state"] for party in status["parties"]] == ["joined"] * 3
    assert_equal_tensors(load_file(deployment.folder / status["global_model"]), twin.global_model_.state_dict())
    assert [row["evaluated"] for row in json.loads(deployment.run_command("report", "lab", "--json"))["table"]] == [
        ROUNDS
    ] * 3


def test_a_kill_of_any_process_leads_to_the_same_model(lab: Callable[..., LocalDeployment]) -> None:
    """One kill of each kind of process, in one run."""
    deployment = lab(SILO_CASES["FedGeoMedPlus"])
    deployment.start_all()
    deployment.wait_for_round(1)
    deployment.child_process("server", "flower-superlink").kill()
    deployment.wait_until(lambda: "are restarted" in deployment.log_text())
    deployment.child_process("north", "descant.deployment.silo.silo_worker").kill()
    deployment.wait_until(lambda: deployment.log_text("south").count("Joined.") == 2)
    assert any(
        deployment.rejoin_waits_for_session("south") for _ in range(5)
    )  # a machine may be too busy to be in time
    deployment.wait_for_round(2)
    deployment.kill("server")
    time.sleep(1)
    deployment.start_server()
    assert_equals_simulation(deployment)


def test_a_killed_nginx_is_restarted_and_the_run_gives_the_same_model(
    lab: Callable[..., LocalDeployment],
) -> None:
    """First the master alone, whose worker then holds the port and keeps serving; then both."""
    deployment = lab(SILO_CASES["FedGeoMedPlus"])
    deployment.start_all()
    for round, whole in ((1, False), (2, True)):
        deployment.wait_for_round(round)
        master = deployment.child_process("server", "nginx")
        workers = master.children()
        assert workers
        for process in (master, *(workers if whole else ())):
            process.kill()
        deployment.wait_until(lambda: deployment.log_text().count("nginx has ended") == round)  # noqa: B023  it is called here
        deployment.wait_until(lambda: not any(alive(worker) for worker in workers))  # noqa: B023
    assert_equals_simulation(deployment)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def listening(process: psutil.Process) -> list[str]:
    """Return the addresses at which a process listens."""
    found = process.net_connections("inet") if hasattr(process, "net_connections") else process.connections("inet")
    return [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


def test_a_local_federation_listens_on_loopback_only(lab: Callable[..., LocalDeployment]) -> None:
    deployment = lab(SILO_CASES["FedAvg"], 5000)
    deployment.start_all()
    deployment.wait_for_round(1)
    begun = {name: psutil.Process(process.pid) for name, process in deployment.processes.items()}
    found = {
        name: [address for one in (process, *process.children(recursive=True)) for address in listening(one)]
        for name, process in begun.items()
    }
    assert listening(deployment.child_process("server", "nginx")) and listening(
        deployment.child_process("server", "flower-superlink")
    )
    assert set(found.pop("server")) == {"127.0.0.1"} and not any(found.values())


def test_an_invite_on_a_second_machine_ends_with_a_reason(lab: Callable[..., LocalDeployment]) -> None:
    """While the first is connected, because of its session; after it has left, because of its machine id."""
    deployment = lab(SILO_CASES["FedAvg"])
    deployment.start_server()
    deployment.start_silo("north")
    deployment.wait_until(lambda: "Taking part" in deployment.log_text("north"))

    def assert_rejected(reason: str) -> None:
        deployment.start("second", "silo", "join", "north.invite", "north.py", "--folder", "second.silo")
        assert deployment.processes["second"].wait(300) == 1
        assert reason in deployment.log_text("second")

    assert_rejected("in use in another place")
    assert deployment.processes["north"].poll() is None
    deployment.run_command("silo", "leave", "north.silo")
    assert deployment.processes["north"].wait(300) == 0
    assert_rejected("another machine")
    assert "used in two places" in deployment.log_text()
    assert (deployment.folder / "north.silo" / "state" / "machine").read_text() not in deployment.log_text("second")


def keys_in(*texts: str) -> list[bytes]:
    """Return the lines of private keys, without the first lines, which only name the kind of key."""
    lines = [line for text in texts for line in text.splitlines()[2:]]
    return [line.encode() for line in lines if len(line) > 40 and "-----" not in line]


def test_rows_keys_and_output_of_silo_code_stay_in_their_folder(
    lab: Callable[..., LocalDeployment],
) -> None:
    """Keys are in their owner's folder only, no log holds any, and north's rows are with north."""
    deployment = lab(SILO_CASES["FedAvg"])
    (deployment.folder / "north.py").write_text(LEAKING_SILO_FILE.format(name="0"))
    deployment.start_all()
    deployment.wait_for_round(1)
    (deployment.folder / "north.py.mark").touch()
    deployment.final_global_model()
    assert "4711-0815" in deployment.log_text("north") and "without north: error: ValueError" in deployment.log_text()
    invites = {name: json.loads((deployment.folder / f"{name}.invite").read_text()) for name in SILO_NAMES}
    keys = {name: keys_in(held["key"], held["node_key"]) for name, held in invites.items()}
    ours = deployment.folder / "lab" / "keys"
    keys["lab"] = keys_in((ours / "ca.key").read_text(), (ours / "server.key").read_text())
    keys["lab"].append((ours / "driver.secret").read_bytes())
    for name in keys:
        folder = deployment.folder / ("lab" if name == "lab" else f"{name}.silo")
        files = [file for file in folder.rglob("*") if file.is_file()]
        said = deployment.log_text("server" if name == "lab" else name).encode()
        held = said + b"\n".join(file.read_bytes() for file in files)
        printed = said + b"\n".join(file.read_bytes() for file in files if file.suffix == ".log")
        others = [key for other, some in keys.items() if other != name for key in some]
        others += [] if name == "north" else canary_bytes()
        assert len(files) > 5 and all(key in held for key in keys[name]), name
        assert not [secret for secret in others if secret in held], name
        assert not [key for key in keys[name] if key in printed], name


@pytest.fixture
def roster(tmp_path: Path) -> Roster:
    (tmp_path / "recipe.toml").write_text("")
    return Roster.create(tmp_path / "lab", tmp_path / "recipe.toml")


def make_silo_transport(
    roster: Roster, folder: Path, name: str, port: int, expired: bool = False
) -> FlowerSiloTransport:
    invite = roster.invite(name, folder / f"{name}.invite")
    keys = invite.unpack(folder / name)
    if expired:
        roster.authority.issue_party_certificate(name, 0).write(keys.folder, "party")
        time.sleep(1.1)  # wait for its last second
    return FlowerSiloTransport(
        f"127.0.0.1:{port}", invite.authority, keys.certificate, key=keys.key, node_key=invite.node_key.encode()
    )


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_reply_that_is_announced_and_never_uploaded_blocks_nothing(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own function would wait forever for the parts of the first, and never fetch the second."""
    with (
        superlink_transports(roster, tmp_path, "north", "south") as (driver, north, south),
        north.session(),
        south.session(),
    ):
        assert driver.connected_parties().keys() == {"north", "south"}
        late = driver.send("south", b"never fetched", 1.0)
        time.sleep(2)
        expired = driver.fetch_replies([late], MAX_REPLY_BYTES)[late]  # reported, so that it can be sent again
        assert isinstance(expired, UndeliveredError)
        first, second = (driver.send(name, b"a task", 60.0) for name in ("north", "south"))
        with monkeypatch.context() as without:
            without.setattr(inflatable_protobuf_utils, "make_push_object_fn_protobuf", lambda *_: lambda *_: None)
            assert answer_next_task(north, b"never uploaded") == b"a task"
        assert answer_next_task(south, b"a reply") == b"a task"
        began = time.monotonic()
        assert reply_bytes(driver.fetch_replies([first, second], MAX_REPLY_BYTES)) == {second: b"a reply"}
        assert driver.fetch_replies([first], MAX_REPLY_BYTES) == {} and time.monotonic() - began < 10


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_only_parties_that_left_in_order_are_departed(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_transport, "HEARTBEAT_INTERVAL", 1.0)  # the interval of its checks
    with superlink_transports(roster, tmp_path, "north", "south") as (driver, north, south):
        with south.session(), north.session():
            assert driver.connected_parties().keys() == {"north", "south"} and not driver.departed_parties()
            monkeypatch.setattr(south._client, "DeactivateNode", lambda request: None)  # as if it were killed
        end = time.monotonic() + PATIENCE
        while driver.connected_parties().keys() | driver.departed_parties() != {"north"}:
            assert "south" not in driver.departed_parties() and time.monotonic() < end
            time.sleep(0.2)
        assert driver.departed_parties() == {"north"} and not driver.connected_parties()  # south is only silent
        with north.session():
            assert driver.connected_parties().keys() == {"north"} and not driver.departed_parties()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_slow_heartbeat_does_not_reconnect_a_party_that_left(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with superlink_transports(roster, tmp_path, "north") as (driver, north):
        beat = north._client.SendNodeHeartbeat
        begun = threading.Event()

        def slow(request: Any) -> None:
            begun.set()
            time.sleep(1)
            beat(request)

        monkeypatch.setattr(north._client, "SendNodeHeartbeat", slow)
        with north.session():
            assert driver.connected_parties().keys() == {"north"} and begun.wait(HEARTBEAT_INTERVAL)
        time.sleep(1.5)
        assert not driver.connected_parties()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_reply_signed_by_a_revoked_key_is_not_taken_for_the_new_party(roster: Roster, tmp_path: Path) -> None:
    """Both commands may fall between two polls of the driver: the name alone does not show the change."""
    with superlink_transports(roster, tmp_path, "north") as (driver, north), north.session():
        driver.connected_parties()
        message_id = driver.send("north", b"a task", 60.0)
        assert answer_next_task(north, b"by the old key") == b"a task"
        roster.revoke("north")
        (tmp_path / "again").mkdir()
        port = int(driver._address.rpartition(":")[2])
        with closing(make_silo_transport(roster, tmp_path / "again", "north", port)) as again:
            for deployment, why in (
                (north, SessionInUse),
                (again, PeerUnavailable),
            ):  # one session is in use, the other key is unknown
                with pytest.raises(PeerUnavailable) as raised, deployment.session():
                    pass
                assert raised.type is why
            driver.set_parties({entry.name: entry.node_key.encode() for entry in roster.parties()})
            lost = driver.fetch_replies([message_id], MAX_REPLY_BYTES)[message_id]
            assert isinstance(lost, UndeliveredError) and not lost.is_final  # the task is sent again, to the new key
            with again.session():
                assert driver.connected_parties().keys() == {"north"}
                message_id = driver.send("north", b"a task", 60.0)
                assert answer_next_task(again, b"by the new key") == b"a task"
                assert reply_bytes(driver.fetch_replies([message_id], MAX_REPLY_BYTES)) == {
                    message_id: b"by the new key"
                }


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_driver_unknown_to_the_superlink_gets_an_error_and_keeps_running(roster: Roster) -> None:
    """Flower's own client would interrupt this process, after a kill of the SuperLink or a jump of its clock."""
    port = free_port()
    credentials = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with run_superlink(credentials, port, roster.run_folder):
        driver = make_driver_transport(roster, credentials, port)
        assert driver.connected_parties() == {}
    with run_superlink(credentials, port, roster.run_folder):
        with pytest.raises(PeerUnavailable, match="answers with 401"):
            driver.connected_parties()
        assert driver._heartbeat.heartbeat_fn()  # it was declined, which ends the retries
    with closing(driver):
        assert not driver._heartbeat.heartbeat_fn()  # no connection: Flower retries


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_chunked_messages_arrive_whole_and_oversized_ones_are_rejected(roster: Roster, tmp_path: Path) -> None:
    """Flower sends equal chunks once: a reply of few bytes on the wire may still be long."""
    payloads = {"zeros": bytes(12 * 2**20), "numbers": b"".join(i.to_bytes(4, "big") for i in range(3 * 2**20)) + b"!"}
    with superlink_transports(roster, tmp_path, "north") as (driver, north), north.session():
        driver.connected_parties()
        for payload in payloads.values():
            message_id = driver.send("north", payload, 60.0)
            assert answer_next_task(north, payload) == payload
            assert reply_bytes(driver.fetch_replies([message_id], len(payload))) == {message_id: payload}
        file = SpillFile()
        file.append(payloads["numbers"])
        dropped = driver.send("north", file, 60.0)
        assert answer_next_task(north, b"a reply") == payloads["numbers"]
        message_id = driver.send("north", b"a task", 60.0)
        answer_next_task(north, payloads["zeros"])
        lost = driver.fetch_replies([message_id], len(payloads["zeros"]) - 1)[message_id]
        assert isinstance(lost, UndeliveredError) and lost.is_final and "more than" in str(lost)
        assert driver._sent_messages.keys() == {dropped}
        driver.discard([dropped, message_id])
        assert not driver._sent_messages and not driver._incoming


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_part_that_flower_lacks_or_rejects_ends_no_process(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts no part twice, as after a lost response, and none three minutes after the previous one."""
    with superlink_transports(roster, tmp_path, "north") as (driver, north), north.session():
        driver.connected_parties()

        def twice(push: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda request: (push(request), push(request))[1]

        driver.send("north", b"a task", 60.0)
        with monkeypatch.context() as without:
            without.setattr(north._client, "PushObject", twice(north._client.PushObject))
            with pytest.raises(PeerUnavailable, match="has accepted a reply, but not all of its parts"):
                answer_next_task(north, b"a reply")
        driver.send("north", b"another task", 60.0)
        with monkeypatch.context() as without:
            without.setattr(north._client, "PullObject", lambda request: SimpleNamespace(object_found=False))
            with pytest.raises(PeerUnavailable, match="could not be received: the message stayed incomplete"):
                north.pull()
        with monkeypatch.context() as without:
            without.setattr(driver._client, "PushObject", twice(driver._client.PushObject))
            with pytest.raises(UndeliveredError, match="Flower did not accept every part of the message"):
                driver.send("north", b"a third", 60.0)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_an_incomplete_task_blocks_nothing_and_is_replaced_by_a_newer_one(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slow or dead driver the silo polls again, and can leave at any time."""
    long = b"".join(i.to_bytes(4, "big") for i in range(3 * 2**20))
    with superlink_transports(roster, tmp_path, "north") as (driver, north), north.session():
        driver.connected_parties()
        push = driver._client.PushObject
        requests = list[Any]()

        def by_half(request: Any) -> Any:
            requests.append(request)
            return push(request) if len(requests) < 4 else SimpleNamespace(stored=True)

        with monkeypatch.context() as without:
            without.setattr(driver._client, "PushObject", by_half)
            message_id = driver.send("north", long, 60.0)
        began = time.monotonic()
        assert [north.pull() for _ in range(5)] == [None] * 5
        assert time.monotonic() - began < 20 and len(requests) > 4
        for request in requests[3:-1]:
            push(request)
        assert north.pull() is None  # the last part
        push(requests[-1])
        assert answer_next_task(north, b"a reply") == long
        while not (found := reply_bytes(driver.fetch_replies([message_id], MAX_REPLY_BYTES))):
            time.sleep(0.1)
        assert found == {message_id: b"a reply"}
        requests.clear()
        with monkeypatch.context() as without:
            without.setattr(driver._client, "PushObject", by_half)
            driver.send("north", long, 60.0)
        assert north.pull() is None
        driver.send("north", b"a newer one", 60.0)
        assert answer_next_task(north, b"a reply") == b"a newer one" and north.pull() is None


def reply_bytes(found: dict[str, MessageBytes | UndeliveredError]) -> dict[str, bytes]:
    return {
        message_id: payload[:] for message_id, payload in found.items() if not isinstance(payload, UndeliveredError)
    }


@contextmanager
def superlink_transports(roster: Roster, folder: Path, *names: str) -> Iterator[Any]:
    """Run a SuperLink; yield the transports of its driver and of some parties that have not joined yet."""
    port = free_port()
    credentials = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with ExitStack() as stack:
        silo_transports = [
            stack.enter_context(closing(make_silo_transport(roster, folder, name, port))) for name in names
        ]
        stack.enter_context(run_superlink(credentials, port, roster.run_folder))
        yield stack.enter_context(closing(make_driver_transport(roster, credentials, port))), *silo_transports


def make_driver_transport(roster: Roster, credentials: SuperLinkCredentials, port: int) -> FlowerServerTransport:
    keys = {entry.name: entry.node_key.encode() for entry in roster.parties()}
    return FlowerServerTransport(
        f"127.0.0.1:{port}", credentials.authority.read_bytes(), credentials.secret.read_bytes(), parties=keys
    )


def answer_next_task(transport: FlowerSiloTransport, payload: bytes) -> bytes:
    """Answer the next task and return its payload."""
    while (received := transport.pull()) is None:
        time.sleep(0.1)
    to, task = received
    transport.push(to, payload)
    return task[:]


def test_an_expired_certificate_and_a_wrong_clock_are_reported(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = free_port()
    port = free_port()
    credentials = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with (
        run_superlink(credentials, inner, roster.run_folder),
        Proxy(inner, "127.0.0.1", port).start(roster.folder),
        closing(make_silo_transport(roster, tmp_path, "north", port)) as north,
        closing(make_silo_transport(roster, tmp_path, "south", port, expired=True)) as south,
    ):
        with pytest.raises(ConnectionRejected, match=r"does not accept our certificate.*expired"), south.session():
            pass
        true = interceptor.now
        for hours, off in ((1, "ahead"), (-1, "behind")):
            with monkeypatch.context() as wrong:
                wrong.setattr(interceptor, "now", lambda by=hours: true() + timedelta(hours=by))
                wrong.setattr(flower_connection, "time", SimpleNamespace(time=lambda by=hours: time.time() + 3600 * by))
                with (
                    pytest.raises(ConnectionRejected, match=rf"clock of this machine is 3\d+ s {off}. Set"),
                    north.session(),
                ):
                    pass


def test_a_revoked_party_cannot_connect(lab: Callable[..., LocalDeployment]) -> None:
    deployment = lab(SILO_CASES["FedAvg"])
    deployment.run_command("server", "revoke", "lab", "west")
    deployment.start_all()
    deployment.wait_until(lambda: "certificate" in deployment.log_text("west"))
    assert deployment.processes["west"].wait(300) == 1


def test_a_quorum_continues_without_a_killed_silo_and_names_it(lab: Callable[..., LocalDeployment]) -> None:
    """First the round waits for it, because Flower still counts it as connected; one party is below the quorum."""
    deployment = lab(SILO_CASES["FedAvg"], 5000)
    deployment.start_all("--quorum", "2", "--deadline", "20")
    deployment.wait_until(lambda: ", 3 parties" in deployment.log_text())
    deployment.kill("west")
    deployment.wait_until(
        lambda: "; without west: lost: no reply within 20 s: the round went on without it" in deployment.log_text()
    )
    deployment.wait_until(lambda: " begins without west." in deployment.log_text())
    deployment.run_command("server", "revoke", "lab", "west")
    before = deployment.log_text()
    deployment.wait_until(lambda: ", 2 parties" in deployment.log_text().removeprefix(before))
    assert "Waiting for" not in deployment.log_text()
    deployment.run_command("server", "revoke", "lab", "south")
    deployment.wait_until(lambda: "1 of 2 parties are connected. Waiting for new invites" in deployment.log_text())


def test_a_party_revoked_during_training_ends_and_the_others_continue(
    lab: Callable[..., LocalDeployment],
) -> None:
    deployment = lab(SILO_CASES["FedAvg"], 5000)
    deployment.start("server", "server", "start", "lab", "--min-parties", "2")
    for name in SILO_NAMES:
        deployment.start_silo(name)
    deployment.wait_until(lambda: ", 3 parties" in deployment.log_text())
    deployment.run_command("server", "revoke", "lab", "west")
    assert deployment.processes["west"].wait(300) == 1
    assert "does not accept our certificate" in deployment.log_text("west")
    before = deployment.log_text()
    deployment.wait_until(lambda: ", 2 parties" in deployment.log_text().removeprefix(before))


VAULT_TABLES = """
wrap = [{{wrapper = "coreset_proxies", share = 0.4}}]
[vault]
folder = "{folder}/vault"
key = "{folder}/key"
"""


def test_a_forgotten_party_has_no_proxy_and_leaves_no_row(lab: Callable[..., LocalDeployment], tmp_path: Path) -> None:
    """North joins, leaves, has a proxy and is forgotten: its coreset is erased, and was never stored in plaintext."""
    key = PrivateKey.new()
    key.write(tmp_path / "key")
    vault = Vault.create(tmp_path / "vault", key)
    deployment = lab(SILO_CASES["FedAvg"], 5000, VAULT_TABLES.format(folder=tmp_path))
    (deployment.folder / "north.py").write_text(LEAKING_SILO_FILE.format(name="0") + 'policy = {"share": 0.5}\n')
    deployment.start("server", "server", "start", "lab", "--min-parties", "2", "--quorum", "2", "--deadline", "20")
    for name in SILO_NAMES:
        deployment.start_silo(name)
    held = lambda: {entry.party: entry for entry in vault.parties()}["north"]  # noqa: E731
    deployment.wait_until(lambda: any(party.state == "sealed" for party in vault.parties()))
    assert held().state == "sealed"
    deployment.run_command("silo", "leave", "north.silo")
    assert deployment.processes["north"].wait(300) == 0
    deployment.wait_until(lambda: held().opened > 0)
    result = json.loads(deployment.run_command("silo", "forget", "north.silo", "--json"))
    assert "destroyed its encrypted rows" in result["server"] and held().state == "forgotten"
    opened = held().opened
    before = deployment.log_text()
    deployment.wait_until(lambda: deployment.log_text().removeprefix(before).count("without north") >= 2)
    assert "north asks to be forgotten: the vault has destroyed" in deployment.log_text()
    assert held().opened == opened and not list((tmp_path / "vault").rglob("coreset*"))
    found = json.loads(deployment.run_command("vault", "verify", "vault", "--key", "key", "--json"))
    assert found["coresets"] == 0 and found["with_key"]
    deployment.run_command("server", "audit", "lab", "--verify")
    requests = sorted(
        file.name for part in ("state", "keys") for file in (deployment.folder / "north.silo" / part).iterdir()
    )
    assert requests == ["machine", "shared_rows.safetensors"]
    check_no_leaks(deployment)


def check_no_leaks(deployment: LocalDeployment) -> None:
    """Assert that no other folder holds a row of north, no log holds a key, and the SuperLink has only its log."""
    invites = [json.loads((deployment.folder / f"{name}.invite").read_text()) for name in SILO_NAMES]
    ours = deployment.folder / "lab" / "keys"
    secrets = keys_in(*(held[name] for held in invites for name in ("key", "node_key")))
    secrets += keys_in((ours / "ca.key").read_text(), (ours / "server.key").read_text())
    secrets += [(ours / "driver.secret").read_bytes(), (deployment.folder / "key").read_bytes().strip()[-64:]]
    logs = b"\n".join(file.read_bytes() for file in deployment.folder.rglob("*.log"))
    others = [
        file for part in ("lab", "vault", "south.silo", "west.silo") for file in (deployment.folder / part).rglob("*")
    ]
    held = logs + b"\n".join(file.read_bytes() for file in others if file.is_file())
    assert len(logs) > 1000 and not [secret for secret in secrets if secret in logs]
    assert len(held) > 100_000 and not [canary for canary in canary_bytes() if canary in held]
    link = deployment.child_process("server", "flower-superlink")
    files = [Path(file.path) for process in (link, *link.children(recursive=True)) for file in process.open_files()]
    assert files and {file.suffix for file in files} == {".log"}, files


def test_a_party_invited_during_training_takes_part_from_then_on(lab: Callable[..., LocalDeployment]) -> None:
    deployment = lab(SILO_CASES["FedAvg"], 5000)
    deployment.start_all()
    deployment.wait_for_round(1)
    deployment.invite("east", 3)
    deployment.start_silo("east")
    deployment.wait_until(
        lambda: "part of it from now on: east" in deployment.log_text() and ", 4 parties" in deployment.log_text()
    )
    deployment.kill("server")
    before = deployment.log_text()
    deployment.start_server()
    deployment.wait_until(lambda: ", 4 parties" in deployment.log_text().removeprefix(before))
    status = json.loads(deployment.run_command("server", "status", "lab", "--json"))
    first = {party["name"]: party["first round"] for party in status["parties"]}
    assert {first[name] for name in SILO_NAMES} == {1} and 1 < first["east"] <= status["round"]


def test_the_driver_does_not_import_the_superlink_database() -> None:
    folder = Path(descant.__file__).parent / "deployment" / "flower"
    names = ("driver_transport", "flower_connection", "message_chunks", "superlink_calls")
    files = [folder / f"{name}.py" for name in names]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    wanted = sorted(name for name in modules if name.startswith("flwr."))
    assert "flwr.supercore.runtime" in wanted
    code = f"import sys, {', '.join(wanted)}\nprint(*sorted({{'sqlalchemy', 'alembic'}} & sys.modules.keys()))"
    assert not subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
