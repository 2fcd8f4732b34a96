"""Who has come: parties are introduced to one another's recipe before any of them is given work."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .. import __version__
from ..config import Recipe
from ..core import Report, Task
from ..engines.silos import Lost, Post
from ..errors import DescantError, EngineError
from ..parties.elsewhere import elsewhere
from ..silo.desk import reduced
from ..wire import pack, unpack

_SECONDS = 600.0  # that a party has to introduce itself: it reads its data first
_PAUSE = 0.1


class Meeting:
    """A post that knows whom it carries letters to: only a party that has introduced itself, and fits, is there."""

    def __init__(
        self,
        post: Post,
        recipe: Recipe,
        federation: str,
        layout: str,
        loss: str,
        say: Callable[[str], None] = print,
        note: Callable[[str, str], object] = lambda party, machine: None,
    ) -> None:
        self._post, self._loss, self._say, self._note = post, loss, say, note
        tables = reduced(recipe.tables)
        self._hello = {"recipe": tables, "federation": federation, "layout": layout, "version": __version__}
        self._asked: dict[str, str] = {}  # letters that are out, by their number: to whom
        self._refused: dict[str, str] = {}
        self.described: dict[str, Mapping[str, Any]] = {}

    def here(self) -> Collection[str]:
        """Who is there and was introduced; whoever is there for the first time is asked who it is."""
        there = set(self._post.here())
        for party in sorted(there - self.described.keys() - set(self._asked.values()) - self._refused.keys()):
            letter = pack(Task(party, 0, "hello", {}, self._hello, _SECONDS))
            try:
                self._asked[self._post.send(party, letter, _SECONDS)] = party
            except Lost:
                continue  # it has gone again
        for number, answer in self._post.fetch(tuple(self._asked)).items() if self._asked else ():
            self._take(self._asked.pop(number), answer)
        self._refused = {
            party: why for party, why in self._refused.items() if party in there
        }  # it may come back, mended
        return [party for party in sorted(there) if party in self.described]

    def _take(self, party: str, answer: bytes | Lost) -> None:
        if isinstance(answer, Lost):
            return
        try:
            report = unpack(answer, Report)
            self.described[party] = self._checked(party, report)
            samples = self.described[party]["samples"]
            self._say(f"{party} has come, with {samples} samples.")
        except (DescantError, ValueError, KeyError, TypeError) as error:
            self._refused[party] = str(error)
            self._say(f"{party} has come, and cannot take part: {error}")

    def _checked(self, party: str, report: Report) -> Mapping[str, Any]:
        """What a party says of its data, if it fits."""
        if report.status != "ok" or report.kind != "hello" or report.party != party:
            raise EngineError(report.reason or f"it answered as {report.party!r:.40}")
        for name, here in (("layout", self._hello["layout"]), ("version", __version__), ("loss", self._loss)):
            if report.metrics.get(name) != here:
                raise EngineError(f"its {name} is {report.metrics.get(name)!r:.80}, and the federation's is {here!r}.")
        said: Mapping[str, Any] = report.metrics["described"]
        self._note(party, str(report.metrics.get("machine", "")))
        elsewhere({**{name: other for name, other in self.described.items() if name != party}, party: said})
        return said

    def gather(self, least: int, pause: float = _PAUSE) -> dict[str, Mapping[str, Any]]:
        """Wait until so many have been introduced; what they say of themselves."""
        told = ""
        while len(here := self.here()) < least:
            waits = f"{len(here)} of {least} parties are there. Waiting."
            if waits != told:
                self._say(waits)
                told = waits
            time.sleep(pause)
        return dict(self.described)

    def send(self, party: str, letter: bytes, seconds: float) -> str:
        return self._post.send(party, letter, seconds)

    def fetch(self, numbers: Collection[str]) -> dict[str, bytes | Lost]:
        return self._post.fetch(numbers)
