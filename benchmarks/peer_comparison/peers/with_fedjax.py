"""FedJAX: its federated averaging with the jit backend, models in Haiku, pictures with channels last."""

# ruff: noqa: E402  JAX must be patched before FedJAX is imported
from __future__ import annotations

from typing import Any

import haiku as hk  # type: ignore[import-not-found,unused-ignore]
import jax  # type: ignore[import-not-found,unused-ignore]
import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]
import numpy as np

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 calls a function that JAX has removed
import fedjax  # type: ignore[import-not-found,unused-ignore]

from .contestant_process import parse_workload, serve
from .work import Array, SharedWorkload


def network(name: str) -> Any:
    """Return the layers by the name of the model."""
    if name == "logistic":
        return hk.Sequential([hk.Linear(10)])
    if name == "mlp":
        return hk.Sequential([hk.Linear(200), jax.nn.relu, hk.Linear(200), jax.nn.relu, hk.Linear(10)])
    return hk.Sequential(
        [
            *(hk.Conv2D(32, 5), jax.nn.relu, hk.MaxPool(2, 2, "VALID")),
            *(hk.Conv2D(64, 5), jax.nn.relu, hk.MaxPool(2, 2, "VALID")),
            *(hk.Flatten(), hk.Linear(512), jax.nn.relu, hk.Linear(10)),
        ]
    )


LAYERS = {
    "logistic": {"linear": ""},
    "mlp": {"linear": "0.", "linear_1": "2.", "linear_2": "4."},
    "cnn": {"conv2_d": "0.", "conv2_d_1": "3.", "linear": "7.", "linear_1": "9."},
}


def from_torch(name: str, weights: dict[str, Array]) -> dict[str, dict[str, Any]]:
    """Return torch weights in Haiku's layout: [in, out], filters as [height, width, in, out]."""
    found = {}
    for layer, prefix in LAYERS[name].items():
        w = weights[f"{prefix}weight"]
        if (name, layer) == ("cnn", "linear"):  # its inputs are flattened with channels first
            w = w.reshape(512, 64, 7, 7).transpose(0, 2, 3, 1).reshape(512, 3136)
        found[layer] = {"w": jnp.asarray(w.transpose(2, 3, 1, 0) if w.ndim == 4 else w.T)}
        found[layer]["b"] = jnp.asarray(weights[f"{prefix}bias"])
    return found


def to_torch(name: str, params: Any) -> dict[str, Array]:
    """Return Haiku weights in torch's layout, the inverse of :func:`from_torch`."""
    found = {}
    for layer, prefix in LAYERS[name].items():
        w = np.asarray(params[layer]["w"])
        w = w.transpose(3, 2, 0, 1) if w.ndim == 4 else w.T
        if (name, layer) == ("cnn", "linear"):
            w = w.reshape(512, 7, 7, 64).transpose(0, 3, 1, 2).reshape(512, 3136)
        found[f"{prefix}weight"] = np.ascontiguousarray(w)
        found[f"{prefix}bias"] = np.asarray(params[layer]["b"])
    return found


class FedJax:
    """FedJAX's own algorithm and sampler."""

    def __init__(self, shared: SharedWorkload) -> None:
        self.work = work = shared.work
        x = np.moveaxis(shared.x, 1, -1) if work.model == "cnn" else shared.x  # one channel: no copy
        data = {f"{k:06d}": {"x": x[cut], "y": shared.y[cut]} for k, cut in enumerate(shared.cuts())}
        clients = fedjax.InMemoryFederatedData(data)
        self.sampler = fedjax.client_samplers.UniformGetClientSampler(clients, work.participants, seed=work.seed)
        forward = hk.transform(lambda batch: network(work.model)(batch["x"]))
        model = fedjax.create_model_from_haiku(
            transformed_forward_pass=forward,
            sample_batch={"x": x[:1], "y": shared.y[:1]},
            train_loss=lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output),
        )
        self.algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            fedjax.model_grad(model),
            fedjax.optimizers.sgd(work.lr),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=None, num_steps=work.steps),
        )
        self.state = self.algorithm.init(from_torch(work.model, shared.initial()))

    def rounds(self, n: int) -> None:
        for _ in range(n):
            self.state, _ = self.algorithm.apply(self.state, self.sampler.sample())
        jax.block_until_ready(self.state.params)  # JAX runs asynchronously

    def weights(self) -> dict[str, Array]:
        return to_torch(self.work.model, self.state.params)


if __name__ == "__main__":
    shared = parse_workload()
    serve(lambda: FedJax(shared))
