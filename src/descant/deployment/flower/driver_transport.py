"""Flower as a post: its SuperLink holds letters for parties, and its fleet protocol carries them.

Only that is used of Flower. Neither end runs code that comes with a run: the driver takes the place of a ServerApp, and
a silo that of a SuperNode with its ClientApp, each in its own process, which holds model and data warm. Flower asks for
an app bundle to begin a run; ours is empty, and nobody opens it.

Its modules used here carry no promise, and a contract test runs against a real SuperLink.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from ...engines.remote import Lost
from ...errors import EngineError
from ...serialization.wire import Letter
from .call_retries import gone_in_order, heartbeat, listed, steadied, struck_off
from .flower_connection import HEARTBEAT, Away, require, told
from .message_chunks import Coming, hand_over, settle, wrapped

_AT_ONCE = 100  # answers that are handed out together: each is an open file
_TYPE = "train"
_BUNDLE = """[project]
name = "descant"
version = "0.1.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0,<1.42"]
[tool.flwr.app]
publisher = "descant"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
"""


def run_of_nothing() -> Any:
    """What Flower is asked by to begin a run: with an app bundle in which there is nothing to run."""
    from flwr.cli.build import build_fab_from_files
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    files = {"pyproject.toml": _BUNDLE.encode(), "LICENSE": b"None.\n", "nothing.py": b"app = None\n"}
    bundle, _ = build_fab_from_files(files)
    return StartRunRequest(fab=Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle), federation="")


class Hub:
    """The driver's end: one run on a SuperLink, whose port nobody but the driver and the proxy can reach."""

    def __init__(self, address: str, ca: bytes, secret: bytes, parties: Mapping[str, bytes]) -> None:
        require()
        self._address, self._ca, self._secret = address, ca, secret
        self._parties: dict[str, bytes] = {}  # the public key of each who is given letters
        self._keys: dict[bytes, bytes] = {}  # all that the SuperLink was told of, by how they are written
        self._nodes: dict[str, int] = {}
        self._checked = time.monotonic()  # when it was last known that the SuperLink knows all parties
        self._due: dict[str, float] = {}  # until when each must be heard again, as the SuperLink has it
        self._left: set[str] = set()
        self._sent: dict[str, tuple[str, bytes]] = {}  # by the number of a letter: to whom, by which key
        self._coming: dict[str, Coming] = {}  # by the same: answers that are on their way
        self._open(parties)

    @told("The SuperLink")
    def _open(self, parties: Mapping[str, bytes]) -> None:
        """Make the parties' keys known, begin a run, and take it over as its ServerApp would.

        Flower's own grid does the same, and brings the SuperLink's database along: 32 MB that nobody here needs.
        """
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.node_pb2 import Node
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.heartbeat import HeartbeatSender
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker

        self.admit(parties)
        self._begin()
        token = RuntimeTokenHttpInterceptor(token=self._token())
        self._client = self._runtime("flwr-serverapp", token, steadied(make_simple_http_retry_invoker()))
        self._beat = HeartbeatSender(heartbeat(self._client))
        self._beat.start()
        try:
            given = self._client.PullTaskInput(PullTaskInputRequest())
        except BaseException:
            self.close()
            raise
        self._who = (given.task_id, given.run.run_id, given.context.node_id)
        self._node, self._run = Node(node_id=SUPERLINK_NODE_ID), given.run.run_id
        settle()

    @told("The SuperLink")
    def admit(self, parties: Mapping[str, bytes]) -> None:
        """These are given letters from now on, and nobody else; keys that are new are made known."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        for name, key in parties.items():
            if key not in self._keys:
                public: Any = load_ssh_public_key(key)
                written = public_key_to_bytes(public)
                with closing(self._control()) as control:
                    control.RegisterNode(RegisterNodeRequest(public_key=written, name=name))
                self._keys[key] = written
        self._parties = {name: self._keys[key] for name, key in parties.items()}

    def _begin(self) -> None:
        with closing(self._control()) as control:
            control.StartRun(run_of_nothing())

    def _control(self) -> Any:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(self._address, False, self._ca, [version])

    def _runtime(self, name: str, proof: Any, retries: Any = None) -> Any:
        """A line to the SuperLink for a component of this name, with what shows that it may."""
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        told = [RuntimeVersionHttpInterceptor(component_name=name), proof]
        return RuntimeHttpClient.from_server_address(self._address, False, self._ca, told, retry_invoker=retries)

    def _token(self, tries: int = 200) -> str:
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        secret = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods=methods)
        client = self._runtime("SuperExec", secret)
        try:
            for _ in range(tries):
                got = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if got.token:
                    return str(got.token)
                time.sleep(0.05)
        finally:
            client.close()
        raise EngineError(f"The SuperLink at {self._address} has begun no run. Is another driver on it?")

    @told("The SuperLink")
    def here(self) -> dict[str, str]:
        from flwr.proto.runtime_pb2 import GetNodesRequest

        whose = {key: name for name, key in self._parties.items()}  # by its key: a name may have had another before
        nodes = self._client.GetNodes(GetNodesRequest()).nodes
        online = [node for node in nodes if node.status == "online" and node.public_key in whose]
        self._nodes = {whose[node.public_key]: node.node_id for node in online}
        self._due |= {whose[node.public_key]: node.online_until for node in online}
        if len(online) < len(whose):
            self._check_known()
        return {whose[node.public_key]: str(node.last_activated_at) for node in online}

    def left(self) -> Collection[str]:
        return self._left - self._nodes.keys()

    def _check_known(self) -> None:
        """Whoever is not there may have left, or been struck off, and could not come again: looked up now and then."""
        if time.monotonic() < self._checked + HEARTBEAT:
            return
        with closing(self._control()) as control:
            found = listed(control)
        if missing := struck_off(found, self._parties):
            raise Away(f"The SuperLink does not know {', '.join(missing)} any more: somebody on this machine did that")
        self._left = gone_in_order(found, self._parties, self._due)
        self._checked = time.monotonic()

    @told("The SuperLink")
    def send(self, party: str, letter: Letter, seconds: float) -> str:
        from flwr.app import Message
        from flwr.supercore.task_identity import TaskIdentity

        if party not in self._nodes:
            raise Lost("it is not there")
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = self._who
        # Its number is a hash of it. Flower lets every party answer a number that it knows, so that none may be guessed
        secret = os.urandom(16).hex()
        message = Message(wrapped(letter), self._nodes[party], _TYPE, ttl=seconds, group_id=secret)
        told = hand_over(message, partial(_announced, self._client), self._client, self._node, self._run)
        number = str(told.message_ids[0] if told.message_ids else "")
        if not number:
            raise Lost("Flower did not take the letter")
        self._sent[number] = (party, self._parties.get(party, b""))
        return number

    @told("The SuperLink")
    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        sent = {number: self._sent[number] for number in numbers}
        barred = {number: party for number, (party, key) in sent.items() if self._parties.get(party) != key}
        found: dict[str, Letter | Lost] = {
            number: Lost("it was revoked", final=party not in self._parties) for number, party in barred.items()
        }
        self._look([number for number in numbers if number not in found])
        for number in [number for number in numbers if number in self._coming and number not in found]:
            coming = self._coming[number] if len(found) < _AT_ONCE else None
            answer = coming.whole(self._client, self._node, self._run, most) if coming else None
            if answer is not None:
                found[number] = answer
                del self._coming[number]
        for number in found:
            del self._sent[number]
        return found

    def drop(self, numbers: Collection[str]) -> None:
        for number in numbers:
            self._sent.pop(number, None)
            self._coming.pop(number, None)

    def _look(self, numbers: Sequence[str]) -> None:
        """Which answers are there, or on their way: what holds them comes after they were announced."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        asked = [number for number in numbers if number not in self._coming]
        got = self._client.PullMessages(PullAppMessagesRequest(message_ids=asked)) if asked else None
        for message, tree in zip(got.messages_list, got.message_object_trees, strict=True) if got else ():
            self._coming[message.metadata.reply_to_message_id] = Coming(message.metadata.message_id, tree)

    def close(self) -> None:
        """End the run."""
        if self._beat.is_running:  # else Flower raises
            self._beat.stop()
        self._client.close()


def _announced(client: Any, message: Any, tree: Any) -> Any:
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return client.PushMessages(PushAppMessagesRequest(messages_list=[message], message_object_trees=[tree]))
