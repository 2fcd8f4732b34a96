"""The desk at which a party answers letters: bytes in, bytes out, and what it keeps is on its own disk.

A letter is a task (see `wire`). It can ask for an introduction, for a key, for training and for judging; it cannot ask
for the party's own model, for more than the team's policy lets go, or for code to be run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...core.algorithm import Memory
from ...core.messages import Report, Status, Task
from ...coresets import proxy_training
from ...engines.remote import ACCEPTED
from ...errors import DescantError, EngineError
from ...rounds.party_side import work
from ...rounds.plan import Plan
from ...serialization.wire import pack, unpack
from .console_messages import done
from .dry_run import checked
from .execution_mode import suited
from .handshake_reply import Introduction
from .outgoing_fields import ANEW
from .result_files import Result
from .silo_file import SiloFile
from .silo_state import RESTS, Keeping, Resting

_ELSEWHERE = "The party's own log says more."


class Desk:
    """Answers letters for one party, whose invite names the recipe by its digest and the vault by its fingerprint."""

    def __init__(
        self, file: SiloFile, folder: Path, log: Callable[[str], None] = print, agreed: str = "", vault: str = ""
    ) -> None:
        self.file, self.keeping, self.log, self.result = file, Keeping(folder), log, Result(folder)
        self._introduction = Introduction(file, folder, log, agreed, vault)

    @property
    def plan(self) -> Plan:
        """What this party does, as the server introduced it."""
        return self._introduction.plan

    def fit(self) -> str:
        """Why the team's file cannot take part, or ""."""
        try:
            checked(self.file)
        except DescantError as error:
            return str(error)
        except Exception as error:
            self.log("".join(traceback.format_exception(error)))
            return f"{self.file.path} failed: {type(error).__name__}: {error}"
        return ""

    def answer(self, letter: bytes) -> bytes:
        """The answer to a letter. Whatever is wrong with it, there is one."""
        try:
            task = unpack(letter, Task)
        except EngineError as error:
            return pack(Report(self.file.party, 0, "hello", "refused", reason=str(error)))
        try:
            return self._answer(task, letter)
        except EngineError as error:  # what is wrong with the letter
            if task.kind != "hello":  # of which the server tells it, and its command ends with that
                self.log(f"Round {task.round}: {error}")
            rests = {RESTS: error.seconds} if isinstance(error, Resting) else {}
            return pack(replace(_no(task, "refused", str(error)), metrics=rests))
        except Exception as error:  # its text may hold values of the party's data and names of files, which stay here
            self.log(f"Round {task.round}: {type(error).__name__}: {error}")
            status: Status = "refused" if isinstance(error, DescantError) else "error"
            return pack(_no(task, status, f"{type(error).__name__}. {_ELSEWHERE}"))

    def _answer(self, task: Task, letter: bytes) -> bytes:
        if task.party != self.file.party:
            raise EngineError(f"This is {self.file.party!r}, and the letter is for {task.party!r:.40}.")
        if task.kind == "hello":
            return pack(self._introduction.answer(task))
        if task.kind == "train":
            return self._trained(task, letter)
        if task.kind not in ("evaluate", "keys"):
            raise EngineError(f"A task of the kind {task.kind!r:.40} is not answered here.")
        memory = self.keeping.memory(task.settings.get(ACCEPTED)) if task.kind == "evaluate" else {}
        report, _ = self._worked(task, memory)
        if task.kind == "evaluate" and report.status == "ok":
            self.result.keep(self.plan, task, memory, report.metrics)
        return pack(report)

    def _trained(self, task: Task, letter: bytes) -> bytes:
        accepted = task.settings.get(ACCEPTED)
        if type(accepted) is not int or not 0 <= accepted < task.round:
            raise EngineError(f"Round {task.round} cannot follow round {accepted!r:.40}.")
        known = self.keeping.answered(task.round, letter)
        if known is not None:
            self.log(f"Round {task.round}: it was asked again, and answers as before.")
            return known
        if accepted < self.keeping.stand.counted:
            raise EngineError(
                f"Stale: round {self.keeping.stand.counted} has counted here, and {accepted} is said to be the last."
            )
        if task.round < self.keeping.stand.waiting:
            raise EngineError(f"Stale: round {self.keeping.stand.waiting} has been answered here.")
        if self.plan.algorithm.secure is not None and task.round <= self.keeping.stand.answered:
            raise EngineError(
                f"Round {self.keeping.stand.answered} has been answered here, and the masks of a round hide one answer."
            )
        if self.file.policy.rounds_a_day is not None:
            self.keeping.take_up(letter, self.file.policy.rounds_a_day)
        whole, (task, report, memory) = self.keeping.settle(accepted), self._learnt(suited(self.plan, task))
        if not whole:
            self.log(f"Round {task.round}: what was kept of round {accepted} is not here. The party begins anew.")
            report = replace(report, metrics={**report.metrics, ANEW: 1.0})
        if report.sealed and memory is not None:  # what leaves once stays known, whether the round counts or not
            self.keeping.leave(proxy_training.gone(memory))
        answer = pack(report)
        if report.status == "ok":
            self.result.note(task)
            self.keeping.wait(task.round, letter, memory or {}, answer)
        return answer

    def _learnt(self, task: Task) -> tuple[Task, Report, Memory | None]:
        """The work, once more by a way that this model goes if it does not go by the one that was asked for."""
        report, memory = self._worked(task, self.keeping.memory())
        if report.status != "error" or (own := suited(self.plan, task, failed=True)) is task:
            return task, report, memory
        self.log(f"Round {own.round}: this model is not computed as the server's is: {own.settings['way']}.")
        return own, *self._worked(own, self.keeping.memory())

    def _worked(self, task: Task, memory: Memory) -> tuple[Report, Memory | None]:
        """As any engine does it; what the party's code said when it failed stays in its own log."""
        plan, left, began = self.plan, self.keeping.left(), time.monotonic()
        [(report, after)] = work(plan, [task], [proxy_training.having_left(memory, left)])
        if report.status == "ok":
            self.log(done(report, time.monotonic() - began, self.file.words.trained))
        if report.reason:
            self.log(f"Round {task.round}: {report.reason}")
        if report.reason and report.status == "ok":
            report = replace(report, reason=f"It left no coreset. {_ELSEWHERE}")
        if report.status == "error":
            return _no(task, "error", f"{report.reason.partition(':')[0]:.60}. {_ELSEWHERE}"), None
        return report, after if after is not None else memory


def _no(task: Task, status: Status, reason: str) -> Report:
    return Report(task.party, task.round, task.kind, status, reason=reason)
