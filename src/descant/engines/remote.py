"""The engine for silos: tasks go out as messages, and replies come back as messages, or not at all.

A `ServerTransport` carries the messages: Flower's (see `deployment.flower`), or a fake one in tests. Data and party
states stay with the parties. A party commits the state of a round only when a later task says that its reply was
accepted; so a round interrupted on either side leaves no trace.
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
"""The task setting with the last round in which the party's reply was accepted; 0: none yet."""

_MAX_NAMED = 10  # parties
_NO_PARTIES_ADVICE = "new invites, because too few parties are left; or start again with a smaller --quorum"
_MIN_POLL = 0.02  # seconds between two polls of the transport
_MAX_POLL = 1.0


class UndeliveredError(Exception):
    """A message has no reply; `is_final` if it must not be sent again."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class ServerTransport(Protocol):
    """Carries messages to parties and back without reading them; large messages are files."""

    def connected_parties(self) -> Mapping[str, str]:
        """Return the parties that can be reached now with their session ids; a reconnect makes a new session."""

    def departed_parties(self) -> Collection[str]:
        """Return the parties that have said goodbye and have not reconnected at once."""

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        """Send a message that expires after `ttl` seconds and return its id, or raise :class:`UndeliveredError`."""

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        """Return new replies by message id, each once, and an error for each that will never come or is too long."""

    def discard(self, message_ids: Collection[str]) -> None:
        """Forget these messages; their replies are no longer wanted."""


class Silos:
    """Makes engines whose parties are reached by a transport: ``Federation(..., engine=Silos(transport))``."""

    def __init__(
        self,
        transport: ServerTransport,
        limits: WaitLimits = WaitLimits(),  # noqa: B008
        log: Callable[[str], None] = print,
        excluded: Callable[[], Mapping[str, str]] = dict,  # parties out for good, with the reason
        on_wait: Callable[[], None] = lambda: None,  # called while a round cannot begin; it may raise to stop the wait
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
    """A `core.Engine` for one plan; its store has only the last accepted round of each party."""

    def __init__(self, plan: Plan, silos: Silos) -> None:
        self._plan = plan
        self._transport = silos.transport
        self._limits = silos.limits
        self._log = silos.log
        self._excluded = silos.excluded
        self._on_wait = silos.on_wait
        self._party_states = PartyStore(plan.memory_budget)
        self._in_flight: dict[str, tuple[Task, str]] = {}  # by message id: the task, and its party's session id
        self._sent_ids: set[str] = set()  # ids of all messages since the last `submit`
        self._to_resend: list[Task] = []  # undelivered tasks of parties that the round waits for
        self._proxy_tasks: list[Task] = []  # run here, on the parties' coresets
        self._ready: list[Reply] = []
        self._absent: Sequence[str] = ()  # parties missing when the last round began
        self._reply_count = 0
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
        return self._party_states

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        """Return the connected parties once there are enough of them.

        A party that has left counts as missing at the start of a round, and is ignored for an evaluation.
        """
        last_message = ""
        pause = _MIN_POLL
        while True:
            connected = self._transport.connected_parties()  # first: it updates which parties are excluded
            ignored = {*self._excluded(), *(() if starting_round else self._transport.departed_parties())}
            wanted = [name for name in self._plan.population if name not in ignored]
            present, missing = (
                [name for name in wanted if (name in connected) is is_present] for is_present in (True, False)
            )
            needed = self._min_parties(len(wanted), starting_round)
            if len(present) >= needed:
                if starting_round:
                    self._log_absent(missing)
                return present
            waiting_for = name_list(missing) or _NO_PARTIES_ADVICE
            message = f"{len(present)} of {needed} parties are connected. Waiting for {waiting_for}."
            if message != last_message:
                self._log(message)
                last_message = message
            self._on_wait()
            pause = min(_MAX_POLL, 2 * pause)
            time.sleep(pause)

    def _min_parties(self, wanted: int, starting_round: bool) -> int:
        """Return how many parties must be connected: the quorum, once a round has been accepted.

        The number is at most `wanted`, except that no round starts below the quorum.
        """
        has_accepted_round = bool(self._party_states.names())
        secure = self._plan.algorithm.secure_aggregation
        quorum = self._limits.quorum if has_accepted_round else None
        needed = self._limits.min_parties if quorum is None else quorum
        needed = needed if starting_round and quorum is not None else min(needed, wanted)
        return max(needed, 1 if secure is None else secure.min_parties)

    def _log_absent(self, missing: Sequence[str]) -> None:
        """Log the parties missing at the start of a round, unless they are the same as before."""
        if missing and missing != self._absent:
            self._log(f"Round {self._party_states.round + 1} begins without {name_list(missing)}.")
        self._absent = missing

    def submit(self, tasks: Sequence[Task]) -> None:
        wanted = {_task_key(task): task for task in tasks}  # other tasks in flight are of an interrupted round
        self._in_flight = {
            message_id: (task, session_id)
            for message_id, (task, session_id) in self._in_flight.items()
            if _is_same_task(task, wanted.get(_task_key(task)))
        }
        self._transport.discard(self._sent_ids - self._in_flight.keys())
        self._sent_ids = set(self._in_flight)
        self._to_resend = []
        self._ready = []
        self._reply_count = 0
        self._started = time.monotonic()
        self._is_late = False
        self._proxy_tasks = [task for task in tasks if task.kind == "proxy"]
        sessions = self._transport.connected_parties()
        in_flight = {_task_key(task) for task, _ in self._in_flight.values()}
        for task in tasks:
            if task.kind != "proxy" and _task_key(task) not in in_flight:
                self._send(task, sessions.get(task.party, ""))

    def _send(self, task: Task, session_id: str) -> None:
        accepted = int(self._party_states.get(task.party).get(LAST_ACCEPTED, torch.tensor(0)))
        limits = self._limits
        seconds = limits.timeout if limits.quorum is None else limits.deadline
        outgoing = replace(task, settings={**task.settings, LAST_ACCEPTED: accepted}, deadline=seconds)
        try:
            message = pack_or_spill(self._plan.memory_budget, outgoing)
            message_id = self._transport.send(task.party, message, limits.timeout)
            self._sent_ids.add(message_id)
            self._in_flight[message_id] = (task, session_id)
        except UndeliveredError as error:
            self._ready += self._handle_undelivered(task, error)

    def _handle_undelivered(self, task: Task, error: UndeliveredError) -> list[Reply]:
        """Resend an undelivered task when its party is back; give up a final error or an evaluation."""
        if error.is_final or task.kind not in ("train", "keys"):
            return [_failed_reply(task, "lost", str(error))]
        self._log(f"Round {task.round}: {task.party} does not answer ({printable(str(error))}).")
        self._to_resend.append(task)
        return []

    def _resend(self) -> None:
        """Send undelivered tasks to connected parties, and all tasks of parties that have a new session.

        A party gives the same reply to a task that comes twice.
        """
        sessions = self._transport.connected_parties()
        self._drop_unreachable(sessions)
        reconnected = [
            message_id
            for message_id, (task, session_id) in self._in_flight.items()
            if sessions.get(task.party, session_id) != session_id
        ]
        tasks = [*self._to_resend, *(self._in_flight.pop(message_id)[0] for message_id in reconnected)]
        self._to_resend = [task for task in tasks if task.party not in sessions]
        for task in tasks:
            if task.party in sessions:
                self._send(task, sessions[task.party])

    def _drop_unreachable(self, connected: Collection[str]) -> None:
        """Give up the tasks of disconnected parties that have left, were revoked or were forgotten."""
        tasks = [*self._to_resend, *(task for task, _ in self._in_flight.values())]
        away = {task.party for task in tasks} - set(connected)
        departed = self._transport.departed_parties() if away else ()
        reasons = {**dict.fromkeys(departed, "it has left"), **self._excluded()} if away else {}
        gone = away & reasons.keys()
        self._ready += [_failed_reply(task, "lost", reasons[task.party]) for task in tasks if task.party in gone]
        self._to_resend = [task for task in self._to_resend if task.party not in gone]
        self._in_flight = {
            message_id: (task, session_id)
            for message_id, (task, session_id) in self._in_flight.items()
            if task.party not in gone
        }

    def collect(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        pause = _MIN_POLL
        while True:
            replies = self._run_proxies() or self._take_ready() or self._fetch_replies() or self._give_up_overdue()
            seconds_left = end - time.monotonic()
            if replies or not (self._in_flight or self._to_resend) or seconds_left <= 0:
                return replies
            self._resend()
            time.sleep(min(pause, seconds_left))
            pause = min(_MAX_POLL, 1.5 * pause)

    def _run_proxies(self) -> list[Reply]:
        tasks = self._proxy_tasks
        self._proxy_tasks = []
        if not tasks:
            return []
        excluded = self._excluded()
        reasons = {party: f"{reason}: it gets no coreset proxy" for party, reason in excluded.items()}
        declined = [_failed_reply(task, "declined", reasons[task.party]) for task in tasks if task.party in reasons]
        tasks = [task for task in tasks if task.party not in excluded]
        return declined + [reply for reply, _ in perform_tasks(self._plan, tasks, [{} for _ in tasks])]

    def _take_ready(self) -> list[Reply]:
        replies = self._ready
        self._ready = []
        return replies

    def _fetch_replies(self) -> list[Reply]:
        if not self._in_flight:
            return []
        replies = list[Reply]()
        payloads = self._transport.fetch_replies(tuple(self._in_flight), self._max_message_bytes)
        for message_id, payload in payloads.items():
            task, _ = self._in_flight.pop(message_id, (None, ""))
            if task is None:  # it replies to an interrupted round
                continue
            if isinstance(payload, UndeliveredError):
                replies += self._handle_undelivered(task, payload)
            else:
                self._reply_count += 1
                replies.append(self._decode_reply(task, payload))
        return replies

    def _decode_reply(self, task: Task, payload: MessageBytes) -> Reply:
        """Return the reply in a payload, or a failed one if it is of another party, round or kind."""
        if len(payload) > self._max_message_bytes:
            return _failed_reply(
                task, "error", f"its reply has {len(payload)} bytes, and the limit is {self._max_message_bytes}"
            )
        try:
            reply = unpack(payload, Reply, self._message_limits)
        except EngineError as error:
            return _failed_reply(task, "error", str(error))
        if _task_key(reply) != _task_key(task):
            return _failed_reply(
                task, "error", f"it answered for {_task_key(reply)}, and was asked for {_task_key(task)}"
            )
        reply = replace(reply, reason=printable(reply.reason))
        if reply.status == "ok" and task.kind == "train":
            self._party_states.stage(task.party, {LAST_ACCEPTED: torch.tensor(task.round)})
        return reply

    def _give_up_overdue(self) -> list[Reply]:
        """Give up the open tasks when the deadline is over and a quorum has replied, with any status."""
        seconds = self._limits.deadline
        quorum = self._limits.quorum
        late = [*self._to_resend, *(task for task, _ in self._in_flight.values())]
        if quorum is None or not late or time.monotonic() - self._started < seconds:
            return []
        if self._reply_count < quorum and late[0].kind != "evaluate":
            self._log_late(late, quorum)
            return []
        self._in_flight = {}
        self._to_resend = []
        return [
            _failed_reply(task, "lost", f"no reply within {seconds:g} s: the round went on without it") for task in late
        ]

    def _log_late(self, late: Sequence[Task], quorum: int) -> None:
        """Log once which parties a round waits for after its deadline, because it has no quorum."""
        if not self._is_late:
            seconds = self._limits.deadline
            waiting_for = name_list([task.party for task in late])
            self._log(
                f"Round {late[0].round} has {self._reply_count} of its quorum of {quorum} replies after {seconds:g} s. "
                f"Waiting for {waiting_for}."
            )
        self._is_late = True


def _task_key(message: Task | Reply) -> tuple[str, int, str]:
    return message.party, message.round, message.kind


def _is_same_task(task: Task, current: Task | None) -> bool:
    """Return whether a task asks for the same work as the current one, so that its reply can be used."""
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
    """Return the settings of a task that decide its result; an evaluation of the work does not change it."""
    return {name: value for name, value in task.settings.items() if name != "evaluate_local"}


def name_list(names: Sequence[str]) -> str:
    """Return the names joined with commas, at most ten of them."""
    return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")


def _failed_reply(task: Task, status: Status, reason: str) -> Reply:
    return Reply(task.party, task.round, task.kind, status=status, reason=printable(reason))
