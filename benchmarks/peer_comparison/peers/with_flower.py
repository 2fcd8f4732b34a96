"""Flower's simulation over Ray: its FedAvg strategy, one core for a client, as many clients at once as workers."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from flwr.app import ArrayRecord, Context  # type: ignore[import-not-found,unused-ignore]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found,unused-ignore]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found,unused-ignore]
from flwr.simulation import run_simulation  # type: ignore[import-not-found,unused-ignore]

from . import flower_client
from .contestant_process import parse_workload, serve
from .models import build, load
from .work import Array, SharedWorkload


class StrictFedAvg(FedAvg):  # type: ignore[misc]
    """FedAvg that fails unless all clients have answered, because fewer would mean less work."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        wrong = [reply.error.reason for reply in replies if reply.has_error()]
        if wrong or len(replies) < self.min_train_nodes:
            raise RuntimeError(f"{len(replies)} clients answered, {len(wrong)} of them with an error: {wrong[:1]}")
        return super().aggregate_train(server_round, replies)


class Flower:
    """The strategy's own loop, some rounds at a time."""

    def __init__(self, shared: SharedWorkload, grid: Grid) -> None:
        work = shared.work
        self.grid = grid
        self.arrays = ArrayRecord(load(build(work.model), shared.initial()).state_dict())
        self.strategy = StrictFedAvg(
            fraction_train=work.participants / work.parties,
            min_train_nodes=work.participants,
            min_available_nodes=work.parties,
            fraction_evaluate=0.0,
        )

    def rounds(self, n: int) -> None:
        result: Any = self.strategy.start(self.grid, self.arrays, num_rounds=n)
        self.arrays = result.arrays

    def weights(self) -> dict[str, Array]:
        return {name: tensor.numpy() for name, tensor in self.arrays.to_torch_state_dict().items()}


def simulate(shared: SharedWorkload) -> None:
    """Run the protocol inside Flower's server app, the only place that can drive its simulation."""
    os.environ[flower_client.FOLDER] = str(shared.folder)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    server = ServerApp()
    began = time.perf_counter()

    @server.main()  # type: ignore[untyped-decorator,unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        serve(lambda: Flower(shared, grid), began)

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server,
        flower_client.app,
        num_supernodes=shared.work.parties,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": shared.threads, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    simulate(parse_workload())
