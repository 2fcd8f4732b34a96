"""`descant server start`: a SuperLink, a proxy before it, and the driver, which does our own rounds through them.

The run's folder is the truth. Whatever is killed, the same command goes on behind the last round that was acknowledged:
the SuperLink holds nothing that is not asked for again, and parties answer a letter twice in the same way.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import functional

from .. import seeds
from ..address import address_of
from ..config import Recipe, read
from ..config.parts import sealing
from ..engines.flower import Away, Hub
from ..engines.silos import Patience, Silos
from ..errors import EngineError, SettingError, StateError
from ..federation import Federation
from ..flat import Net
from ..parties.elsewhere import elsewhere
from ..record import Run, is_run
from ..settings import check
from ..store import clear_errors, disk
from ..store.lock import Lock
from ..trust.founding import RECIPE
from ..trust.keys import AUTHORITY, SERVER
from ..trust.proxy import Proxy, RunningProxy
from ..trust.roster import Roster
from .meeting import Meeting
from .superlink import HOST, Papers, superlink

TRAINING = "training"
BUDGET = 2**25  # bytes of models in memory, of those that grow with the number of parties; the rest is on disk
_MET = "parties.json"
_SECRET = "driver.secret"
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds before a SuperLink that died is started anew


@dataclass(frozen=True)
class Serving:
    """One federation, from its folder."""

    folder: Path
    patience: Patience
    say: Callable[[str], None] = print

    def until_done(self) -> dict[str, Any]:
        """Serve until all rounds of the recipe are done; a SuperLink that dies is replaced."""
        check(self.patience, "server start")
        roster, recipe = Roster(self.folder.resolve()), read(self.folder / RECIPE)
        recipe.length, recipe.model(), recipe.settings()  # what is wrong is said now
        if recipe.algorithm().stand_in is not None and not recipe.tables.get("vault"):
            raise SettingError(
                "Stand-ins need a [vault] in the recipe: parties on machines of their own seal their rows."
            )
        lock = Lock(roster.run / ".lock")
        try:
            return self._served(roster, recipe)
        finally:
            lock.release()

    def _served(self, roster: Roster, recipe: Recipe) -> dict[str, Any]:
        host, _, port = roster.address.rpartition(":")
        inner = free_port()
        self.say(f"Parties reach {host} at port {port}. The authority's fingerprint: {roster.fingerprint}")
        at = HOST if host in ("localhost", HOST) else "0.0.0.0"
        with Proxy(upstream=inner, host=at, port=int(port)).start(self.folder) as proxy:
            for pause in (0.0, *_PAUSES):
                time.sleep(pause)
                try:
                    with superlink(self._papers(roster), inner, roster.run):
                        return self._drive(roster, recipe, f"{HOST}:{inner}", proxy)
                except Away as why:
                    self.say(f"{why}. The SuperLink is started anew, and the round is done again.")
        raise EngineError(f"The SuperLink was started {len(_PAUSES) + 1} times, and died. See {roster.run}.")

    def _papers(self, roster: Roster) -> Papers:
        secret = roster.keys / _SECRET
        if not secret.exists():
            with clear_errors(roster.keys):
                disk.replace(secret, os.urandom(32), f".{_SECRET}", disk.PRIVATE)
        keys = roster.keys
        return Papers(keys / f"{AUTHORITY}.crt", keys / f"{SERVER}.crt", keys / f"{SERVER}.key", secret)

    def _drive(self, roster: Roster, recipe: Recipe, address: str, proxy: RunningProxy) -> dict[str, Any]:
        """Rounds of the run, until they are done."""
        keys = _let_in(roster)
        if not keys:
            raise StateError(f"Nobody is invited yet: descant server invite {self.folder} NAME")
        papers = self._papers(roster)
        with _opened(Hub(address, papers.ca.read_bytes(), papers.secret.read_bytes(), keys)) as hub:
            model: Any = recipe.model()
            net = Net.made(model, seeds.torch_seed(recipe.length.seed, 0, seeds.EVERYBODY, "model"))
            loss = address_of(recipe.settings().get("loss", functional.cross_entropy))
            look = partial(_look, proxy, roster, hub)
            meeting = Meeting(hub, recipe, roster.federation, net, loss, self.say, roster.joined, look)
            federation = self._federation(roster, recipe, meeting, list(keys))
            meeting.net = net = federation._plan.net  # the same once more would be one model more in memory
            place = roster.run / TRAINING
            run = (
                Run.resume(place, federation) if is_run(place) else Run.start(place, federation, recipe.text, "always")
            )
            with run:
                for round in run.rounds(max(0, recipe.length.rounds - run.round), self._every(recipe)):
                    without = "".join(
                        f"; without {refusal.party}: {refusal.reason}" for refusal in round.round.refusals
                    )
                    self.say(f"Round {round.index}: {round.round.told}, {len(round.round.accepted)} parties{without}")
            return {"folder": str(place), "rounds": federation.state.round, "hash": federation.hash()}

    def _every(self, recipe: Recipe) -> int:
        return max(1, recipe.length.rounds // recipe.length.points)

    def _federation(self, roster: Roster, recipe: Recipe, meeting: Meeting, names: list[str]) -> Federation:
        """Everybody who was invited when the training began; who had not come then counts with one sample."""
        file = roster.run / _MET
        met: dict[str, Mapping[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
        if not met:
            came = meeting.gather(min(self.patience.gather, len(names)))
            unknown = {**next(iter(came.values())), "samples": 1, "tested": 0}
            met = {name: came.get(name, unknown) for name in names}
        later = [name for name in names if name not in met]
        if later:
            self.say(f"Invited after the training began, and not part of it: {', '.join(later)}.")
        settings = {key: value for key, value in recipe.settings().items() if key != "engine"}
        settings |= sealing(recipe.tables.get("vault", {}))
        federation = Federation(
            recipe.model(),
            elsewhere(met),
            recipe.algorithm(),
            seed=recipe.length.seed,
            engine=Silos(meeting, self.patience, self.say),
            deadline=self.patience.limit,
            budget=BUDGET,
            **settings,
        )
        federation.state  # noqa: B018  whoever does not fit is found before it is noted as one who does
        with clear_errors(roster.run):
            disk.replace(file, json.dumps(met).encode(), f".{_MET}", disk.PRIVATE)
        return federation


def _look(proxy: RunningProxy, roster: Roster, hub: Hub) -> None:
    """Is the proxy alive, and was somebody revoked meanwhile?"""
    if not proxy.alive:
        raise EngineError(f"nginx has ended. See {proxy.folder}, and start the server again.")
    if proxy.keep_up():
        hub.only(_let_in(roster))


def _let_in(roster: Roster) -> dict[str, bytes]:
    """The keys of all who may take part."""
    return {entry.name: entry.node_key.encode() for entry in roster.parties() if entry.state != "revoked"}


@contextmanager
def _opened(hub: Hub) -> Iterator[Hub]:
    try:
        yield hub
    finally:
        hub.close()


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as tried:
        tried.bind((HOST, 0))
        return int(tried.getsockname()[1])
