"""A driver's calls to its SuperLink fail where Flower would end the process that makes them, as by Ctrl-C.

Flower does so when a run was stopped. Whoever reaches its port can stop one, or strike a party off; then the SuperLink
is started anew, and what was asked is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_TRYING = 5.0  # seconds
_SOON = (502, 503, 504)  # statuses that may pass


def steadied(retries: Any) -> Any:
    """An invoker of Flower's that tries again for some seconds, and hands on what it is answered."""
    retries.max_time = _TRYING  # else it would try for ever to reach a SuperLink that is dead
    retries.should_giveup = _is_final
    return retries


def _is_final(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _SOON


def heartbeat(client: Any) -> Callable[[], bool]:
    """What is called to say that the driver is alive; whether it was heard."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPStatusError:  # the run was stopped, which the driver's next call says, too
            return True
        except httpx.HTTPError:
            return False
        return True

    return beat


def struck_off(control: Any, parties: Mapping[str, bytes]) -> list[str]:
    """Those of some parties, by their public keys, whom the SuperLink does not know; it takes no key a second time."""
    from flwr.proto.control_pb2 import ListNodesRequest

    nodes = control.ListNodes(ListNodesRequest()).nodes_info
    known = {node.public_key for node in nodes if node.status != "unregistered"}
    return [name for name, key in parties.items() if key not in known]
