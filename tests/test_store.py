"""Party state stays within its budget in memory and comes back from disk; parties that take no part cost nothing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from descant import Federation, algorithms, parties
from descant.engines import InProcess
from descant.store import PartyStore

Steps = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 99), st.sampled_from(["commit", "rollback"])))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(Steps, st.sampled_from([1, 40, 10**6]))
def test_a_store_is_a_dictionary_whatever_its_budget(steps: list[tuple[str, int, str]], budget: int) -> None:
    store, expected = PartyStore(budget), dict[str, int]()
    for party, value, end in steps:
        store.stage(party, {"w": torch.full((4,), value), "step": torch.tensor(float(value))})
        if end == "commit":
            store.commit(1, [party])
            expected[party] = value
        else:
            store.rollback(store.round)
        assert store.names() == sorted(expected)
        for name, number in expected.items():
            assert torch.equal(store.get(name)["w"], torch.full((4,), number))
        assert store.held_bytes <= max(budget, 36)
    assert store.get("nobody") == {}


def test_what_is_handed_out_or_in_is_not_shared() -> None:
    store, row = PartyStore(), torch.zeros(3)
    store.stage("a", {"w": row})
    store.commit(1, ["a"])
    row += 1
    assert torch.equal(store.get("a")["w"], torch.zeros(3))
    store.get("a")["w"].add_(1)
    assert torch.equal(store.get("a")["w"], torch.zeros(3))


def test_only_the_parties_that_count_are_committed() -> None:
    store = PartyStore()
    for name in "ab":
        store.stage(name, {"w": torch.ones(1)})
    store.commit(7, ["b", "c"])
    assert (store.names(), store.round) == (["b"], 7)
    store.commit(8, ["a"])
    assert store.names() == ["b"]


def test_a_hundred_thousand_parties_of_which_ten_take_part() -> None:
    """Only those who trained have state, and no more of it is in memory than the budget allows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 784)).astype(np.float32), np.array([0, 1, 2])
    people = parties.from_arrays([(x, y)] * 100_000, test=0)
    algorithm = algorithms.FedAvgPlus(alpha=1.0)
    budget = 25 * 7850 * 4
    fed = Federation(nn.Linear(784, 10), people, algorithm, lr=0.1, steps=1, batch=3, attend=10, budget=budget)
    fed.fit(8, progress=False)
    own = fed.state.own
    assert isinstance(own, PartyStore)
    assert 70 < len(own.names()) <= 80
    assert 0 < own.held_bytes <= budget
    assert all(torch.isfinite(own.get(name)["model"]).all() for name in own.names())
    assert isinstance(fed._engine, InProcess) and fed._engine.memory.names() == []
