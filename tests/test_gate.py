"""Every report passes the gate: what is bad is refused with its reason, the others go on, the model stays whole."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from descant import Federation, algorithms
from descant.core import Report
from descant.errors import DescantWarning
from descant.flat import Layout
from descant.gate import Gate, Refusal
from fakes import Bytes
from problems import classes, network

LAYOUT = Layout.of(network())
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))


def good(**changes: object) -> Report:
    arrays = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    report = Report("a", 3, "train", arrays=arrays, metrics={"samples": 10, "loss": 0.5})
    return replace(report, **changes)  # type: ignore[arg-type]


def with_tensor(name: str, tensor: Tensor) -> Report:
    return good(arrays={**good().arrays, name: tensor})


def admit(report: Report, gate: Gate | None = None) -> Refusal | None:
    return (gate or Gate(LAYOUT)).admit(report, 3, {"a": 3, "b": 3}, {"a", "b", "c"})


def spoilt(value: float) -> Tensor:
    tensor = torch.zeros(5, 6)
    tensor[2, 3] = value
    return tensor


BAD: dict[str, tuple[Report, str, str]] = {
    "NaN": (
        with_tensor("0.weight", spoilt(math.nan)),
        "0.weight",
        "not finite: expected finite numbers, found 1 of 30",
    ),
    "+Inf": (with_tensor("0.weight", spoilt(math.inf)), "0.weight", "the first inf"),
    "-Inf": (with_tensor("0.weight", spoilt(-math.inf)), "0.weight", "the first -inf"),
    "shape": (
        with_tensor("0.weight", torch.zeros(6, 5)),
        "0.weight",
        r"wrong shape: expected \[5, 6\], found \[6, 5\]",
    ),
    "broadcastable": (with_tensor("0.bias", torch.zeros(1)), "0.bias", r"expected \[5\], found \[1\]"),
    "scalar": (with_tensor("0.bias", torch.zeros(())), "0.bias", r"expected \[5\], found \[\]"),
    "double": (with_tensor("0.bias", torch.zeros(5).double()), "0.bias", "expected torch.float32, found torch.float64"),
    "half": (with_tensor("0.bias", torch.zeros(5).half()), "0.bias", "wrong dtype"),
    "integers": (with_tensor("0.bias", torch.zeros(5, dtype=torch.int64)), "0.bias", "wrong dtype"),
    "sparse": (with_tensor("0.weight", torch.zeros(5, 6).to_sparse()), "0.weight", "not a dense tensor"),
    "extra": (with_tensor("more", torch.zeros(1)), "more", "unexpected tensor"),
    "missing": (good(arrays={n: t for n, t in good().arrays.items() if n != "2.bias"}), "2.bias", "missing tensor"),
    "renamed": (
        good(arrays={("2.b" if n == "2.bias" else n): t for n, t in good().arrays.items()}),
        "2.b",
        "unexpected tensor",
    ),
    "empty": (good(arrays={}), "0.weight", "missing tensor"),
    "unknown party": (good(party="z"), "", "unknown party"),
    "not asked": (good(party="c"), "", "not asked in this round"),
    "stale": (good(round=2), "", "stale: expected round 3, found round 2"),
    "future": (good(round=4), "", "from the future"),
    "error": (good(status="error", reason="out of memory"), "", "error: out of memory"),
    "lost": (good(status="lost"), "", "lost"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_report_is_refused_with_party_tensor_expected_and_found(name: str) -> None:
    report, tensor, message = BAD[name]
    refusal = admit(report)
    assert refusal is not None
    assert (refusal.party, refusal.round, refusal.tensor) == (report.party, report.round, tensor)
    assert re.search(message, str(refusal)), str(refusal)


@pytest.mark.parametrize("samples", [0, -1, math.nan, math.inf, True, False, None, "10", 1.5, 10**30, [1]])
def test_an_absurd_sample_count_is_refused(samples: object) -> None:
    refusal = admit(good(metrics={"samples": samples}))
    assert refusal is not None
    assert "absurd sample count" in str(refusal)


@pytest.mark.parametrize("report", [good(), good(metrics={"samples": 10.0, "loss": -3.0, "reward": -1e9})])
def test_a_good_report_passes_whatever_its_loss_or_reward(report: Report) -> None:
    assert admit(report) is None


def test_a_replay_is_refused() -> None:
    gate = Gate(LAYOUT)
    assert admit(good(), gate) is None
    refusal = admit(good(), gate)
    assert refusal is not None and "replayed" in refusal.reason
    assert admit(good(party="b"), gate) is None


def test_an_algorithm_may_allow_staleness_and_replays_are_found_all_the_same() -> None:
    gate = Gate(LAYOUT, max_staleness=2)
    late = good(round=1)
    assert gate.admit(late, 3, {"a": 1}, {"a"}) is None
    gate.forget_before(3)
    refusal = gate.admit(late, 3, {"a": 1}, {"a"})
    assert refusal is not None and "replayed" in refusal.reason
    older = gate.admit(good(round=0), 3, {"a": 0}, {"a"})
    assert older is not None and str(older).endswith("stale: expected rounds 1 to 3, found round 0")


def test_a_private_tensor_is_refused() -> None:
    refusal = admit(good(), Gate(LAYOUT, private=("2.weight",)))
    assert refusal is not None
    assert (refusal.tensor, refusal.reason) == ("2.weight", "private tensor")


# ── in a round ────────────────────────────────────────────────────────────────────────────────────────────────────────

Fault = Callable[[Report], Sequence[Report]]


def poisoned(report: Report) -> Sequence[Report]:
    if report.party != "1":
        return [report]
    return [replace(report, arrays={name: torch.full_like(t, math.nan) for name, t in report.arrays.items()})]


def twice(report: Report) -> Sequence[Report]:
    return [report, report]


def run(fault: Fault | None, absent: tuple[str, ...] = (), rounds: int = 3) -> Federation:
    engine = partial(Bytes, pieces=2, absent=absent, fault=fault)
    algorithm = algorithms.FedAvgPlus(alpha=1.0)
    return Federation(network(), classes(5), algorithm, lr=0.1, steps=3, batch=4, engine=engine).fit(
        rounds, progress=False
    )


def test_the_round_goes_on_without_the_refused_as_if_they_had_been_absent() -> None:
    fed, without = run(poisoned), run(None, absent=("1",))
    assert torch.equal(fed.state.center, without.state.center)
    assert [refusal.party for refusal in fed.refusals_] == ["1", "1", "1"]
    assert fed.refusals_[0].tensor == "0.weight"


def test_a_replay_changes_nothing() -> None:
    fed = run(twice)
    assert torch.equal(fed.state.center, run(None).state.center)
    assert len(fed.refusals_) == 15


def all_bad(report: Report) -> Sequence[Report]:
    return [replace(report, metrics={"samples": -1})]


def test_a_round_in_which_all_are_refused_leaves_the_model_unchanged_and_says_so() -> None:
    with pytest.warns(DescantWarning, match=r"Round 1: no report was accepted: the model is unchanged .*absurd sample"):
        fed = run(all_bad, rounds=1)
    assert torch.equal(fed.state.center, fed.state.initial)
    assert fed.state.own.names() == []
    assert fed.history_[-1]["accepted"] == 0


def huge(report: Report) -> Sequence[Report]:
    return [replace(report, arrays={name: torch.full_like(t, 3e38) for name, t in report.arrays.items()})]


def test_finite_reports_whose_aggregate_is_not_leave_the_model_unchanged() -> None:
    engine = partial(Bytes, fault=huge)
    algorithm = replace(algorithms.FedAvg(), server_step=2.0)
    fed = Federation(network(), classes(5), algorithm, lr=0.1, steps=1, batch=4, engine=engine)
    with pytest.warns(DescantWarning, match="the aggregate is not finite"):
        fed.fit(1, progress=False)
    assert torch.equal(fed.state.center, fed.state.initial)


def silent(report: Report) -> Sequence[Report]:
    return [] if report.party == "1" else [report]


def test_a_party_that_never_answers_is_lost_and_named() -> None:
    fed = run(silent, rounds=1)
    assert [str(refusal) for refusal in fed.refusals_] == ["round 1, party '1': lost: no answer before the deadline"]


def test_a_party_whose_data_fails_is_named_and_the_others_go_on() -> None:
    people = classes(5)
    people["2"].y[:] = 99  # a label that the model does not know
    fed = Federation(network(), people, algorithms.FedAvg(), lr=0.1, steps=2, batch=4)
    fed.fit(1, progress=False)
    assert [refusal.party for refusal in fed.refusals_] == ["2"]
    assert fed.history_[-1]["accepted"] == 4


def test_a_party_that_diverged_forgets_it_and_can_come_back() -> None:
    people = classes(4)
    fed = Federation(network(), people, algorithms.FedAvg(), solver=None, lr=0.1, steps=2, batch=4)
    people["1"].x[:] = math.inf
    fed.fit(1, progress=False)
    assert [refusal.reason for refusal in fed.refusals_] == ["not finite"]
    people["1"].x[:] = 1.0
    fed.fit(1, progress=False)
    assert fed.history_[-1]["accepted"] == 4
