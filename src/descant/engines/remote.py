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
from ..core.messages import Reply, Status, Task
from ..core.settings import check_settings
from ..core.timeouts import WaitLimits
from ..coresets.proxy_training import max_encrypted_size
from ..errors import EngineError
from ..privacy.dp_wrappers import check_quorum_is_private
from ..rounds.party_side import perform_tasks
from ..rounds.plan import Plan
from ..rounds.validation import printable
from ..serialization.wire import MessageBytes, MessageLimits, pack_or_spill, unpack
from ..storage import PartyStore

LAST_ACCEPTED = "accepted"
"""The setting by which a task tells its party the last round in which the party's report counted; 0: none yet."""

_MAX_NAMED = 10  # parties
_NO_PARTIES_ADVICE = "new invites, as more are needed than are left; or begin again with a smaller --quorum"
_MIN_POLL = 0.02
_MAX_POLL = 1.0  # seconds between two looks into the letter box


class UndeliveredError(Exception):
    """A letter that has no answer, and why; `final` if it would be in vain to send it again."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class ServerTransport(Protocol):
    """Who carries letters to parties and back. Nothing is known of them here; large ones go and come as files."""

    def connected_parties(self) -> Mapping[str, str]:
        """The parties that can be reached now, each with a mark of when it came: one that comes again has another."""

    def departed_parties(self) -> Collection[str]:
        """Those who cannot be reached because they have left in order, and were not back at once."""

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        """Send a letter that is good for so long; the number to ask for its answer by, or :class:`Lost`."""

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        """The answers that have come, by number, each once; and why others never will: if they are too long, say."""

    def discard(self, message_ids: Collection[str]) -> None:
        """Nobody asks for the answers to these any more."""


class Silos:
    """Makes engines whose parties are reached by a post: ``Federation(..., engine=Silos(post))``."""

    def __init__(
        self,
        transport: ServerTransport,
        limits: WaitLimits = WaitLimits(),  # noqa: B008
        log: Callable[[str], None] = print,
        excluded: Callable[[], Mapping[str, str]] = dict,  # whom nobody waits or stands in for any more, and why
        on_wait: Callable[[], None] = lambda: None,  # called while a round cannot begin: it may break it off
    ) -> None:
        check_settings(limits, "[server]")
        self.transport = transport
        self.limits = limits
        self.log = log
        self.excluded = excluded
        self.on_wait = on_wait

    def __call__(self, plan: Plan) -> SiloEngine:
        """An engine for one federation."""
        check_quorum_is_private(plan.algorithm, self.limits.quorum)
        return SiloEngine(plan, self)


class SiloEngine:
    """A `core.Engine` for one plan. Its memory holds, of each party, only which of its rounds counted last."""

    def __init__(self, plan: Plan, silos: Silos) -> None:
        self._plan = plan
        self._transport = silos.transport
        self._limits = silos.limits
        self._log = silos.log
        self._excluded = silos.excluded
        self._on_wait = silos.on_wait
        self._memory = PartyStore(plan.memory_budget)
        self._in_flight: dict[str, tuple[Task, str]] = {}  # by the number of the letter: the task, and its party's mark
        self._sent_ids: set[str] = set()  # the numbers of all letters since the last tasks came
        self._to_resend: list[Task] = []  # letters that got lost, to parties that the round waits for
        self._proxy_tasks: list[Task] = []  # stand-ins: they learn from what parties have left with us
        self._ready: list[Reply] = []
        self._absent: Sequence[str] = ()  # whom the last round began without
        self._answer_count = 0
        self._started = 0.0
        self._is_late = False
        layout = plan.net.layout
        self._message_limits = MessageLimits.for_tensors(layout.names)
        self._max_message_bytes = (
            layout.width * max(8, 2 * layout.dtype.itemsize)
            + self._message_limits.max_header_bytes
            + max_encrypted_size(plan)
        )

    @property
    def party_states(self) -> Store:
        return self._memory

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        """Who is there, once they are enough; who has left is wanted to begin a round, and not to be judged."""
        told = ""
        pause = _MIN_POLL
        while True:
            here = self._transport.connected_parties()  # first: who was forgotten and has come again is wanted
            barred = {*self._excluded(), *(() if starting_round else self._transport.departed_parties())}
            wanted = [name for name in self._plan.population if name not in barred]
            found, missing = ([name for name in wanted if (name in here) is there] for there in (True, False))
            least = self._min_parties(len(wanted), starting_round)
            if len(found) >= least:
                if starting_round:
                    self._log_absent(missing)
                return found
            waits = (
                f"{len(found)} of {least} parties are there. Waiting for {name_list(missing) or _NO_PARTIES_ADVICE}."
            )
            if waits != told:
                self._log(waits)
                told = waits
            self._on_wait()
            pause = min(_MAX_POLL, 2 * pause)
            time.sleep(pause)

    def _min_parties(self, wanted: int, begin: bool) -> int:
        """How many must be there; once a round has counted, a quorum will do, and less than that begins no round.

        Else they are no more than there are.
        """
        begun = bool(self._memory.names())
        secure = self._plan.algorithm.secure_aggregation
        quorum = self._limits.quorum if begun else None
        least = self._limits.min_parties if quorum is None else quorum
        least = least if begin and quorum is not None else min(least, wanted)
        return max(least, 1 if secure is None else secure.min_parties)

    def _log_absent(self, missing: Sequence[str]) -> None:
        """Say whom a round begins without, where that is not as it was before."""
        if missing and missing != self._absent:
            self._log(f"Round {self._memory.round + 1} begins without {name_list(missing)}.")
        self._absent = missing

    def submit(self, tasks: Sequence[Task]) -> None:
        wanted = {_task_key(task): task for task in tasks}  # what else is out is of a round that was broken off
        self._in_flight = {
            number: one
            for number, one in self._in_flight.items()
            if _is_same_task(one[0], wanted.get(_task_key(one[0])))
        }
        self._transport.discard(self._sent_ids - self._in_flight.keys())
        self._sent_ids = set(self._in_flight)
        self._to_resend = []
        self._ready = []
        self._answer_count = 0
        self._started = time.monotonic()
        self._is_late = False
        self._proxy_tasks = [task for task in tasks if task.kind == "proxy"]
        marks = self._transport.connected_parties()
        out = {_task_key(task) for task, _ in self._in_flight.values()}
        for task in tasks:
            if task.kind != "proxy" and _task_key(task) not in out:
                self._send(task, marks.get(task.party, ""))

    def _send(self, task: Task, session_id: str) -> None:
        accepted = int(self._memory.get(task.party).get(LAST_ACCEPTED, torch.tensor(0)))
        waits = self._limits
        seconds = waits.timeout if waits.quorum is None else waits.deadline
        outgoing = replace(task, settings={**task.settings, LAST_ACCEPTED: accepted}, deadline=seconds)
        try:
            message = pack_or_spill(self._plan.memory_budget, outgoing)
            message_id = self._transport.send(task.party, message, waits.timeout)
            self._sent_ids.add(message_id)
            self._in_flight[message_id] = (task, session_id)
        except UndeliveredError as why:
            self._ready += self._handle_undelivered(task, why)

    def _handle_undelivered(self, task: Task, why: UndeliveredError) -> list[Reply]:
        """A letter got lost: it goes out again when its party is there again. Nobody is waited for to be judged."""
        if why.is_final or task.kind not in ("train", "keys"):
            return [_failed_reply(task, "lost", str(why))]
        self._log(f"Round {task.round}: {task.party} does not answer ({printable(str(why))}).")
        self._to_resend.append(task)
        return []

    def _resend(self) -> None:
        """What got lost goes out to parties that are there; and to those that went and came, for nobody tells of that.

        A party answers a letter that comes twice in the same way.
        """
        here = self._transport.connected_parties()
        self._drop_unreachable(here)
        moved = [number for number, (task, mark) in self._in_flight.items() if here.get(task.party, mark) != mark]
        tasks = [*self._to_resend, *(self._in_flight.pop(number)[0] for number in moved)]
        self._to_resend = [task for task in tasks if task.party not in here]
        for task in tasks:
            if task.party in here:
                self._send(task, here[task.party])

    def _drop_unreachable(self, here: Collection[str]) -> None:
        """Nobody waits for those who are gone and do not come for letters: who left, was revoked, or forgotten."""
        tasks = [*self._to_resend, *(task for task, _ in self._in_flight.values())]
        away = {task.party for task in tasks} - set(here)
        why = {**dict.fromkeys(self._transport.departed_parties(), "it has left"), **self._excluded()} if away else {}
        gone = away & why.keys()
        self._ready += [_failed_reply(task, "lost", why[task.party]) for task in tasks if task.party in gone]
        self._to_resend = [task for task in self._to_resend if task.party not in gone]
        self._in_flight = {number: one for number, one in self._in_flight.items() if one[0].party not in gone}

    def collect(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        pause = _MIN_POLL
        while True:
            reports = self._run_proxies() or self._take_ready() or self._fetch_replies() or self._give_up_overdue()
            left = end - time.monotonic()
            if reports or not (self._in_flight or self._to_resend) or left <= 0:
                return reports
            self._resend()
            time.sleep(min(pause, left))
            pause = min(_MAX_POLL, 1.5 * pause)

    def _run_proxies(self) -> list[Reply]:
        tasks = self._proxy_tasks
        self._proxy_tasks = []
        if not tasks:
            return []
        barred = self._excluded()
        reasons = {party: f"{reason}: nobody stands in for it" for party, reason in barred.items()}
        declined = [_failed_reply(task, "declined", reasons[task.party]) for task in tasks if task.party in reasons]
        tasks = [task for task in tasks if task.party not in barred]
        return declined + [report for report, _ in perform_tasks(self._plan, tasks, [{} for _ in tasks])]

    def _take_ready(self) -> list[Reply]:
        reports = self._ready
        self._ready = []
        return reports

    def _fetch_replies(self) -> list[Reply]:
        reports = []
        for number, answer in (
            self._transport.fetch_replies(tuple(self._in_flight), self._max_message_bytes).items()
            if self._in_flight
            else ()
        ):
            task, _ = self._in_flight.pop(number, (None, ""))
            if task is not None:  # else it answers a round that was broken off
                self._answer_count += not isinstance(answer, UndeliveredError)
                reports += (
                    self._handle_undelivered(task, answer)
                    if isinstance(answer, UndeliveredError)
                    else [self._decode_reply(task, answer)]
                )
        return reports

    def _decode_reply(self, task: Task, answer: MessageBytes) -> Reply:
        """The report in an answer; one of another party or round is not taken for it."""
        if len(answer) > self._max_message_bytes:
            return _failed_reply(
                task, "error", f"its answer has {len(answer)} bytes, and may have {self._max_message_bytes}"
            )
        try:
            report = unpack(answer, Reply, self._message_limits)
        except EngineError as error:
            return _failed_reply(task, "error", str(error))
        said = _task_key(report)
        asked = _task_key(task)
        if said != asked:
            return _failed_reply(task, "error", f"it answered for {said}, and was asked for {asked}")
        report = replace(report, reason=printable(report.reason))
        if report.status == "ok" and task.kind == "train":
            self._memory.stage(task.party, {LAST_ACCEPTED: torch.tensor(task.round)})
        return report

    def _give_up_overdue(self) -> list[Reply]:
        """Who is not waited for any more: the others are a quorum, whatever they have answered."""
        seconds = self._limits.deadline
        quorum = self._limits.quorum
        late = [*self._to_resend, *(task for task, _ in self._in_flight.values())]
        if quorum is None or not late or time.monotonic() - self._started < seconds:
            return []
        if self._answer_count < quorum and late[0].kind != "evaluate":
            self._log_late(late, quorum)
            return []
        self._in_flight = {}
        self._to_resend = []
        return [
            _failed_reply(task, "lost", f"no answer within {seconds:g} s: the round went on without it")
            for task in late
        ]

    def _log_late(self, late: Sequence[Task], quorum: int) -> None:
        """Say once whom a round waits for that is due and has no quorum."""
        if not self._is_late:
            needs = f"{self._answer_count} of the {quorum} answers with which it goes on without others"
            after = f"after {self._limits.deadline:g} s. Waiting for {name_list([task.party for task in late])}"
            self._log(f"Round {late[0].round} has {needs}, {after}.")
        self._is_late = True


def _task_key(one: Task | Reply) -> tuple[str, int, str]:
    return one.party, one.round, one.kind


def _is_same_task(task: Task, current: Task | None) -> bool:
    """Whether what was asked is what is asked now, so that its answer will do."""
    if (
        current is None
        or _work_settings(task) != _work_settings(current)
        or task.arrays.keys() != current.arrays.keys()
    ):
        return False
    return all(
        current.arrays[name] is tensor or current.arrays[name].equal(tensor) for name, tensor in task.arrays.items()
    )


def _work_settings(task: Task) -> dict[str, Any]:
    """What a task says of its work: to judge it is no other."""
    return {name: value for name, value in task.settings.items() if name != "evaluate_local"}


def name_list(names: Sequence[str]) -> str:
    """Parties by name, the first ten of them."""
    return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")


def _failed_reply(task: Task, status: Status, reason: str) -> Reply:
    return Reply(task.party, task.round, task.kind, status=status, reason=printable(reason))
