"""The driver's transport over Flower: the SuperLink stores messages for parties, the fleet protocol carries them.

Nothing else of Flower is used. Neither end runs code that comes with a run. The driver takes the place of a ServerApp,
a silo that of a SuperNode with its ClientApp. Each runs in its own process, which keeps model and data loaded. Flower
needs an app bundle to start a run: ours is empty, and nothing opens it.

The Flower modules used here are not a stable API, so a contract test runs against a real SuperLink.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from ...engines.remote import UndeliveredError
from ...errors import EngineError
from ...serialization.wire import MessageBytes
from .flower_connection import HEARTBEAT_INTERVAL, PeerUnavailable, require_flower, translate_http_errors
from .message_chunks import IncomingMessage, freeze_startup_objects, push_message, to_record
from .superlink_calls import departed_parties, heartbeat_sender, limit_retries, list_nodes, unregistered_parties

_MAX_REPLIES_PER_FETCH = 100  # each reply is an open file
_MESSAGE_TYPE = "train"
_EMPTY_APP_TOML = """[project]
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


def empty_run_request() -> Any:
    """Return the request that starts a run with an empty app bundle."""
    from flwr.cli.build import build_fab_from_files
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    files = {"pyproject.toml": _EMPTY_APP_TOML.encode(), "LICENSE": b"None.\n", "nothing.py": b"app = None\n"}
    bundle, _ = build_fab_from_files(files)
    return StartRunRequest(fab=Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle), federation="")


class FlowerServerTransport:
    """The driver's end: one run on a SuperLink whose port only local processes can reach."""

    def __init__(self, address: str, authority: bytes, secret: bytes, parties: Mapping[str, bytes]) -> None:
        require_flower()
        self._address = address
        self._authority = authority
        self._secret = secret
        self._parties: dict[str, bytes] = {}  # the encoded public key of each current party
        self._registered_keys: dict[bytes, bytes] = {}  # the encoded form of every key that the SuperLink knows
        self._nodes: dict[str, int] = {}
        self._last_check = time.monotonic()  # the last time all parties were known to be registered
        self._online_until: dict[str, float] = {}  # the SuperLink's deadline for each party's next heartbeat
        self._departed: set[str] = set()
        self._sent_messages: dict[str, tuple[str, bytes]] = {}  # party and its key, by message id
        self._incoming: dict[str, IncomingMessage] = {}  # replies that are arriving, by the id of the sent message
        self._connect(parties)

    @translate_http_errors("The SuperLink")
    def _connect(self, parties: Mapping[str, bytes]) -> None:
        """Register the parties' keys, start a run, and take it over as its ServerApp would.

        Flower's own grid does the same, but also imports the SuperLink's database: 32 MB without use here.
        """
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.node_pb2 import Node
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.heartbeat import HeartbeatSender
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker

        self.set_parties(parties)
        self._start_run()
        token = RuntimeTokenHttpInterceptor(token=self._acquire_token())
        self._client = self._runtime_client("flwr-serverapp", token, limit_retries(make_simple_http_retry_invoker()))
        self._heartbeat = HeartbeatSender(heartbeat_sender(self._client))
        self._heartbeat.start()
        try:
            task_input = self._client.PullTaskInput(PullTaskInputRequest())
        except BaseException:
            self.close()
            raise
        self._task_identity = (task_input.task_id, task_input.run.run_id, task_input.context.node_id)
        self._node = Node(node_id=SUPERLINK_NODE_ID)
        self._run = task_input.run.run_id
        freeze_startup_objects()

    @translate_http_errors("The SuperLink")
    def set_parties(self, parties: Mapping[str, bytes]) -> None:
        """Send messages to these parties only from now on; register their new keys."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        for name, key in parties.items():
            if key not in self._registered_keys:
                public: Any = load_ssh_public_key(key)
                encoded = public_key_to_bytes(public)
                with closing(self._control_client()) as control:
                    control.RegisterNode(RegisterNodeRequest(public_key=encoded, name=name))
                self._registered_keys[key] = encoded
        self._parties = {name: self._registered_keys[key] for name, key in parties.items()}

    def _start_run(self) -> None:
        with closing(self._control_client()) as control:
            control.StartRun(empty_run_request())

    def _control_client(self) -> Any:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(self._address, False, self._authority, [version])

    def _runtime_client(self, name: str, auth_interceptor: Any, retries: Any = None) -> Any:
        """Return a client of the SuperLink for a component, with its authentication."""
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        interceptors = [RuntimeVersionHttpInterceptor(component_name=name), auth_interceptor]
        return RuntimeHttpClient.from_server_address(
            self._address, False, self._authority, interceptors, retry_invoker=retries
        )

    def _acquire_token(self, tries: int = 200) -> str:
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        secret = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods=methods)
        client = self._runtime_client("SuperExec", secret)
        try:
            for _ in range(tries):
                acquired = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if acquired.token:
                    return str(acquired.token)
                time.sleep(0.05)
        finally:
            client.close()
        raise EngineError(f"The SuperLink at {self._address} has started no run. Does another driver use it?")

    @translate_http_errors("The SuperLink")
    def connected_parties(self) -> dict[str, str]:
        from flwr.proto.runtime_pb2 import GetNodesRequest

        names_by_key = {key: name for name, key in self._parties.items()}  # a name may have had another key before
        nodes = self._client.GetNodes(GetNodesRequest()).nodes
        online = [node for node in nodes if node.status == "online" and node.public_key in names_by_key]
        self._nodes = {names_by_key[node.public_key]: node.node_id for node in online}
        self._online_until |= {names_by_key[node.public_key]: node.online_until for node in online}
        if len(online) < len(names_by_key):
            self._check_registered()
        return {names_by_key[node.public_key]: str(node.last_activated_at) for node in online}

    def departed_parties(self) -> Collection[str]:
        return self._departed - self._nodes.keys()

    def _check_registered(self) -> None:
        """Look up absent parties now and then: did they leave in order, or were they unregistered?"""
        if time.monotonic() < self._last_check + HEARTBEAT_INTERVAL:
            return
        with closing(self._control_client()) as control:
            nodes = list_nodes(control)
        if missing := unregistered_parties(nodes, self._parties):
            raise PeerUnavailable(
                f"The SuperLink no longer knows {', '.join(missing)}: another user of this machine unregistered it"
            )
        self._departed = departed_parties(nodes, self._parties, self._online_until)
        self._last_check = time.monotonic()

    @translate_http_errors("The SuperLink")
    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        from flwr.app import Message
        from flwr.supercore.task_identity import TaskIdentity

        if party not in self._nodes:
            raise UndeliveredError("it is not connected")
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = self._task_identity
        # A message id is a hash of the message. Flower accepts a reply from every party that knows the id, so this
        # random group id keeps it from being guessed.
        secret = os.urandom(16).hex()
        message = Message(to_record(payload), self._nodes[party], _MESSAGE_TYPE, ttl=ttl, group_id=secret)
        response = push_message(
            message, partial(_push_message, self._client), self._client, node=self._node, run=self._run
        )
        message_id = str(response.message_ids[0] if response.message_ids else "")
        if not message_id:
            raise UndeliveredError("Flower did not accept the message")
        self._sent_messages[message_id] = (party, self._parties.get(party, b""))
        return message_id

    @translate_http_errors("The SuperLink")
    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        sent = {message_id: self._sent_messages[message_id] for message_id in message_ids}
        revoked = {message_id: party for message_id, (party, key) in sent.items() if self._parties.get(party) != key}
        replies: dict[str, MessageBytes | UndeliveredError] = {
            message_id: UndeliveredError("it was revoked", is_final=party not in self._parties)
            for message_id, party in revoked.items()
        }
        expected = [message_id for message_id in message_ids if message_id not in replies]
        self._poll_replies(expected)
        for message_id in [message_id for message_id in expected if message_id in self._incoming]:
            incoming = self._incoming[message_id] if len(replies) < _MAX_REPLIES_PER_FETCH else None
            payload = (
                incoming.pull_payload(self._client, self._node, run=self._run, max_bytes=max_bytes)
                if incoming
                else None
            )
            if payload is not None:
                replies[message_id] = payload
                del self._incoming[message_id]
        for message_id in replies:
            del self._sent_messages[message_id]
        return replies

    def discard(self, message_ids: Collection[str]) -> None:
        for message_id in message_ids:
            self._sent_messages.pop(message_id, None)
            self._incoming.pop(message_id, None)

    def _poll_replies(self, message_ids: Sequence[str]) -> None:
        """Start to receive replies that were announced; their parts arrive later."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        unannounced = [message_id for message_id in message_ids if message_id not in self._incoming]
        if not unannounced:
            return
        response = self._client.PullMessages(PullAppMessagesRequest(message_ids=unannounced))
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            self._incoming[message.metadata.reply_to_message_id] = IncomingMessage(message.metadata.message_id, tree)

    def close(self) -> None:
        """End the run."""
        if self._heartbeat.is_running:  # otherwise Flower raises
            self._heartbeat.stop()
        self._client.close()


def _push_message(client: Any, message: Any, tree: Any) -> Any:
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return client.PushMessages(PushAppMessagesRequest(messages_list=[message], message_object_trees=[tree]))
