"""The silo's side of the handshake: its description, the recipe that it accepts, and the resulting plan.

It accepts the recipe of its invite. Of that recipe it uses the training settings, nothing that names a file or code.
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
"""The handshake setting with the recipe as written; the digest in an invite is computed from it."""
MODEL_SUMMARY = "model"
"""The handshake setting that describes the federation's model, for messages about a mismatch."""
HANDSHAKE_FILE = "handshake.json"
MACHINE_FILE = "machine"
_IDENTITY_FIELDS = ("party", "federation")
_SECRET_FILE = "secret"
_MAX_SHOWN_TENSORS = 6  # tensors


class HandshakeResponder:
    """Answers handshakes for one party; its invite fixes the recipe's digest and the vault's fingerprint."""

    def __init__(
        self, file: SiloFile, folder: Path, log: Callable[[str], None], recipe_digest: str, vault_fingerprint: str
    ) -> None:
        self.file = file
        self.folder = folder
        self.log = log
        self._recipe_digest = recipe_digest
        self._vault_fingerprint = vault_fingerprint

    def reply(self, task: Task) -> Reply:
        """Check the server's proposal, store it, and return the party's description."""
        proposal = {name: task.settings.get(name) for name in ("recipe", "federation", "layout")}
        if not isinstance(proposal["recipe"], Mapping) or not isinstance(proposal["federation"], str):
            raise EngineError("A handshake must hold a recipe and the federation's name.")
        version = task.settings.get("version", __version__)
        if version != __version__:
            raise EngineError(
                f"The server has Descant {version!r:.40}, and this party {__version__}. Install the same version."
            )
        if self._recipe_digest:
            self._check_recipe(str(task.settings.get(RECIPE_TEXT, "")), proposal["recipe"])
        previous = self._previous_handshake
        if previous is not None and previous["federation"] != proposal["federation"]:
            raise EngineError(
                f"This folder belongs to the federation {previous['federation']!r}, not to "
                f"{proposal['federation']!r:.80}. "
                "Use another folder."
            )
        if previous is not None and previous["recipe"] != proposal["recipe"]:
            raise EngineError(
                "The server has another recipe than before. To accept it, run descant silo forget and join again."
            )
        plan = self._build_plan(proposal["recipe"])
        if proposal["layout"] != plan.net.layout.digest:
            server_model = printable(str(task.settings.get(MODEL_SUMMARY, proposal["layout"])))
            raise EngineError(
                f"The model of this party is {layout_summary(plan.net.layout)}, "
                f"and the federation's {server_model:.600}."
            )
        dry_run(self.file)
        check_party_kind(self.file, plan)
        if plan.algorithm.privacy is not None:
            check_budget(plan.algorithm.privacy, 1)
        self.log(f"Taking part with {plan.algorithm.name} and {plan.solver}.")
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
        """Raise unless the proposed recipe is the one of the invite and its tables match its text."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != self._recipe_digest:
            raise EngineError(
                f"The invite is for the recipe {self._recipe_digest}, and the server's is {digest}. "
                "Ask the server operator by another channel which one was agreed on: "
                "another recipe needs another server and a new invite."
            )
        if training_part(toml_io.read(text.removeprefix("\ufeff"), "The server's recipe")) != tables:
            raise EngineError("The server proposes something else than what its recipe says.")

    @property
    def _machine_id(self) -> str:
        """Return the random id of this folder; it reveals an invite that is used in two places."""
        return self._random_token(MACHINE_FILE, 16)

    def _random_token(self, name: str, size: int) -> str:
        """Return a random token that is drawn once for this folder: `size` bytes in hexadecimal digits."""
        file = self.folder / name
        if not file.exists():
            with write_errors(self.folder):
                atomic.replace(file, secrets.token_hex(size).encode(), f".{name}", atomic.PRIVATE_MODE)
        return file.read_text()

    @property
    def _previous_handshake(self) -> dict[str, Any] | None:
        previous = read_handshake(self.folder)
        if previous is not None and previous["party"] != self.file.party:
            raise EngineError(f"This folder belongs to {previous['party']!r}, and the party is {self.file.party!r}.")
        return previous

    @cached_property
    def plan(self) -> Plan:
        """Return the plan that follows from the accepted handshake."""
        previous = self._previous_handshake
        if previous is None:
            raise EngineError("This silo has had no handshake yet.")
        return self._build_plan(previous["recipe"])

    def _build_plan(self, tables: Mapping[str, Any]) -> Plan:
        try:
            recipe = Recipe(training_part(tables), "the server's recipe")
            solver = recipe.solver()
            algorithm = recipe.algorithm()
        except DescantError as error:  # the recipe is the server's own text: the message may go back
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
    """Raise unless the solver trains this kind of party and the model can act in its environment.

    For rows, the dry run checks that they fit model and loss.
    """
    if not file.has_rows or plan.solver.metric is not None:
        possible_execution_modes(plan)


def layout_summary(layout: Layout) -> str:
    """Return a model's fingerprint, its first tensors and its size."""
    names = ", ".join(layout.names[:_MAX_SHOWN_TENSORS]) + (", ..." if len(layout.names) > _MAX_SHOWN_TENSORS else "")
    return f"{layout.digest} ({names}: {layout.trainable_width} parameters)"


def require_handshake(folder: Path) -> dict[str, Any]:
    """Return the stored handshake of a folder: party, federation, recipe; raise if there is none."""
    handshake = read_handshake(folder)
    if handshake is None:
        raise StateError(f"There was no handshake in {folder} yet. Join first: descant silo join.")
    return handshake


def read_handshake(folder: Path) -> dict[str, Any] | None:
    """Return the stored handshake of a folder, or None if there is none."""
    file = folder / HANDSHAKE_FILE
    try:
        handshake: Any = json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError):
        handshake = ""
    if handshake is not None and not (
        isinstance(handshake, dict) and all(type(handshake.get(name)) is str for name in _IDENTITY_FIELDS)
    ):
        raise StateError(f"{file} is not as Descant wrote it. Restore it, or start with another folder: --folder NEW")
    return handshake


def _with_columns_dropped(algorithm: Algorithm, columns: Sequence[int]) -> Algorithm:
    """Return the algorithm with these columns dropped from coresets, besides those that it drops itself."""
    if algorithm.coreset_proxy is None:
        return algorithm
    selection = algorithm.coreset_proxy.selection
    selection = replace(selection, drop_columns=tuple(sorted({*selection.drop_columns, *columns})))
    return replace(algorithm, coreset_proxy=replace(algorithm.coreset_proxy, selection=selection))


def training_part(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a recipe that a party needs: method and training settings, no files and no code.

    >>> training = {"lr": 0.1, "participation": 3}
    >>> training_part({"training": training, "method": {"algorithm": "fedavg"}, "model": {"net": "mine:net"}})
    {'method': {'algorithm': 'fedavg'}, 'training': {'lr': 0.1}, 'run': {}}
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
            raise SettingError(
                f"The server's recipe names {text!r:.80}: code and files of the server are not used here."
            )
    return selected


def _strings_in(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _strings_in(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _strings_in(part)]
    return [value] if isinstance(value, str) else []
