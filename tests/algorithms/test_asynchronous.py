"""Asynchronous methods: the virtual clock, quorum, staleness, and stops with pending tasks."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytes_engine import BytesEngine
from descant import Algorithm, Federation, Sgd, algorithms
from descant.algorithms import CoresetProxies, Dropouts, FedAsync, FedBuff, Hinge, Polynomial, RandomAvailability
from descant.algorithms.fedavg_and_baselines import local_baseline
from descant.analysis import interpolate
from descant.core.messages import Reply
from descant.engines import InProcess, Processes, VirtualClock
from descant.errors import DescantWarning, SettingError
from descant.tracking import Run
from toy_problems import METHODS, classification_parties, network
from write_faults import SimulatedCrash, inject_faults

SPEEDS = {"0": 0.25, "1": 3.0}
CLOCK = VirtualClock(SPEEDS)


def make_federation(algorithm: Algorithm, engine: object = CLOCK, **settings: object) -> Federation:
    solver = settings.pop("solver", Sgd(lr=0.1, steps=3, batch=4))
    return Federation(network(), classification_parties(5), algorithm, solver=solver, seed=7, engine=engine, **settings)  # type: ignore[arg-type]


def run_rounds(fed: Federation, rounds: int) -> Federation:
    return fed.fit(rounds, progress=False)


def column(fed: Federation, name: str) -> list[float]:
    return [entry[name] for entry in fed.history_]


def test_faster_parties_reply_more_often_and_staleness_counts_versions() -> None:
    """Three steps take 1, 3 or 12 seconds: versions computed by hand."""
    fed = run_rounds(make_federation(FedAsync()), 14)
    presence = [entry["presence"].replace("a", ".") for entry in fed.history_]
    replying = [text.index("p") for text in presence]
    replying_together = [sorted(replying[begin:end]) for begin, end in ((0, 2), (2, 6), (6, 8), (8, 12), (12, 14))]
    assert replying_together == [[1, 1], [1, 2, 3, 4], [1, 1], [1, 2, 3, 4], [1, 1]]
    assert column(fed, "clock") == [1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8]
    task_version = dict.fromkeys(replying, 0)  # the version at which each got its task
    for version, (party, stale) in enumerate(zip(replying, column(fed, "staleness"), strict=True), 1):
        assert stale == version - 1 - task_version[party]
        task_version[party] = version
    stale = run_rounds(make_federation(FedAsync(max_staleness=40)), 30)
    at = [entry["presence"][0] for entry in stale.history_].index("p")
    assert stale.history_[at]["clock"] == 12 and stale.history_[at]["staleness"] == at


@pytest.mark.parametrize(("algorithm", "parties"), [(FedBuff(2), 3), (FedBuff(3), 10), (FedAsync(), 5)])
def test_parties_of_equal_speed_reply_equally_often(algorithm: Algorithm, parties: int) -> None:
    """The seed breaks ties: by name, some parties would reply twice as often as others."""
    versions = 90
    turns = []
    for seed in (0, 1):
        solver = Sgd(lr=0.01, steps=1, batch=4)
        fed = Federation(
            network(), classification_parties(parties), algorithm, solver=solver, seed=seed, engine=VirtualClock()
        )
        run_rounds(fed, versions)
        counts = [sum(entry["presence"][k] == "p" for entry in fed.history_) for k in range(parties)]
        assert max(counts) <= 1.3 * min(counts) and max(column(fed, "staleness")) < parties, counts
        turns.append([entry["presence"] for entry in fed.history_])
    assert turns[0] != turns[1]


@pytest.mark.parametrize("name", METHODS)
def test_clock_changes_only_the_time_of_synchronous_methods(name: str) -> None:
    timed = run_rounds(make_federation(METHODS[name]()), 2)
    plain = run_rounds(make_federation(METHODS[name](), InProcess), 2)
    assert torch.equal(timed.state.global_model, plain.state.global_model)
    for party in plain.state.personal_models.names():
        assert torch.equal(
            timed.state.personal_models.get(party)["model"], plain.state.personal_models.get(party)["model"]
        )
    assert column(timed, "clock")[-1] > 0 and "clock" not in plain.history_[-1]


def test_quorum_larger_than_the_pending_tasks_waits_for_all() -> None:
    waiting = run_rounds(make_federation(replace(algorithms.FedAvg(), quorum=9)), 3)
    assert torch.equal(
        waiting.state.global_model, run_rounds(make_federation(algorithms.FedAvg()), 3).state.global_model
    )
    assert column(waiting, "clock") == [12, 24, 36] and column(waiting, "staleness") == [0, 0, 0]


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5), st.integers(1, 4), st.floats(0, 1))
@settings(max_examples=12, deadline=None)
def test_time_never_decreases_and_every_party_gets_a_turn(speeds: list[float], quorum: int, jitter: float) -> None:
    clock = VirtualClock(dict(zip("01234", speeds, strict=True)), jitter)
    fed = run_rounds(
        make_federation(replace(FedBuff(quorum), max_staleness=1000), clock, solver=Sgd(lr=0.01, steps=1, batch=4)), 12
    )
    times = column(fed, "clock")
    assert times == sorted(times) and not fed.rejections_
    assert all(entry["accepted"] == quorum for entry in fed.history_)
    pending = fed.state.server_state["pending_tasks"]
    assert len(pending["party_index"]) == 5 - quorum and len(set(pending["party_index"].tolist())) == 5 - quorum


def test_evaluation_takes_no_time_and_changes_nothing() -> None:
    plain = run_rounds(make_federation(FedBuff(2)), 6)
    evaluated = make_federation(FedBuff(2))
    for done in evaluated.rounds(6):
        done.scores  # noqa: B018
        evaluated.models_["0"]
        if done.index == 3:
            interpolate(evaluated, points=2)
    assert evaluated.hash() == plain.hash() and column(evaluated, "clock") == column(plain, "clock")


def test_staleness_discounts_are_those_of_the_papers() -> None:
    assert [Polynomial(0.5)(d) for d in (0, 3, 8)] == [1, 0.5, pytest.approx(1 / 3)]
    assert [Hinge(10.0, 4)(d) for d in (0, 4, 5, 6)] == [1, 1, 1 / 11, 1 / 21]
    assert FedAsync(staleness="constant").staleness_discount is None
    assert FedAsync(staleness="hinge").staleness_discount == Hinge(10.0, 4)
    assert FedBuff().staleness_discount is not None and FedBuff().staleness_discount(3) == 1 / math.sqrt(4)  # type: ignore[misc]


@pytest.mark.parametrize("reply_content", ["model", "update"])
def test_one_step_of_fedasync_and_of_fedbuff_by_hand(reply_content: str) -> None:
    """A reply 3 versions late moves the global model by α·s(3) of the way, or by η·s(3) of its update."""
    algorithm = FedAsync(0.5, rho=0.0) if reply_content == "model" else FedBuff(1, server_step=0.5)
    clock = VirtualClock({"0": 2.9, "1": 1.1, "2": 1.0, "3": 0.01, "4": 0.01})
    fed = make_federation(algorithm, clock)
    first = fed.state.global_model.clone()
    run_rounds(fed, 3)
    before = fed.state.global_model
    run_rounds(fed, 1)
    assert column(fed, "staleness") == [0, 0, 2, 3] and fed.history_[-1]["presence"][2] == "p"
    lone = make_federation(
        replace(algorithms.Local(), participation=Dropouts({"0": 0, "1": 0, "3": 0, "4": 0})), InProcess
    )
    trained = run_rounds(lone, 1).state.personal_models.get("2")["model"]
    s = 0.5 * (1 + 3) ** -0.5
    update = trained - (before if reply_content == "model" else first)
    torch.testing.assert_close(fed.state.global_model, before + s * update, rtol=0, atol=1e-6)


def test_stale_reply_is_rejected_by_name_and_its_party_gets_a_new_task() -> None:
    fed = make_federation(FedAsync(max_staleness=8))
    with pytest.warns(DescantWarning, match="1 of 2 replies were rejected, the first: round 1, party '0': stale"):
        run_rounds(fed, 30)
    assert all(entry["presence"][0] == "." and entry["presence"].count("p") == 1 for entry in fed.history_)
    assert 0 in fed.state.server_state["pending_tasks"]["party_index"]


def test_parties_with_personal_models_may_be_late() -> None:
    algorithm = replace(algorithms.FedAvgPlus(alpha=1.0), quorum=2, max_staleness=9)
    fed = run_rounds(make_federation(algorithm, solver=Sgd(lr=0.05, steps=3, batch=4, optimizer="Adam")), 8)
    assert not fed.rejections_ and len(fed.state.personal_models.names()) >= 4
    steps = {
        name: float(fed.engine_.party_states.get(name)["moment.step"]) for name in fed.state.personal_models.names()
    }
    attended = dict(zip(fed.population, fed.state.rounds_trained(fed.plan_).tolist(), strict=True))
    assert steps == {name: 3 * attended[name] for name in steps}  # party state advances when its reply counts


ASYNCHRONOUS: dict[str, Algorithm] = {
    "FedAsync": FedAsync(max_staleness=5),
    "FedBuff": FedBuff(2),
    "Fed+": replace(algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1), quorum=2, max_staleness=9),
    "dropouts": replace(FedBuff(2), participation=Dropouts({"1": 3, "2": 5})),
    "random": replace(FedBuff(2), participation=RandomAvailability(0.7)),
}


@pytest.mark.filterwarnings("ignore::descant.errors.DescantWarning")
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_stop_at_any_round_changes_nothing(name: str, tmp_path: Path) -> None:
    solver = Sgd(lr=0.05, steps=3, batch=4, optimizer="Adam")
    clock = VirtualClock(SPEEDS, jitter=0.4)
    whole = run_rounds(make_federation(ASYNCHRONOUS[name], clock, solver=solver), 10)
    assert max(column(whole, "staleness")) > 0
    for stop in (1, 4, 7):
        run_rounds(make_federation(ASYNCHRONOUS[name], clock, solver=solver), stop).save(tmp_path / str(stop))
        resumed = run_rounds(
            make_federation(ASYNCHRONOUS[name], clock, solver=solver).load(tmp_path / str(stop)), 10 - stop
        )
        assert resumed.hash() == whole.hash()
        assert [e["presence"] for e in resumed.history_] == [e["presence"] for e in whole.history_]


def test_interrupted_round_is_repeated() -> None:
    fed = run_rounds(make_federation(FedBuff(2)), 4)
    collect = fed.engine_.collect

    def broken(timeout: float) -> list[Reply]:
        collect(timeout)
        raise KeyboardInterrupt

    fed.engine_.collect = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_rounds(fed, 1)
    fed.engine_.collect = collect  # type: ignore[method-assign]
    assert run_rounds(fed, 4).hash() == run_rounds(make_federation(FedBuff(2)), 8).hash()


@pytest.mark.parametrize("name", ["FedBuff", "dropouts"])
@pytest.mark.parametrize("writes", [35, 50, 65])
def test_kill_at_any_write_changes_nothing(
    name: str, writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = run_rounds(make_federation(ASYNCHRONOUS[name]), 6)
    with (
        pytest.raises(SimulatedCrash),
        inject_faults(writes),
        Run.start(tmp_path / "run", make_federation(ASYNCHRONOUS[name]), sync=2) as run,
    ):
        for _ in run.rounds(6):
            pass
    resumed = make_federation(ASYNCHRONOUS[name])
    with Run.resume(tmp_path / "run", resumed) as run:
        assert 0 <= run.round < 6
        for _ in run.rounds(6 - run.round):
            pass
    assert resumed.hash() == whole.hash()


def test_batches_and_worker_processes_agree() -> None:
    algorithm = replace(FedBuff(3), participation=Dropouts({"1": 3}))
    whole = run_rounds(make_federation(algorithm), 6)
    batched = run_rounds(
        make_federation(algorithm, VirtualClock(SPEEDS, engine=partial(BytesEngine, batch_count=3))), 6
    )
    torch.testing.assert_close(batched.state.global_model, whole.state.global_model, rtol=0, atol=1e-6)
    assert [e["presence"] for e in batched.history_] == [e["presence"] for e in whole.history_]
    processes = Processes(workers=1)
    try:
        fed = Federation(
            network,
            classification_parties,
            algorithm,
            lr=0.1,
            steps=3,
            batch=4,
            seed=7,
            engine=VirtualClock(SPEEDS, 0, processes),
        )
        assert torch.equal(run_rounds(fed, 6).state.global_model, whole.state.global_model)
    finally:
        processes.close()


def test_pending_tasks_grow_with_working_parties_not_rounds() -> None:
    fed = make_federation(FedBuff(2))
    sizes = [len(done.round.state.server_state["pending_tasks"]) for done in fed.rounds(25)]
    assert max(sizes) <= 6 + 5 and sizes[-1] <= max(sizes[5:15])


def test_local_baseline_has_the_same_replies() -> None:
    """Otherwise a party would be compared with a baseline that trained more often."""
    fed = run_rounds(make_federation(FedBuff(2)), 8)
    baseline = run_rounds(make_federation(local_baseline(fed.algorithm, fed.history_)), 8)
    assert [e["presence"] for e in baseline.history_] == [e["presence"] for e in fed.history_]
    assert column(baseline, "clock") == column(fed, "clock")


@pytest.mark.parametrize(
    "algorithm",
    [CoresetProxies(FedAsync()), CoresetProxies(FedBuff(2)), replace(CoresetProxies(algorithms.FedAvg()), quorum=2)],
)
def test_coreset_proxies_need_a_method_that_waits_for_all(algorithm: Algorithm) -> None:
    """Otherwise a proxy would count in every version, far more often than the present parties."""
    with pytest.raises(SettingError, match=r"does not wait for all parties \(its quorum is [12]\)"):
        make_federation(algorithm).state  # noqa: B018


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (VirtualClock({"9": 1.0}), "a speed for party '9', and there is no party"),
        (VirtualClock({"0": 0.0}), "The speed of party '0' must be a number > 0. Got 0.0"),
        (VirtualClock(jitter=-1.0), "The 'jitter' of VirtualClock must be >= 0"),
    ],
)
def test_invalid_clock_is_rejected(clock: VirtualClock, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        run_rounds(make_federation(FedAsync(), clock), 1)


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(
        SettingError, match="The 'staleness' of FedAsync must be one of 'constant', 'polynomial', 'hinge'"
    ):
        FedAsync(staleness="linear")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"The 'quorum' of FedBuff must be a whole number >= 1. Got 0"):
        run_rounds(make_federation(FedBuff(0)), 1)
