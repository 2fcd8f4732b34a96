"""The desk at which a party answers letters: bytes in, bytes out, and what it keeps is on its own disk.

A letter is a task (see `wire`). It can ask for an introduction, for a key, for training and for judging; it cannot ask
for the party's own model, for more than the team's policy lets go, or for code to be run.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import __version__, standing
from ..config import Recipe, toml
from ..config.parts import ATTENDANCE
from ..core import Algorithm, Memory, Report, Status, Task
from ..disguise import check_budget
from ..engines.silos import ACCEPTED
from ..errors import DescantError, EngineError, SettingError, StateError
from ..metrics import metric_for
from ..parties.elsewhere import description
from ..piece import Plan, work
from ..store import clear_errors, disk
from ..store.rows import Agreed
from ..wire import pack, unpack
from .checking import checked
from .file import SiloFile
from .keeping import RESTS, Keeping, Resting
from .leaving import ANEW, loss_of
from .result import Result
from .suited import suited

TEXT = "text"
"""The setting of an introduction that holds the recipe as it was written: what the digest in an invite is of."""
_ELSEWHERE = "The party's own log says more."
INTRODUCED = "party.json"
_WHOSE = ("party", "federation")
MACHINE = "machine"
_SECRET = "secret"


class Desk:
    """Answers letters for one party, whose invite names the recipe by its digest and the vault by its fingerprint."""

    def __init__(
        self, file: SiloFile, folder: Path, log: Callable[[str], None] = print, agreed: str = "", vault: str = ""
    ) -> None:
        self.file, self.keeping, self.log, self._agreed, self._vault = file, Keeping(folder), log, agreed, vault
        self.result = Result(folder)

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
            return pack(self._introduced(task))
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
            self.keeping.leave(standing.gone(memory))
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
        [(report, after)] = work(self.plan, [task], [standing.having_left(memory, self.keeping.left())])
        if report.reason:
            self.log(f"Round {task.round}: {report.reason}")
        if report.reason and report.status == "ok":
            report = replace(report, reason=f"It left no coreset. {_ELSEWHERE}")
        if report.status == "error":
            return _no(task, "error", f"{report.reason.partition(':')[0]:.60}. {_ELSEWHERE}"), None
        return report, after if after is not None else memory

    # ── the introduction ──────────────────────────────────────────────────────────────────────────────────────────────

    def _introduced(self, task: Task) -> Report:
        """What the party says of itself; from then on it trains as this server's recipe says."""
        said = {name: task.settings.get(name) for name in ("recipe", "federation", "layout")}
        if not isinstance(said["recipe"], Mapping) or not isinstance(said["federation"], str):
            raise EngineError("An introduction must hold a recipe and the federation's name.")
        version = task.settings.get("version", __version__)
        if version != __version__:
            raise EngineError(f"The server has Descant {version!r:.40}, and this party {__version__}. Use the same.")
        if self._agreed:
            self._check_agreed(str(task.settings.get(TEXT, "")), said["recipe"])
        held = self._held
        if held is not None and held["federation"] != said["federation"]:
            raise EngineError(
                f"This folder is of the federation {held['federation']!r}, and {said['federation']!r:.80} asks. "
                "Use another folder."
            )
        if held is not None and held["recipe"] != said["recipe"]:
            raise EngineError("The server has another recipe than before. To agree to it: descant silo forget.")
        plan = self._plan_of(said["recipe"])
        if said["layout"] != plan.net.layout.digest:
            raise EngineError(
                f"The model of this party is {plan.net.layout.digest}, and the federation's is {said['layout']!r:.80}: "
                f"{', '.join(plan.net.layout.names[:6])}, ... with {plan.net.layout.size} parameters here."
            )
        checked(self.file)
        if plan.algorithm.privacy is not None:
            check_budget(plan.algorithm.privacy, 1)
        self.log(f"Taking part by {plan.algorithm.name}, with {plan.solver}.")
        with clear_errors(self.keeping.folder):
            text = json.dumps({**said, "party": self.file.party}).encode()
            disk.replace(self.keeping.folder / INTRODUCED, text, f".{INTRODUCED}", disk.PRIVATE)
        self.__dict__["plan"] = plan
        told = {
            "described": description(self.file.own),
            "layout": plan.net.layout.digest,
            "version": __version__,
            "loss": loss_of(self.file),
            "machine": self._machine,
        }
        return Report(task.party, task.round, "hello", metrics=told)

    def _check_agreed(self, text: str, tables: Mapping[str, Any]) -> None:
        """The recipe that is introduced is the one that the invite is for, and nothing else is done by its name."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != self._agreed:
            raise EngineError(
                f"The invite is for the recipe {self._agreed}, and the server's is {digest}. Ask the organiser, by "
                "another way, which one was agreed on: another recipe needs another server, and a new invite."
            )
        if reduced(toml.read(text.removeprefix("\ufeff"), "The server's recipe")) != tables:
            raise EngineError("The server asks for something else than what is written in the recipe that it shows.")

    @property
    def _machine(self) -> str:
        """A mark that was drawn when this folder was first used: an invite that is used in two places shows by it."""
        return self._drawn(MACHINE, 16)

    def _drawn(self, name: str, size: int) -> str:
        """What was drawn once for this folder, so many bytes as hexadecimal digits."""
        file = self.keeping.folder / name
        if not file.exists():
            with clear_errors(self.keeping.folder):
                disk.replace(file, secrets.token_hex(size).encode(), f".{name}", disk.PRIVATE)
        return file.read_text()

    @property
    def _held(self) -> dict[str, Any] | None:
        held = held_in(self.keeping.folder)
        if held is not None and held["party"] != self.file.party:
            raise EngineError(f"This folder is of {held['party']!r}, and the party is {self.file.party!r}.")
        return held

    @cached_property
    def plan(self) -> Plan:
        """What this party does, as the server introduced it."""
        held = self._held
        if held is None:
            raise EngineError("Nobody has been introduced here yet.")
        return self._plan_of(held["recipe"])

    def _plan_of(self, tables: Mapping[str, Any]) -> Plan:
        try:
            recipe = Recipe(reduced(tables), "the server's recipe")
            solver, algorithm = recipe.solver(), recipe.algorithm()
        except DescantError as error:  # of what the server wrote it may be told all
            raise EngineError(str(error)) from error
        return Plan.made(
            self.file.model,
            self.file.people,
            _dropping(algorithm, self.file.policy.columns_dropped),
            recipe.length.seed,
            solver=solver,
            loss=self.file.loss,
            metric=metric_for(solver.metric, self.file.loss, self.file.own),
            agreed=Agreed(share=self.file.policy.share),
            secret=bytes.fromhex(self._drawn(_SECRET, 32)),
            pinned=self._vault,
        )


def introduced(folder: Path) -> dict[str, Any]:
    """As whom the party of a folder was introduced, to which federation and by which recipe."""
    held = held_in(folder)
    if held is None:
        raise StateError(f"Nobody was introduced in {folder} yet. Join first: descant silo join.")
    return held


def held_in(folder: Path) -> dict[str, Any] | None:
    """The same, or None before anybody was."""
    file = folder / INTRODUCED
    try:
        held: Any = json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError):
        held = ""
    if held is not None and not (isinstance(held, dict) and all(type(held.get(name)) is str for name in _WHOSE)):
        raise StateError(f"{file} is not as Descant wrote it. Restore it, or begin with another folder: --folder NEW")
    return held


def _dropping(algorithm: Algorithm, columns: Sequence[int]) -> Algorithm:
    """The same method, by which these columns are left out of coresets, beside those that it leaves out itself."""
    if algorithm.stand_in is None:
        return algorithm
    selection = algorithm.stand_in.selection
    selection = replace(selection, drop=tuple(sorted({*selection.drop, *columns})))
    return replace(algorithm, stand_in=replace(algorithm.stand_in, selection=selection))


def reduced(tables: Mapping[str, Any]) -> dict[str, Any]:
    """What a party needs of a recipe: how it learns, and nothing that names a file or code.

    >>> reduced({"work": {"lr": 0.1, "attend": 3}, "method": {"algorithm": "fedavg"}, "model": {"net": "mine:net"}})
    {'method': {'algorithm': 'fedavg'}, 'work': {'lr': 0.1}, 'run': {}}
    """
    found: dict[str, Any] = {name: tables[name] for name in ("method", "wrap", "work") if name in tables}
    for name in ("method", "work"):
        given = found.get(name, {})
        if not isinstance(given, Mapping):
            raise SettingError(f"[{name}] of the server's recipe must be a table. Got {given!r:.60}.")
        found[name] = {key: value for key, value in given.items() if key not in ATTENDANCE}
    seed = tables.get("run", {}).get("seed") if isinstance(tables.get("run"), Mapping) else None
    found["run"] = {} if seed is None else {"seed": seed}
    for text in _texts(found):
        if ":" in text or "/" in text or "\\" in text:
            raise SettingError(f"The server's recipe names {text!r:.80}: code and files of others are not used here.")
    return found


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def _no(task: Task, status: Status, reason: str) -> Report:
    return Report(task.party, task.round, task.kind, status, reason=reason)
