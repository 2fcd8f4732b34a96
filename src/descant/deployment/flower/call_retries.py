"""A driver's calls to its SuperLink fail where Flower would end the process that makes them, as by Ctrl-C.

Flower does so when a run was stopped. Whoever reaches its port can stop one, or strike a party off; then the SuperLink
is started anew, and what was asked is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

_TRYING = 5.0  # seconds
_SOON = (502, 503, 504)  # statuses that may pass
_ROUNDED = 1.0  # seconds by which times may differ that are the same
_BACK_AT_ONCE = 5.0  # seconds: a party whose line was down goes in order, and comes again


def steadied(retries: Any) -> Any:
    """An invoker of Flower's that tries again for some seconds, and hands on what it is answered."""
    retries.max_time = _TRYING  # else it would try for ever to reach a SuperLink that is dead
    retries.should_giveup = _is_final
    return retries


def _is_final(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _SOON


def heartbeat(client: Any) -> Callable[[], bool]:
    """What is called to say that the driver is alive; whether it need not be said again at once."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError as error:
            return _is_final(error)  # a run that was stopped: the driver's next call says so, and no beat helps
        return True

    return beat


def listed(control: Any) -> Any:
    """All parties that the SuperLink was told of, and its time."""
    from flwr.proto.control_pb2 import ListNodesRequest

    return control.ListNodes(ListNodesRequest())


def struck_off(found: Any, parties: Mapping[str, bytes]) -> list[str]:
    """Those of some parties, by their public keys, whom the SuperLink does not know; it takes no key a second time."""
    known = {node.public_key for node in found.nodes_info if node.status != "unregistered"}
    return [name for name, key in parties.items() if key not in known]


def gone_in_order(found: Any, parties: Mapping[str, bytes], due: Mapping[str, float]) -> set[str]:
    """Those who have said that they go, and not just now: who is silent is gone only when it was due to be heard."""
    whose, now = {key: name for name, key in parties.items()}, datetime.fromisoformat(found.now).timestamp()
    gone = [node for node in found.nodes_info if node.status == "offline" and node.last_deactivated_at]
    went = {whose.get(n.public_key, ""): datetime.fromisoformat(n.last_deactivated_at).timestamp() for n in gone}
    return {name for name, at in went.items() if at < due.get(name, 0.0) - _ROUNDED and now - at > _BACK_AT_ONCE}
