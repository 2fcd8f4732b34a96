"""`descant silo check`: a dry run of a team's file. Nothing is sent."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ModelError
from ..flat import ONE_AT_A_TIME, Net
from ..parties.coresets import check_columns
from ..parties.elsewhere import description
from ..parties.party import Party
from .file import SiloFile
from .leaving import leaving

_BATCH = 64


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


def checked(file: SiloFile) -> dict[str, Any]:
    """What was found, and what would leave the building; an error if the file cannot take part."""
    party, net = file.own, Net.made(file.model, 0)
    layout, policy = net.layout, file.policy
    check_columns(party, policy.columns_dropped, "columns_dropped", f"policy of {file.path}")
    loss = _first_loss(file, net, party)
    if not math.isfinite(loss):
        raise ModelError(f"The loss of the model as it begins is {loss} on its own data. Mend data or model.")
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return {
        "party": file.party,
        "model": layout.digest,
        "parameters": layout.size,
        "data": description(party),
        "first loss": loss,
        "bytes of an update": layout.width * layout.dtype.itemsize,
        "tensors": {name: [*shape] for name, shape in shapes.items()},
        "leaves": leaving(file, layout),
        "stays": ["the data", "what its optimiser and matching layers remember", "what its code prints or raises"],
    }
