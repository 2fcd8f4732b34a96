"""A driver's calls to its SuperLink fail where Flower would end the process that makes them, as by Ctrl-C.

Flower does so when a run was stopped. Whoever reaches its port can stop one, or strike a party off; then the SuperLink
is started anew, and what was asked is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

_RETRY_SECONDS = 5.0  # seconds
_RETRIABLE_STATUSES = (502, 503, 504)  # statuses that may pass
_TIME_TOLERANCE = 1.0  # seconds by which times may differ that are the same
_RECONNECT_GRACE = 5.0  # seconds: a party whose line was down goes in order, and comes again


def limit_retries(retries: Any) -> Any:
    """An invoker of Flower's that tries again for some seconds, and hands on what it is answered."""
    retries.max_time = _RETRY_SECONDS  # else it would try for ever to reach a SuperLink that is dead
    retries.should_giveup = _is_final
    return retries


def _is_final(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _RETRIABLE_STATUSES


def heartbeat_sender(client: Any) -> Callable[[], bool]:
    """What is called to say that the driver is alive; whether it need not be said again at once."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    def send_heartbeat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError as error:
            return _is_final(error)  # a run that was stopped: the driver's next call says so, and no beat helps
        return True

    return send_heartbeat


def list_nodes(control: Any) -> Any:
    """All parties that the SuperLink was told of, and its time."""
    from flwr.proto.control_pb2 import ListNodesRequest

    return control.ListNodes(ListNodesRequest())


def unregistered_parties(nodes: Any, parties: Mapping[str, bytes]) -> list[str]:
    """Those of some parties, by their public keys, whom the SuperLink does not know; it takes no key a second time."""
    known = {node.public_key for node in nodes.nodes_info if node.status != "unregistered"}
    return [name for name, key in parties.items() if key not in known]


def departed_parties(nodes: Any, parties: Mapping[str, bytes], online_until: Mapping[str, float]) -> set[str]:
    """Those who have said that they go, and not just now: who is silent is gone only when it was due to be heard."""
    names_by_key = {key: name for name, key in parties.items()}
    now = datetime.fromisoformat(nodes.now).timestamp()
    offline = [node for node in nodes.nodes_info if node.status == "offline" and node.last_deactivated_at]
    deactivated_at = {
        names_by_key.get(n.public_key, ""): datetime.fromisoformat(n.last_deactivated_at).timestamp() for n in offline
    }
    return {
        name
        for name, at in deactivated_at.items()
        if at < online_until.get(name, 0.0) - _TIME_TOLERANCE and now - at > _RECONNECT_GRACE
    }
