"""The party's side of a stand-in: the rows that it leaves behind, and who trains on them while it is away.

With a vault the party seals its rows before they leave, and only the worker that stands in opens them, in memory.
Without one, which is for simulations on one machine, no row leaves its party at all: its memory keeps the numbers of
the rows that it chose, and the stand-in takes them out of the party's own data. So a run's folder never holds a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import CORESET_STATE, NamedTensors, ProxySettings, hidden_state
from ..core.messages import CORESET_KEY, Reply, Task
from ..errors import SettingError, VaultError
from ..parties.party import Party, SampleSpec
from .features import FEATURE_SPACES
from .selection import Coreset

if TYPE_CHECKING:
    from ..rounds.party_side import TaskResult
    from ..rounds.plan import Plan
    from ..storage.vault.coreset_rows import ExpectedCoreset

_ROWS_KEY = f"{CORESET_STATE}rows"
_WEIGHTS_KEY = f"{CORESET_STATE}weights"
_DEPOSITED_KEY = f"{CORESET_STATE}ever"

_MAX_ENCRYPTION_OVERHEAD = 8192  # bytes that sealing adds, at most
_NO_ROWS = torch.zeros(0, dtype=torch.int64)


def proxy_settings(plan: Plan) -> ProxySettings:
    """How this run's stand-ins are made."""
    if plan.algorithm.coreset_proxy is None:
        raise SettingError(f"{plan.algorithm.name} has no stand-ins. Wrap it: algorithms.StandIns(...).")
    return plan.algorithm.coreset_proxy


def deposited_rows(party_state: NamedTensors) -> Tensor:
    """The numbers of all rows that ever left the party."""
    return party_state.get(_DEPOSITED_KEY, _NO_ROWS)


def with_deposited_rows(party_state: NamedTensors, rows: Tensor | None) -> NamedTensors:
    """A memory of a party that has let these rows go, whatever else it remembers."""
    return party_state if rows is None else {**party_state, _DEPOSITED_KEY: rows}


def expected_coreset(plan: Plan, samples: int) -> ExpectedCoreset:
    """What the run knows of the coreset of a party with so many rows, before it is opened."""
    from ..storage.vault.coreset_rows import CoresetLimit, ExpectedCoreset

    selection = proxy_settings(plan).selection
    first = plan.population[plan.population.names[0]]
    form = SampleSpec(tuple(first.x.shape[1:]), first.x.dtype, tuple(first.y.shape[1:]), y_dtype=first.y.dtype)
    max_rows = CoresetLimit(None if selection.count else selection.share, selection.count).max_rows(samples)
    return ExpectedCoreset(form, max_rows, plan.classes)


def max_encrypted_size(plan: Plan) -> int:
    """The most bytes that a sealed coreset may have; 0 where none is asked for."""
    if plan.algorithm.coreset_proxy is None or plan.vault is None:
        return 0
    return expected_coreset(plan, max(plan.population.samples.values())).max_bytes + _MAX_ENCRYPTION_OVERHEAD


def proxy_party(plan: Plan, task: Task, party_state: NamedTensors) -> Party:
    """Who trains in a party's place, Tuor et al. (2021), eq. (6); an error says why nobody can."""
    party_label = f"party {task.party!r}"
    if plan.vault is not None:
        expected_rows = expected_coreset(plan, task.settings["samples"])
        rows = plan.vault.with_key.open(task.party, task.round, expected_rows, *task.settings["coreset_version"])
        return Coreset(*rows).as_party(task.party)
    if _ROWS_KEY not in party_state:
        raise VaultError(
            f"The run does not know which rows stand in for {party_label}. If they lie in a vault, say where: "
            "Federation(..., vault=VaultAt(...))."
        )
    selection = proxy_settings(plan).selection
    party = plan.population[task.party]
    return selection.again(party, party_state[_ROWS_KEY], party_state[_WEIGHTS_KEY]).party(task.party)  # type: ignore[no-any-return]


def finish_reply(
    plan: Plan, task: Task, old_party_state: NamedTensors, global_model: Tensor, answer: TaskResult
) -> TaskResult:
    """An answer to training with what stand-ins need of it: the party's coreset, or the |D_i| that one counts with.

    A coreset that cannot be made, or that the party has not agreed to, does not cost it its round: the report says why.
    """
    report, party_state = answer
    if task.kind == "proxy":
        return replace(report, metrics={**report.metrics, "samples": task.settings["samples"]}), None
    reserved = dict(hidden_state(old_party_state))
    if CORESET_KEY in task.settings:
        try:
            report, reserved = _deposit_coreset(
                plan, task, global_model, report=report, deposited_before=old_party_state.get(_DEPOSITED_KEY, _NO_ROWS)
            )
        except Exception as error:
            report = replace(report, reason=f"it left no coreset: {error}")
    if (
        CORESET_KEY in report.metrics and party_state is None
    ):  # the work was in vain, and its rows have left all the same
        party_state = old_party_state
    return report, {**party_state, **reserved} if party_state is not None and reserved else party_state


def _deposit_coreset(
    plan: Plan, task: Task, global_model: Tensor, report: Reply, deposited_before: Tensor
) -> tuple[Reply, dict[str, Tensor]]:
    """The party chooses its rows, seals them if there is a vault, and remembers the numbers of all that ever left."""
    from ..storage.vault.coreset_rows import CoresetRows, check_coreset_limit, pack_rows
    from ..storage.vault.encryption import Invitation, encrypt_coreset

    party = plan.population[task.party]
    selection = proxy_settings(plan).selection
    request: Mapping[str, Any] = task.settings[CORESET_KEY]
    if plan.coreset_limit is not None:  # before the work, because no choice of so many rows would do
        check_coreset_limit(party.name, selection.size_for(party), party.samples, coreset_limit=plan.coreset_limit)
    features = (
        None if selection.space == "input" else FEATURE_SPACES[selection.space](plan.net.module_from_row(global_model))
    )
    chosen = selection.choose(party, task.settings["seed"], features)
    rows = torch.from_numpy(chosen.rows)
    reserved = {_DEPOSITED_KEY: torch.from_numpy(np.union1d(deposited_before.numpy(), chosen.rows))}
    if plan.coreset_limit is not None:
        check_coreset_limit(
            party.name,
            len(reserved[_DEPOSITED_KEY]) - len(deposited_before),
            party.samples,
            coreset_limit=plan.coreset_limit,
            deposited_rows=len(deposited_before),
        )
    report = replace(report, metrics={**report.metrics, CORESET_KEY: len(rows)})
    if not request:
        return report, {**reserved, _ROWS_KEY: rows, _WEIGHTS_KEY: chosen.coreset.weights}
    invitation = Invitation(bytes.fromhex(request["public"]), request["generation"])
    payload = pack_rows(CoresetRows(chosen.coreset.x, chosen.coreset.y, chosen.coreset.weights))
    fingerprint = plan.vault_fingerprint or (plan.vault.fingerprint if plan.vault is not None else "")
    return replace(
        report,
        encrypted_coreset=encrypt_coreset(
            invitation, payload, request["run"], party=party.name, expected_fingerprint=fingerprint
        ),
    ), reserved
