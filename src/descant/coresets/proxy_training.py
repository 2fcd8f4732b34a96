"""The party's side of coreset proxies: depositing a coreset, and training on it while the party is away.

With a vault the party encrypts its rows before they leave, and only the worker that trains the proxy opens them, in
memory. Without a vault, for simulations on one machine, no row leaves its party. The party state keeps the numbers of
the chosen rows, and the proxy reads them from the party's own data. So a run's folder never holds a row.
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
from .selection import Coreset, Selection

if TYPE_CHECKING:
    from ..rounds.party_side import TaskResult
    from ..rounds.plan import Plan
    from ..storage.vault.coreset_rows import ExpectedCoreset

_ROWS_KEY = f"{CORESET_STATE}rows"
_WEIGHTS_KEY = f"{CORESET_STATE}weights"
_DEPOSITED_KEY = f"{CORESET_STATE}ever"

_MAX_ENCRYPTION_OVERHEAD = 8192  # maximum of bytes that encryption adds
_NO_ROWS = torch.zeros(0, dtype=torch.int64)


def proxy_settings(plan: Plan) -> ProxySettings:
    """Return the run's settings of coreset proxies; raise if it has none."""
    if plan.algorithm.coreset_proxy is None:
        raise SettingError(f"{plan.algorithm.name} has no coreset proxies. Wrap it: algorithms.CoresetProxies(...).")
    return plan.algorithm.coreset_proxy


def deposited_rows(party_state: NamedTensors) -> Tensor:
    """Return the numbers of all rows that ever left the party."""
    return party_state.get(_DEPOSITED_KEY, _NO_ROWS)


def with_deposited_rows(party_state: NamedTensors, rows: Tensor | None) -> NamedTensors:
    """Return the party state with these rows recorded as having left."""
    return party_state if rows is None else {**party_state, _DEPOSITED_KEY: rows}


def expected_coreset(plan: Plan, samples: int) -> ExpectedCoreset:
    """Return the properties required of the coreset of a party with `samples` samples."""
    from ..storage.vault.coreset_rows import CoresetLimit, ExpectedCoreset

    selection = proxy_settings(plan).selection
    first = plan.population[plan.population.names[0]]
    sample_spec = SampleSpec(tuple(first.x.shape[1:]), first.x.dtype, tuple(first.y.shape[1:]), y_dtype=first.y.dtype)
    max_rows = CoresetLimit(None if selection.count else selection.share, selection.count).max_rows(samples)
    return ExpectedCoreset(sample_spec, max_rows, plan.classes)


def max_encrypted_size(plan: Plan) -> int:
    """Return the maximum size of an encrypted coreset; 0 where none is requested."""
    if plan.algorithm.coreset_proxy is None or plan.vault is None:
        return 0
    return expected_coreset(plan, max(plan.population.samples.values())).max_bytes + _MAX_ENCRYPTION_OVERHEAD


def proxy_party(plan: Plan, task: Task, party_state: NamedTensors) -> Party:
    """Return the party that trains in place of an absent one: Tuor et al. (2021), eq. (6)."""
    if plan.vault is not None:
        expected = expected_coreset(plan, task.settings["samples"])
        rows = plan.vault.with_key.open(task.party, task.round, expected, *task.settings["coreset_version"])
        return Coreset(*rows).as_party(task.party)
    if _ROWS_KEY not in party_state:
        raise VaultError(
            f"The run does not know the coreset of party {task.party!r}. If it is in a vault, give its location: "
            "Federation(..., vault=VaultLocation(...))."
        )
    selection: Selection = proxy_settings(plan).selection
    party = plan.population[task.party]
    return selection.rebuild(party, party_state[_ROWS_KEY], party_state[_WEIGHTS_KEY]).as_party(task.party)


def finish_reply(
    plan: Plan, task: Task, old_party_state: NamedTensors, global_model: Tensor, answer: TaskResult
) -> TaskResult:
    """Add to a training reply what coreset proxies need: the party's coreset, or the |D_i| that a proxy counts with.

    A coreset that fails, or that exceeds the party's limit, does not cost the party its round: the reply says why.
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
            report = replace(report, reason=f"it deposited no coreset: {error}")
    if CORESET_KEY in report.metrics and party_state is None:  # training failed, and its rows have left all the same
        party_state = old_party_state
    return report, {**party_state, **reserved} if party_state is not None and reserved else party_state


def _deposit_coreset(
    plan: Plan, task: Task, global_model: Tensor, report: Reply, deposited_before: Tensor
) -> tuple[Reply, dict[str, Tensor]]:
    """Choose the party's rows, encrypt them if there is a vault, and record the indices of all rows that ever left."""
    from ..storage.vault.coreset_rows import CoresetRows, check_coreset_limit, pack_rows
    from ..storage.vault.encryption import Invitation, encrypt_coreset

    party = plan.population[task.party]
    selection: Selection = proxy_settings(plan).selection
    request: Mapping[str, Any] = task.settings[CORESET_KEY]
    if plan.coreset_limit is not None:  # before choosing rows, because every choice of this size would fail
        check_coreset_limit(party.name, selection.coreset_size(party), party.samples, coreset_limit=plan.coreset_limit)
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
