"""Networks for rows of numbers and for images; all have kernels (see `training.stacked_gradient`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from ..core.settings import check_settings, setting
from ..errors import SettingError

Initialization: TypeAlias = Literal["torch", "he"]


@dataclass(frozen=True)
class _Sizes:
    inputs: int = setting(784, "numbers per sample", least=1, whole=True)
    outputs: int = setting(10, "number of classes", least=1, whole=True)
    hidden: Sequence[int] = setting((200,), "units of each hidden layer", least=1, whole=True)
    channels: Sequence[int] = setting((32, 64), "channels of each convolution", least=1, whole=True)
    dense: int = setting(512, "units of the dense layer after the convolutions", least=1, whole=True)
    init: Initialization = setting("torch", "the initialization of weights", one_of=("torch", "he"))


def logistic(inputs: int = 784, outputs: int = 10) -> nn.Module:
    """Multinomial logistic regression: the papers' model for synthetic data (60 inputs), MNIST and FEMNIST (784).

    >>> sum(p.numel() for p in logistic(60, 10).parameters())
    610
    """
    check_settings(_Sizes(inputs, outputs), "logistic")
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


def mlp(inputs: int = 784, outputs: int = 10, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Linear layers with ReLU: `hidden=(100, 100)` is Mostafa's (2019), 200 or 1,500 units Tuor's (2021).

    >>> [tuple(p.shape) for p in mlp(64, 10, [32]).parameters()]
    [(32, 64), (32,), (10, 32), (10,)]
    """
    check_settings(_Sizes(inputs, outputs, tuple(hidden)), "mlp")
    layers = list[nn.Module]([nn.Flatten()])
    width = inputs
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def cnn(
    outputs: int = 10,
    shape: Sequence[int] = (1, 28, 28),
    channels: Sequence[int] = (32, 64),
    dense: int = 512,
    init: Initialization = "torch",
) -> nn.Module:
    """5 x 5 convolutions, each with ReLU and 2 x 2 pooling, and a dense layer, for small images.

    `shape` is (channels, height, width) of an image; both sides must be divisible by 2 for every convolution.
    The default is the network of McMahan et al. (2017); with `dense=1024` it is Mostafa's (2019, §4) for CIFAR-10.
    `init="he"` draws weights as He et al. (2015) do for ReLU, which keeps the signal's variance through the layers.

    >>> sum(p.numel() for p in cnn(shape=(3, 32, 32)).parameters())
    2156490
    """
    return _convolutional("cnn", outputs, shape, channels=channels, dense=dense, init=init, kernel=5, pool_every=1)


def keyword_cnn(
    outputs: int = 10,
    shape: Sequence[int] = (1, 32, 32),
    channels: Sequence[int] = (64, 64, 64, 64),
    dense: int = 1024,
    init: Initialization = "torch",
) -> nn.Module:
    """Pairs of 3 x 3 convolutions with ReLU and pooling, and a dense layer, for keywords (Mostafa, §4).

    2 x 2 pooling follows each pair of convolutions. The paper has four convolutions of 64 feature maps and 1024 units;
    it states neither padding nor initialization. With torch's default initialization, the outputs hardly depend on the
    input for hundreds of steps.

    >>> sum(p.numel() for p in keyword_cnn().parameters())
    4317002
    """
    if len(channels) % 2:
        raise SettingError(
            f"The 'channels' of keyword_cnn must have an even length: convolutions come in pairs. Got {channels!r}."
        )
    return _convolutional(
        "keyword_cnn", outputs, shape, channels=channels, dense=dense, init=init, kernel=3, pool_every=2
    )


def _convolutional(
    owner: str,
    outputs: int,
    shape: Sequence[int],
    channels: Sequence[int],
    dense: int,
    init: Initialization,
    kernel: int,
    pool_every: int,  # convolutions before each pooling
) -> nn.Module:
    check_settings(_Sizes(outputs=outputs, channels=tuple(channels), dense=dense, init=init), owner)
    factor = 2 ** (len(channels) // pool_every)
    if len(shape) != 3 or shape[1] % factor or shape[2] % factor:
        raise SettingError(
            f"The 'shape' of {owner} must be (channels, height, width), both sides divisible by {factor}. "
            f"Got {shape!r}."
        )
    layers = list[nn.Module]()
    depth = shape[0]
    for index, units in enumerate(channels, 1):
        layers += [nn.Conv2d(depth, units, kernel, padding=kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (index % pool_every == 0)
        depth = units
    flat = depth * (shape[1] // factor) * (shape[2] // factor)
    layers += [nn.Flatten(), nn.Linear(flat, dense), nn.ReLU(), nn.Linear(dense, outputs)]
    net = nn.Sequential(*layers)
    for name, parameter in net.named_parameters() if init == "he" else ():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return net
