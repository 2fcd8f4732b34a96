"""Who may open what: a caller with the authority's certificate and nothing else, at our proxy and at Flower's port.

`bash scripts/engines` runs this, in an environment that has Flower.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from test_flower import Lab, lab  # noqa: F401

from descant.engines.flower import require, run_of_nothing
from descant.trust.founding import KEYS
from descant.trust.keys import AUTHORITY

OPEN = 200
WHO = {401, 403}  # statuses by which the SuperLink says that it does not want the caller, whatever is asked


def clients() -> dict[str, type]:
    require()
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient

    return {"control": ControlHttpClient, "runtime": RuntimeHttpClient, "fleet": FleetHttpClient}


def statuses(client: type, address: str, ca: bytes) -> dict[str, int]:
    """What an anonymous caller is answered to every call that there is, with nothing in it."""
    return {name: status(client, address, ca, name) for name in vars(client) if name[0].isupper()}


def status(client: Any, address: str, ca: bytes, name: str, request: Any = None) -> int:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    caller = client.from_server_address(address, False, ca, [version])
    try:
        call = getattr(caller, name)
        answer = call(typing.get_type_hints(call)["request"]() if request is None else request)
        if inspect.isgenerator(answer):
            next(answer, None)
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    finally:
        caller.close()
    return OPEN


@pytest.fixture
def doors(lab: Callable[..., Lab]) -> Iterator[tuple[str, str, bytes]]:  # noqa: F811
    """The address of the proxy, that of the SuperLink behind it, and the certificate."""
    one = lab("fedavg")
    one.serve()
    one.until(lambda: "Waiting" in one.said())
    line = one.child("server", "flower-superlink").cmdline()
    outer = re.search(r"at port (\d+)", one.said())
    assert outer is not None
    ca = (one.folder / "lab" / KEYS / f"{AUTHORITY}.crt").read_bytes()
    yield f"127.0.0.1:{outer[1]}", f"127.0.0.1:{line[line.index('--port') + 1]}", ca


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports to make a bundle
def test_what_an_anonymous_caller_may_do(doors: tuple[str, str, bytes]) -> None:
    """At the proxy nothing; at Flower's own port whatever the Control API offers: it listens on loopback alone."""
    outer, inner, ca = doors
    found = {kind: statuses(client, outer, ca) for kind, client in clients().items()}
    assert {"ListNodes", "StartRun"} <= found["control"].keys() and "AcquireTask" in found["runtime"]
    for answers in found.values():
        assert set(answers.values()) == {400}  # nginx, of a caller without a certificate
    inside = {kind: statuses(client, inner, ca) for kind, client in clients().items()}
    for kind in ("runtime", "fleet"):
        assert set(inside[kind].values()) <= WHO, inside[kind]
    assert {inside["control"][name] for name in ("ListNodes", "ListRuns", "ListFederations")} == {OPEN}
    control = clients()["control"]
    assert status(control, inner, ca, "StartRun", run_of_nothing()) == OPEN
    assert status(control, outer, ca, "StartRun", run_of_nothing()) == 400
