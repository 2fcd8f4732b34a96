"""Update validation: bad replies are rejected with a reason, the others count, the model stays finite."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bytes_engine import BytesEngine
from descant import Algorithm, Federation, Sgd, algorithms, parties
from descant.algorithms.components import ServerStep, uniform_weights
from descant.core.messages import Reply, Task
from descant.engines import InProcess
from descant.errors import DescantWarning
from descant.models.flat import Layout
from descant.rounds.validation import Rejection, UpdateValidator
from descant.serialization.wire import pack, unpack
from toy_problems import METHODS, classification_parties, network

LAYOUT = Layout.from_module(network())
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))


def good(**changes: object) -> Reply:
    arrays = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    reply = Reply("a", 3, "train", arrays=arrays, metrics={"samples": 10, "loss": 0.5})
    return replace(reply, **changes)  # type: ignore[arg-type]


def with_tensor(name: str, tensor: Tensor) -> Reply:
    return good(arrays={**good().arrays, name: tensor})


def make_validator(**settings: Any) -> UpdateValidator:
    validator = UpdateValidator(LAYOUT, {"a", "b", "c"}, **settings)
    validator.expect([Task(party, 3, "train", arrays={}, settings={}) for party in "ab"], 3)
    return validator


def validate_reply(reply: Reply, validator: UpdateValidator | None = None) -> Rejection | None:
    return (validator or make_validator()).validate(reply, 3)


def with_one_value(value: float) -> Tensor:
    tensor = torch.zeros(5, 6)
    tensor[2, 3] = value
    return tensor


BAD: dict[str, tuple[Reply, str, str]] = {
    "NaN": (
        with_tensor("0.weight", with_one_value(math.nan)),
        "0.weight",
        "not finite: expected finite numbers, found 1 of 30",
    ),
    "+Inf": (with_tensor("0.weight", with_one_value(math.inf)), "0.weight", "the first inf"),
    "-Inf": (with_tensor("0.weight", with_one_value(-math.inf)), "0.weight", "the first -inf"),
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
    "another kind": (good(kind="evaluate"), "", "another kind of task: expected train, found evaluate"),
    "error": (good(status="error", reason="out of memory"), "", "error: out of memory"),
    "lost": (good(status="lost"), "", "lost"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_rejected_with_party_tensor_expected_and_found(name: str) -> None:
    reply, tensor, message = BAD[name]
    rejection = validate_reply(reply)
    assert rejection is not None
    assert (rejection.party, rejection.round, rejection.tensor) == (reply.party, reply.round, tensor)
    assert re.search(message, str(rejection)), str(rejection)


@pytest.mark.parametrize("samples", [0, -1, math.nan, math.inf, True, False, None, "10", 1.5, 10**30, [1]])
def test_an_absurd_sample_count_is_rejected(samples: object) -> None:
    rejection = validate_reply(good(metrics={"samples": samples}))
    assert rejection is not None
    assert "absurd sample count" in str(rejection)


@pytest.mark.parametrize("reply", [good(), good(metrics={"samples": 10.0, "loss": -3.0, "reward": -1e9})])
def test_a_good_reply_is_accepted_with_any_loss_or_reward(reply: Reply) -> None:
    assert validate_reply(reply) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"party": ["a"]},
        {"party": None},
        {"round": "3"},
        {"round": None},
        {"round": True},
        {"round": 3.0},
        {"status": 7},
        {"metrics": [1]},
        {"metrics": None},
        {"metrics": {"samples": 10, "loss": "low"}},
        {"metrics": {"samples": 10, "loss": None}},
        {"metrics": {"samples": 10, "loss": 10**400}},
        {"metrics": {"samples": 10**400}},
        {"arrays": {**good().arrays, "0.bias": torch.zeros(5, device="meta")}},
        {"arrays": [torch.zeros(1)]},
        {"arrays": {"0.weight": [0.0]}},
    ],
)
def test_malformed_replies_are_rejected_without_raising(changes: dict[str, object]) -> None:
    assert validate_reply(good(**changes)) is not None


def test_a_replay_is_rejected() -> None:
    validator = make_validator()
    assert validate_reply(good(), validator) is None
    rejection = validate_reply(good(), validator)
    assert rejection is not None and "replayed" in rejection.reason
    assert validate_reply(good(party="b"), validator) is None


def test_max_staleness_accepts_late_replies_and_still_rejects_replays() -> None:
    validator = UpdateValidator(LAYOUT, {"a"}, max_staleness=2)
    for round in (1, 2, 3):
        validator.expect([Task("a", round, "train", arrays={}, settings={})], round)
    late = good(round=1)
    assert validator.validate(late, 3) is None
    rejection = validator.validate(late, 3)
    assert rejection is not None and "replayed" in rejection.reason
    validator.expect([], 4)
    older = validator.validate(late, 4)
    assert older is not None and str(older).endswith("stale: expected rounds 2 to 4, found round 1")
    assert validator.validate(good(round=2), 4) is None


def test_a_private_tensor_is_rejected() -> None:
    rejection = validate_reply(good(), make_validator(private_layers=("2.weight",)))
    assert rejection is not None
    assert (rejection.tensor, rejection.reason) == ("2.weight", "private tensor")


Fault = Callable[[Reply], Sequence[Reply]]


def poisoned(reply: Reply) -> Sequence[Reply]:
    if reply.party != "1":
        return [reply]
    return [replace(reply, arrays={name: torch.full_like(t, math.nan) for name, t in reply.arrays.items()})]


def twice(reply: Reply) -> Sequence[Reply]:
    return [reply, reply]


def run(fault: Fault | None, absent: tuple[str, ...] = (), rounds: int = 3) -> Federation:
    engine = partial(BytesEngine, batch_count=2, absent=absent, tamper=fault)
    solver = Sgd(lr=0.1, steps=3, batch=4, optimizer="Adam")
    fed = Federation(
        network(), classification_parties(5), algorithms.FedAvgPlus(alpha=1.0), solver=solver, engine=engine
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*replies were rejected", category=DescantWarning)
        return fed.fit(rounds, progress=False)


def test_a_round_treats_rejected_parties_as_absent() -> None:
    fed = run(poisoned)
    without = run(None, absent=("1",))
    assert fed.hash() == without.hash()  # the same models and party states
    assert [rejection.party for rejection in fed.rejections_] == ["1", "1", "1"]
    assert fed.rejections_[0].tensor == "0.weight"


def test_a_replay_changes_nothing() -> None:
    fed = run(twice)
    assert fed.hash() == run(None).hash()
    assert len(fed.rejections_) == 15


def test_rejections_warn_once() -> None:
    engine = partial(BytesEngine, tamper=poisoned)
    fed = Federation(network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=1, batch=4, engine=engine)
    with pytest.warns(DescantWarning, match=r"1 of 5 replies were rejected, the first: round 1, party '1'") as caught:
        fed.fit(3, progress=False)
    assert len(caught) == 1 and len(fed.rejections_) == 3
    again = Federation(
        network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=1, batch=4, engine=engine
    )
    assert len(again.rejections_) == 0


class Late(BytesEngine):
    """An engine that returns the replies of party 1 a round late, before those of the round."""

    ready: tuple[Reply, ...] = ()
    held: tuple[Reply, ...] = ()

    def submit(self, tasks: Sequence[Task]) -> None:
        super().submit(tasks)
        self.ready = self.held
        self.held = ()

    def collect(self, timeout: float) -> list[Reply]:
        replies = super().collect(timeout)
        late = self.ready
        self.ready = ()
        self.held += tuple(reply for reply in replies if reply.party == "1")
        return [*late, *(reply for reply in replies if reply.party != "1")]


def test_a_late_reply_counts_only_within_max_staleness() -> None:
    def run_late(staleness: int) -> Federation:
        algorithm = replace(algorithms.FedAvg(), max_staleness=staleness)
        fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=1, batch=4, engine=Late)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DescantWarning)
            return fed.fit(3, progress=False)

    strict = run_late(0)
    tolerant = run_late(1)
    assert [entry["accepted"] for entry in strict.history_] == [4, 4, 4]
    assert {rejection.reason.split(":")[0] for rejection in strict.rejections_} == {"lost", "stale"}
    assert [entry["accepted"] for entry in tolerant.history_] == [4, 5, 5]


def test_leftovers_of_an_interrupted_round_do_not_reach_the_next() -> None:
    """After an interrupt between two batches, the engine drops the rest of the round and the run continues."""

    def make_federation() -> Federation:
        engine = partial(InProcess, max_parties=2)
        return Federation(
            network(), classification_parties(5), algorithms.FedAvgPlus(), lr=0.1, steps=2, batch=4, engine=engine
        )

    fed = make_federation().fit(1, progress=False)
    collect = fed.engine_.collect
    calls = iter([0])

    def interrupted(timeout: float) -> list[Reply]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return collect(timeout)

    fed.engine_.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fed.fit(1, progress=False)
    fed.engine_.collect = collect  # type: ignore[method-assign]
    assert fed.scores().names == fed.population.names
    assert fed.fit(2, progress=False).hash() == make_federation().fit(3, progress=False).hash()
    assert not fed.rejections_


def all_bad(reply: Reply) -> Sequence[Reply]:
    return [replace(reply, metrics={"samples": -1})]


def test_a_round_without_accepted_replies_warns_and_keeps_the_model() -> None:
    with pytest.warns(DescantWarning, match=r"Round 1: no reply was accepted: the model is unchanged .*absurd sample"):
        fed = run(all_bad, rounds=1)
    assert torch.equal(fed.state.global_model, fed.state.initial_model)
    assert fed.state.personal_models.names() == []
    assert fed.history_[-1]["accepted"] == 0


def huge(reply: Reply) -> Sequence[Reply]:
    return [replace(reply, arrays={name: torch.full_like(t, 3e38) for name, t in reply.arrays.items()})]


def test_a_non_finite_aggregate_leaves_the_model_unchanged() -> None:
    engine = partial(BytesEngine, tamper=huge)
    algorithm = replace(algorithms.FedAvg(), server_update=ServerStep(2.0))
    fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=1, batch=4, engine=engine)
    with pytest.warns(DescantWarning, match="the aggregate is not finite"):
        fed.fit(1, progress=False)
    assert torch.equal(fed.state.global_model, fed.state.initial_model)


def hostile(reply: Reply) -> Sequence[Reply]:
    """Let two of five parties send huge finite values, which validation accepts and the aggregator must resist."""
    if reply.party not in ("3", "4"):
        return [reply]
    return [replace(reply, arrays={name: torch.full_like(t, 1e4) for name, t in reply.arrays.items()})]


@pytest.mark.parametrize("name", ["FedAvg", "RFA", "CoordinateMedian", "FedGeoMedPlus", "FedCoMedPlus"])
def test_medians_resist_40_percent_hostile_parties_and_the_mean_does_not(name: str) -> None:
    algorithm = replace(METHODS[name](), compute_weights=uniform_weights)

    def center(fault: Fault | None) -> torch.Tensor:
        engine = partial(BytesEngine, tamper=fault)
        fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=2, batch=4, engine=engine)
        return fed.fit(3, progress=False).state.global_model

    moved = (center(hostile) - center(None)).abs().max()
    assert moved > 1e3 if name == "FedAvg" else moved < 2


def extreme(reply: Reply) -> Sequence[Reply]:
    losses = {"0": math.inf, "1": -math.inf, "2": math.nan}
    return [replace(reply, metrics={**reply.metrics, "loss": losses.get(reply.party, 1.7e308)})]


def test_any_numeric_loss_is_accepted() -> None:
    fed = run(extreme, rounds=2)
    assert [entry["accepted"] for entry in fed.history_] == [5, 5]
    assert fed.history_[-1]["loss"] == pytest.approx(1.7e308)


def test_objects_that_are_no_replies_are_rejected_and_the_round_continues() -> None:
    class Malformed(BytesEngine):
        def collect(self, timeout: float) -> list[Reply]:
            return [None, "x", {}, replace(good(), party=["1"]), *super().collect(timeout)]  # type: ignore[list-item, arg-type]

    fed = Federation(
        network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=1, batch=4, engine=Malformed
    )
    with pytest.warns(DescantWarning, match="4 of 5 replies were rejected"):
        fed.fit(1, progress=False)
    assert fed.history_[-1]["accepted"] == 5
    plain = Federation(network(), classification_parties(5), algorithms.FedAvg(), lr=0.1, steps=1, batch=4).fit(
        1, progress=False
    )
    assert fed.hash() == plain.hash()


def test_tensors_that_require_gradients_are_accepted() -> None:
    class Parameters(BytesEngine):
        def collect(self, timeout: float) -> list[Reply]:
            replies = super().collect(timeout)
            return [replace(r, arrays={n: torch.nn.Parameter(t) for n, t in r.arrays.items()}) for r in replies]

    fed = Federation(
        network(), classification_parties(5), algorithms.FedAvgPlus(), lr=0.1, steps=1, batch=4, engine=Parameters
    )
    plain = Federation(network(), classification_parties(5), algorithms.FedAvgPlus(), lr=0.1, steps=1, batch=4).fit(
        2, progress=False
    )
    assert fed.fit(2, progress=False).hash() == plain.hash()


def test_robust_methods_resist_hostile_running_statistics() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    population = classification_parties(7).subset(["0", "1", "2", "3", "4"])

    def with_statistics(values: dict[str, float]) -> Fault:
        def fault(reply: Reply) -> Sequence[Reply]:
            bad = {name: torch.full((6,), value) for name, value in values.items()}
            return [replace(reply, arrays={**reply.arrays, **bad}) if reply.party == "4" else reply]

        return fault

    def center(algorithm: Algorithm, fault: Fault) -> dict[str, torch.Tensor]:
        engine = partial(BytesEngine, tamper=fault)
        fed = Federation(model, population, algorithm, lr=0.1, steps=2, batch=4, engine=engine)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DescantWarning)
            return fed.fit(2, progress=False).global_model_.state_dict()

    far = with_statistics({"0.running_mean": 1e6})
    assert center(algorithms.FedAvg(), far)["0.running_mean"].abs().max() > 1e4
    for algorithm in (algorithms.RFA(), algorithms.FedGeoMedPlus(), algorithms.FedCoMedPlus()):
        assert center(algorithm, far)["0.running_mean"].abs().max() < 10
    for algorithm in (algorithms.FedAvg(), replace(algorithms.FedAvg(), reply_content="update")):
        negative = center(algorithm, with_statistics({"0.running_var": -1000.0}))
        assert (negative["0.running_var"] > 0).all()  # rejected by validation


def test_a_party_that_cannot_be_evaluated_is_named_and_does_not_count() -> None:
    def failed_evaluation(reply: Reply) -> Sequence[Reply]:
        if reply.kind != "evaluate":
            return [reply, reply]
        lost = reply.party == "1"
        return [replace(reply, status="lost") if lost else replace(reply, metrics={**reply.metrics, "note": "abc"})]

    population = parties.digits(count=4, seed=0)
    engine = partial(BytesEngine, tamper=failed_evaluation)
    fed = Federation(lambda: torch.nn.Linear(64, 10), population, algorithms.FedAvg(), lr=0.1, steps=1, engine=engine)
    with pytest.warns(DescantWarning, match="Party '1' could not be evaluated and does not count: lost"):
        scores = fed.scores()
    assert [math.isnan(value) for value in scores.personal.values] == [False, True, False, False]
    assert torch.equal(fed.models_["1"].get_parameter("bias"), fed.global_model_.get_parameter("bias"))


def silent(reply: Reply) -> Sequence[Reply]:
    return [] if reply.party == "1" else [reply]


def test_a_party_that_never_answers_is_lost_and_named() -> None:
    fed = run(silent, rounds=1)
    assert [str(rejection) for rejection in fed.rejections_] == [
        "round 1, party '1': lost: no reply before the deadline"
    ]


def test_a_party_whose_data_fails_is_named_and_the_others_continue() -> None:
    population = classification_parties(5)
    fed = Federation(network(), population, algorithms.FedAvg(), lr=0.1, steps=2, batch=4)
    fed.state  # noqa: B018  creates the state before the data changes
    population["1"].y[:] = 99  # a label beyond the classes of the model
    with pytest.warns(DescantWarning, match="party '1': error: .*99 is out of bounds"):
        fed.fit(1, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1"]
    assert fed.history_[-1]["accepted"] == 4


def test_a_party_that_diverged_is_accepted_once_its_data_is_finite() -> None:
    population = classification_parties(4)
    fed = Federation(network(), population, algorithms.FedAvg(), solver=None, lr=0.1, steps=2, batch=4)
    population["0"].x[:] = math.inf
    with pytest.warns(DescantWarning, match="not finite"):
        fed.fit(1, progress=False)
    assert [rejection.reason for rejection in fed.rejections_] == ["not finite"]
    population["0"].x[:] = 1.0
    fed.fit(1, progress=False)
    assert fed.history_[-1]["accepted"] == 4


def test_tensors_that_share_memory_are_serialized_separately() -> None:
    rows = torch.arange(6.0).view(2, 3)
    sent = Reply("a", 1, "train", arrays={"first": rows[0], "second": rows[1], "all": rows})
    received = unpack(pack(sent), Reply).arrays
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.arrays.items())
