"""`descant silo check`: a dry run of a team's file. Nothing is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...core.interfaces import Exam
from ...core.metrics import ANNUAL, RETURN
from ...coresets.selection import check_columns
from ...errors import ModelError, SettingError
from ...models.flat import ONE_AT_A_TIME, Net
from ...parties import Agent, Desk
from ...parties.party import Party
from ...parties.remote_parties import description
from ...training.agent_training import acting, in_test_episodes
from ...training.backtest_evaluation import in_test_years
from ...training.portfolio_policy import trading
from .outgoing_fields import leaving
from .silo_file import SiloFile

_BATCH = 64
_BESIDE = (0, 1)  # outputs beyond an agent's actions: a policy gradient may have one for the value of what it sees


def _first_loss(file: SiloFile, net: Net, party: Party) -> float:
    """The mean loss of the model as it begins, over all rows to train on."""
    row, size, total = net.row(), net.layout.size, 0.0
    with ONE_AT_A_TIME, torch.no_grad():
        for x, y in zip(torch.split(party.x, _BATCH), torch.split(party.y, _BATCH), strict=True):
            try:
                output, _ = net.apply(row[:size], row[size:], x.clone())
                total += float(file.loss(output, y.clone()).mean()) * len(x)
            except Exception as error:
                raise ModelError(
                    f"The model or the loss of {file.path} fails on a batch of x {tuple(x.shape)} {x.dtype} with "
                    f"y {tuple(y.shape)} {y.dtype}: {type(error).__name__}: {str(error).rstrip('.')}. "
                    "Mend data, model or loss."
                ) from error
    return total / party.samples


def _tried(file: SiloFile, net: Net, party: Agent | Desk) -> tuple[str, float]:
    """By what a party without rows is judged, and how good the model is as it begins: in one episode, or all days."""
    if given := file.for_rows:
        raise SettingError(
            f"{', '.join(given)} of {file.path}: these are for rows, and its party has none. Leave it out."
        )
    metric, examine = (RETURN, in_test_episodes) if isinstance(party, Agent) else (ANNUAL, in_test_years)
    if isinstance(party, Agent):
        acting("an agent", net, party, _BESIDE)
        party = replace(party, tests=1)
    else:
        trading("a desk", net, party)
    with ONE_AT_A_TIME:
        [judged] = examine(Exam(net, metric, [party], [[net.row()]], False))
    return metric.name, judged.scores[0]


def checked(file: SiloFile) -> dict[str, Any]:
    """What was found, and what would leave the building; an error if the file cannot take part."""
    party, net = file.own, Net.made(file.model, 0)
    layout, policy = net.layout, file.policy
    if file.has_rows:
        check_columns(party, policy.columns_dropped, "columns_dropped", f"policy of {file.path}")
        first = "loss", _first_loss(file, net, party)
    else:
        first = _tried(file, net, party)
    if not math.isfinite(first[1]):
        raise ModelError(f"The {first[0]} of the model as it begins is {first[1]} on its own data. Mend data or model.")
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return {
        "party": file.party,
        "model": layout.digest,
        "parameters": layout.size,
        "data": description(party),
        f"first {first[0]}": first[1],
        "bytes of an update": layout.width * layout.dtype.itemsize,
        "tensors": {name: [*shape] for name, shape in shapes.items()},
        "leaves": leaving(file, layout),
        "stays": [
            file.words.stays,
            "what its optimiser and matching layers remember",
            "what its code prints or raises",
        ],
    }
