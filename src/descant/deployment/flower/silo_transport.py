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

from ...engines.remote import Lost
from ...errors import StateError
from ...serialization.wire import Letter
from ..pki.invite import Unpacked
from .flower_connection import HEARTBEAT, Away, Held, require, told
from .message_chunks import Coming, hand_over, settle, wrapped

_MOST = 2**40  # bytes of a letter
_LAST = 5.0  # seconds in which a beat that is on its way has arrived, or the line is down


class Spoke:
    """A silo's end: it speaks to the SuperLink as a SuperNode does, and opens no port of its own."""

    def __init__(self, address: str, ca: str, certificate: Path, key: Path, node_key: bytes) -> None:
        require()
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        private: Any = load_ssh_private_key(node_key, None)
        trusted = ssl.create_default_context(cadata=ca)
        trusted.load_cert_chain(certificate, key)
        signed = NodeAuthHttpInterceptor(private, private.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        self._client = FleetHttpClient(f"https://{address}", interceptors=[version, signed], verify=trusted)
        self._public = public_key_to_bytes(private.public_key())
        self._node: Any = None
        self._coming: tuple[Any, Coming] | None = None
        settle()

    @classmethod
    def of(cls, keys: Unpacked) -> Spoke:
        """The end of the party whose keys these are."""
        address, authority = keys.address.read_text(), keys.authority.read_text()
        return cls(address, authority, keys.certificate, keys.key, keys.node_key.read_bytes())

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be there, with a heartbeat of its own, while the block runs."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest
        from flwr.proto.node_pb2 import Node

        try:
            self._node = Node(node_id=self._activated(HEARTBEAT))
        except Held:
            self._check_known()
            raise
        self._coming = None
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(over,), daemon=True)
        beating.start()
        try:
            yield
        finally:
            over.set()
            beating.join(_LAST)  # a beat that comes behind the farewell would be a return
            with suppress(Exception):  # whoever goes while the line is down is missed soon enough
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    @told("The server", elsewhere=True)
    def _activated(self, heartbeat: float) -> int:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest

        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=heartbeat)
        return int(self._client.ActivateNode(request).node_id)

    def _check_known(self) -> None:
        """Raise unless the place that is refused is there: Flower says the same of a party that it does not know."""
        try:
            self._activated(0.0)  # which is no heartbeat: whoever is known is refused for that, and nothing comes of it
        except Held:
            raise Away("The server does not know us yet") from None
        except Away:
            pass

    def _beat(self, over: threading.Event) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not over.wait(HEARTBEAT / 2):
            try:
                self._client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT))
            except Exception:
                continue

    @told("The server", elsewhere=True)
    def pull(self) -> tuple[Any, Letter] | None:
        """A letter, and what to answer it by; None if there is none, or not all of it.

        A newer one takes the place of one that does not come whole.
        """
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        got = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if got.messages_list:
            tree, message = got.message_object_trees[0], message_from_proto(got.messages_list[0])
            self._coming = message, Coming(tree.object_id, tree)
        if self._coming is None:
            return None
        to, coming = self._coming
        try:
            letter = coming.whole(self._client, self._node, to.metadata.run_id, _MOST)
        except StateError as error:  # there is no room for it now
            raise Away(str(error)) from error
        if letter is None:
            return None
        self._coming = None
        if isinstance(letter, Lost):  # it has run out, say; to whoever comes again it is sent again
            raise Away(f"A letter of the server was given up: {letter}")
        return to, letter

    @told("The server", elsewhere=True)
    def push(self, to: Any, answer: bytes) -> None:
        """The answer to a letter."""
        from flwr.app import Message
        from flwr.supercore.task_identity import TaskIdentity

        run = to.metadata.run_id
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, run, self._node.node_id
        try:
            hand_over(Message(wrapped(answer), reply_to=to), self._announced, self._client, self._node, run)
        except Lost as error:  # whoever comes again is asked again, and answers as before
            raise Away("The server has taken an answer, and not a part of it") from error

    def _announced(self, message: Any, tree: Any) -> Any:
        from flwr.proto.fleet_pb2 import PushMessagesRequest

        some: dict[str, Any] = {"messages_list": [message], "message_object_trees": [tree]}
        return self._client.PushMessages(PushMessagesRequest(node=self._node, clientapp_runtime_list=[0.0], **some))

    def close(self) -> None:
        self._client.close()
