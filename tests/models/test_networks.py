"""The papers' networks: each trains the way it should, and word vectors are neither learnt nor copied."""

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
from descant import models as problems
from descant.errors import PartyError, SettingError
from descant.models.flat import Net


def pictures(shape: tuple[int, ...], seed: int = 0) -> parties.Population:
    rng = np.random.default_rng(seed)
    return parties.from_arrays([(rng.normal(size=(12, *shape)).astype(np.float32), np.arange(12) % 10) for _ in "abc"])


@pytest.mark.parametrize(
    ("name", "settings", "shape", "way"),
    [
        ("logistic", {}, (1, 28, 28), "stacked"),
        ("logistic", {"inputs": 60}, (60,), "stacked"),
        ("mlp", {"inputs": 64, "hidden": [16]}, (64,), "stacked"),
        ("cnn", {"channels": [4, 8], "dense": 16}, (1, 28, 28), "stacked"),
        ("cnn", {"shape": [3, 32, 32]}, (3, 32, 32), "single"),
    ],
)
def test_nets_train_and_take_the_fast_way(
    name: str, settings: dict[str, object], shape: tuple[int, ...], way: str
) -> None:
    people = pictures(shape)
    net = partial(problems.NETWORKS[name], **settings)
    fed = Federation(net, people, algorithms.FedAvg(), lr=0.01, steps=2, batch=4)
    assert next(found for found, reason in fed.execution_modes().items() if not reason) == way
    fed.fit(2, progress=False)
    assert fed.history_[-1]["accepted"] == 3 and fed.history_[-1]["change"] > 0


@pytest.fixture
def sentiment(tmp_path: Path) -> tuple[parties.Population, partial[nn.Module]]:
    people = parties.sentiment(data=write_review_dataset(tmp_path), max_words=6)
    return people, partial(problems.lstm, hidden=8, dense=5, data=tmp_path)


def test_the_lstm_learns_by_a_loop(sentiment: tuple[parties.Population, partial[nn.Module]]) -> None:
    people, net = sentiment
    fed = Federation(net, people, algorithms.FedAvg(), participation=3, lr=1.0, steps=20, batch=5)
    assert next(found for found, reason in fed.execution_modes().items() if not reason) == "looped"
    fed.fit(8, progress=False)
    assert fed.scores().personal.mean > 0.95 > fed.scores().majority.mean


def test_word_vectors_neither_learn_nor_travel_nor_are_copied(
    sentiment: tuple[parties.Population, partial[nn.Module]],
) -> None:
    people, make = sentiment
    module = make()
    net = Net.from_model(make, 0)
    assert isinstance(net.module, nn.Module) and not any("words" in name for name in net.layout.names)
    assert net.layout.width == sum(p.numel() for p in module.parameters())
    assert "words.table" not in module.state_dict()
    fed = Federation(make, people, algorithms.FedAvgPlus(), lr=0.5, steps=2, batch=5).fit(2, progress=False)
    models = [fed.models_[name] for name in ("0", "1")]
    assert len({model.words.table.data_ptr() for model in models}) == 1, "one table for all"
    assert make().words.table is module.words.table, "of other federations, too"
    assert copy.deepcopy(models[0]).words.table is models[0].words.table
    assert torch.equal(models[0].words.table, module.words.table)
    assert not torch.equal(models[0].lstm.weight_hh_l0, models[1].lstm.weight_hh_l0)


def test_two_layers_of_256_units_are_the_default(sentiment: tuple[parties.Population, partial[nn.Module]]) -> None:
    _, make = sentiment
    shapes = {name: tuple(p.shape) for name, p in problems.lstm(data=make.keywords["data"]).named_parameters()}
    assert shapes["lstm.weight_ih_l0"] == (1024, 100) and shapes["lstm.weight_hh_l1"] == (1024, 256)
    assert (problems.lstm(data=make.keywords["data"], hidden=8).lstm.bias_ih_l1[8:16] == 1).all()
    assert shapes["dense.weight"] == (30, 256) and shapes["head.weight"] == (2, 30)


def test_settings_of_nets_have_bounds(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"The 'outputs' of logistic must be a whole number >= 1"):
        problems.logistic(3, 0)
    with pytest.raises(SettingError, match=r"The 'hidden' of mlp must be a whole number >= 1\. Got 0"):
        problems.mlp(3, 2, [4, 0])
    with pytest.raises(SettingError, match=r"both sides divisible by 4\. Got \(1, 27, 28\)"):
        problems.cnn(shape=(1, 27, 28))
    with pytest.raises(SettingError, match="The 'vectors' of lstm must be one of 'glove100'"):
        problems.lstm(vectors="glove")
    with pytest.raises(PartyError, match="does not hold glove100"):
        problems.lstm(data=tmp_path)


@pytest.mark.parametrize(("make", "shape"), [(problems.cnn, (3, 32, 32)), (problems.keyword_cnn, (1, 32, 32))])
def test_a_net_drawn_for_relu_sees_its_input(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(32, *shape)
    spread = {}
    for init in ("torch", "he"):
        outputs = make(shape=shape, channels=[16, 16, 16, 16], dense=64, init=init)(inputs)
        spread[init] = float(outputs.detach().std(0).mean())  # how unlike the outputs of unlike inputs are
    assert 0.2 < spread["he"] < 5 and spread["torch"] < 0.1 * spread["he"]
    with pytest.raises(SettingError, match=r"The 'init' of \w+ must be one of 'torch', 'he'"):
        make(shape=shape, init="she")
