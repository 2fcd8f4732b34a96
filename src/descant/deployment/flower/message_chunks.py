"""Payloads in Flower messages: one array per message, cut into chunks that travel one by one.

Flower's own functions hold all parts of a message in memory, and then the whole message as well. Here a payload is
uploaded part by part, and received part by part into an unnamed file.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...engines.remote import UndeliveredError
from ...serialization.wire import MessageBytes
from ...storage.spill import SpillFile

_PAYLOAD_KEY = "payload"
_SERIALIZATION_TYPE = "descant"
_HEADER_OBJECTS = 4  # the parts that are not chunks: message, record dict, record, array
_LOSS_REASONS = {
    3: "its task has expired",
    4: "its reply has expired",
    5: "it has sent no heartbeat",
}  # by Flower's error codes


def to_record(payload: MessageBytes) -> Any:
    """Wrap a payload in a Flower record; a payload in a file stays there."""
    from flwr.app import Array, ArrayRecord, RecordDict

    record: Any = ArrayRecord({_PAYLOAD_KEY: Array("uint8", (len(payload),), _SERIALIZATION_TYPE, b"")})
    record[_PAYLOAD_KEY].data = payload if isinstance(payload, bytes) else payload.memory_map()
    return RecordDict({_PAYLOAD_KEY: record})


def push_message(message: Any, announce: Callable[[Any, Any], Any], client: Any, node: Any, run: int) -> Any:
    """Announce a message with the tree of its parts, push the requested parts, and return the response.

    Raise `UndeliveredError` if a part is not accepted: Flower takes none twice, and none three minutes after the
    previous one.
    """
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable import inflatable_object as parts
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    with parts.no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        response = announce(message_to_proto(remove_content_from_message(message)), parts.get_object_tree(message))
        push = make_push_object_fn_protobuf(client.PushObject, node, run, response.session_id)
        requested = set(response.objects_to_push)
        for name, part in parts.get_all_nested_objects(message).items():
            if name in requested:
                try:
                    push(name, part.deflate())
                except ObjectPushError as error:
                    raise UndeliveredError("Flower did not accept every part of the message") from error
                _collect_garbage()
    return response


@dataclass
class IncomingMessage:
    """A message that was announced and whose parts are arriving. Flower's own functions would block here.

    Nothing is kept of an incomplete message: the next attempt asks first for the part that was missing.
    """

    message_id: str
    tree: Any
    missing_part: str = ""

    def pull_payload(self, client: Any, node: Any, run: int, max_bytes: int) -> SpillFile | UndeliveredError | None:
        """Return the payload of at most `max_bytes` once all parts have arrived, else None."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

        pull = make_pull_object_fn_protobuf(client.PullObject, node, run)

        def pull_part(part: str) -> bytes:
            self.missing_part = part
            return bytes(pull(part))

        try:
            if self.missing_part:
                pull(self.missing_part)
            payload = assemble_payload(self.tree, pull_part, max_bytes)
        except ObjectUnavailableError:
            return None
        except ObjectPullError as error:
            return UndeliveredError(f"the message stayed incomplete: {error}")
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=self.message_id)
        )
        return payload


def assemble_payload(tree: Any, pull: Callable[[str], bytes], max_bytes: int) -> SpillFile | UndeliveredError:
    """Return the payload assembled from a tree of parts, at most `max_bytes` long; a repeated chunk counts each time.

    A sender can cut a payload in any way: more parts than Flower would make of `max_bytes` are not fetched.
    """
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
    from flwr.supercore.inflatable import inflatable_object as parts

    nodes = list(parts.iterate_object_tree(tree))
    max_parts = _HEADER_OBJECTS + 1 + max_bytes // CHUNK
    if len(nodes) > max_parts:
        return UndeliveredError(f"the message has {len(nodes)} parts; at most {max_parts} are allowed", is_final=True)
    chunks = {node.object_id for node in nodes if not node.children} - {tree.object_id}
    headers = {node.object_id: pull(node.object_id) for node in nodes if node.object_id not in chunks}
    if sum(map(len, headers.values())) > max_bytes:
        return UndeliveredError(f"the message has more than {max_bytes} bytes", is_final=True)
    order = _chunk_order(tree.object_id, headers, chunks)
    if isinstance(order, UndeliveredError):
        return order
    if len(order) > max_parts:
        return UndeliveredError(f"the message has {len(order)} parts; at most {max_parts} are allowed", is_final=True)
    file = SpillFile()
    for name in order:
        part = pull(name)
        try:
            body = parts.get_object_body(part, ArrayChunk)
        except Exception as error:
            return _malformed(error)
        if len(file) + len(body) > max_bytes:
            return UndeliveredError(f"the message has more than {max_bytes} bytes", is_final=True)
        file.append(body)
        _collect_garbage()
    return file


def _chunk_order(root: str, headers: Mapping[str, bytes], chunks: Collection[str]) -> list[str] | UndeliveredError:
    """Return the chunk ids of a payload in order, read from untrusted headers."""
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        order = [name for head in headers.values() for name in _chunks_of(head)]
        empty: Any = {name: ArrayChunk(memoryview(b"")) for name in chunks}
        message: Any = inflate_object_from_contents(root, dict(headers), objects=empty)
        if message.has_error():
            return UndeliveredError(
                _LOSS_REASONS.get(message.error.code, f"{message.error.reason} (Flower's code {message.error.code})")
            )
        message.content[_PAYLOAD_KEY][_PAYLOAD_KEY]  # a KeyError if the record has another form
    except Exception as error:  # includes protobuf's own errors, and recursion errors
        return _malformed(error)
    return order


def _malformed(error: Exception) -> UndeliveredError:
    return UndeliveredError(f"the message is malformed: {type(error).__name__}", is_final=True)


def _chunks_of(header: bytes) -> list[str]:
    """Return the chunk ids of an array in order; none for other objects."""
    from flwr.app import Array
    from flwr.supercore.inflatable import inflatable_object as parts

    kind, children, _ = parts.get_object_head_values_from_object_content(header)
    if kind != Array.__qualname__:
        return []
    return [children[index] for index in json.loads(parts.get_object_body(header, Array))["arraychunk_ids"]]


def freeze_startup_objects() -> None:
    """Freeze start-up objects (`gc.freeze`) to keep later collections short."""
    gc.collect()
    gc.freeze()


def _collect_garbage() -> None:
    """Collect the reference cycles of httpx: they hold megabytes of sent or received data."""
    gc.collect()
