"""Party state stays within its budget in memory and comes back from disk; parties that take no part cost nothing."""

from __future__ import annotations

import copy
import json
import pickle  # noqa: TID251 - what users do between processes of their own
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from descant import Federation, algorithms, parties
from descant.engines import InProcess
from descant.engines.ray.remote_state import MIN_REMOTE_BYTES, RemotePartyStore, RemoteState
from descant.errors import StateError
from descant.rounds.checkpoint import make_rejections
from descant.rounds.validation import Rejection
from descant.storage import PartyStore
from descant.storage.compressed_list import CompressedList, _Block, manifest_chunks
from descant.storage.event_log import replace_non_finite

Steps = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 99), st.sampled_from(["commit", "rollback"])))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(Steps, st.sampled_from([1, 40, 10**6]))
def test_a_store_is_a_dictionary_whatever_its_budget(steps: list[tuple[str, int, str]], budget: int) -> None:
    store = PartyStore(budget)
    expected = dict[str, int]()
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
        assert store.memory_bytes <= max(budget, 36)
    assert store.get("unknown") == {}


Moves = st.tuples(
    st.sampled_from("abc"), st.integers(0, 99), st.booleans(), st.sampled_from(["commit", "drop", "undo"])
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(Moves))
def test_a_remote_store_is_a_dictionary_wherever_states_are(moves: list[tuple[str, int, bool, str]]) -> None:
    fetched = list[int]()

    def fetch(place: int) -> dict[str, torch.Tensor]:
        fetched.append(place)
        return {"w": torch.full((4,), place)}

    store = RemotePartyStore(10**6)
    expected = dict[str, tuple[int, bool]]()
    for party, value, far, end in moves:
        store.stage(party, RemoteState(value, fetch) if far else {"w": torch.full((4,), value)})
        if end == "drop":
            store.rollback(store.round)
        else:
            store.commit(store.round + 1, [party])
            if end == "undo":
                store.rollback(store.round - 1)
            else:
                expected[party] = (value, far)
        assert store.names() == sorted(expected)
        assert {name for name in "abc" if isinstance(store.peek(name), RemoteState)} == {
            k for k in expected if expected[k][1]
        }
        assert store.held_bytes == sum(32 for _, far in expected.values() if not far) and not fetched
    assert {name: int(store.get(name)["w"][0]) for name in store.names()} == {k: v for k, (v, _) in expected.items()}
    assert sorted(fetched) == sorted(value for value, far in expected.values() if far)
    assert not store.has_remote or any(far for _, _, far, _ in moves)
    store.clear()
    assert store.names() == [] and store.get("a") == {}


def test_interrupted_rollback_of_remote_state_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C pressed twice the previous round is still there."""
    store = RemotePartyStore(10**6)
    for round, place in ((1, 10), (2, 20)):
        store.stage("a", RemoteState(place, lambda place: {"w": torch.full((4,), place)}))
        store.commit(round, ["a"])
    rollback = PartyStore.rollback

    def broken(near: PartyStore, round: int) -> None:
        rollback(near, round)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PartyStore, "rollback", broken)
        store.rollback(1)
    store.rollback(1)
    assert store.round == 1 and int(store.get("a")["w"][0]) == 10


def test_undo_record_is_dropped_when_the_next_round_starts() -> None:
    """Otherwise a round would hold three copies: the previous, the current and the new state."""
    store = RemotePartyStore(10**6)
    places = list[weakref.ref[RemoteState]]()
    for round in (1, 2, 3):
        store.rollback(store.round)
        assert [place() is not None for place in places] == [False, True][3 - round :]
        far = RemoteState(round, lambda place: {"w": torch.full((4,), place)})
        places.append(weakref.ref(far))
        store.stage("a", far)
        store.commit(round, ["a"])
        del far
    store.rollback(2)
    assert int(store.get("a")["w"][0]) == 2
    with pytest.raises(StateError, match="The state is of round 1"):
        store.rollback(1)


def test_large_party_state_marks_the_store_as_remote() -> None:
    store = RemotePartyStore(10**6)
    store.stage("a", {"w": torch.zeros(MIN_REMOTE_BYTES - 1, dtype=torch.uint8)})
    assert not store.has_remote
    store.stage("a", {"w": torch.zeros(MIN_REMOTE_BYTES, dtype=torch.uint8)})
    assert store.has_remote


def test_store_copies_tensors_in_and_out() -> None:
    store = PartyStore()
    row = torch.zeros(3)
    store.stage("a", {"w": row})
    store.commit(1, ["a"])
    row += 1
    assert torch.equal(store.get("a")["w"], torch.zeros(3))
    store.get("a")["w"].add_(1)
    assert torch.equal(store.get("a")["w"], torch.zeros(3))


def test_only_named_parties_are_committed() -> None:
    store = PartyStore()
    for name in "ab":
        store.stage(name, {"w": torch.ones(1)})
    store.commit(7, ["b", "c"])
    assert (store.names(), store.round) == (["b"], 7)
    store.commit(8, ["a"])
    assert store.names() == ["b"]


def test_a_hundred_thousand_parties_of_which_ten_take_part() -> None:
    """Only parties that trained have state, and no more of it is in memory than the budget allows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 784)).astype(np.float32)
    y = np.array([0, 1, 2])
    people = parties.from_arrays([(x, y)] * 100_000, test=0)
    algorithm = algorithms.FedAvgPlus(alpha=1.0)
    budget = 25 * 7850 * 4
    fed = Federation(
        nn.Linear(784, 10), people, algorithm, lr=0.1, steps=1, batch=3, participation=10, memory_budget=budget
    )
    fed.fit(8, progress=False)
    own = fed.state.personal_models
    assert isinstance(own, PartyStore)
    assert 70 < len(own.names()) <= 80
    assert 0 < own.memory_bytes <= budget
    assert all(torch.isfinite(own.get(name)["model"]).all() for name in own.names())
    assert isinstance(fed.engine_, InProcess) and fed.engine_.party_states.names() == []


NUMBERS = st.one_of(st.floats(), st.integers(-5, 5), st.text(max_size=2), st.lists(st.floats(), max_size=2))
ENTRIES = st.dictionaries(st.text(max_size=2), NUMBERS, max_size=3)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.one_of(st.none(), st.lists(ENTRIES, min_size=1, max_size=3)), max_size=20), st.data())
def test_compressed_list_reads_like_a_list_and_gives_its_json(steps: list[Any], data: st.DataObject) -> None:
    """`None` compresses the list in between, however often."""
    kept = CompressedList[dict[str, Any]]([], dict, dict)
    expected = list[dict[str, Any]]()
    for entries in steps:
        if entries is None:
            kept.compress()
            continue
        again = entries * data.draw(st.integers(1, 40))
        kept.extend(map(dict, again))
        expected += again
    assert len(kept) == len(expected) and repr(kept) == repr(expected) == repr([*kept])
    assert [repr(kept[at]) for at in range(-len(kept), len(kept))] == [repr(entry) for entry in expected * 2]
    for some in (slice(3, 40, 2), slice(-3, None), slice(40, 3, -5), slice(70, 40), slice(None, None, -1)):
        assert repr(kept[some]) == repr(expected[some])
    for ordered in (False, True):
        text = json.dumps(replace_non_finite(expected), sort_keys=ordered).encode()
        assert b"".join(kept.json_chunks(ordered)) == text
        assert b"".join(manifest_chunks({"a": kept}, ordered)) == b'{"a": ' + text + b"}"
    with pytest.raises(IndexError):
        kept[len(kept)]


def test_last_entry_of_a_compressed_list_can_be_changed() -> None:
    kept = CompressedList([{"round": round} for round in range(64)], dict, dict)
    kept.compress()
    kept[-1]["own"] = 0.5
    kept.compress()
    assert kept == [*({"round": round} for round in range(63)), {"round": 63, "own": 0.5}] and kept != kept[:-1]


def test_compressed_list_can_be_pickled_and_copied() -> None:
    """A comparison in several processes sends it between them."""
    refusals = make_rejections(Rejection("a", round, "late") for round in range(70))
    refusals.compress()
    assert pickle.loads(pickle.dumps(refusals)) == [*refusals]  # noqa: S301
    other = copy.copy(refusals)
    other.append(Rejection("b", 71, "late"))
    assert len(other) == 71 and len(refusals) == 70 and other[:-1] == [*refusals]


def test_last_entries_are_read_without_decompressing_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompressedList([{"round": round} for round in range(1000)], dict, dict)
    opened = list[_Block]()
    kept.compress()
    entries = _Block.entries
    monkeypatch.setattr(_Block, "entries", lambda block: [opened.append(block), entries(block)][1])
    assert [entry["round"] for entry in kept[-40:]] == [*range(960, 1000)] and len(opened) == 1
    assert kept[::-300] == [{"round": 999}, {"round": 699}, {"round": 399}, {"round": 99}]
