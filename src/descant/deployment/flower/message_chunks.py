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

from ...engines.remote import Lost
from ...serialization.wire import Letter
from ...storage.spill import Filed

_ITEM = "letter"
_STYPE = "descant"
_HEADS = 4  # parts of a message that are no chunks: itself, its records, a record, an array
_LOST = {3: "its letter has run out", 4: "its answer has run out", 5: "it is not heard any more"}  # by Flower's codes


def wrapped(letter: Letter) -> Any:
    """Bytes as what Flower carries; what lies in a file stays there."""
    from flwr.app import Array, ArrayRecord, RecordDict

    record: Any = ArrayRecord({_ITEM: Array("uint8", (len(letter),), _STYPE, b"")})
    record[_ITEM].data = letter if isinstance(letter, bytes) else letter.mapped()
    return RecordDict({_ITEM: record})


def hand_over(message: Any, announce: Callable[[Any, Any], Any], client: Any, node: Any, run: int) -> Any:
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
        told = announce(message_to_proto(remove_content_from_message(message)), parts.get_object_tree(message))
        push = make_push_object_fn_protobuf(client.PushObject, node, run, told.session_id)
        asked = set(told.objects_to_push)
        for name, part in parts.get_all_nested_objects(message).items():
            if name in asked:
                try:
                    push(name, part.deflate())
                except ObjectPushError as error:
                    raise Lost("Flower did not take all of the letter") from error
                _let_go()
    return told


@dataclass
class Coming:
    """A message that was announced, and whose parts are on their way. Flower's own way waits here for them.

    Nothing is held of one that is not whole: what was missing is asked for first the next time.
    """

    name: str
    tree: Any
    missing: str = ""

    def whole(self, client: Any, node: Any, run: int, most: int) -> Filed | Lost | None:
        """The letter in it, of at most so many bytes, when all parts have come; None while some have not."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

        pull = make_pull_object_fn_protobuf(client.PullObject, node, run)

        def pulled(part: str) -> bytes:
            self.missing = part
            return bytes(pull(part))

        try:
            if self.missing:
                pull(self.missing)
            letter = put_together(self.tree, pulled, most)
        except ObjectUnavailableError:
            return None
        except ObjectPullError as error:
            return Lost(f"what came was never whole: {error}")
        client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=self.name))
        return letter


def put_together(tree: Any, pull: Callable[[str], bytes], most: int) -> Filed | Lost:
    """The letter whose parts are in a tree, of at most so many bytes; a chunk that stands in it twice counts twice.

    Whoever sends it may have cut it as it likes: more parts than Flower would make of so many bytes are not fetched.
    """
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
    from flwr.supercore.inflatable import inflatable_object as parts

    nodes, longest = list(parts.iterate_object_tree(tree)), _HEADS + 1 + most // CHUNK
    if len(nodes) > longest:
        return Lost(f"what came has {len(nodes)} parts, and may have {longest}", final=True)
    chunks = {node.object_id for node in nodes if not node.children} - {tree.object_id}
    heads = {node.object_id: pull(node.object_id) for node in nodes if node.object_id not in chunks}
    if sum(map(len, heads.values())) > most:
        return Lost(f"what came has more than {most} bytes", final=True)
    order = _order(tree.object_id, heads, chunks)
    if isinstance(order, Lost):
        return order
    if len(order) > longest:
        return Lost(f"what came has {len(order)} parts, and may have {longest}", final=True)
    file = Filed()
    for name in order:
        part = pull(name)
        try:
            body = parts.get_object_body(part, ArrayChunk)
        except Exception as error:
            return _no_letter(error)
        if len(file) + len(body) > most:
            return Lost(f"what came has more than {most} bytes", final=True)
        file.add(body)
        _let_go()
    return file


def _order(root: str, heads: Mapping[str, bytes], chunks: Collection[str]) -> list[str] | Lost:
    """The chunks of a letter in their order, by what holds them; anybody may have written that, and so anything."""
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        order = [name for head in heads.values() for name in _chunks_of(head)]
        empty: Any = {name: ArrayChunk(memoryview(b"")) for name in chunks}
        message: Any = inflate_object_from_contents(root, dict(heads), objects=empty)
        if message.has_error():
            return Lost(_LOST.get(message.error.code, f"{message.error.reason} (Flower's code {message.error.code})"))
        message.content[_ITEM][_ITEM]  # a KeyError where it is of another form
    except Exception as error:  # protobuf's own errors among them, and what is nested too deep
        return _no_letter(error)
    return order


def _no_letter(error: Exception) -> Lost:
    return Lost(f"what came is no letter: {type(error).__name__}", final=True)


def _chunks_of(head: bytes) -> list[str]:
    """The chunks of an array, in their order; of anything else, none."""
    from flwr.app import Array
    from flwr.supercore.inflatable import inflatable_object as parts

    kind, children, _ = parts.get_object_head_values_from_object_content(head)
    if kind != Array.__qualname__:
        return []
    return [children[place] for place in json.loads(parts.get_object_body(head, Array))["arraychunk_ids"]]


def settle() -> None:
    """Whatever has been made so far will stay: Python need not go through it again when it looks for rings."""
    gc.collect()
    gc.freeze()


def _let_go() -> None:
    """What httpx has sent or received holds itself: megabytes that would stay until Python looks for such rings."""
    gc.collect()
