"""Parties on machines of their own: a task goes out as a letter, and its answer comes back as one, or not at all.

A `Post` carries letters: Flower does (see `flower`), and so does a fake in tests. Data and memories stay with the
parties. A party keeps what it learned in a round aside until the next letter says that its report was accepted; so a
round that was broken off, on either side, leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..core.interfaces import Store
from ..core.messages import Report, Status, Task
from ..core.settings import check
from ..core.timeouts import Patience
from ..coresets.proxy_training import most_sealed
from ..errors import EngineError
from ..privacy.dp_wrappers import check_waits_for_all
from ..rounds.party_side import work
from ..rounds.plan import Plan
from ..rounds.validation import plain
from ..serialization.wire import Letter, Most, pack_beyond, unpack
from ..storage import PartyStore

ACCEPTED = "accepted"
"""The setting by which a task tells its party the last round in which the party's report counted; 0: none yet."""

_NAMED = 10  # parties
_NOBODY = "new invites, as more are needed than are left; or begin again with a smaller --quorum"
_SHORTEST, _LONGEST = 0.02, 1.0  # seconds between two looks into the letter box


class Lost(Exception):
    """A letter that has no answer, and why; `final` if it would be in vain to send it again."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Post(Protocol):
    """Who carries letters to parties and back. Nothing is known of them here; large ones go and come as files."""

    def here(self) -> Mapping[str, str]:
        """The parties that can be reached now, each with a mark of when it came: one that comes again has another."""

    def left(self) -> Collection[str]:
        """Those who cannot be reached because they have left in order, and were not back at once."""

    def send(self, party: str, letter: Letter, seconds: float) -> str:
        """Send a letter that is good for so long; the number to ask for its answer by, or :class:`Lost`."""

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        """The answers that have come, by number, each once; and why others never will: if they are too long, say."""

    def drop(self, numbers: Collection[str]) -> None:
        """Nobody asks for the answers to these any more."""


class Silos:
    """Makes engines whose parties are reached by a post: ``Federation(..., engine=Silos(post))``."""

    def __init__(
        self,
        post: Post,
        patience: Patience = Patience(),  # noqa: B008
        say: Callable[[str], None] = print,
        barred: Callable[[], Mapping[str, str]] = dict,  # whom nobody waits or stands in for any more, and why
        waiting: Callable[[], None] = lambda: None,  # called while a round cannot begin: it may break it off
    ) -> None:
        check(patience, "[server]")
        self.post, self.patience, self.say, self.barred, self.waiting = post, patience, say, barred, waiting

    def __call__(self, plan: Plan) -> SiloEngine:
        """An engine for one federation."""
        check_waits_for_all(plan.algorithm, self.patience.quorum)
        return SiloEngine(plan, self)


class SiloEngine:
    """A `core.Engine` for one plan. Its memory holds, of each party, only which of its rounds counted last."""

    def __init__(self, plan: Plan, silos: Silos) -> None:
        self._plan, self._post, self._patience, self._say = plan, silos.post, silos.patience, silos.say
        self._barred, self._waiting = silos.barred, silos.waiting
        self._memory = PartyStore(plan.budget)
        self._out: dict[str, tuple[Task, str]] = {}  # by the number of the letter: the task, and its party's mark
        self._sent: set[str] = set()  # the numbers of all letters since the last tasks came
        self._again: list[Task] = []  # letters that got lost, to parties that the round waits for
        self._here: list[Task] = []  # stand-ins: they learn from what parties have left with us
        self._ready: list[Report] = []
        self._absent: Sequence[str] = ()  # whom the last round began without
        self._answered, self._began, self._is_late = 0, 0.0, False
        layout = plan.net.layout
        self._form = Most.of(layout.names)
        self._most = layout.width * max(8, 2 * layout.dtype.itemsize) + self._form.header + most_sealed(plan)

    @property
    def memory(self) -> Store:
        return self._memory

    def members(self, begin: bool = False) -> Sequence[str]:
        """Who is there, once they are enough; who has left is wanted to begin a round, and not to be judged."""
        told, pause = "", _SHORTEST
        while True:
            here = self._post.here()  # first: who was forgotten and has come again is wanted
            barred = {*self._barred(), *(() if begin else self._post.left())}
            wanted = [name for name in self._plan.people if name not in barred]
            found, missing = ([name for name in wanted if (name in here) is there] for there in (True, False))
            least = self._least(len(wanted), begin)
            if len(found) >= least:
                if begin:
                    self._note_absent(missing)
                return found
            waits = f"{len(found)} of {least} parties are there. Waiting for {some(missing) or _NOBODY}."
            if waits != told:
                self._say(waits)
                told = waits
            self._waiting()
            pause = min(_LONGEST, 2 * pause)
            time.sleep(pause)

    def _least(self, wanted: int, begin: bool) -> int:
        """How many must be there; once a round has counted, a quorum will do, and less than that begins no round.

        Else they are no more than there are.
        """
        begun, secure = bool(self._memory.names()), self._plan.algorithm.secure
        quorum = self._patience.quorum if begun else None
        least = self._patience.gather if quorum is None else quorum
        least = least if begin and quorum is not None else min(least, wanted)
        return max(least, 1 if secure is None else secure.least)

    def _note_absent(self, missing: Sequence[str]) -> None:
        """Say whom a round begins without, where that is not as it was before."""
        if missing and missing != self._absent:
            self._say(f"Round {self._memory.round + 1} begins without {some(missing)}.")
        self._absent = missing

    def submit(self, tasks: Sequence[Task]) -> None:
        wanted = {_key(task): task for task in tasks}  # what else is out is of a round that was broken off
        self._out = {number: one for number, one in self._out.items() if _same(one[0], wanted.get(_key(one[0])))}
        self._post.drop(self._sent - self._out.keys())
        self._sent = set(self._out)
        self._again, self._ready, self._answered, self._began, self._is_late = [], [], 0, time.monotonic(), False
        self._here = [task for task in tasks if task.kind == "stand_in"]
        marks, out = self._post.here(), {_key(task) for task, _ in self._out.values()}
        for task in tasks:
            if task.kind != "stand_in" and _key(task) not in out:
                self._send(task, marks.get(task.party, ""))

    def _send(self, task: Task, mark: str) -> None:
        accepted, waits = int(self._memory.get(task.party).get(ACCEPTED, torch.tensor(0))), self._patience
        seconds = waits.limit if waits.quorum is None else waits.deadline
        told = replace(task, settings={**task.settings, ACCEPTED: accepted}, deadline=seconds)
        try:
            letter = pack_beyond(self._plan.budget, told)
            number = self._post.send(task.party, letter, waits.limit)
            self._sent.add(number)
            self._out[number] = (task, mark)
        except Lost as why:
            self._ready += self._missed(task, why)

    def _missed(self, task: Task, why: Lost) -> list[Report]:
        """A letter got lost: it goes out again when its party is there again. Nobody is waited for to be judged."""
        if why.final or task.kind not in ("train", "keys"):
            return [_failed(task, "lost", str(why))]
        self._say(f"Round {task.round}: {task.party} does not answer ({plain(str(why))}).")
        self._again.append(task)
        return []

    def _resent(self) -> None:
        """What got lost goes out to parties that are there; and to those that went and came, for nobody tells of that.

        A party answers a letter that comes twice in the same way.
        """
        here = self._post.here()
        self._give_up(here)
        moved = [number for number, (task, mark) in self._out.items() if here.get(task.party, mark) != mark]
        tasks = [*self._again, *(self._out.pop(number)[0] for number in moved)]
        self._again = [task for task in tasks if task.party not in here]
        for task in tasks:
            if task.party in here:
                self._send(task, here[task.party])

    def _give_up(self, here: Collection[str]) -> None:
        """Nobody waits for those who are gone and do not come for letters: who left, was revoked, or forgotten."""
        tasks = [*self._again, *(task for task, _ in self._out.values())]
        away = {task.party for task in tasks} - set(here)
        why = {**dict.fromkeys(self._post.left(), "it has left"), **self._barred()} if away else {}
        gone = away & why.keys()
        self._ready += [_failed(task, "lost", why[task.party]) for task in tasks if task.party in gone]
        self._again = [task for task in self._again if task.party not in gone]
        self._out = {number: one for number, one in self._out.items() if one[0].party not in gone}

    def collect(self, timeout: float) -> list[Report]:
        end, pause = time.monotonic() + timeout, _SHORTEST
        while True:
            reports = self._stood_in() or self._returned() or self._fetched() or self._overdue()
            left = end - time.monotonic()
            if reports or not (self._out or self._again) or left <= 0:
                return reports
            self._resent()
            time.sleep(min(pause, left))
            pause = min(_LONGEST, 1.5 * pause)

    def _stood_in(self) -> list[Report]:
        tasks, self._here = self._here, []
        if not tasks:
            return []
        barred = self._barred()
        why = {party: f"{reason}: nobody stands in for it" for party, reason in barred.items()}
        refused = [_failed(task, "refused", why[task.party]) for task in tasks if task.party in why]
        tasks = [task for task in tasks if task.party not in barred]
        return refused + [report for report, _ in work(self._plan, tasks, [{} for _ in tasks])]

    def _returned(self) -> list[Report]:
        reports, self._ready = self._ready, []
        return reports

    def _fetched(self) -> list[Report]:
        reports = []
        for number, answer in self._post.fetch(tuple(self._out), self._most).items() if self._out else ():
            task, _ = self._out.pop(number, (None, ""))
            if task is not None:  # else it answers a round that was broken off
                self._answered += not isinstance(answer, Lost)
                reports += self._missed(task, answer) if isinstance(answer, Lost) else [self._read(task, answer)]
        return reports

    def _read(self, task: Task, answer: Letter) -> Report:
        """The report in an answer; one of another party or round is not taken for it."""
        if len(answer) > self._most:
            return _failed(task, "error", f"its answer has {len(answer)} bytes, and may have {self._most}")
        try:
            report = unpack(answer, Report, self._form)
        except EngineError as error:
            return _failed(task, "error", str(error))
        said, asked = _key(report), _key(task)
        if said != asked:
            return _failed(task, "error", f"it answered for {said}, and was asked for {asked}")
        report = replace(report, reason=plain(report.reason))
        if report.status == "ok" and task.kind == "train":
            self._memory.stage(task.party, {ACCEPTED: torch.tensor(task.round)})
        return report

    def _overdue(self) -> list[Report]:
        """Who is not waited for any more: the others are a quorum, whatever they have answered."""
        seconds, quorum = self._patience.deadline, self._patience.quorum
        late = [*self._again, *(task for task, _ in self._out.values())]
        if quorum is None or not late or time.monotonic() - self._began < seconds:
            return []
        if self._answered < quorum and late[0].kind != "evaluate":
            self._note_late(late, quorum)
            return []
        self._out, self._again = {}, []
        return [_failed(task, "lost", f"no answer within {seconds:g} s: the round went on without it") for task in late]

    def _note_late(self, late: Sequence[Task], quorum: int) -> None:
        """Say once whom a round waits for that is due and has no quorum."""
        if not self._is_late:
            needs = f"{self._answered} of the {quorum} answers with which it goes on without others"
            after = f"after {self._patience.deadline:g} s. Waiting for {some([task.party for task in late])}"
            self._say(f"Round {late[0].round} has {needs}, {after}.")
        self._is_late = True


def _key(one: Task | Report) -> tuple[str, int, str]:
    return one.party, one.round, one.kind


def _same(task: Task, now: Task | None) -> bool:
    """Whether what was asked is what is asked now, so that its answer will do."""
    if now is None or _work(task) != _work(now) or task.arrays.keys() != now.arrays.keys():
        return False
    return all(now.arrays[name] is tensor or now.arrays[name].equal(tensor) for name, tensor in task.arrays.items())


def _work(task: Task) -> dict[str, Any]:
    """What a task says of its work: to judge it is no other."""
    return {name: value for name, value in task.settings.items() if name != "judge"}


def some(names: Sequence[str]) -> str:
    """Parties by name, the first ten of them."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _failed(task: Task, status: Status, reason: str) -> Report:
    return Report(task.party, task.round, task.kind, status, reason=plain(reason))
