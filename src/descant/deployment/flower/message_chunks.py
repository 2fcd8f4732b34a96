"""How Flower carries a letter: as an array in a message, cut into chunks, each of which travels by itself.

Flower's own ways hold all parts of a message at once, and then the whole beside them. Here a letter is given away part
by part, and goes part by part into a file that has no name.
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
_HEADER_OBJECTS = 4  # parts of a message that are no chunks: itself, its records, a record, an array
_LOSS_REASONS = {
    3: "its letter has run out",
    4: "its answer has run out",
    5: "it is not heard any more",
}  # by Flower's codes


def to_record(payload: MessageBytes) -> Any:
    """Bytes as what Flower carries; what lies in a file stays there."""
    from flwr.app import Array, ArrayRecord, RecordDict

    record: Any = ArrayRecord({_PAYLOAD_KEY: Array("uint8", (len(payload),), _SERIALIZATION_TYPE, b"")})
    record[_PAYLOAD_KEY].data = payload if isinstance(payload, bytes) else payload.memory_map()
    return RecordDict({_PAYLOAD_KEY: record})


def push_message(message: Any, announce: Callable[[Any, Any], Any], client: Any, node: Any, run: int) -> Any:
    """Announce a message with the tree of its parts, and give away those that are asked for; what was announced.

    :class:`Lost` if one is not taken: Flower takes none twice, and none three minutes after the one before.
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
                    raise UndeliveredError("Flower did not take all of the letter") from error
                _collect_garbage()
    return response


@dataclass
class IncomingMessage:
    """A message that was announced, and whose parts are on their way. Flower's own way waits here for them.

    Nothing is held of one that is not whole: what was missing is asked for first the next time.
    """

    message_id: str
    tree: Any
    missing_part: str = ""

    def pull_payload(self, client: Any, node: Any, run: int, max_bytes: int) -> SpillFile | UndeliveredError | None:
        """The letter in it, of at most so many bytes, when all parts have come; None while some have not."""
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
            return UndeliveredError(f"what came was never whole: {error}")
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=self.message_id)
        )
        return payload


def assemble_payload(tree: Any, pull: Callable[[str], bytes], max_bytes: int) -> SpillFile | UndeliveredError:
    """The letter whose parts are in a tree, of at most so many bytes; a chunk that stands in it twice counts twice.

    Whoever sends it may have cut it as it likes: more parts than Flower would make of so many bytes are not fetched.
    """
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
    from flwr.supercore.inflatable import inflatable_object as parts

    nodes = list(parts.iterate_object_tree(tree))
    max_parts = _HEADER_OBJECTS + 1 + max_bytes // CHUNK
    if len(nodes) > max_parts:
        return UndeliveredError(f"what came has {len(nodes)} parts, and may have {max_parts}", is_final=True)
    chunks = {node.object_id for node in nodes if not node.children} - {tree.object_id}
    headers = {node.object_id: pull(node.object_id) for node in nodes if node.object_id not in chunks}
    if sum(map(len, headers.values())) > max_bytes:
        return UndeliveredError(f"what came has more than {max_bytes} bytes", is_final=True)
    order = _chunk_order(tree.object_id, headers, chunks)
    if isinstance(order, UndeliveredError):
        return order
    if len(order) > max_parts:
        return UndeliveredError(f"what came has {len(order)} parts, and may have {max_parts}", is_final=True)
    file = SpillFile()
    for name in order:
        part = pull(name)
        try:
            body = parts.get_object_body(part, ArrayChunk)
        except Exception as error:
            return _malformed(error)
        if len(file) + len(body) > max_bytes:
            return UndeliveredError(f"what came has more than {max_bytes} bytes", is_final=True)
        file.append(body)
        _collect_garbage()
    return file


def _chunk_order(root: str, headers: Mapping[str, bytes], chunks: Collection[str]) -> list[str] | UndeliveredError:
    """The chunks of a letter in their order, by what holds them; anybody may have written that, and so anything."""
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
        message.content[_PAYLOAD_KEY][_PAYLOAD_KEY]  # a KeyError where it is of another form
    except Exception as error:  # protobuf's own errors among them, and what is nested too deep
        return _malformed(error)
    return order


def _malformed(error: Exception) -> UndeliveredError:
    return UndeliveredError(f"what came is no letter: {type(error).__name__}", is_final=True)


def _chunks_of(header: bytes) -> list[str]:
    """The chunks of an array, in their order; of anything else, none."""
    from flwr.app import Array
    from flwr.supercore.inflatable import inflatable_object as parts

    kind, children, _ = parts.get_object_head_values_from_object_content(header)
    if kind != Array.__qualname__:
        return []
    return [children[index] for index in json.loads(parts.get_object_body(header, Array))["arraychunk_ids"]]


def freeze_startup_objects() -> None:
    """Whatever has been made so far will stay: Python need not go through it again when it looks for rings."""
    gc.collect()
    gc.freeze()


def _collect_garbage() -> None:
    """What httpx has sent or received holds itself: megabytes that would stay until Python looks for such rings."""
    gc.collect()
