"""pfl (Apple): FederatedAveraging on its SimulatedBackend, datasets as tensors, weights by samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found,unused-ignore]
from pfl.aggregate.weighting import WeightingStrategy  # type: ignore[import-not-found,unused-ignore]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found,unused-ignore]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found,unused-ignore]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found,unused-ignore]
from pfl.data.pytorch import PyTorchTensorDataset  # type: ignore[import-not-found,unused-ignore]
from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found,unused-ignore]
from pfl.metrics import Metrics, Weighted  # type: ignore[import-not-found,unused-ignore]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn
from torch.nn import functional

from .contestant_process import parse_workload, serve
from .models import build, load, weights_of
from .work import Array, SharedWorkload

NEVER = 10**9


class Net(nn.Module):
    """A module with the loss and metrics methods that pfl calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.inner(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(functional.cross_entropy(self.inner(x), y, reduction="sum")), len(y))}


class BySamples(WeightingStrategy):  # type: ignore[misc]
    """Weights by a party's samples; pfl's WeightByDatapoints would count the samples drawn for its steps."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> tuple[Any, Metrics]:
        stats.reweight(self.samples[user_context.user_id])
        return stats, Metrics()


class Pfl:
    """pfl's own loop, some iterations at a time; the algorithm continues from its state."""

    def __init__(self, shared: SharedWorkload) -> None:
        torch.set_num_threads(shared.threads)
        self.shared = shared
        self.work = shared.work
        self.done = 0
        self.rng = np.random.default_rng(self.work.seed)
        x = torch.from_numpy(shared.x)
        y = torch.from_numpy(shared.y)
        self.parties = [(x[cut], y[cut]) for cut in shared.cuts()]
        self.net = Net(load(build(self.work.model), shared.initial()))
        central = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.model = PyTorchModel(self.net, torch.optim.SGD, central)
        data = FederatedDataset(self.dataset, self.draw)
        weighting = BySamples([len(y) for _, y in self.parties])
        self.backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[weighting])
        self.algorithm = FederatedAveraging()
        self.train = NNTrainHyperParams(
            local_batch_size=self.work.batch, local_num_epochs=1, local_learning_rate=self.work.lr
        )

    def draw(self) -> int:
        return int(self.rng.integers(len(self.parties)))

    def dataset(self, party: int) -> PyTorchTensorDataset:
        """Return the samples of all steps in sequence, because pfl runs epochs over a dataset."""
        x, y = self.parties[party]
        index = torch.from_numpy(self.shared.batches(len(y), self.rng).reshape(-1))
        return PyTorchTensorDataset((x[index], y[index]), user_id=party)

    def rounds(self, n: int) -> None:
        self.done += n
        params = NNAlgorithmParams(
            central_num_iterations=self.done,
            evaluation_frequency=NEVER,
            train_cohort_size=self.work.participants,
            val_cohort_size=None,
        )
        self.algorithm.run(params, self.backend, self.model, self.train, send_metrics_to_platform=False)

    def weights(self) -> dict[str, Array]:
        return weights_of(self.net.inner)


if __name__ == "__main__":
    shared = parse_workload()
    serve(lambda: Pfl(shared))
