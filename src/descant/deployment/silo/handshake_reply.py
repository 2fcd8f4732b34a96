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
from ...config.sections import PARTICIPATION_KEYS
from ...core.algorithm import Algorithm
from ...core.messages import Reply, Task
from ...core.metrics import metric_for
from ...errors import DescantError, EngineError, SettingError, StateError
from ...models.flat import Layout
from ...parties.remote_parties import describe_party
from ...privacy.local_dp import check_budget
from ...rounds.loop import possible_execution_modes
from ...rounds.plan import Plan
from ...rounds.validation import printable
from ...storage import atomic, write_errors
from ...storage.vault.coreset_rows import CoresetLimit
from .dry_run import dry_run
from .outgoing_fields import loss_name
from .silo_file import SiloFile

RECIPE_TEXT = "text"
"""The setting of an introduction that holds the recipe as it was written: what the digest in an invite is of."""
MODEL_SUMMARY = "model"
"""The setting of an introduction that says in words what the federation's model is, for whom it does not fit."""
HANDSHAKE_FILE = "handshake.json"
MACHINE_FILE = "machine"
_IDENTITY_FIELDS = ("party", "federation")
_SECRET_FILE = "secret"
_MAX_SHOWN_TENSORS = 6  # tensors


class HandshakeResponder:
    """One party's, kept in its folder; its invite names the recipe by its digest and the vault by its fingerprint."""

    def __init__(
        self, file: SiloFile, folder: Path, log: Callable[[str], None], recipe_digest: str, vault_fingerprint: str
    ) -> None:
        self.file = file
        self.folder = folder
        self.log = log
        self._recipe_digest = recipe_digest
        self._vault_fingerprint = vault_fingerprint

    def reply(self, task: Task) -> Reply:
        """What the party says of itself; from then on it trains as this server's recipe says."""
        proposal = {name: task.settings.get(name) for name in ("recipe", "federation", "layout")}
        if not isinstance(proposal["recipe"], Mapping) or not isinstance(proposal["federation"], str):
            raise EngineError("An introduction must hold a recipe and the federation's name.")
        version = task.settings.get("version", __version__)
        if version != __version__:
            raise EngineError(f"The server has Descant {version!r:.40}, and this party {__version__}. Use the same.")
        if self._recipe_digest:
            self._check_recipe(str(task.settings.get(RECIPE_TEXT, "")), proposal["recipe"])
        previous = self._previous_handshake
        if previous is not None and previous["federation"] != proposal["federation"]:
            raise EngineError(
                f"This folder is of the federation {previous['federation']!r}, and {proposal['federation']!r:.80} asks. "
                "Use another folder."
            )
        if previous is not None and previous["recipe"] != proposal["recipe"]:
            raise EngineError("The server has another recipe than before. To agree to it: descant silo forget.")
        plan = self._build_plan(proposal["recipe"])
        if proposal["layout"] != plan.net.layout.digest:
            server_model = printable(str(task.settings.get(MODEL_SUMMARY, proposal["layout"])))
            raise EngineError(
                f"The model of this party is {layout_summary(plan.net.layout)}, and the federation's {server_model:.600}."
            )
        dry_run(self.file)
        check_party_kind(self.file, plan)
        if plan.algorithm.privacy is not None:
            check_budget(plan.algorithm.privacy, 1)
        self.log(f"Taking part by {plan.algorithm.name}, with {plan.solver}.")
        with write_errors(self.folder):
            text = json.dumps({**proposal, "party": self.file.party}).encode()
            atomic.replace(self.folder / HANDSHAKE_FILE, text, f".{HANDSHAKE_FILE}", atomic.PRIVATE_MODE)
        self.__dict__["plan"] = plan
        metrics = {
            "data_description": describe_party(self.file.party_data),
            "layout": plan.net.layout.digest,
            "version": __version__,
            "loss": loss_name(self.file),
            "machine": self._machine_id,
        }
        return Reply(task.party, task.round, "handshake", metrics=metrics)

    def _check_recipe(self, text: str, tables: Mapping[str, Any]) -> None:
        """The recipe that is introduced is the one that the invite is for, and nothing else is done by its name."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != self._recipe_digest:
            raise EngineError(
                f"The invite is for the recipe {self._recipe_digest}, and the server's is {digest}. Ask the organiser, by "
                "another way, which one was agreed on: another recipe needs another server, and a new invite."
            )
        if training_part(toml_io.read(text.removeprefix("\ufeff"), "The server's recipe")) != tables:
            raise EngineError("The server asks for something else than what is written in the recipe that it shows.")

    @property
    def _machine_id(self) -> str:
        """A mark that was drawn when this folder was first used: an invite that is used in two places shows by it."""
        return self._random_token(MACHINE_FILE, 16)

    def _random_token(self, name: str, size: int) -> str:
        """What was drawn once for this folder, so many bytes as hexadecimal digits."""
        file = self.folder / name
        if not file.exists():
            with write_errors(self.folder):
                atomic.replace(file, secrets.token_hex(size).encode(), f".{name}", atomic.PRIVATE_MODE)
        return file.read_text()

    @property
    def _previous_handshake(self) -> dict[str, Any] | None:
        previous = read_handshake(self.folder)
        if previous is not None and previous["party"] != self.file.party:
            raise EngineError(f"This folder is of {previous['party']!r}, and the party is {self.file.party!r}.")
        return previous

    @cached_property
    def plan(self) -> Plan:
        """What this party does, as the server introduced it."""
        previous = self._previous_handshake
        if previous is None:
            raise EngineError("Nobody has been introduced here yet.")
        return self._build_plan(previous["recipe"])

    def _build_plan(self, tables: Mapping[str, Any]) -> Plan:
        try:
            recipe = Recipe(training_part(tables), "the server's recipe")
            solver = recipe.solver()
            algorithm = recipe.algorithm()
        except DescantError as error:  # of what the server wrote it may be told all
            raise EngineError(str(error)) from error
        return Plan.create(
            self.file.model,
            self.file.population,
            _with_columns_dropped(algorithm, self.file.policy.columns_dropped),
            recipe.length.seed,
            solver=solver,
            loss=self.file.loss,
            metric=metric_for(solver.metric, self.file.loss, self.file.party_data),
            coreset_limit=CoresetLimit(share=self.file.policy.share),
            secret=bytes.fromhex(self._random_token(_SECRET_FILE, 32)),
            vault_fingerprint=self._vault_fingerprint,
        )


def check_party_kind(file: SiloFile, plan: Plan) -> None:
    """Raise unless the party of a file is of the kind that a plan's solver trains, and its model can act there.

    That rows fit model and loss is found by trying them.
    """
    if not file.has_rows or plan.solver.metric is not None:
        possible_execution_modes(plan)


def layout_summary(layout: Layout) -> str:
    """A model by its fingerprint, the first of its tensors and its size."""
    names = ", ".join(layout.names[:_MAX_SHOWN_TENSORS]) + (", ..." if len(layout.names) > _MAX_SHOWN_TENSORS else "")
    return f"{layout.digest} ({names}: {layout.trainable_width} parameters)"


def require_handshake(folder: Path) -> dict[str, Any]:
    """As whom the party of a folder was introduced, to which federation and by which recipe."""
    handshake = read_handshake(folder)
    if handshake is None:
        raise StateError(f"Nobody was introduced in {folder} yet. Join first: descant silo join.")
    return handshake


def read_handshake(folder: Path) -> dict[str, Any] | None:
    """The same, or None before anybody was."""
    file = folder / HANDSHAKE_FILE
    try:
        handshake: Any = json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError):
        handshake = ""
    if handshake is not None and not (
        isinstance(handshake, dict) and all(type(handshake.get(name)) is str for name in _IDENTITY_FIELDS)
    ):
        raise StateError(f"{file} is not as Descant wrote it. Restore it, or begin with another folder: --folder NEW")
    return handshake


def _with_columns_dropped(algorithm: Algorithm, columns: Sequence[int]) -> Algorithm:
    """The same method, by which these columns are left out of coresets, beside those that it leaves out itself."""
    if algorithm.coreset_proxy is None:
        return algorithm
    selection = algorithm.coreset_proxy.selection
    selection = replace(selection, drop=tuple(sorted({*selection.drop, *columns})))
    return replace(algorithm, coreset_proxy=replace(algorithm.coreset_proxy, selection=selection))


def training_part(tables: Mapping[str, Any]) -> dict[str, Any]:
    """What a party needs of a recipe: how it learns, and nothing that names a file or code.

    >>> reduced({"work": {"lr": 0.1, "attend": 3}, "method": {"algorithm": "fedavg"}, "model": {"net": "mine:net"}})
    {'method': {'algorithm': 'fedavg'}, 'work': {'lr': 0.1}, 'run': {}}
    """
    selected: dict[str, Any] = {name: tables[name] for name in ("method", "wrap", "training") if name in tables}
    for name in ("method", "training"):
        table = selected.get(name, {})
        if not isinstance(table, Mapping):
            raise SettingError(f"[{name}] of the server's recipe must be a table. Got {table!r:.60}.")
        selected[name] = {key: value for key, value in table.items() if key not in PARTICIPATION_KEYS}
    seed = tables.get("run", {}).get("seed") if isinstance(tables.get("run"), Mapping) else None
    selected["run"] = {} if seed is None else {"seed": seed}
    for text in _strings_in(selected):
        if ":" in text or "/" in text or "\\" in text:
            raise SettingError(f"The server's recipe names {text!r:.80}: code and files of others are not used here.")
    return selected


def _strings_in(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _strings_in(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _strings_in(part)]
    return [value] if isinstance(value, str) else []
