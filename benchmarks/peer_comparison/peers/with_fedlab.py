"""FedLab: its serial trainer and synchronous server, standalone; batches come as tensors, without a DataLoader."""

# ruff: noqa: E402  torchvision must be replaced before FedLab is imported
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

# FedLab imports torchvision for data sets that are not used here: empty modules replace it.
for name in ("torchvision", "torchvision.transforms"):
    sys.modules.setdefault(name, ModuleType(name))
sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]

from fedlab.contrib.algorithm.basic_client import (  # type: ignore[import-not-found,unused-ignore]
    SGDSerialClientTrainer,
)
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # type: ignore[import-not-found,unused-ignore]
from fedlab.contrib.dataset.basic_dataset import FedDataset  # type: ignore[import-not-found,unused-ignore]
from fedlab.utils import Aggregators, SerializationTool  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from .contestant_process import parse_workload, serve
from .models import build, load, weights_of
from .work import Array, SharedWorkload


class Parties(FedDataset):  # type: ignore[misc]
    """The parties as iterators of batches, which avoids copying samples one by one."""

    def __init__(self, shared: SharedWorkload) -> None:
        self.shared = shared
        self.rng = np.random.default_rng(shared.work.seed)
        x = torch.from_numpy(shared.x)
        y = torch.from_numpy(shared.y)
        self.parties = [(x[cut], y[cut]) for cut in shared.cuts()]
        self.num = len(self.parties)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.parties[id]
        return ((x[index], y[index]) for index in torch.from_numpy(self.shared.batches(len(y), self.rng)))


class Trainer(SGDSerialClientTrainer):  # type: ignore[misc]
    """The serial trainer, whose replies also contain the number of samples."""

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        for id in id_list:
            reply = self.train(payload[0], self.dataset.get_dataloader(id, self.batch_size))
            self.cache.append([*reply, torch.tensor(float(len(self.dataset.parties[id][1])))])


class Server(SyncServerHandler):  # type: ignore[misc]
    """The synchronous server, with weights by samples."""

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        models = [reply[0] for reply in buffer]
        samples = torch.stack([reply[1] for reply in buffer])
        SerializationTool.deserialize_model(self._model, Aggregators.fedavg_aggregate(models, samples))


class FedLab:
    """The loop of FedLab's StandalonePipeline, some rounds at a time."""

    def __init__(self, shared: SharedWorkload) -> None:
        logging.getLogger().setLevel(logging.WARNING)
        torch.set_num_threads(shared.threads)
        work = shared.work
        model = load(build(work.model), shared.initial())
        self.trainer: Any = Trainer(model, work.parties)
        self.trainer.setup_dataset(Parties(shared))
        self.trainer.setup_optim(1, work.batch, work.lr)
        self.server: Any = Server(model, global_round=2**62, sample_ratio=work.participants / work.parties)
        self.server.num_clients = work.parties

    def rounds(self, n: int) -> None:
        for _ in range(n):
            present = self.server.sample_clients()
            self.trainer.local_process(self.server.downlink_package, present)
            for reply in self.trainer.uplink_package:
                self.server.load(reply)

    def weights(self) -> dict[str, Array]:
        return weights_of(self.server.model)


if __name__ == "__main__":
    shared = parse_workload()
    serve(lambda: FedLab(shared))
