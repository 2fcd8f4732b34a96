"""Secure aggregation: sums, masks, missing parties, checks at the party, and rejected methods."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import Algorithm, DescantError, DescantWarning, DpSgd, Federation, algorithms, parties
from descant.algorithms import FedAvg, LocalDP, SecureAggregation
from descant.analysis import interpolate
from descant.config import Recipe
from descant.core.algorithm import SecureSettings
from descant.core.messages import Reply, Task
from descant.engines import VirtualClock
from descant.engines.remote import UndeliveredError, WaitLimits
from descant.errors import EngineError, PartyError, SettingError
from descant.privacy.secure_aggregation.pairwise_masks import (
    MAX_CHANGE,
    STEPS_PER_UNIT,
    Cohort,
    add_masks,
    round_key,
    to_fixed_point,
    unmasked_sum,
)
from descant.privacy.secure_aggregation.secure_sum import exchange_keys
from descant.rounds.loop import run
from descant.rounds.party_side import perform_tasks
from descant.serialization.wire import pack, unpack
from descant.training import Dqn
from test_deployment_in_memory import (
    PARTY_NAMES,
    InMemoryTransport,
    assert_same_models,
    count_kills_of_recipe,
    deployed_federation,
    recipe_for,
    silo_handlers,
    simulated_federation,
)
from toy_problems import classification_parties, network


def federation(method: Algorithm | None = None, dtype: torch.dtype = torch.float32, **settings: Any) -> Federation:
    chosen = {"lr": 0.1, "steps": 3, "batch": 4, "seed": 5, **settings}
    return Federation(network(dtype), classification_parties(6, dtype), method or SecureAggregation(), **chosen)


def cohort_of(weights: Sequence[int], round: int = 1) -> tuple[Cohort, dict[str, Any]]:
    names = tuple(f"party {i}" for i in range(len(weights)))
    keys = {name: round_key(f"secret of {name}".encode(), 0, round, party=name) for name in names}
    public = torch.stack([torch.frombuffer(bytearray(key.public), dtype=torch.uint8) for key in keys.values()])
    return Cohort(names, public, torch.tensor(weights)), keys


def masked_parts(
    cohort: Cohort, keys: dict[str, Any], changes: dict[str, Tensor], digest: bytes = b"digest"
) -> list[Tensor]:
    words = [
        add_masks(to_fixed_point(changes[name], cohort.share(name)), name, keys[name], cohort=cohort, digest=digest)
        for name in cohort.names
    ]
    return [torch.from_numpy(word.view(np.int64)) for word in words]


numbers = st.floats(-0.99 * MAX_CHANGE, 0.99 * MAX_CHANGE, allow_nan=False)


@given(st.lists(st.tuples(st.integers(1, 10**9), numbers, numbers), min_size=2, max_size=6), st.randoms())
def test_unmasked_sum_is_the_mean_within_half_a_step_each(rows: list[tuple[int, float, float]], rng: Any) -> None:
    cohort, keys = cohort_of([weight for weight, *_ in rows])
    changes = dict(zip(cohort.names, (torch.tensor(row[1:], dtype=torch.float64) for row in rows), strict=True))
    parts = masked_parts(cohort, keys, changes)
    mean = sum(changes[name] * cohort.share(name) for name in cohort.names)
    assert ((unmasked_sum(parts) - mean).abs() <= len(rows) / 2 / STEPS_PER_UNIT + 1e-15 * MAX_CHANGE * len(rows)).all()
    rng.shuffle(parts)
    plain = [
        torch.from_numpy(to_fixed_point(changes[name], cohort.share(name)).view(np.int64)) for name in cohort.names
    ]
    assert torch.equal(unmasked_sum(parts), unmasked_sum(plain))  # neither masks nor their order change a bit


def chi_square_deviations(tensors: Sequence[Tensor]) -> float:
    """Return χ² of the bytes, in standard deviations from its expectation for uniform bytes."""
    data = np.concatenate([tensor.numpy().reshape(-1).view(np.uint8) for tensor in tensors])
    found = np.bincount(data, minlength=256)
    chi = float(((found - len(data) / 256) ** 2).sum() / (len(data) / 256))
    return (chi - 255) / math.sqrt(2 * 255)


@pytest.mark.parametrize("change", [torch.zeros(50_000), torch.full((50_000,), 1e-3)], ids=["nothing", "the same"])
def test_partial_sums_are_noise(change: Tensor) -> None:
    """Uniform bytes exceed 7 standard deviations once in a hundred billion draws."""
    cohort, keys = cohort_of([1, 1, 1])
    parts = masked_parts(cohort, keys, dict.fromkeys(cohort.names, change))
    assert all(chi_square_deviations([part]) < 7 for part in parts) and chi_square_deviations([parts[0] + parts[1]]) < 7
    assert chi_square_deviations([parts[0] + parts[1] + parts[2]]) > 1000  # the test can fail
    assert not (parts[0] == parts[1]).any()


def test_masks_differ_by_pair_round_global_model_and_cohort() -> None:
    cohort, keys = cohort_of([1, 2, 3])
    later, later_keys = cohort_of([1, 2, 3], round=2)
    other = replace(cohort, weights=torch.tensor([1, 2, 4]))
    center = torch.zeros(3)
    digests = [
        cohort.digest(1, center), cohort.digest(2, center), cohort.digest(1, center + 1), other.digest(1, center)
    ]  # fmt: skip
    changes = dict.fromkeys(cohort.names, torch.zeros(4))
    found = [part for digest in digests for part in masked_parts(cohort, keys, changes, digest)]
    found += masked_parts(later, later_keys, changes, digests[0])
    assert len({tuple(part.tolist()) for part in found}) == len(found) == 15


@pytest.mark.parametrize("bad", [MAX_CHANGE, -MAX_CHANGE, 1e30, math.inf, math.nan])
def test_change_too_large_for_the_sum_is_not_sent(bad: float) -> None:
    with pytest.raises(PartyError, match="training diverged"):
        to_fixed_point(torch.tensor([0.0, bad]), 1e-9)


@pytest.mark.parametrize("what", ["a part is missing", "a part twice", "another key"])
def test_masks_that_do_not_cancel_are_detected(what: str) -> None:
    cohort, keys = cohort_of([1, 1, 1])
    changes = dict.fromkeys(cohort.names, torch.ones(30))
    parts = masked_parts(cohort, keys, changes)
    other = {**keys, "party 2": round_key(b"another", 0, 1, party="party 2")}
    cases = {
        "a part is missing": parts[:2],
        "a part twice": [*parts, parts[0]],
        "another key": masked_parts(cohort, other, changes),
    }
    torch.testing.assert_close(
        unmasked_sum(parts), torch.ones(30, dtype=torch.float64), rtol=0, atol=2 / STEPS_PER_UNIT
    )
    with pytest.raises(EngineError, match="do not cancel"):
        unmasked_sum(cases[what])


BASES: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "uniform": lambda: FedAvg(weights="uniform"),
    "of all samples": lambda: FedAvg(normalize="total"),
    "FedProx": algorithms.FedProx,
    "Ditto": algorithms.Ditto,
    "FedPer": algorithms.FedPer,
    "changes": lambda: replace(FedAvg(), reply_content="update"),
    "matching": lambda: algorithms.RepresentationMatching(FedAvg()),
    "private at parties": lambda: LocalDP(clip=0.1, source="seed"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", BASES)
def test_secure_aggregation_equals_the_base_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    secure, plain = (
        federation(method, dtype).fit(1, progress=False) for method in (SecureAggregation(BASES[name]()), BASES[name]())
    )
    rounding = torch.finfo(dtype).eps * plain.state.global_model.abs()
    assert ((secure.state.global_model - plain.state.global_model).abs() <= 6 / 2 / STEPS_PER_UNIT + rounding).all()
    assert not torch.equal(secure.state.global_model, secure.state.initial_model) and not secure.rejections_


def test_secure_aggregation_works_with_dp_sgd() -> None:
    solver = DpSgd(lr=0.1, steps=3, batch=4, noise=1.0, source="seed")
    secure, plain = (
        Federation(network(), classification_parties(6), method, solver=solver).fit(2, progress=False)
        for method in (SecureAggregation(), FedAvg())
    )
    torch.testing.assert_close(secure.state.global_model, plain.state.global_model, rtol=0, atol=1e-6)


def test_running_statistics_are_part_of_the_sum() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    people = classification_parties(7).subset(["0", "1", "2", "3", "4"])
    secure, plain = (
        Federation(model, people, method, lr=0.1, steps=3, batch=4).fit(2, progress=False)
        for method in (SecureAggregation(), FedAvg())
    )
    torch.testing.assert_close(secure.state.global_model, plain.state.global_model, rtol=0, atol=1e-6)
    assert (secure.global_model_[1].running_var >= 0).all()  # type: ignore[index, union-attr, operator]


def test_server_receives_integers_and_no_single_model() -> None:
    seen: list[Reply] = []
    fed = federation(engine=partial(BytesEngine, tamper=lambda report: (seen.append(report), [report])[1]))
    fed.fit(1, progress=False)
    trained = [report for report in seen if report.kind == "train"]
    assert len(trained) == 6 and {t.dtype for report in trained for t in report.arrays.values()} == {torch.int64}
    assert {*trained[0].metrics} == {"loss", "samples"}  # sent without masks
    assert math.isnan(fed.history_[-1]["jump"])
    with pytest.raises(DescantError, match="which secure aggregation hides"):
        interpolate(fed)


def test_virtual_clock_gives_the_same_sum() -> None:
    timed = federation(engine=VirtualClock({"1": 0.1})).fit(2, progress=False)
    assert torch.equal(timed.state.global_model, federation().fit(2, progress=False).state.global_model)


def spoiled_reply(report: Reply, how: str) -> list[Reply]:
    first = next(iter(report.arrays))
    arrays = {
        "floats": {**report.arrays, first: report.arrays[first].double()},
        "another shape": {**report.arrays, first: report.arrays[first][:1]},
        "other words": {**report.arrays, first: report.arrays[first] + 2**60},
    }
    if how in arrays:
        return [replace(report, arrays=arrays[how])]
    return [Reply(report.party, report.round, report.kind, status="lost", reason="its machine is off")]


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("lost", "cannot be unmasked without the updates of '3'"),
        ("floats", "cannot be unmasked without the updates of '3'"),
        ("another shape", "cannot be unmasked without the updates of '3'"),
        ("other words", "masks of the sum do not cancel"),
    ],
)
def test_round_with_a_missing_party_is_void_and_the_next_continues(how: str, note: str) -> None:
    def fault(report: Reply) -> list[Reply]:
        return (
            spoiled_reply(report, how) if (report.party, report.round, report.kind) == ("3", 2, "train") else [report]
        )

    fed = federation(engine=partial(BytesEngine, tamper=fault))
    centers = [fed.state.global_model]
    with pytest.warns(DescantWarning, match=f"Round 2: .*{note}"):
        for _ in fed.rounds(3):
            centers.append(fed.state.global_model)
    first, second, third, fourth = centers
    assert torch.equal(second, third) and not torch.equal(first, second) and not torch.equal(third, fourth)
    assert [entry["accepted"] for entry in fed.history_] == [6, 0, 6]


KEYS: dict[str, Callable[[Reply], Reply]] = {
    "none": lambda report: replace(report, status="error", arrays={}, reason="its disk is full"),
    "short": lambda report: replace(report, arrays={"key": report.arrays["key"][:5]}),
    "zeros": lambda report: replace(report, arrays={"key": torch.zeros(32, dtype=torch.uint8)}),
    "absurd samples": lambda report: replace(report, metrics={"samples": 1e30}),
    "another round's": lambda report: replace(report, round=7),
}


@pytest.mark.parametrize("how", KEYS)
def test_party_without_a_valid_key_is_left_out(how: str) -> None:
    def fault(report: Reply) -> list[Reply]:
        return [KEYS[how](report)] if (report.party, report.kind) == ("3", "keys") else [report]

    with pytest.warns(DescantWarning, match="rejected"):
        fed = federation(engine=partial(BytesEngine, tamper=fault), deadline=0.5).fit(2, progress=False)
    without = federation(engine=partial(BytesEngine, absent=("3",))).fit(2, progress=False)
    assert torch.equal(fed.state.global_model, without.state.global_model)
    assert {refusal.party for refusal in fed.rejections_} == {"3"}


def test_parties_with_the_same_key_are_left_out() -> None:
    def fault(report: Reply) -> list[Reply]:
        kept.setdefault(report.round, report.arrays.get("key"))
        return [replace(report, arrays={"key": kept[report.round]})] if report.party in ("0", "3") else [report]

    kept: dict[int, Any] = {}
    fed = federation(engine=partial(BytesEngine, tamper=fault))
    exchange = exchange_keys(fed.plan_, fed.engine_, dict.fromkeys(fed.population, fed.plan_.solver.hyper), index=1)
    assert [*exchange.participants] == ["1", "2", "4", "5"] and [refusal.party for refusal in exchange.rejections] == [
        "0",
        "3",
    ]


def test_too_few_keys_stop_the_round_with_a_warning() -> None:
    fed = federation(engine=partial(BytesEngine, absent=("0", "1", "2", "3")))
    with pytest.warns(DescantWarning, match="fewer than 3 parties sent keys"):
        (round,) = fed.rounds(1)
    assert torch.equal(fed.state.global_model, fed.state.initial_model) and not round.round.participants


def test_diverged_training_voids_the_round_and_names_the_party() -> None:
    with pytest.warns(DescantWarning, match="cannot be unmasked without the updates of"):
        fed = federation(lr=1e30).fit(1, progress=False)
    assert torch.equal(fed.state.global_model, fed.state.initial_model)
    assert any("training diverged" in refusal.reason for refusal in fed.rejections_)


def tasks(fed: Federation) -> list[Task]:
    """Return the training tasks of a first round, as the server would send them."""
    out: list[Task] = []

    class Noting(BytesEngine):
        def submit(self, tasks: Sequence[Task]) -> None:
            out.extend(task for task in tasks if task.kind == "train")
            super().submit(tasks)

    next(run(fed.plan_, Noting(fed.plan_), fed.state, 1))
    return out


def reply_to(fed: Federation, task: Task) -> Reply:
    ((report, _),) = perform_tasks(fed.plan_, [task], [{}])
    return report


def test_repeated_task_gets_the_same_masked_reply_and_another_secret_another_one() -> None:
    fed = federation()
    asked = tasks(fed)[0]
    one, again = (reply_to(fed, asked).arrays for _ in range(2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    cohort = asked.arrays["keys"].clone()
    fed.plan_ = replace(fed.plan_, secret=b"its own")
    cohort[0] = torch.frombuffer(bytearray(round_key(b"its own", 5, 1, party="0").public), dtype=torch.uint8)
    other = reply_to(fed, replace(asked, arrays={**asked.arrays, "keys": cohort})).arrays
    assert not any(bool((one[name] == other[name]).any()) for name in one)
    assert "its own" not in repr(fed.plan_)


COHORTS: dict[str, tuple[Callable[[Task], Task], str]] = {
    "none": (lambda t: replace(t, settings={**t.settings, "cohort": None}), "without a cohort"),
    "of others": (lambda t: replace(t, settings={**t.settings, "cohort": ["a", "b", "c"]}), "without a cohort"),
    "one twice": (lambda t: replace(t, settings={**t.settings, "cohort": ["0"] * 6}), "a key and a weight for each"),
    "no keys": (lambda t: replace(t, arrays={"global_model": t.arrays["global_model"]}), "a key and a weight for each"),
    "of two": (lambda t: _only(t, 2), "a sum of 2 does not hide its update: it requires at least 3"),
    "a false own key": (lambda t: _changed(t, "keys", 0), "another key for it than the one that it sent"),
    "one key twice": (lambda t: _key_twice(t), "have the same key"),
    "no key at all": (lambda t: _changed(t, "keys", 3), "not a valid public key"),
    "a false own weight": (lambda t: _changed(t, "weights", 0), "gives it the weight 0|gives it the weight 8"),
    "a weight of 0": (lambda t: _changed(t, "weights", 3, 0), "a key and a weight for each"),
}


def _only(task: Task, count: int) -> Task:
    arrays = {name: task.arrays[name][:count] for name in ("keys", "weights")}
    settings = {**task.settings, "cohort": task.settings["cohort"][:count]}
    return replace(task, arrays={**task.arrays, **arrays}, settings=settings)


def _changed(task: Task, name: str, at: int, to: int | None = None) -> Task:
    changed = task.arrays[name].clone()
    changed[at] = to if to is not None else 0 if name == "keys" else changed[at] - 1
    return replace(task, arrays={**task.arrays, name: changed})


def _key_twice(task: Task) -> Task:
    keys = task.arrays["keys"].clone()
    keys[2] = keys[1]
    return replace(task, arrays={**task.arrays, "keys": keys})


@pytest.mark.parametrize("name", COHORTS)
def test_party_declines_an_invalid_cohort(name: str) -> None:
    fed = federation()
    change, why = COHORTS[name]
    asked = tasks(fed)[0]
    assert reply_to(fed, asked).status == "ok"
    report = reply_to(fed, change(asked))
    assert report.status == "declined" and not report.arrays
    assert re.search(why, report.reason), report.reason


def secure_recipe(method: str = "fedavg", min_parties: int = 3) -> Recipe:
    return Recipe({**recipe_for(method).tables, "wrap": [{"wrapper": "secure", "min_parties": min_parties}]})


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper"])
def test_secure_deployment_equals_the_simulation(tmp_path: Path, method: str) -> None:
    """Although the parties' secrets differ: masks leave no trace in the sum."""
    fed = deployed_federation(InMemoryTransport(silo_handlers(tmp_path)), secure_recipe(method)).fit(3, progress=False)
    twin = simulated_federation(secure_recipe(method), 3)
    assert_same_models(fed, twin)
    plain = simulated_federation(recipe_for(method), 3)
    torch.testing.assert_close(fed.state.global_model, plain.state.global_model, rtol=0, atol=1e-6)
    secrets = [(tmp_path / f"at-{name}" / "secret") for name in PARTY_NAMES]
    assert len({file.read_text() for file in secrets}) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}


def test_secure_run_killed_at_any_moment_continues_undisturbed(tmp_path: Path) -> None:
    assert count_kills_of_recipe(tmp_path, secure_recipe("fedavg", min_parties=2), every=3) > 10


def test_late_party_voids_the_round_and_joins_the_next(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    transport.corrupt_reply = lambda task, answer: (
        None if (task.party, task.round, task.kind) == ("1", 2, "train") else answer
    )
    fed = deployed_federation(transport, secure_recipe(), WaitLimits(deadline=0.2, quorum=3))
    with pytest.warns(DescantWarning, match="Round 2: the sum cannot be unmasked without the updates of '1'"):
        fed.fit(3, progress=False)
    assert [entry["accepted"] for entry in fed.history_] == [4, 0, 4]


@pytest.mark.parametrize("kind", ["keys", "train"])
def test_lost_task_is_resent_after_a_reconnect(tmp_path: Path, kind: str) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    lost = [3]

    def spoil(task: Task, answer: bytes) -> bytes | UndeliveredError:
        if (task.party, task.round, task.kind) == ("1", 2, kind) and lost[0]:
            lost[0] -= 1
            return UndeliveredError("its machine is off")
        return answer

    transport.corrupt_reply = spoil
    assert_same_models(
        deployed_federation(transport, secure_recipe()).fit(3, progress=False), simulated_federation(secure_recipe(), 3)
    )
    assert not lost[0]


def test_absent_party_is_not_in_the_sum(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))
    fed = deployed_federation(transport, secure_recipe()).fit(1, progress=False)
    transport.unreachable = {"2"}
    fed.fit(1, progress=False)
    transport.unreachable = set()
    fed.fit(1, progress=False)
    assert [entry["accepted"] for entry in fed.history_] == [4, 3, 4] and not fed.rejections_


def test_party_with_a_lost_secret_declines_the_cohort(tmp_path: Path) -> None:
    transport = InMemoryTransport(silo_handlers(tmp_path))

    def spoil(task: Task, answer: bytes) -> bytes:
        if (task.party, task.round, task.kind) == ("1", 2, "keys"):
            (tmp_path / "at-1" / "secret").unlink()
        return answer

    transport.corrupt_reply = spoil
    fed = deployed_federation(transport, secure_recipe())
    with pytest.warns(DescantWarning, match="without the updates of '1'"):
        fed.fit(3, progress=False)
    [refusal] = fed.rejections_
    assert "another key for it" in refusal.reason
    assert [entry["accepted"] for entry in fed.history_] == [4, 0, 4]


@pytest.mark.parametrize(
    "change", ["another cohort", "another global model", "an old round", "one that came to nothing"]
)
def test_masks_of_a_round_hide_one_reply_only(tmp_path: Path, change: str) -> None:
    """Otherwise the difference of two sums, or of two replies under the same masks, would reveal one party."""
    transport = InMemoryTransport(silo_handlers(tmp_path))
    tasks_by_round = dict[int, Task]()

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party == "1" and task.kind == "train":
            tasks_by_round[task.round] = task
        return answer

    transport.corrupt_reply = spoil
    deployed_federation(transport, secure_recipe()).fit(2, progress=False)
    handler = transport.handlers["1"]()
    last = tasks_by_round[2]
    center = {**last.arrays, "global_model": last.arrays["global_model"] + 1}
    asked = {
        "another cohort": _only(last, 3),
        "another global model": replace(last, arrays=center),
        "an old round": replace(tasks_by_round[1], settings={**tasks_by_round[1].settings, "work": 2}),
    }
    assert unpack(handler.answer(pack(last)), Reply).status == "ok"  # the same task gets the same answer
    if change == "one that came to nothing":  # round 2 did not count, and round 3 failed
        lost = replace(last, round=3, settings={**last.settings, "cohort": None})
        assert (
            unpack(handler.answer(pack(lost)), Reply).status == "declined" and not handler.state.progress.pending_round
        )
    report = unpack(handler.answer(pack(asked.get(change, asked["another global model"]))), Reply)
    assert report.status == "declined" and ("hide one reply" in report.reason or "Stale" in report.reason)


A = algorithms
REFUSED: dict[str, tuple[Callable[[], Algorithm], str]] = {
    "geometric median": (
        lambda: SecureAggregation(A.RFA()),
        "the aggregate of GeometricMedian needs every single model",
    ),
    "coordinate median": (lambda: SecureAggregation(A.CoordinateMedian()), "the aggregate of CoordinateMedian needs"),
    "median of Fed+": (lambda: SecureAggregation(A.FedGeoMedPlus()), "the aggregate of Norm2 needs every single model"),
    "robust statistics": (
        lambda: SecureAggregation(replace(FedAvg(), aggregate_statistics=A.CoordinateMedian().aggregate_statistics)),
        "the aggregate of CoordinateMedian needs",
    ),
    "lying": (lambda: SecureAggregation(A.ByzantineParties(FedAvg())), "the aggregate of PoisonedAggregator needs"),
    "own models": (lambda: SecureAggregation(A.FedAvgPlus()), "server stores its personal models.*Ditto"),
    "all": (lambda: SecureAggregation(A.FedAvgPlus(aggregate_over="all")), "counts models of absent parties"),
    "coreset_proxies": (
        lambda: SecureAggregation(A.CoresetProxies(FedAvg())),
        "a proxy trains where the server sees it",
    ),
    "async": (lambda: SecureAggregation(A.FedAsync()), "does not wait for all"),
    "buffered": (lambda: SecureAggregation(A.FedBuff()), "does not wait for all"),
    "rewards": (lambda: SecureAggregation(A.FedRL()), "weights are known only after training"),
    "tuned": (lambda: SecureAggregation(A.AdaptiveHyper(reward="clients")), "need each of them"),
    "central": (lambda: SecureAggregation(A.CentralDP()), "CentralDP clips every single change"),
    "alone": (lambda: SecureAggregation(replace(A.Local(), personalize=None)), "computes no sum"),
    "twice": (lambda: SecureAggregation(SecureAggregation()), r"FedAvg\+SecAgg already has secure aggregation"),
    "one": (
        lambda: SecureAggregation(min_parties=1),
        "The 'min_parties' of SecureAggregation must be a whole number >= 2. Got 1.",
    ),
}
WRAPPED: dict[str, tuple[Callable[[], Algorithm], str]] = {
    "coreset_proxies": (lambda: A.CoresetProxies(SecureAggregation()), "cannot use secure aggregation: a proxy trains"),
    "tuned": (lambda: A.AdaptiveHyper(SecureAggregation(), reward="clients"), "need each of them"),
    "lying": (lambda: A.ByzantineParties(SecureAggregation()), "the aggregate of PoisonedAggregator needs"),
    "quorum": (lambda: replace(SecureAggregation(), quorum=2), "does not wait for all"),
    "central": (lambda: A.CentralDP(SecureAggregation()), "CentralDP clips every single change"),
    "many": (lambda: SecureAggregation(min_parties=7), "sums of at least 7 parties, and there are 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_needing_single_models_are_rejected_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(SettingError, match=reason):
        make()


@pytest.mark.parametrize("name", WRAPPED)
def test_unsound_outer_wrappers_are_rejected_before_training(name: str) -> None:
    make, reason = WRAPPED[name]
    with pytest.raises(SettingError, match=reason):
        federation(make()).fit(1, progress=False)


def test_agents_have_no_sample_weights_before_training() -> None:
    people = parties.agents(count=3, test_episodes=2)
    net = partial(nn.Linear, 4, 2)
    with pytest.raises(SettingError, match=r"agents and desks have none before training. Use weights='uniform'"):
        Federation(net, people, SecureAggregation(), solver=Dqn(steps=20)).fit(1, progress=False)
    Federation(net, people, SecureAggregation(FedAvg("uniform")), solver=Dqn(steps=20)).fit(1, progress=False)


def test_a_recipe_wraps_a_method() -> None:
    found = secure_recipe("fedprox", min_parties=4).algorithm()
    assert found.secure_aggregation == SecureSettings(4) and found.name == "FedProx+SecAgg"
