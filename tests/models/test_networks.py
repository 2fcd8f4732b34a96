"""The papers' networks: execution modes, frozen word vectors, defaults and settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dataset_files import write_review_dataset
from descant import Federation, algorithms, parties
from descant import models as networks
from descant.errors import PartyError, SettingError
from descant.models.flat import Net


def image_parties(shape: tuple[int, ...], seed: int = 0) -> parties.Population:
    rng = np.random.default_rng(seed)
    return parties.from_arrays([(rng.normal(size=(12, *shape)).astype(np.float32), np.arange(12) % 10) for _ in "abc"])


@pytest.mark.parametrize(
    ("name", "settings", "shape", "expected_mode"),
    [
        ("logistic", {}, (1, 28, 28), "stacked"),
        ("logistic", {"inputs": 60}, (60,), "stacked"),
        ("mlp", {"inputs": 64, "hidden": [16]}, (64,), "stacked"),
        ("cnn", {"channels": [4, 8], "dense": 16}, (1, 28, 28), "stacked"),
        ("cnn", {"shape": [3, 32, 32]}, (3, 32, 32), "single"),
    ],
)
def test_networks_train_in_the_fastest_mode(
    name: str, settings: dict[str, object], shape: tuple[int, ...], expected_mode: str
) -> None:
    population = image_parties(shape)
    net = partial(networks.NETWORKS[name], **settings)
    fed = Federation(net, population, algorithms.FedAvg(), lr=0.01, steps=2, batch=4)
    assert next(mode for mode, reason in fed.execution_modes().items() if not reason) == expected_mode
    fed.fit(2, progress=False)
    assert fed.history_[-1]["accepted"] == 3 and fed.history_[-1]["change"] > 0


@pytest.fixture
def sentiment(tmp_path: Path) -> tuple[parties.Population, partial[nn.Module]]:
    population = parties.sentiment(data=write_review_dataset(tmp_path), max_words=6)
    return population, partial(networks.lstm, hidden=8, dense=5, data=tmp_path)


def test_the_lstm_is_trained_in_looped_mode(sentiment: tuple[parties.Population, partial[nn.Module]]) -> None:
    population, net = sentiment
    fed = Federation(net, population, algorithms.FedAvg(), participation=3, lr=1.0, steps=20, batch=5)
    assert next(mode for mode, reason in fed.execution_modes().items() if not reason) == "looped"
    fed.fit(8, progress=False)
    assert fed.scores().personal.mean > 0.95 > fed.scores().majority.mean


def test_word_vectors_are_frozen_never_sent_and_shared(
    sentiment: tuple[parties.Population, partial[nn.Module]],
) -> None:
    population, make = sentiment
    module = make()
    net = Net.from_model(make, 0)
    assert isinstance(net.module, nn.Module) and not any("words" in name for name in net.layout.names)
    assert net.layout.width == sum(p.numel() for p in module.parameters())
    assert "words.table" not in module.state_dict()
    fed = Federation(make, population, algorithms.FedAvgPlus(), lr=0.5, steps=2, batch=5).fit(2, progress=False)
    models = [fed.models_[name] for name in ("0", "1")]
    assert len({model.words.table.data_ptr() for model in models}) == 1, "one table for all models"
    assert make().words.table is module.words.table, "shared between federations, too"
    assert copy.deepcopy(models[0]).words.table is models[0].words.table
    assert torch.equal(models[0].words.table, module.words.table)
    assert not torch.equal(models[0].lstm.weight_hh_l0, models[1].lstm.weight_hh_l0)


def test_the_lstm_has_two_layers_of_256_units_by_default(
    sentiment: tuple[parties.Population, partial[nn.Module]],
) -> None:
    _, make = sentiment
    shapes = {name: tuple(p.shape) for name, p in networks.lstm(data=make.keywords["data"]).named_parameters()}
    assert shapes["lstm.weight_ih_l0"] == (1024, 100) and shapes["lstm.weight_hh_l1"] == (1024, 256)
    assert (networks.lstm(data=make.keywords["data"], hidden=8).lstm.bias_ih_l1[8:16] == 1).all()
    assert shapes["dense.weight"] == (30, 256) and shapes["head.weight"] == (2, 30)


def test_settings_of_networks_have_bounds(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"The 'outputs' of logistic must be a whole number >= 1"):
        networks.logistic(3, 0)
    with pytest.raises(SettingError, match=r"The 'hidden' of mlp must be a whole number >= 1\. Got 0"):
        networks.mlp(3, 2, [4, 0])
    with pytest.raises(SettingError, match=r"both sides divisible by 4\. Got \(1, 27, 28\)"):
        networks.cnn(shape=(1, 27, 28))
    with pytest.raises(SettingError, match="The 'vectors' of lstm must be one of 'glove100'"):
        networks.lstm(vectors="glove")
    with pytest.raises(PartyError, match="does not hold glove100"):
        networks.lstm(data=tmp_path)


@pytest.mark.parametrize(("make", "shape"), [(networks.cnn, (3, 32, 32)), (networks.keyword_cnn, (1, 32, 32))])
def test_he_initialization_keeps_the_outputs_dependent_on_the_input(
    make: Callable[..., nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(32, *shape)
    spread = {}
    for init in ("torch", "he"):
        outputs = make(shape=shape, channels=[16, 16, 16, 16], dense=64, init=init)(inputs)
        spread[init] = float(outputs.detach().std(0).mean())  # deviation of outputs over different inputs
    assert 0.2 < spread["he"] < 5 and spread["torch"] < 0.1 * spread["he"]
    with pytest.raises(SettingError, match=r"The 'init' of \w+ must be one of 'torch', 'he'"):
        make(shape=shape, init="she")
