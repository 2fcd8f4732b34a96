"""Flower's client: a module of its own, so that Ray's workers import it by name."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import (  # type: ignore[import-not-found,unused-ignore]
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn
from torch.nn import functional

from .models import build
from .work import SharedWorkload, open_shared, read

FOLDER = "DESCANT_BENCH_FOLDER"

app = ClientApp()


@lru_cache(1)
def open_client_workload() -> tuple[SharedWorkload, nn.Module, Tensor, Tensor]:
    """Return the module and the memory-mapped data that a worker keeps between messages."""
    torch.set_num_threads(1)
    shared = open_shared(Path(os.environ[FOLDER]))
    x, y = (torch.from_numpy(read(shared.folder / file, mapped=True)) for file in ("x.npy", "y.npy"))
    return shared, build(shared.work.model), x, y


@app.train()  # type: ignore[untyped-decorator,unused-ignore]
def train(message: Message, context: Context) -> Message:
    """Run some steps of SGD from the received weights."""
    shared, model, all_x, all_y = open_client_workload()
    party = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"])
    cut = shared.cuts()[party]
    x = all_x[cut]
    y = all_y[cut]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=shared.work.lr)
    rng = np.random.default_rng([party, number])
    for index in torch.from_numpy(shared.batches(len(y), rng)):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
