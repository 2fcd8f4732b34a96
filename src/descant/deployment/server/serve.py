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

from ...config import Recipe, read
from ...config.resume_command import note_start
from ...core import seeds
from ...core.settings import check
from ...core.timeouts import Patience
from ...engines.remote import Post
from ...errors import EngineError, StateError
from ...models.flat import Net
from ...privacy.dp_wrappers import check_waits_for_all
from ...serialization.references import address_of
from ...storage import atomic, clear_errors
from ...storage.lock import Lock, holder
from ...storage.spill import room
from ..flower.driver_transport import Hub
from ..flower.flower_connection import Away
from ..flower.superlink_process import HOST, Papers, superlink
from ..nginx_proxy import Proxy, RunningProxy
from ..pki.certificates import AUTHORITY, SERVER
from ..pki.federation_setup import RECIPE, ROSTER, recipe_in
from ..pki.roster import Roster
from .handshakes import Meeting
from .presence import Noting, there_in
from .recipe_check import servable
from .row_erasure import forget_rows, vault_of
from .training_session import BUDGET, Training, met_in, rounds_in

_SECRET, _LOCK = "driver.secret", ".lock"
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds before a SuperLink or an nginx that died is started anew
_BACK = 10.0  # seconds in which parties that were there are to be back after that
# Both, whichever it was: a SuperLink that lives on would hold the places of parties that have lost their line.
_BOTH = "The SuperLink and nginx"


@dataclass(frozen=True)
class Serving:
    """One federation, from its folder."""

    folder: Path
    patience: Patience
    say: Callable[[str], None] = print

    def until_done(self) -> dict[str, Any]:
        """Serve until all rounds of the recipe are done; a SuperLink or an nginx that dies is replaced."""
        check(self.patience, "server start")
        roster = Roster(self.folder.resolve())
        recipe = read(self.folder / RECIPE, roster.home)
        roster.check_recipe()
        settings = servable(recipe, True, list(met_in(roster.run) or _let_in(roster)))
        check_waits_for_all(recipe.algorithm(), self.patience.quorum)
        lock = Lock(roster.run / _LOCK, then=f"It serves already: descant server status {self.folder}")
        try:
            note_start(self.folder, self.patience)
            return self._served(roster, recipe, settings)
        finally:
            lock.release()

    def _served(self, roster: Roster, recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.say(f"Parties reach {roster.address}. The authority's fingerprint: {roster.fingerprint}")
        pauses, done, back = list(_PAUSES), rounds_in(roster.run), set[str]()
        while True:
            inner = free_port()  # anew: another process may have taken it since
            try:
                with (
                    Proxy.before(inner, roster.address).start(self.folder) as proxy,
                    superlink(self._papers(roster), inner, roster.run),
                ):
                    return self._drive(roster, recipe, settings, f"{HOST}:{inner}", proxy, back)
            except Away as why:
                back = back or there_in(roster.run)  # no round is to begin without them for a fault that was ours
                if (now := rounds_in(roster.run)) > done:  # it was not always so: it may die as often once more
                    pauses, done = list(_PAUSES), now
                if not pauses:
                    times = f"{len(_PAUSES)} times in a row, and died before a round was done"
                    raise EngineError(f"{_BOTH} were started anew {times}: {why}. See {roster.run}.") from why
                self.say(f"{why}. {_BOTH} are started anew, and the round is done again.")
                time.sleep(pauses.pop(0))

    def _papers(self, roster: Roster) -> Papers:
        secret = roster.keys / _SECRET
        if not secret.exists():
            with clear_errors(roster.keys):
                atomic.replace(secret, os.urandom(32), f".{_SECRET}", atomic.PRIVATE)
        keys = roster.keys
        return Papers(keys / f"{AUTHORITY}.crt", keys / f"{SERVER}.crt", keys / f"{SERVER}.key", secret)

    def _drive(
        self,
        roster: Roster,
        recipe: Recipe,
        settings: Mapping[str, Any],
        address: str,
        proxy: RunningProxy,
        back: Collection[str],
    ) -> dict[str, Any]:
        """Rounds of the run, until they are done."""
        keys = _let_in(roster)
        if not keys:
            raise StateError(f"Nobody is invited yet: descant server invite {self.folder} NAME")
        papers = self._papers(roster)
        with closing(Hub(address, papers.ca.read_bytes(), papers.secret.read_bytes(), keys)) as hub:
            meeting = self._meeting(roster, recipe, Noting(hub, roster.run), Door(proxy, roster, hub).look)
            meeting.wait_for(back, _BACK)
            barred = partial(revoked, roster)
            training = Training(roster.run, recipe, meeting, self.patience, self.say, barred, sealed=settings)
            return training.until_done(lambda: list(_let_in(roster)))

    def _meeting(self, roster: Roster, recipe: Recipe, post: Post, look: Callable[[], None]) -> Meeting:
        model: Any = recipe.model()
        seed = seeds.torch_seed(recipe.length.seed, 0, seeds.EVERYBODY, "model")
        net = Net.made(model, seed, partial(room, budget=BUDGET))
        loss = address_of(recipe.settings().get("loss", functional.cross_entropy))
        text = recipe_in(roster.folder / RECIPE)[0].decode()
        forget = partial(forget_rows, vault_of(recipe))
        return Meeting(post, recipe, roster.federation, net, loss, self.say, roster.joined, look, text, forget)


class Door:
    """Who is let in, as the roster has it: looked at while the server runs."""

    def __init__(self, proxy: RunningProxy, roster: Roster, hub: Hub) -> None:
        self._proxy, self._roster, self._hub = proxy, roster, hub
        self._seen = b""

    def look(self) -> None:
        """Is the proxy alive, and was somebody invited or revoked meanwhile?"""
        table = (self._roster.folder / ROSTER).read_bytes()
        try:
            changed = self._proxy.keep_up()
        except EngineError:
            if self._proxy.alive:
                raise
        if not self._proxy.alive:
            raise Away(f"nginx has ended: see {self._proxy.folder}")
        if changed or table != self._seen:
            self._hub.admit(_let_in(self._roster))
            self._seen = table


def serves(roster: Roster) -> str:
    """Which process serves a federation now, and since when; "" if none does."""
    return holder(roster.run / _LOCK)


def _let_in(roster: Roster) -> dict[str, bytes]:
    """The keys of all who may take part."""
    return {entry.name: entry.node_key.encode() for entry in roster.parties() if entry.state != "revoked"}


def revoked(roster: Roster) -> dict[str, str]:
    """Who may take part no more, and why."""
    return {entry.name: "it was revoked" for entry in roster.parties() if entry.state == "revoked"}


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as tried:
        tried.bind((HOST, 0))
        return int(tried.getsockname()[1])
