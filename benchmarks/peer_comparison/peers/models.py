"""The models of the workloads as torch modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .work import Array


def build(name: str) -> nn.Module:
    """Return 784-10, 784-200-200-10, or two 5x5 convolutions with pooling and 512 units, by name."""
    if name == "logistic":
        return nn.Linear(784, 10)
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    if name == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
    raise ValueError(f"There is no model {name!r}.")


def load(module: nn.Module, weights: Mapping[str, Array]) -> nn.Module:
    """Return the module with these weights loaded."""
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return module


def weights_of(module: nn.Module) -> dict[str, Array]:
    """Return the weights of a module by name."""
    return {name: _array(parameter) for name, parameter in module.named_parameters()}


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().numpy().copy()
    return array
