"""Calls of the driver to its SuperLink that raise an error where Flower itself would end the process.

Flower ends the process when a run was stopped. Every local user who reaches its port can stop a run or unregister a
party. Then the SuperLink is restarted and the calls are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

_RETRY_SECONDS = 5.0
_RETRIABLE_STATUSES = (502, 503, 504)  # transient HTTP statuses
_TIME_TOLERANCE = 1.0  # seconds by which two records of one time may differ
_RECONNECT_GRACE = 5.0  # seconds: after an outage a party leaves in order and reconnects


def limit_retries(retries: Any) -> Any:
    """Make a retry invoker of Flower stop after some seconds and pass on final errors."""
    retries.max_time = _RETRY_SECONDS  # otherwise it would retry forever when the SuperLink is dead
    retries.should_giveup = _is_final
    return retries


def _is_final(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _RETRIABLE_STATUSES


def heartbeat_sender(client: Any) -> Callable[[], bool]:
    """Return the heartbeat function of the driver; it returns False if Flower should retry at once."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    def send_heartbeat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError as error:
            return _is_final(error)  # the run was stopped: the driver's next call reports it
        return True

    return send_heartbeat


def list_nodes(control: Any) -> Any:
    """Return all nodes that the SuperLink knows, and its clock."""
    from flwr.proto.control_pb2 import ListNodesRequest

    return control.ListNodes(ListNodesRequest())


def unregistered_parties(nodes: Any, parties: Mapping[str, bytes]) -> list[str]:
    """Return the parties whose public key the SuperLink does not know; it registers no key twice."""
    known = {node.public_key for node in nodes.nodes_info if node.status != "unregistered"}
    return [name for name, key in parties.items() if key not in known]


def departed_parties(nodes: Any, parties: Mapping[str, bytes], online_until: Mapping[str, float]) -> set[str]:
    """Return the parties that left in order some seconds ago, without those that merely fell silent."""
    names_by_key = {key: name for name, key in parties.items()}
    now = datetime.fromisoformat(nodes.now).timestamp()
    offline = [node for node in nodes.nodes_info if node.status == "offline" and node.last_deactivated_at]
    deactivated_at = {
        names_by_key.get(node.public_key, ""): datetime.fromisoformat(node.last_deactivated_at).timestamp()
        for node in offline
    }
    return {
        name
        for name, at in deactivated_at.items()
        if at < online_until.get(name, 0.0) - _TIME_TOLERANCE and now - at > _RECONNECT_GRACE
    }
