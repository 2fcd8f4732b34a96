"""The silo's transport over Flower: it talks to the SuperLink like a SuperNode, in the silo's own process.

See `driver_transport` for the parts of Flower that are used.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...engines.remote import UndeliveredError
from ...errors import StateError
from ...serialization.wire import MessageBytes
from ..pki.invite import CredentialFiles
from .flower_connection import HEARTBEAT_INTERVAL, PeerUnavailable, SessionInUse, require_flower, translate_http_errors
from .message_chunks import IncomingMessage, freeze_startup_objects, push_message, to_record

_MAX_PAYLOAD_BYTES = 2**40  # bytes of a task
_HEARTBEAT_JOIN_TIMEOUT = 5.0  # seconds: by then a heartbeat in progress has arrived or failed


class FlowerSiloTransport:
    """The silo's end: it talks to the SuperLink like a SuperNode and opens no port."""

    def __init__(self, address: str, authority: str, certificate: Path, key: Path, node_key: bytes) -> None:
        require_flower()
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        private: Any = load_ssh_private_key(node_key, None)
        tls_context = ssl.create_default_context(cadata=authority)
        tls_context.load_cert_chain(certificate, key)
        signing = NodeAuthHttpInterceptor(private, private.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        self._client = FleetHttpClient(f"https://{address}", interceptors=[version, signing], verify=tls_context)
        self._public_key = public_key_to_bytes(private.public_key())
        self._node: Any = None
        self._incoming: tuple[Any, IncomingMessage] | None = None
        freeze_startup_objects()

    @classmethod
    def from_credentials(cls, credentials: CredentialFiles) -> FlowerSiloTransport:
        """Create the transport of the party that owns these credentials."""
        address = credentials.address.read_text()
        authority = credentials.authority.read_text()
        return cls(
            address,
            authority,
            credentials.certificate,
            key=credentials.key,
            node_key=credentials.node_key.read_bytes(),
        )

    @contextmanager
    def session(self) -> Iterator[None]:
        """Stay connected and send heartbeats while the block runs."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest
        from flwr.proto.node_pb2 import Node

        try:
            self._node = Node(node_id=self._activate(HEARTBEAT_INTERVAL))
        except SessionInUse:
            self._check_registered()
            raise
        self._incoming = None
        stop = threading.Event()
        heartbeat_thread = threading.Thread(target=self._send_heartbeats, args=(stop,), daemon=True)
        heartbeat_thread.start()
        try:
            yield
        finally:
            stop.set()
            heartbeat_thread.join(_HEARTBEAT_JOIN_TIMEOUT)  # a later heartbeat would reactivate the node
            with suppress(Exception):  # without a connection the server notices by the missing heartbeats
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    @translate_http_errors("The server", is_remote=True)
    def _activate(self, heartbeat: float) -> int:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest

        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=heartbeat)
        return int(self._client.ActivateNode(request).node_id)

    def _check_registered(self) -> None:
        """Raise if the server does not know this party: Flower reports that like a session in use."""
        try:
            self._activate(0.0)  # an invalid interval: Flower declines it for a known party, without effect
        except SessionInUse:
            raise PeerUnavailable("The server does not know this party yet") from None
        except PeerUnavailable:
            pass

    def _send_heartbeats(self, stop: threading.Event) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not stop.wait(HEARTBEAT_INTERVAL / 2):
            try:
                self._client.SendNodeHeartbeat(
                    SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_INTERVAL)
                )
            except Exception:
                continue

    @translate_http_errors("The server", is_remote=True)
    def pull(self) -> tuple[Any, MessageBytes] | None:
        """Return a request handle and its payload; None if no task has arrived completely.

        A newer task replaces one that is still incomplete.
        """
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        response = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if response.messages_list:
            tree = response.message_object_trees[0]
            message = message_from_proto(response.messages_list[0])
            self._incoming = message, IncomingMessage(tree.object_id, tree)
        if self._incoming is None:
            return None
        request, incoming = self._incoming
        try:
            payload = incoming.pull_payload(
                self._client, self._node, run=request.metadata.run_id, max_bytes=_MAX_PAYLOAD_BYTES
            )
        except StateError as error:  # no disk space for it now
            raise PeerUnavailable(str(error)) from error
        if payload is None:
            return None
        self._incoming = None
        if isinstance(payload, UndeliveredError):  # such as expired; the server sends it again after a reconnect
            raise PeerUnavailable(f"A task of the server could not be received: {payload}")
        return request, payload

    @translate_http_errors("The server", is_remote=True)
    def push(self, request: Any, payload: bytes) -> None:
        """Send the reply to a request."""
        from flwr.app import Message
        from flwr.supercore.task_identity import TaskIdentity

        run = request.metadata.run_id
        TaskIdentity.task_id = 0
        TaskIdentity.run_id = run
        TaskIdentity.node_id = self._node.node_id
        try:
            push_message(
                Message(to_record(payload), reply_to=request),
                self._push_message,
                self._client,
                node=self._node,
                run=run,
            )
        except UndeliveredError as error:  # after a reconnect the task and the stored reply are sent again
            raise PeerUnavailable("The server has accepted a reply, but not all of its parts") from error

    def _push_message(self, message: Any, tree: Any) -> Any:
        from flwr.proto.fleet_pb2 import PushMessagesRequest

        messages: dict[str, Any] = {"messages_list": [message], "message_object_trees": [tree]}
        return self._client.PushMessages(PushMessagesRequest(node=self._node, clientapp_runtime_list=[0.0], **messages))

    def close(self) -> None:
        self._client.close()
