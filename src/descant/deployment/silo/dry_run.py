"""`descant silo check`: a dry run of a silo's file. Nothing is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...core.interfaces import EvaluationJob
from ...core.metrics import ANNUAL_RETURN, EPISODE_RETURN
from ...coresets.selection import check_columns
from ...errors import ModelError, SettingError
from ...models.flat import MODULE_LOCK, Net
from ...parties import Agent, Desk
from ...parties.party import Party
from ...parties.remote_parties import describe_party
from ...training.agent_solver_helpers import evaluate_test_episodes, probe_observations
from ...training.backtest_evaluation import evaluate_backtests
from ...training.portfolio_policy import probe_days
from .outgoing_fields import outgoing_fields
from .silo_file import SiloFile

_BATCH_SIZE = 64
_EXTRA_OUTPUTS = (0, 1)  # outputs beyond an agent's actions: a policy gradient may add one for the state value


def _initial_loss(file: SiloFile, net: Net, party: Party) -> float:
    """Return the mean loss of the initial model over all training rows."""
    row = net.copy_initial_row()
    size = net.layout.trainable_width
    total = 0.0
    with MODULE_LOCK, torch.no_grad():
        for x, y in zip(torch.split(party.x, _BATCH_SIZE), torch.split(party.y, _BATCH_SIZE), strict=True):
            try:
                output, _ = net.apply(row[:size], row[size:], x.clone())
                total += float(file.loss(output, y.clone()).mean()) * len(x)
            except Exception as error:
                raise ModelError(
                    f"The model or the loss of {file.path} fails on a batch of x {tuple(x.shape)} {x.dtype} with "
                    f"y {tuple(y.shape)} {y.dtype}: {type(error).__name__}: {str(error).rstrip('.')}. "
                    "Correct the data, the model or the loss."
                ) from error
    return total / party.samples


def _initial_score(file: SiloFile, net: Net, party: Agent | Desk) -> tuple[str, float]:
    """Return metric name and score of the initial model for a party without rows: one episode, or all days."""
    if row_settings := file.row_only_settings:
        raise SettingError(
            f"{', '.join(row_settings)} of {file.path}: they apply to rows, and this party has none. Remove them."
        )
    metric, evaluate = (
        (EPISODE_RETURN, evaluate_test_episodes) if isinstance(party, Agent) else (ANNUAL_RETURN, evaluate_backtests)
    )
    if isinstance(party, Agent):
        probe_observations("an agent", net, party, extra_outputs=_EXTRA_OUTPUTS)
        party = replace(party, test_count=1)
    else:
        probe_days("a desk", net, party)
    with MODULE_LOCK:
        [result] = evaluate(EvaluationJob(net, metric, [party], models=[[net.copy_initial_row()]], trivial=False))
    return metric.name, result.scores[0]


def dry_run(file: SiloFile) -> dict[str, Any]:
    """Return what the checks found and what would leave the machine; raise if the file cannot take part."""
    party = file.party_data
    net = Net.from_model(file.model, 0)
    layout = net.layout
    policy = file.policy
    if file.has_rows:
        check_columns(party, policy.columns_dropped, "columns_dropped", owner=f"policy of {file.path}")
        initial = "loss", _initial_loss(file, net, party)
    else:
        initial = _initial_score(file, net, party)
    if not math.isfinite(initial[1]):
        raise ModelError(
            f"The {initial[0]} of the initial model is {initial[1]} on the silo's own data. Correct data or model."
        )
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return {
        "party": file.party,
        "model": layout.digest,
        "parameters": layout.trainable_width,
        "data": describe_party(party),
        f"first {initial[0]}": initial[1],
        "bytes of an update": layout.width * layout.dtype.itemsize,
        "tensors": {name: [*shape] for name, shape in shapes.items()},
        "outgoing": outgoing_fields(file, layout),
        "local_only": [
            file.wording.private_data,
            "its party state: optimizer moments and matching layers",
            "everything its code prints or raises",
        ],
    }
