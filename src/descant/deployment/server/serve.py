"""`descant server start`: a SuperLink, a proxy in front of it, and the driver, which runs the rounds through them.

All state is in the run folder. After any kill the same command continues after the last committed round: the driver
sends again whatever the SuperLink lost, and a party gives the same reply to a task that comes twice.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import functional

from ...config import Recipe, read_recipe
from ...config.resume_command import save_start_options
from ...core import seeds
from ...core.settings import check_settings
from ...core.timeouts import WaitLimits
from ...engines.remote import ServerTransport
from ...errors import EngineError, StateError
from ...models.flat import Net
from ...privacy.dp_wrappers import check_quorum_is_private
from ...serialization.references import address_of
from ...storage import atomic, write_errors
from ...storage.lock import FolderLock, lock_holder
from ...storage.spill import spill_buffer
from ..flower.driver_transport import FlowerServerTransport
from ..flower.flower_connection import PeerUnavailable
from ..flower.superlink_process import LOOPBACK, SuperLinkCredentials, run_superlink
from ..nginx_proxy import Proxy, RunningProxy
from ..pki.certificates import AUTHORITY_NAME, SERVER_NAME
from ..pki.federation_setup import RECIPE_FILE, ROSTER_FILE, read_recipe_bytes
from ..pki.roster import Roster
from .handshakes import HandshakeTransport
from .presence import PresenceRecorder, connected_in
from .recipe_check import check_servable
from .row_erasure import erase_rows, vault_location
from .training_session import MEMORY_BUDGET, TrainingSession, completed_rounds, read_descriptions

_SECRET = "driver.secret"
_LOCK = ".lock"
_RESTART_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds before the restarts of a dead SuperLink or nginx
_RECONNECT_TIMEOUT = 10.0  # seconds for connected parties to reconnect after a restart
# Both restart together: a living SuperLink would keep the places of parties that have lost their connection.
_BOTH_PROCESSES = "The SuperLink and nginx"


@dataclass(frozen=True)
class FederationServer:
    """The server of one federation, from its folder."""

    folder: Path
    limits: WaitLimits
    log: Callable[[str], None] = print

    def run_to_completion(self) -> dict[str, Any]:
        """Serve until all rounds of the recipe are done, restarting a SuperLink or an nginx that dies."""
        check_settings(self.limits, "server start")
        roster = Roster(self.folder.resolve())
        recipe = read_recipe(self.folder / RECIPE_FILE, roster.recipe_folder)
        roster.check_recipe()
        settings = check_servable(recipe, True, list(read_descriptions(roster.run_folder) or _admitted_keys(roster)))
        check_quorum_is_private(recipe.algorithm(), self.limits.quorum)
        advice = f"It is already served: descant server status {self.folder}"
        lock = FolderLock(roster.run_folder / _LOCK, advice=advice)
        try:
            save_start_options(self.folder, self.limits)
            return self._serve_with_restarts(roster, recipe, settings)
        finally:
            lock.release()

    def _serve_with_restarts(self, roster: Roster, recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.log(f"Parties reach {roster.address}. The authority's fingerprint: {roster.fingerprint}")
        delays = list(_RESTART_DELAYS)
        rounds_done = completed_rounds(roster.run_folder)
        reconnecting = set[str]()
        while True:
            upstream_port = free_port()  # a new one: another process may have taken the old one
            try:
                with (
                    Proxy.for_address(upstream_port, roster.address).start(self.folder) as proxy,
                    run_superlink(self._superlink_credentials(roster), upstream_port, roster.run_folder),
                ):
                    address = f"{LOOPBACK}:{upstream_port}"
                    return self._drive(
                        roster, recipe, settings, address=address, proxy=proxy, reconnecting=reconnecting
                    )
            except PeerUnavailable as error:
                # A fault of the server must not make the next round begin without these parties.
                reconnecting = reconnecting or connected_in(roster.run_folder)
                rounds_now = completed_rounds(roster.run_folder)
                if rounds_now > rounds_done:  # progress resets the number of allowed restarts
                    delays = list(_RESTART_DELAYS)
                    rounds_done = rounds_now
                if not delays:
                    times = f"{len(_RESTART_DELAYS)} times in a row, and died before a round was done"
                    raise EngineError(
                        f"{_BOTH_PROCESSES} were restarted {times}: {error}. See {roster.run_folder}."
                    ) from error
                self.log(f"{error}. {_BOTH_PROCESSES} are restarted, and the round is repeated.")
                time.sleep(delays.pop(0))

    def _superlink_credentials(self, roster: Roster) -> SuperLinkCredentials:
        secret = roster.keys_folder / _SECRET
        if not secret.exists():
            with write_errors(roster.keys_folder):
                atomic.replace(secret, os.urandom(32), f".{_SECRET}", mode=atomic.PRIVATE_MODE)
        keys = roster.keys_folder
        return SuperLinkCredentials(
            keys / f"{AUTHORITY_NAME}.crt", keys / f"{SERVER_NAME}.crt", keys / f"{SERVER_NAME}.key", secret=secret
        )

    def _drive(
        self,
        roster: Roster,
        recipe: Recipe,
        settings: Mapping[str, Any],
        address: str,
        proxy: RunningProxy,
        reconnecting: Collection[str],
    ) -> dict[str, Any]:
        """Run the remaining rounds over a SuperLink at this address."""
        keys = _admitted_keys(roster)
        if not keys:
            raise StateError(f"No party is invited yet: descant server invite {self.folder} NAME")
        credentials = self._superlink_credentials(roster)
        with closing(
            FlowerServerTransport(
                address, credentials.authority.read_bytes(), credentials.secret.read_bytes(), parties=keys
            )
        ) as transport:
            handshakes = self._handshake_transport(
                roster,
                recipe,
                transport=PresenceRecorder(transport, roster.run_folder),
                check_access=AccessMonitor(proxy, roster, transport).refresh,
            )
            handshakes.wait_for(reconnecting, _RECONNECT_TIMEOUT)
            excluded = partial(revoked_parties, roster)
            training = TrainingSession(
                roster.run_folder,
                recipe,
                handshakes,
                limits=self.limits,
                log=self.log,
                excluded=excluded,
                vault_settings=settings,
            )
            return training.run_to_completion(lambda: list(_admitted_keys(roster)))

    def _handshake_transport(
        self, roster: Roster, recipe: Recipe, transport: ServerTransport, check_access: Callable[[], None]
    ) -> HandshakeTransport:
        model: Any = recipe.model()
        seed = seeds.torch_seed(recipe.length.seed, 0, seeds.ALL_PARTIES, "model")
        net = Net.from_model(model, seed, partial(spill_buffer, budget=MEMORY_BUDGET))
        loss = address_of(recipe.settings().get("loss", functional.cross_entropy))
        text = read_recipe_bytes(roster.folder / RECIPE_FILE)[0].decode()
        erase_rows_of = partial(erase_rows, vault_location(recipe))
        return HandshakeTransport(
            transport,
            recipe,
            roster.federation,
            net=net,
            loss=loss,
            log=self.log,
            record_join=roster.record_join,
            check_access=check_access,
            recipe_text=text,
            erase_rows=erase_rows_of,
        )


class AccessMonitor:
    """Applies changes of the roster while the server runs."""

    def __init__(self, proxy: RunningProxy, roster: Roster, transport: FlowerServerTransport) -> None:
        self._proxy = proxy
        self._roster = roster
        self._transport = transport
        self._last_roster = b""

    def refresh(self) -> None:
        """Raise if the proxy is dead, and let in the parties of a changed roster."""
        table = (self._roster.folder / ROSTER_FILE).read_bytes()
        try:
            changed = self._proxy.reload_if_revoked()
        except EngineError:
            if self._proxy.is_alive:
                raise
        if not self._proxy.is_alive:
            raise PeerUnavailable(f"nginx has ended: see {self._proxy.folder}")
        if changed or table != self._last_roster:
            self._transport.set_parties(_admitted_keys(self._roster))
            self._last_roster = table


def serving_process(roster: Roster) -> str:
    """Return the process that serves a federation, and since when; "" if there is none."""
    return lock_holder(roster.run_folder / _LOCK)


def _admitted_keys(roster: Roster) -> dict[str, bytes]:
    """Return the public node keys of all parties that may take part."""
    return {entry.name: entry.node_key.encode() for entry in roster.parties() if entry.state != "revoked"}


def revoked_parties(roster: Roster) -> dict[str, str]:
    """Return the revoked parties, each with the reason for the log."""
    return {entry.name: "it was revoked" for entry in roster.parties() if entry.state == "revoked"}


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
