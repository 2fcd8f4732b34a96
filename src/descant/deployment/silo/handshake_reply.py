"""How a party is introduced: what it says of itself, what it agrees to, and the plan that follows from that.

It agrees to the recipe that its invite is for, of which it uses how it learns and nothing that names a file or code.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import __version__
from ...config import Recipe, toml_io
from ...config.sections import ATTENDANCE
from ...core.algorithm import Algorithm
from ...core.messages import Report, Task
from ...core.metrics import metric_for
from ...errors import DescantError, EngineError, SettingError, StateError
from ...models.flat import Layout
from ...parties.remote_parties import description
from ...privacy.local_dp import check_budget
from ...rounds.loop import possible_ways
from ...rounds.plan import Plan
from ...rounds.validation import plain
from ...storage import atomic, clear_errors
from ...storage.vault.coreset_rows import Agreed
from .dry_run import checked
from .outgoing_fields import loss_of
from .silo_file import SiloFile

TEXT = "text"
"""The setting of an introduction that holds the recipe as it was written: what the digest in an invite is of."""
MODEL = "model"
"""The setting of an introduction that says in words what the federation's model is, for whom it does not fit."""
INTRODUCED = "party.json"
MACHINE = "machine"
_WHOSE = ("party", "federation")
_SECRET = "secret"
_SHOWN = 6  # tensors


class Introduction:
    """One party's, kept in its folder; its invite names the recipe by its digest and the vault by its fingerprint."""

    def __init__(self, file: SiloFile, folder: Path, log: Callable[[str], None], agreed: str, vault: str) -> None:
        self.file, self.folder, self.log, self._agreed, self._vault = file, folder, log, agreed, vault

    def answer(self, task: Task) -> Report:
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
            theirs = plain(str(task.settings.get(MODEL, said["layout"])))
            raise EngineError(
                f"The model of this party is {in_words(plan.net.layout)}, and the federation's {theirs:.600}."
            )
        checked(self.file)
        check_kind(self.file, plan)
        if plan.algorithm.privacy is not None:
            check_budget(plan.algorithm.privacy, 1)
        self.log(f"Taking part by {plan.algorithm.name}, with {plan.solver}.")
        with clear_errors(self.folder):
            text = json.dumps({**said, "party": self.file.party}).encode()
            atomic.replace(self.folder / INTRODUCED, text, f".{INTRODUCED}", atomic.PRIVATE)
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
        if reduced(toml_io.read(text.removeprefix("\ufeff"), "The server's recipe")) != tables:
            raise EngineError("The server asks for something else than what is written in the recipe that it shows.")

    @property
    def _machine(self) -> str:
        """A mark that was drawn when this folder was first used: an invite that is used in two places shows by it."""
        return self._drawn(MACHINE, 16)

    def _drawn(self, name: str, size: int) -> str:
        """What was drawn once for this folder, so many bytes as hexadecimal digits."""
        file = self.folder / name
        if not file.exists():
            with clear_errors(self.folder):
                atomic.replace(file, secrets.token_hex(size).encode(), f".{name}", atomic.PRIVATE)
        return file.read_text()

    @property
    def _held(self) -> dict[str, Any] | None:
        held = held_in(self.folder)
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


def check_kind(file: SiloFile, plan: Plan) -> None:
    """Raise unless the party of a file is of the kind that a plan's solver trains, and its model can act there.

    That rows fit model and loss is found by trying them.
    """
    if not file.has_rows or plan.solver.metric is not None:
        possible_ways(plan)


def in_words(layout: Layout) -> str:
    """A model by its fingerprint, the first of its tensors and its size."""
    shown = ", ".join(layout.names[:_SHOWN]) + (", ..." if len(layout.names) > _SHOWN else "")
    return f"{layout.digest} ({shown}: {layout.size} parameters)"


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
