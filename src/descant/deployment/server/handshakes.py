"""Who has come: parties are introduced to one another's recipe before any of them is given work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional

from ... import __version__
from ...config import Recipe
from ...core.messages import Report, Task
from ...engines.remote import Lost, Post
from ...errors import DescantError, EngineError, StateError, VaultError
from ...models.flat import Net
from ...parties.party import Party
from ...parties.remote_parties import elsewhere, in_common, only_known, told
from ...rounds.validation import plain
from ...serialization.wire import Letter, Most, pack, unpack
from ..silo.forget import FORGOTTEN
from ..silo.handshake_reply import MODEL, TEXT, in_words, reduced
from ..silo.outgoing_fields import FORGET, OWN
from ..silo.silo_worker import REASON, ROUNDS
from .row_erasure import NOTHING_HELD

_SECONDS = 600.0  # that a party has to introduce itself: it reads its data first
_LAST = 30.0  # that a party has to fetch why it is not wanted: another that comes for it later is not meant
_PARTING = 10.0  # in which all should have heard that it is over
_PAUSE = 0.1
_MOST = 2**16  # bytes of an introduction


class Meeting:
    """A post that knows whom it carries letters to: only a party that has introduced itself, and fits, is there.

    Whoever comes again is introduced again: it may be another machine, or have lost what it kept. `text` is the recipe
    as it was written, which parties compare with what they were invited to.
    """

    def __init__(
        self,
        post: Post,
        recipe: Recipe,
        federation: str,
        net: Net,
        loss: str,
        say: Callable[[str], None] = print,
        note: Callable[[str, str], object] = lambda party, machine: None,
        watch: Callable[[], None] = lambda: None,
        text: str = "",
        forget: Callable[[str], str] = lambda party: NOTHING_HELD,
    ) -> None:
        self._post, self.net, self._loss, self._say, self._note, self._watch = post, net, loss, say, note, watch
        self._forget, self._value = forget, recipe.settings().get("loss", functional.cross_entropy)
        self._solver = recipe.solver()
        self._hello: dict[str, Any] = {
            "recipe": reduced(recipe.tables),
            TEXT: text,
            "federation": federation,
            "layout": net.layout.digest,
            MODEL: in_words(net.layout),
            "version": __version__,
        }
        self._asked: dict[str, tuple[str, str]] = {}  # letters that are out, by their number: to whom, and its mark
        self._known: dict[str, str] = {}  # the marks of those that were introduced, or refused
        self._fits: set[str] = set()
        self.described: dict[str, Mapping[str, Any]] = {}
        self.form: Mapping[str, Any] = {}  # what all have in common, once a training has begun: whoever comes must, too
        self.parted: set[str] = set()  # who was told that it is over
        self.forgotten: dict[str, str] = {}  # who has wished for it and not come back since, and that it has

    def here(self) -> dict[str, str]:
        """Who is there and was introduced; whoever has come is asked who it is."""
        self._watch()
        there = self._post.here()
        for gone in () if self.form else self._fits - there.keys():  # nobody need be like it, and others may come first
            self._fits.discard(gone)
            self._known.pop(gone)
        asked = set(self._asked.values())
        for party, mark in sorted(there.items()):
            if self._known.get(party) != mark and (party, mark) not in asked:
                self._ask(party, mark)
        for number, answer in self._post.fetch(tuple(self._asked), _MOST).items() if self._asked else ():
            self._take(*self._asked.pop(number), answer)
        known = {party: mark for party, mark in there.items() if party in self._fits}
        return {party: mark for party, mark in known.items() if self._known.get(party) == mark}

    def _ask(self, party: str, mark: str) -> None:
        letter = pack(Task(party, 0, "hello", {}, self._hello, _SECONDS))
        with suppress(Lost):  # it has gone again
            self._asked[self._post.send(party, letter, _SECONDS)] = (party, mark)

    def _take(self, party: str, mark: str, answer: Letter | Lost) -> None:
        if isinstance(answer, Lost) and not answer.final:
            return
        self._known[party] = mark
        self._fits.discard(party)
        try:
            if isinstance(answer, Lost):
                raise EngineError(str(answer))
            if len(answer) > _MOST:
                raise EngineError(f"its answer has {len(answer)} bytes")
            report = unpack(answer, Report, Most.of(()))
            if FORGET in report.metrics:
                self._let_go(party, str(report.metrics[FORGET]))
                return
            self.described[party] = self._checked(party, report)
        except (DescantError, ValueError, KeyError, TypeError, RuntimeError) as error:
            self._say(f"{party} has come, and cannot take part: {plain(str(error))}")
            own = isinstance(error, StateError | VaultError)  # its text would name files of the server
            self._send_away(party, {REASON: "the server has trouble of its own" if own else plain(str(error))})
            return
        self._fits.add(party)
        self.forgotten.pop(party, None)
        self._say(f"{party} has come, with {told(self.described[party])}.")

    def _let_go(self, party: str, machine: str) -> None:
        """A party wishes to be forgotten, from where it has joined: its rows go, and nobody waits for it any more."""
        self._note(party, machine)
        done = self._forget(party)
        self.forgotten[party] = "it was forgotten, as it wished"
        self._say(f"{party} wishes to be forgotten: {done}.")
        self._send_away(party, {REASON: done, FORGOTTEN: True})

    def _send_away(self, party: str, told: Mapping[str, Any]) -> bool:
        """Nobody waits for work that never comes: whoever cannot take part is told why, if it is still there."""
        with suppress(Lost):
            self.drop([self._post.send(party, pack(Task(party, 0, "goodbye", {}, told)), _LAST)])
            return True
        return False

    def part(self, parties: Collection[str], rounds: int) -> None:
        """The training is over, and these are told so."""
        self.parted |= {party for party in parties if self._send_away(party, {ROUNDS: rounds})}

    def end(self, rounds: int) -> None:
        """Whoever is still there is told that it is over; who is slow to hear it is not waited for."""
        self.part(self._post.here().keys() - self.parted, rounds)
        end = time.monotonic() + _PARTING
        while self._post.here() and time.monotonic() < end:
            time.sleep(_PAUSE)

    def _checked(self, party: str, report: Report) -> Mapping[str, Any]:
        """What a party says of its data, if it fits; what is wrong is told to it, and so names nobody else."""
        if report.status != "ok" or report.kind != "hello" or report.party != party:
            raise EngineError(report.reason or f"it answered as {report.party!r:.40}")
        _check_same(report.metrics, {"layout": self._hello["layout"], "version": __version__})
        if report.metrics.get("loss") not in (OWN, self._loss):
            ours = self._loss.rpartition("/")[2]  # where the organiser's file lies is nobody's business
            raise EngineError(f"its loss is {report.metrics.get('loss')!r:.80}, and the federation's is {ours}.")
        self._note(party, str(report.metrics.get("machine", "")))
        said = only_known(report.metrics["described"])
        people = elsewhere({party: said})
        others = [self.described[name] for name in self._fits if name != party]
        _check_same(said, self.form or (in_common(others[0]) if others else {}))
        self._try(people[party])
        return said

    def _try(self, party: Any) -> None:
        """Raise unless model and loss take what a party of this form has.

        They are anybody's code, and may raise anything. A solver of parties that have no rows says itself whether this
        is one, and whether the model can act there.
        """
        row, size = self.net.row(), self.net.layout.size
        try:
            if not isinstance(party, Party) or self._solver.metric is not None:
                self._solver.ways(self.net, self._value, (), party, 1)
                return
            with torch.no_grad():
                output, _ = self.net.apply(row[:size], row[size:], party.x[:2].clone())
                self._value(output, party.y[:2].clone())
        except DescantError:
            raise
        except Exception as error:
            raise EngineError(f"model and loss do not take what it has: {type(error).__name__}: {error}") from error

    def gather(self, least: int, most: Callable[[], float] = lambda: math.inf) -> dict[str, Mapping[str, Any]]:
        """Wait until so many have been introduced, or as many as can come; what they say of themselves.

        Whoever comes from then on must be like them.
        """
        told = ""
        while len(here := self.here()) < (wanted := max(1, min(least, most()))):
            waits = f"{len(here)} of {wanted} parties are there. Waiting."
            if waits != told:
                self._say(waits)
                told = waits
            time.sleep(_PAUSE)
        gathered = {party: self.described[party] for party in here}
        self.form = in_common(next(iter(gathered.values())))
        return gathered

    def wait_for(self, parties: Collection[str], seconds: float) -> None:
        """Wait until these are there, for so long at most."""
        end = time.monotonic() + seconds
        while set(parties) - self.here().keys() and time.monotonic() < end:
            time.sleep(_PAUSE)

    def left(self) -> Collection[str]:
        return self._post.left()

    def send(self, party: str, letter: Letter, seconds: float) -> str:
        return self._post.send(party, letter, seconds)

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        return self._post.fetch(numbers, most)

    def drop(self, numbers: Collection[str]) -> None:
        self._post.drop(numbers)


def _check_same(its: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name, here in ours.items():
        if its.get(name) != here:
            raise EngineError(f"its {name} is {its.get(name)!r:.80}, and the federation's is {here!r}.")
