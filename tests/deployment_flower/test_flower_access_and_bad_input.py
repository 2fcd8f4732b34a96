"""Access rights of a caller with only the authority's certificate, at our proxy and at Flower's port.

`bash scripts/engines` runs this, in an environment that has Flower.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from descant.core.timeouts import WaitLimits
from descant.deployment.flower import driver_transport
from descant.deployment.flower.driver_transport import empty_run_request
from descant.deployment.flower.flower_connection import PeerUnavailable, require_flower
from descant.deployment.flower.message_chunks import assemble_payload, push_message, to_record
from descant.deployment.flower.superlink_process import run_superlink
from descant.deployment.nginx_proxy import Proxy
from descant.deployment.pki.certificates import AUTHORITY_NAME
from descant.deployment.pki.federation_setup import KEYS_FOLDER
from descant.deployment.pki.roster import Roster
from descant.deployment.server.serve import FederationServer, free_port
from descant.engines.remote import UndeliveredError
from recipe_matrix import SILO_CASES
from test_flower_deployment import (  # noqa: F401
    MAX_REPLY_BYTES,
    SILO_NAMES,
    LocalDeployment,
    answer_next_task,
    assert_equals_simulation,
    lab,
    make_driver_transport,
    make_silo_transport,
    reply_bytes,
    roster,
    superlink_transports,
)

OPEN = 200
UNAUTHORIZED = {401, 403}


def clients() -> dict[str, type]:
    require_flower()
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient

    return {"control": ControlHttpClient, "runtime": RuntimeHttpClient, "fleet": FleetHttpClient}


def statuses(client: type, address: str, ca: bytes) -> dict[str, int]:
    """Return the HTTP status of every call of a client, made anonymously with an empty request."""
    return {name: status(client, address, ca, name) for name in vars(client) if name[0].isupper()}


def status(client: Any, address: str, ca: bytes, name: str, request: Any = None) -> int:
    try:
        call_anonymously(client, address, ca, name, request)
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return OPEN


def call_anonymously(client: Any, address: str, ca: bytes, name: str, request: Any = None) -> Any:
    """Return the response to an anonymous call."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    with closing(client.from_server_address(address, False, ca, [version])) as caller:
        call = getattr(caller, name)
        payload = call(typing.get_type_hints(call)["request"]() if request is None else request)
        if inspect.isgenerator(payload):
            next(payload, None)
        return payload


class LocalUser:
    """Another user of the server's machine, with the authority's certificate and the open Control API."""

    def __init__(self, address: str, ca: bytes) -> None:
        self._at = (clients()["control"], address, ca)

    def is_allowed(self, name: str, request: Any) -> bool:
        return status(*self._at, name, request) == OPEN

    def nodes(self) -> dict[str, Any]:
        return {node.name: node for node in call_anonymously(*self._at, "ListNodes").nodes_info}

    def register(self, name: str, key: bytes) -> bool:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        return self.is_allowed("RegisterNode", RegisterNodeRequest(public_key=key, name=name))

    def unregister(self, party: str) -> bool:
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        return self.is_allowed("UnregisterNode", UnregisterNodeRequest(node_id=self.nodes()[party].node_id))

    def stop_runs(self) -> int:
        """Stop all runs; return their number."""
        from flwr.proto.control_pb2 import StopRunRequest

        runs = call_anonymously(*self._at, "ListRuns").run_dict
        stopped = [
            call_anonymously(*self._at, "StopRun", StopRunRequest(run_id=run))
            for run in runs
            if not runs[run].finished_at
        ]
        return sum(payload.success for payload in stopped)


def new_public_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key: bytes = public_key_to_bytes(ec.generate_private_key(ec.SECP384R1()).public_key())
    return key


@pytest.fixture
def ports(lab: Callable[..., LocalDeployment]) -> Iterator[tuple[str, str, bytes]]:  # noqa: F811
    """Yield the addresses of the proxy and of the SuperLink behind it, and the certificate."""
    deployment = lab(SILO_CASES["FedAvg"])
    deployment.start_server()
    deployment.wait_until(lambda: "Waiting" in deployment.log_text())
    yield addresses(deployment)


def addresses(deployment: LocalDeployment) -> tuple[str, str, bytes]:
    line = deployment.child_process("server", "flower-superlink").cmdline()
    outer = re.search(r"Parties reach \S+:(\d+)\.", deployment.log_text())
    assert outer is not None
    ca = (deployment.folder / "lab" / KEYS_FOLDER / f"{AUTHORITY_NAME}.crt").read_bytes()
    return f"127.0.0.1:{outer[1]}", f"127.0.0.1:{line[line.index('--port') + 1]}", ca


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports to make a bundle
def test_anonymous_callers_reach_only_the_control_api_on_loopback(ports: tuple[str, str, bytes]) -> None:
    """Nothing at the proxy; at Flower's own port, on loopback, only the Control API."""
    outer, inner, ca = ports
    found = {kind: statuses(client, outer, ca) for kind, client in clients().items()}
    assert {"ListNodes", "StartRun"} <= found["control"].keys() and "AcquireTask" in found["runtime"]
    for payloads in found.values():
        assert set(payloads.values()) == {400}  # from nginx, without a client certificate
    inside = {kind: statuses(client, inner, ca) for kind, client in clients().items()}
    for kind in ("runtime", "fleet"):
        assert set(inside[kind].values()) <= UNAUTHORIZED, inside[kind]
    assert {inside["control"][name] for name in ("ListNodes", "ListRuns", "ListFederations")} == {OPEN}
    there = LocalUser(outer, ca)
    here = LocalUser(inner, ca)
    assert here.is_allowed("StartRun", empty_run_request()) and not there.is_allowed("StartRun", empty_run_request())
    key = new_public_key()
    assert here.register("made up", key) and not there.register("another", new_public_key())
    assert here.nodes().keys() == {*SILO_NAMES, "made up"}
    assert here.unregister("made up") and not here.register("made up", key)  # an unregistered key stays out
    assert here.unregister("north") and here.stop_runs()


def test_telemetry_and_downloads_of_the_superlink_are_off(roster: Roster) -> None:  # noqa: F811
    port = free_port()
    credentials = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with run_superlink(credentials, port, roster.run_folder):
        [found] = [child for child in psutil.Process().children(recursive=True) if str(port) in child.cmdline()]
        environment = found.environ()
        assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
        assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert "--disable-runtime-dependency-installation" in found.cmdline()


class RecordingClient:
    """A fake Flower client that records the size of each request."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def announce(self, message: Any, tree: Any) -> Any:
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self.sizes.append(PushMessagesRequest(messages_list=[message], message_object_trees=[tree]).ByteSize())
        names = [node.object_id for node in iterate_object_tree(tree)]
        return SimpleNamespace(session_id="", objects_to_push=names)

    def PushObject(self, request: Any) -> Any:
        self.sizes.append(request.ByteSize())
        return SimpleNamespace(stored=True)


def test_every_request_of_a_large_reply_passes_the_proxy() -> None:
    from flwr.app import Message
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.task_identity import TaskIdentity

    client = RecordingClient()
    payload = b"".join(at.to_bytes(8, "big") + bytes(2**20 - 8) for at in range(128))
    TaskIdentity.task_id = 0
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = 2
    message = Message(to_record(payload), 3, "train")
    push_message(message, client.announce, client, node=Node(node_id=2), run=1)
    announced, *parts = client.sizes
    assert (
        max(8 * announced, *parts) < Proxy(8000).max_body_megabytes * 2**20 / 2
    )  # one part for every 5 MB, all of one size
    assert sum(client.sizes) > len(payload)


def wasteful_record(kind: str) -> Any:
    """Return a short payload as a record with far too many parts, or far too long headers."""
    from flwr.app import Array, ArrayRecord, RecordDict

    if kind == "a long head":
        return RecordDict({"payload": ArrayRecord({"payload": Array("uint8", (1,), "x" * 3 * 2**20, b"1")})})
    return to_record(bytes(20_000) if kind == "one part again and again" else bytes(range(250)) * 80)


@pytest.mark.parametrize("kind", ["many parts", "one part again and again", "a long head"])
def test_a_reply_of_too_many_parts_is_rejected_before_they_are_fetched(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from flwr.app import Message
    from flwr.supercore.inflatable import inflatable_object as parts
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 0
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = 2
    monkeypatch.setattr(sys.modules["flwr.app.message.array"], "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1)
    message = Message(wasteful_record(kind), 3, "train")
    pulled = list[str]()
    objects = {name: part.deflate() for name, part in parts.get_all_nested_objects(message).items()}

    def pull(name: str) -> bytes:
        pulled.append(name)
        return objects[name]

    error = assemble_payload(parts.get_object_tree(message), pull, 2**21)
    assert isinstance(error, UndeliveredError) and error.is_final and len(pulled) < 10


@pytest.mark.parametrize("kind", ["nothing", "no array", "no arrays", "another item"])
def test_a_message_of_another_form_is_rejected(kind: str) -> None:
    """A silo logs it and continues; at the driver that party's reply fails."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable import inflatable_object as parts
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 0
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = 2
    array = Array("uint8", (1,), "x", b"1")
    content = {
        "nothing": {},
        "no array": {"payload": ArrayRecord({})},
        "no arrays": {"payload": ConfigRecord({"payload": b"1"})},
        "another item": {"parcel": ArrayRecord({"payload": array})},
    }[kind]
    message = Message(RecordDict(content), 3, "train")  # type: ignore[arg-type]
    objects = {name: part.deflate() for name, part in parts.get_all_nested_objects(message).items()}
    error = assemble_payload(parts.get_object_tree(message), objects.__getitem__, 2**21)
    assert isinstance(error, UndeliveredError) and error.is_final and "malformed" in str(error)


GARBAGE = {  # objects that Flower itself accepts and carries
    "no protobuf": [("Message", b"\xff\xff\xff\xff")],
    "a head that is nested too deep": [("Array", b"[" * 200_000)],
    "another kind of object": [("ArrayChunk", b"1")],
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_garbage_reply_fails_that_party_only(
    roster: Roster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Over a real SuperLink: a party can announce and upload objects that Flower would not make."""
    from hashlib import sha256

    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.inflatable import inflatable_object as parts

    [(name, body)] = GARBAGE[kind]
    objects = f"{name}  {len(body)}\0".encode() + body
    root = sha256(objects).hexdigest()

    class Part:
        def deflate(self) -> bytes:
            return objects

    with superlink_transports(roster, tmp_path, "north") as (driver, north), north.session():
        driver.connected_parties()
        message_id = driver.send("north", b"a task", 60.0)
        while (received := north.pull()) is None:
            time.sleep(0.1)
        with monkeypatch.context() as falsified:
            falsified.setattr(parts, "get_object_tree", lambda message: ObjectTree(object_id=root))
            falsified.setattr(parts, "get_all_nested_objects", lambda message: {root: Part()})
            announce = north._push_message

            def announced(message: Any, tree: Any) -> Any:
                message.metadata.message_id = root
                return announce(message, tree)

            falsified.setattr(north, "_push_message", announced)
            north.push(received[0], b"a reply")
        while not (found := driver.fetch_replies([message_id], MAX_REPLY_BYTES)):
            time.sleep(0.1)
        assert isinstance(found[message_id], UndeliveredError) and "malformed" in str(found[message_id])
        assert driver.connected_parties().keys() == {"north"}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_malformed_task_or_full_disk_does_not_end_a_silo(
    roster: Roster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reports the error and continues; the task is sent again after a reconnect."""
    from flwr.app import RecordDict

    with superlink_transports(roster, tmp_path, "north") as (driver, north), north.session():
        driver.connected_parties()
        with monkeypatch.context() as wrong:
            wrong.setattr(driver_transport, "to_record", lambda task: RecordDict({}))
            driver.send("north", b"a task", 60.0)
        with pytest.raises(PeerUnavailable, match=r"could not be received: the message is malformed"):
            north.pull()
        driver.send("north", b"a task", 60.0)
        with monkeypatch.context() as full:
            full.setattr(tempfile, "TemporaryFile", no_room)
            with pytest.raises(PeerUnavailable, match=r"cannot be allocated in .* No space left"):
                north.pull()
        assert answer_next_task(north, b"a reply") == b"a task"


def no_room(**settings: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_unregistered_parties_and_stopped_runs_lead_to_the_same_model(
    lab: Callable[..., LocalDeployment],  # noqa: F811
    tmp_path: Path,
) -> None:
    """The SuperLink is restarted, and the round is repeated."""
    deployment = lab(SILO_CASES["FedGeoMedPlus"])
    deployment.start_all()
    deployment.wait_for_round(1)
    _, inner, ca = addresses(deployment)
    assert LocalUser(inner, ca).unregister("north")
    deployment.wait_until(
        lambda: "no longer knows north" in deployment.log_text() and "are restarted" in deployment.log_text()
    )
    deployment.wait_until(lambda: deployment.log_text().partition("are restarted")[2].count("Round ") > 0)
    _, inner, ca = addresses(deployment)  # a new SuperLink has another port
    assert LocalUser(inner, ca).stop_runs()
    deployment.wait_until(lambda: deployment.log_text().count("are restarted") == 2)
    assert_equals_simulation(deployment)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_driver_reports_a_stopped_run_or_an_unregistered_party_as_unavailable(
    roster: Roster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower itself would end the calling process, as Ctrl-C does."""
    port = free_port()
    credentials = FederationServer(roster.folder, WaitLimits())._superlink_credentials(roster)
    with (
        closing(make_silo_transport(roster, tmp_path, "north", port)) as north,
        closing(make_silo_transport(roster, tmp_path, "south", port)),
        run_superlink(credentials, port, roster.run_folder),
        closing(make_driver_transport(roster, credentials, port)) as driver,
        north.session(),
    ):
        local_user = LocalUser(f"127.0.0.1:{port}", credentials.authority.read_bytes())
        assert local_user.register("made up", new_public_key())
        assert driver.connected_parties().keys() == {"north"}  # south has not joined yet and is still registered
        assert local_user.unregister("south")
        later = time.monotonic() + driver_transport.HEARTBEAT_INTERVAL
        monkeypatch.setattr(driver_transport, "time", SimpleNamespace(monotonic=lambda: later, time=time.time))
        with pytest.raises(PeerUnavailable, match="no longer knows south"):
            driver.connected_parties()
        driver.set_parties(
            {
                "north": next(
                    key for key, objects in driver._registered_keys.items() if objects == driver._parties["north"]
                )
            }
        )
        message_id = driver.send("north", b"a task", 60.0)
        assert local_user.stop_runs() == 1
        for call in (
            driver.connected_parties,
            lambda: driver.send("north", b"a task", 60.0),
            lambda: driver.fetch_replies([message_id], MAX_REPLY_BYTES),
        ):
            with pytest.raises(PeerUnavailable, match="401"):
                call()
        assert driver._heartbeat.heartbeat_fn()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_a_message_id_gives_access_and_cannot_be_guessed(
    roster: Roster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower authenticates the sender of a reply, but does not compare it with the party that the reply names."""
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf

    with (
        superlink_transports(roster, tmp_path, "north", "south") as (driver, north, south),
        north.session(),
        south.session(),
    ):
        driver.connected_parties()
        message_id = driver.send("south", b"a task", 60.0)
        assert make_pull_object_fn_protobuf(north._client.PullObject, north._node, driver._run)(message_id)
        while (received := south.pull()) is None:
            time.sleep(0.1)
        own = north._node
        north._node = south._node
        with pytest.raises(PeerUnavailable, match="401"):
            north.push(received[0], b"by north, who says that it is south")
        north._node = own
        announced = north._push_message

        def in_its_name(message: Any, tree: Any) -> Any:
            message.metadata.src_node_id = south._node.node_id
            return announced(message, tree)

        monkeypatch.setattr(north, "_push_message", in_its_name)
        north.push(received[0], b"by north, in the name of south")
        assert reply_bytes(driver.fetch_replies([message_id], MAX_REPLY_BYTES)) == {
            message_id: b"by north, in the name of south"
        }
        at = datetime.now(UTC)
        monkeypatch.setattr(sys.modules["flwr.app.message.message"], "now", lambda: at)
        assert driver.send("south", b"the same", 60.0) != driver.send("south", b"the same", 60.0)
