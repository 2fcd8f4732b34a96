"""A silo's end of Flower: it speaks to the SuperLink as a SuperNode does, in the silo's own process.

See `flower` for what is used of Flower, and what is not.
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

_MAX_PAYLOAD_BYTES = 2**40  # bytes of a letter
_HEARTBEAT_JOIN_TIMEOUT = 5.0  # seconds in which a beat that is on its way has arrived, or the line is down


class FlowerSiloTransport:
    """A silo's end: it speaks to the SuperLink as a SuperNode does, and opens no port of its own."""

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
        """The end of the party whose keys these are."""
        address = credentials.address.read_text()
        authority = credentials.authority.read_text()
        return cls(address, authority, credentials.certificate, credentials.key, credentials.node_key.read_bytes())

    @contextmanager
    def session(self) -> Iterator[None]:
        """Be there, with a heartbeat of its own, while the block runs."""
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
            heartbeat_thread.join(_HEARTBEAT_JOIN_TIMEOUT)  # a beat that comes behind the farewell would be a return
            with suppress(Exception):  # whoever goes while the line is down is missed soon enough
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    @translate_http_errors("The server", is_remote=True)
    def _activate(self, heartbeat: float) -> int:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest

        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=heartbeat)
        return int(self._client.ActivateNode(request).node_id)

    def _check_registered(self) -> None:
        """Raise unless the place that is refused is there: Flower says the same of a party that it does not know."""
        try:
            self._activate(0.0)  # which is no heartbeat: whoever is known is refused for that, and nothing comes of it
        except SessionInUse:
            raise PeerUnavailable("The server does not know us yet") from None
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
        """A letter, and what to answer it by; None if there is none, or not all of it.

        A newer one takes the place of one that does not come whole.
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
            payload = incoming.pull_payload(self._client, self._node, request.metadata.run_id, _MAX_PAYLOAD_BYTES)
        except StateError as error:  # there is no room for it now
            raise PeerUnavailable(str(error)) from error
        if payload is None:
            return None
        self._incoming = None
        if isinstance(payload, UndeliveredError):  # it has run out, say; to whoever comes again it is sent again
            raise PeerUnavailable(f"A letter of the server was given up: {payload}")
        return request, payload

    @translate_http_errors("The server", is_remote=True)
    def push(self, request: Any, payload: bytes) -> None:
        """The answer to a letter."""
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
        except UndeliveredError as error:  # whoever comes again is asked again, and answers as before
            raise PeerUnavailable("The server has taken an answer, and not a part of it") from error

    def _push_message(self, message: Any, tree: Any) -> Any:
        from flwr.proto.fleet_pb2 import PushMessagesRequest

        messages: dict[str, Any] = {"messages_list": [message], "message_object_trees": [tree]}
        return self._client.PushMessages(PushMessagesRequest(node=self._node, clientapp_runtime_list=[0.0], **messages))

    def close(self) -> None:
        self._client.close()
