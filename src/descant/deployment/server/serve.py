"""`descant server start`: a SuperLink, a proxy before it, and the driver, which does our own rounds through them.

The run's folder is the truth. Whatever is killed, the same command goes on behind the last round that was acknowledged:
the SuperLink holds nothing that is not asked for again, and parties answer a letter twice in the same way.
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
_RESTART_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds before a SuperLink or an nginx that died is started anew
_RECONNECT_TIMEOUT = 10.0  # seconds in which parties that were there are to be back after that
# Both, whichever it was: a SuperLink that lives on would hold the places of parties that have lost their line.
_BOTH_PROCESSES = "The SuperLink and nginx"


@dataclass(frozen=True)
class FederationServer:
    """One federation, from its folder."""

    folder: Path
    limits: WaitLimits
    log: Callable[[str], None] = print

    def run_to_completion(self) -> dict[str, Any]:
        """Serve until all rounds of the recipe are done; a SuperLink or an nginx that dies is replaced."""
        check_settings(self.limits, "server start")
        roster = Roster(self.folder.resolve())
        recipe = read_recipe(self.folder / RECIPE_FILE, roster.recipe_folder)
        roster.check_recipe()
        settings = check_servable(recipe, True, list(read_descriptions(roster.run_folder) or _admitted_keys(roster)))
        check_quorum_is_private(recipe.algorithm(), self.limits.quorum)
        lock = FolderLock(roster.run_folder / _LOCK, advice=f"It serves already: descant server status {self.folder}")
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
            upstream_port = free_port()  # anew: another process may have taken it since
            try:
                with (
                    Proxy.for_address(upstream_port, roster.address).start(self.folder) as proxy,
                    run_superlink(self._superlink_credentials(roster), upstream_port, roster.run_folder),
                ):
                    return self._drive(roster, recipe, settings, f"{LOOPBACK}:{upstream_port}", proxy, reconnecting)
            except PeerUnavailable as why:
                reconnecting = reconnecting or connected_in(
                    roster.run_folder
                )  # no round is to begin without them for a fault that was ours
                if (
                    now := completed_rounds(roster.run_folder)
                ) > rounds_done:  # it was not always so: it may die as often once more
                    delays = list(_RESTART_DELAYS)
                    rounds_done = now
                if not delays:
                    times = f"{len(_RESTART_DELAYS)} times in a row, and died before a round was done"
                    raise EngineError(
                        f"{_BOTH_PROCESSES} were started anew {times}: {why}. See {roster.run_folder}."
                    ) from why
                self.log(f"{why}. {_BOTH_PROCESSES} are started anew, and the round is done again.")
                time.sleep(delays.pop(0))

    def _superlink_credentials(self, roster: Roster) -> SuperLinkCredentials:
        secret = roster.keys_folder / _SECRET
        if not secret.exists():
            with write_errors(roster.keys_folder):
                atomic.replace(secret, os.urandom(32), f".{_SECRET}", atomic.PRIVATE_MODE)
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
        """Rounds of the run, until they are done."""
        keys = _admitted_keys(roster)
        if not keys:
            raise StateError(f"Nobody is invited yet: descant server invite {self.folder} NAME")
        credentials = self._superlink_credentials(roster)
        with closing(
            FlowerServerTransport(
                address, credentials.authority.read_bytes(), credentials.secret.read_bytes(), parties=keys
            )
        ) as transport:
            handshakes = self._handshake_transport(
                roster,
                recipe,
                PresenceRecorder(transport, roster.run_folder),
                AccessMonitor(proxy, roster, transport).refresh,
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
    """Who is let in, as the roster has it: looked at while the server runs."""

    def __init__(self, proxy: RunningProxy, roster: Roster, transport: FlowerServerTransport) -> None:
        self._proxy = proxy
        self._roster = roster
        self._transport = transport
        self._last_roster = b""

    def refresh(self) -> None:
        """Is the proxy alive, and was somebody invited or revoked meanwhile?"""
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
    """Which process serves a federation now, and since when; "" if none does."""
    return lock_holder(roster.run_folder / _LOCK)


def _admitted_keys(roster: Roster) -> dict[str, bytes]:
    """The keys of all who may take part."""
    return {entry.name: entry.node_key.encode() for entry in roster.parties() if entry.state != "revoked"}


def revoked_parties(roster: Roster) -> dict[str, str]:
    """Who may take part no more, and why."""
    return {entry.name: "it was revoked" for entry in roster.parties() if entry.state == "revoked"}


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
