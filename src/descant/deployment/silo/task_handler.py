"""The handler of a silo's tasks: bytes in, bytes out, all state on the silo's own disk.

A task can ask for a handshake, a key, training or an evaluation. It cannot ask for the personal model, for more rows
than the silo's policy allows, or for code to be run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...core.algorithm import NamedTensors
from ...core.messages import Reply, Status, Task
from ...coresets import proxy_training
from ...engines.remote import LAST_ACCEPTED
from ...errors import DescantError, EngineError
from ...rounds.party_side import perform_tasks
from ...rounds.plan import Plan
from ...serialization.wire import pack, unpack
from .console_messages import reply_summary
from .dry_run import dry_run
from .handshake_reply import HandshakeResponder
from .outgoing_fields import STATE_RESET
from .result_files import SiloResults
from .silo_file import SiloFile
from .silo_state import RETRY_AFTER, DailyLimitReached, SiloState
from .supported_mode import with_supported_mode

_SEE_PARTY_LOG = "The party's own log says more."


class TaskHandler:
    """Answers tasks for one party; its invite fixes the recipe's digest and the vault's fingerprint."""

    def __init__(
        self,
        file: SiloFile,
        folder: Path,
        log: Callable[[str], None] = print,
        recipe_digest: str = "",
        vault_fingerprint: str = "",
    ) -> None:
        self.file = file
        self.state = SiloState(folder)
        self.log = log
        self.results = SiloResults(folder)
        self._handshakes = HandshakeResponder(
            file, folder, log, recipe_digest=recipe_digest, vault_fingerprint=vault_fingerprint
        )

    @property
    def plan(self) -> Plan:
        """Return the plan that follows from the accepted handshake."""
        return self._handshakes.plan

    def check_file(self) -> str:
        """Return the reason why the silo's file cannot take part, or ""."""
        try:
            dry_run(self.file)
        except DescantError as error:
            return str(error)
        except Exception as error:
            self.log("".join(traceback.format_exception(error)))
            return f"{self.file.path} failed: {type(error).__name__}: {error}"
        return ""

    def answer(self, payload: bytes) -> bytes:
        """Return the reply to a packed task; malformed tasks get one too."""
        try:
            task = unpack(payload, Task)
        except EngineError as error:
            return pack(Reply(self.file.party, 0, "handshake", status="declined", reason=str(error)))
        try:
            return self._dispatch(task, payload)
        except EngineError as error:  # the task is invalid, and the server may read why
            if task.kind != "handshake":  # a failed handshake comes back as a goodbye, which is logged
                self.log(f"Round {task.round}: {error}")
            pause = {RETRY_AFTER: error.seconds_left} if isinstance(error, DailyLimitReached) else {}
            return pack(replace(_failure_reply(task, "declined", str(error)), metrics=pause))
        except Exception as error:  # its text may hold values of the data and names of files
            self.log(f"Round {task.round}: {type(error).__name__}: {error}")
            status: Status = "declined" if isinstance(error, DescantError) else "error"
            return pack(_failure_reply(task, status, f"{type(error).__name__}. {_SEE_PARTY_LOG}"))

    def _dispatch(self, task: Task, payload: bytes) -> bytes:
        if task.party != self.file.party:
            raise EngineError(f"This is {self.file.party!r}, and the task is for {task.party!r:.40}.")
        if task.kind == "handshake":
            return pack(self._handshakes.reply(task))
        if task.kind == "train":
            return self._answer_train_task(task, payload)
        if task.kind not in ("evaluate", "keys"):
            raise EngineError(f"A task of the kind {task.kind!r:.40} is not answered here.")
        party_state = self.state.load_party_state(task.settings.get(LAST_ACCEPTED)) if task.kind == "evaluate" else {}
        reply, _ = self._perform(task, party_state)
        if task.kind == "evaluate" and reply.status == "ok":
            self.results.write_models(self.plan, task, party_state, reply.metrics)
        return pack(reply)

    def _answer_train_task(self, task: Task, payload: bytes) -> bytes:
        accepted = task.settings.get(LAST_ACCEPTED)
        if type(accepted) is not int or not 0 <= accepted < task.round:
            raise EngineError(f"Round {task.round} cannot follow round {accepted!r:.40}.")
        stored = self.state.stored_reply(task.round, payload)
        if stored is not None:
            self.log(f"Round {task.round}: the task came again; the stored reply is sent.")
            return stored
        if accepted < self.state.progress.accepted_round:
            raise EngineError(
                f"Stale: round {self.state.progress.accepted_round} was accepted here, and the task names {accepted} "
                "as the last."
            )
        if task.round < self.state.progress.pending_round:
            raise EngineError(f"Stale: round {self.state.progress.pending_round} has been answered here.")
        if self.plan.algorithm.secure_aggregation is not None and task.round <= self.state.progress.answered_round:
            raise EngineError(
                f"Round {self.state.progress.answered_round} has been answered here, and the masks of a round hide one "
                "reply only."
            )
        if self.file.policy.rounds_a_day is not None:
            self.state.count_task(payload, self.file.policy.rounds_a_day)
        has_state = self.state.confirm_accepted(accepted)
        task, reply, party_state = self._train_with_fallback(with_supported_mode(self.plan, task))
        if not has_state:
            self.log(f"Round {task.round}: the party state of round {accepted} is missing. Starting again without it.")
            reply = replace(reply, metrics={**reply.metrics, STATE_RESET: 1.0})
        # Rows that leave once stay recorded, even if the round is rejected.
        if reply.encrypted_coreset and party_state is not None:
            self.state.record_shared_rows(proxy_training.deposited_rows(party_state))
        reply_bytes = pack(reply)
        if reply.status == "ok":
            self.results.record_task(task)
            self.state.store_pending(task.round, payload, party_state or {}, reply_bytes)
        return reply_bytes

    def _train_with_fallback(self, task: Task) -> tuple[Task, Reply, NamedTensors | None]:
        """Train, and once more in a supported execution mode if the requested one fails with this model."""
        reply, party_state = self._perform(task, self.state.load_party_state())
        if reply.status != "error" or (retry := with_supported_mode(self.plan, task, has_failed=True)) is task:
            return task, reply, party_state
        mode = retry.settings["execution_mode"]
        self.log(f"Round {retry.round}: this model does not support the requested execution mode. Using {mode!r}.")
        return retry, *self._perform(retry, self.state.load_party_state())

    def _perform(self, task: Task, party_state: NamedTensors) -> tuple[Reply, NamedTensors | None]:
        """Perform a task as every engine does; the text of a failure stays in the party's own log."""
        plan = self.plan
        shared_rows = self.state.shared_rows()
        started_at = time.monotonic()
        [(reply, new_state)] = perform_tasks(
            plan, [task], [proxy_training.with_deposited_rows(party_state, shared_rows)]
        )
        if reply.status == "ok":
            self.log(reply_summary(reply, time.monotonic() - started_at, self.file.wording.trained_unit))
        if reply.reason:
            self.log(f"Round {task.round}: {reply.reason}")
        if reply.reason and reply.status == "ok":
            reply = replace(reply, reason=f"It sent no coreset. {_SEE_PARTY_LOG}")
        if reply.status == "error":
            return _failure_reply(task, "error", f"{reply.reason.partition(':')[0]:.60}. {_SEE_PARTY_LOG}"), None
        return reply, new_state if new_state is not None else party_state


def _failure_reply(task: Task, status: Status, reason: str) -> Reply:
    return Reply(task.party, task.round, task.kind, status=status, reason=reason)
