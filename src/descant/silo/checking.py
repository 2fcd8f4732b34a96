"""`descant silo check`: a dry run of a team's file. Nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from ..flat import ONE_AT_A_TIME, Net
from ..parties.coresets import check_columns
from ..parties.elsewhere import description
from .file import Policy, SiloFile

_BATCH = 64


def checked(file: SiloFile) -> dict[str, Any]:
    """What was found, and what would leave the building; an error if the file cannot take part."""
    party, net = file.own, Net.made(file.model, 0)
    layout, policy = net.layout, file.policy
    check_columns(party, policy.columns_dropped, "columns_dropped", f"policy of {file.path}")
    x, y = party.x[:_BATCH].clone(), party.y[:_BATCH].clone()
    with ONE_AT_A_TIME, torch.no_grad():
        output, _ = net.apply(net.row()[: layout.size], net.row()[layout.size :], x)
        loss = float(file.loss(output, y).mean())
    if not torch.isfinite(torch.tensor(loss)):
        raise ModelError(
            f"The loss of the model as it begins is {loss} on the first {len(x)} samples. Mend data or model."
        )
    return {
        "party": file.party,
        "model": layout.digest,
        "parameters": layout.size,
        "tensors": len(layout.names),
        "data": description(party),
        "first loss": loss,
        "bytes of an update": layout.width * layout.dtype.itemsize,
        "leaves": [
            f"the model's {len(layout.names)} tensors after each round of training{_paced(policy)}",
            "how many samples it trains and is tested on, their shape and type",
            "its mean training loss, and the scores of models on its own test set, each a number",
            _rows(policy),
        ],
        "stays": ["the data", "what its optimiser and matching layers remember", "what its code prints or raises"],
    }


def _paced(policy: Policy) -> str:
    return "" if policy.rounds_a_day is None else f", in at most {policy.rounds_a_day} rounds a day"


def _rows(policy: Policy) -> str:
    if not policy.share:
        return "no row of its data"
    dropped = ", ".join(str(column) for column in sorted(set(policy.columns_dropped)))
    blank = f", with 0 in place of what is in columns {dropped}" if dropped else ""
    return f"at most {policy.share:.1%} of its rows, sealed, as a coreset{blank}"
