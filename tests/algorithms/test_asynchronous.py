"""Nobody waits for the slow: the virtual clock, quorum, staleness, and stopping with work on its way."""

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
from descant.algorithms.fedavg import local_baseline
from descant.analysis import interpolate
from descant.core.messages import Reply
from descant.engines import InProcess, Processes, VirtualClock
from descant.errors import DescantWarning, SettingError
from descant.tracking import Run
from toy_problems import METHODS, classification_parties, network
from write_faults import SimulatedCrash, inject_faults

SPEEDS = {"0": 0.25, "1": 3.0}
CLOCK = VirtualClock(SPEEDS)


def made(algorithm: Algorithm, engine: object = CLOCK, **settings: object) -> Federation:
    solver = settings.pop("solver", Sgd(lr=0.1, steps=3, batch=4))
    return Federation(network(), classification_parties(5), algorithm, solver=solver, seed=7, engine=engine, **settings)  # type: ignore[arg-type]


def ran(fed: Federation, rounds: int) -> Federation:
    return fed.fit(rounds, progress=False)


def column(fed: Federation, name: str) -> list[float]:
    return [entry[name] for entry in fed.history_]


def test_faster_parties_reply_more_often_and_staleness_counts_versions() -> None:
    """Three steps take 1, 3 and 12 seconds: by hand, version by version."""
    fed = ran(made(FedAsync()), 14)
    letters = [entry["presence"].replace("a", ".") for entry in fed.history_]
    who = [text.index("p") for text in letters]
    at_once = [sorted(who[begin:end]) for begin, end in ((0, 2), (2, 6), (6, 8), (8, 12), (12, 14))]
    assert at_once == [[1, 1], [1, 2, 3, 4], [1, 1], [1, 2, 3, 4], [1, 1]]
    assert column(fed, "clock") == [1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8]
    asked = dict.fromkeys(who, 0)  # the version at which each was asked
    for version, (party, late) in enumerate(zip(who, column(fed, "staleness"), strict=True), 1):
        assert late == version - 1 - asked[party]
        asked[party] = version
    late = ran(made(FedAsync(max_staleness=40)), 30)
    at = [entry["presence"][0] for entry in late.history_].index("p")
    assert late.history_[at]["clock"] == 12 and late.history_[at]["staleness"] == at


@pytest.mark.parametrize(("algorithm", "parties"), [(FedBuff(2), 3), (FedBuff(3), 10), (FedAsync(), 5)])
def test_parties_of_equal_speed_reply_equally_often(algorithm: Algorithm, parties: int) -> None:
    """Ties are broken by the seed: by name, some would report twice as often as others."""
    versions = 90
    turns = []
    for seed in (0, 1):
        solver = Sgd(lr=0.01, steps=1, batch=4)
        fed = Federation(
            network(), classification_parties(parties), algorithm, solver=solver, seed=seed, engine=VirtualClock()
        )
        ran(fed, versions)
        counts = [sum(entry["presence"][k] == "p" for entry in fed.history_) for k in range(parties)]
        assert max(counts) <= 1.3 * min(counts) and max(column(fed, "staleness")) < parties, counts
        turns.append([entry["presence"] for entry in fed.history_])
    assert turns[0] != turns[1]


@pytest.mark.parametrize("name", METHODS)
def test_clock_changes_only_the_time_of_synchronous_methods(name: str) -> None:
    timed = ran(made(METHODS[name]()), 2)
    plain = ran(made(METHODS[name](), InProcess), 2)
    assert torch.equal(timed.state.global_model, plain.state.global_model)
    for party in plain.state.personal_models.names():
        assert torch.equal(
            timed.state.personal_models.get(party)["model"], plain.state.personal_models.get(party)["model"]
        )
    assert column(timed, "clock")[-1] > 0 and "clock" not in plain.history_[-1]


def test_quorum_larger_than_the_pending_tasks_waits_for_all() -> None:
    waiting = ran(made(replace(algorithms.FedAvg(), quorum=9)), 3)
    assert torch.equal(waiting.state.global_model, ran(made(algorithms.FedAvg()), 3).state.global_model)
    assert column(waiting, "clock") == [12, 24, 36] and column(waiting, "staleness") == [0, 0, 0]


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5), st.integers(1, 4), st.floats(0, 1))
@settings(max_examples=12, deadline=None)
def test_time_never_decreases_and_every_party_gets_a_turn(speeds: list[float], quorum: int, jitter: float) -> None:
    clock = VirtualClock(dict(zip("01234", speeds, strict=True)), jitter)
    fed = ran(made(replace(FedBuff(quorum), max_staleness=1000), clock, solver=Sgd(lr=0.01, steps=1, batch=4)), 12)
    times = column(fed, "clock")
    assert times == sorted(times) and not fed.rejections_
    assert all(entry["accepted"] == quorum for entry in fed.history_)
    flight = fed.state.server_state["pending_tasks"]
    assert len(flight["party_index"]) == 5 - quorum and len(set(flight["party_index"].tolist())) == 5 - quorum


def test_evaluation_takes_no_time_and_changes_nothing() -> None:
    plain = ran(made(FedBuff(2)), 6)
    looked = made(FedBuff(2))
    for done in looked.rounds(6):
        done.scores  # noqa: B018
        looked.models_["0"]
        if done.index == 3:
            interpolate(looked, points=2)
    assert looked.hash() == plain.hash() and column(looked, "clock") == column(plain, "clock")


def test_staleness_discounts_are_those_of_the_papers() -> None:
    assert [Polynomial(0.5)(d) for d in (0, 3, 8)] == [1, 0.5, pytest.approx(1 / 3)]
    assert [Hinge(10.0, 4)(d) for d in (0, 4, 5, 6)] == [1, 1, 1 / 11, 1 / 21]
    assert FedAsync(staleness="constant").staleness_discount is None
    assert FedAsync(staleness="hinge").staleness_discount == Hinge(10.0, 4)
    assert FedBuff().staleness_discount is not None and FedBuff().staleness_discount(3) == 1 / math.sqrt(4)  # type: ignore[misc]


@pytest.mark.parametrize("reply_content", ["model", "update"])
def test_one_step_of_fedasync_and_of_fedbuff_by_hand(reply_content: str) -> None:
    """A report that is 3 versions late moves the centre by α·s(3) of the way to it, or by η·s(3) of its change."""
    algorithm = FedAsync(0.5, rho=0.0) if reply_content == "model" else FedBuff(1, server_step=0.5)
    clock = VirtualClock({"0": 2.9, "1": 1.1, "2": 1.0, "3": 0.01, "4": 0.01})
    fed = made(algorithm, clock)
    first = fed.state.global_model.clone()
    ran(fed, 3)
    before = fed.state.global_model
    ran(fed, 1)
    assert column(fed, "staleness") == [0, 0, 2, 3] and fed.history_[-1]["presence"][2] == "p"
    lone = made(replace(algorithms.Local(), participation=Dropouts({"0": 0, "1": 0, "3": 0, "4": 0})), InProcess)
    trained = ran(lone, 1).state.personal_models.get("2")["model"]
    s = 0.5 * (1 + 3) ** -0.5
    moved = trained - (before if reply_content == "model" else first)
    torch.testing.assert_close(fed.state.global_model, before + s * moved, rtol=0, atol=1e-6)


def test_stale_reply_is_rejected_by_name_and_its_party_gets_a_new_task() -> None:
    fed = made(FedAsync(max_staleness=8))
    with pytest.warns(DescantWarning, match="1 of 2 reports were refused, the first: round 1, party '0': stale"):
        ran(fed, 30)
    assert all(entry["presence"][0] == "." and entry["presence"].count("p") == 1 for entry in fed.history_)
    assert 0 in fed.state.server_state["pending_tasks"]["party_index"]


def test_parties_with_personal_models_may_be_late() -> None:
    algorithm = replace(algorithms.FedAvgPlus(alpha=1.0), quorum=2, max_staleness=9)
    fed = ran(made(algorithm, solver=Sgd(lr=0.05, steps=3, batch=4, optimizer="Adam")), 8)
    assert not fed.rejections_ and len(fed.state.personal_models.names()) >= 4
    steps = {
        name: float(fed.engine_.party_states.get(name)["moment.step"]) for name in fed.state.personal_models.names()
    }
    attended = dict(zip(fed.population, fed.state.rounds_trained(fed.plan_).tolist(), strict=True))
    assert steps == {name: 3 * attended[name] for name in steps}  # a memory moves when its report counts


WAYS: dict[str, Algorithm] = {
    "FedAsync": FedAsync(max_staleness=5),
    "FedBuff": FedBuff(2),
    "Fed+": replace(algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1), quorum=2, max_staleness=9),
    "drops": replace(FedBuff(2), participation=Dropouts({"1": 3, "2": 5})),
    "by chance": replace(FedBuff(2), participation=RandomAvailability(0.7)),
}


@pytest.mark.filterwarnings("ignore::descant.errors.DescantWarning")
@pytest.mark.parametrize("name", WAYS)
def test_stop_at_any_round_changes_nothing(name: str, tmp_path: Path) -> None:
    solver = Sgd(lr=0.05, steps=3, batch=4, optimizer="Adam")
    clock = VirtualClock(SPEEDS, jitter=0.4)
    whole = ran(made(WAYS[name], clock, solver=solver), 10)
    assert max(column(whole, "staleness")) > 0
    for stop in (1, 4, 7):
        ran(made(WAYS[name], clock, solver=solver), stop).save(tmp_path / str(stop))
        again = ran(made(WAYS[name], clock, solver=solver).load(tmp_path / str(stop)), 10 - stop)
        assert again.hash() == whole.hash()
        assert [e["presence"] for e in again.history_] == [e["presence"] for e in whole.history_]


def test_interrupted_round_is_repeated() -> None:
    fed = ran(made(FedBuff(2)), 4)
    collect = fed.engine_.collect

    def broken(timeout: float) -> list[Reply]:
        collect(timeout)
        raise KeyboardInterrupt

    fed.engine_.collect = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ran(fed, 1)
    fed.engine_.collect = collect  # type: ignore[method-assign]
    assert ran(fed, 4).hash() == ran(made(FedBuff(2)), 8).hash()


@pytest.mark.parametrize("name", ["FedBuff", "drops"])
@pytest.mark.parametrize("writes", [35, 50, 65])
def test_kill_at_any_write_changes_nothing(
    name: str, writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = ran(made(WAYS[name]), 6)
    with (
        pytest.raises(SimulatedCrash),
        inject_faults(writes),
        Run.start(tmp_path / "run", made(WAYS[name]), sync=2) as run,
    ):
        for _ in run.rounds(6):
            pass
    again = made(WAYS[name])
    with Run.resume(tmp_path / "run", again) as run:
        assert 0 <= run.round < 6
        for _ in run.rounds(6 - run.round):
            pass
    assert again.hash() == whole.hash()


def test_batches_and_worker_processes_agree() -> None:
    algorithm = replace(FedBuff(3), participation=Dropouts({"1": 3}))
    whole = ran(made(algorithm), 6)
    cut = ran(made(algorithm, VirtualClock(SPEEDS, engine=partial(BytesEngine, batch_count=3))), 6)
    torch.testing.assert_close(cut.state.global_model, whole.state.global_model, rtol=0, atol=1e-6)
    assert [e["presence"] for e in cut.history_] == [e["presence"] for e in whole.history_]
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
        assert torch.equal(ran(fed, 6).state.global_model, whole.state.global_model)
    finally:
        processes.close()


def test_pending_tasks_grow_with_working_parties_not_rounds() -> None:
    fed = made(FedBuff(2))
    sizes = [len(done.round.state.server_state["pending_tasks"]) for done in fed.rounds(25)]
    assert max(sizes) <= 6 + 5 and sizes[-1] <= max(sizes[5:15])


def test_local_baseline_has_the_same_replies() -> None:
    """Else a party would be compared with one that worked more often than it did."""
    fed = ran(made(FedBuff(2)), 8)
    twin = ran(made(local_baseline(fed.algorithm, fed.history_)), 8)
    assert [e["presence"] for e in twin.history_] == [e["presence"] for e in fed.history_]
    assert column(twin, "clock") == column(fed, "clock")


@pytest.mark.parametrize(
    "algorithm",
    [CoresetProxies(FedAsync()), CoresetProxies(FedBuff(2)), replace(CoresetProxies(algorithms.FedAvg()), quorum=2)],
)
def test_coreset_proxies_need_a_method_that_waits_for_all(algorithm: Algorithm) -> None:
    """Else one would count in every version, many times as often as the parties that are there."""
    with pytest.raises(SettingError, match=r"does not wait for all parties \(its quorum is [12]\)"):
        made(algorithm).state  # noqa: B018


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        (VirtualClock({"9": 1.0}), "a speed for party '9', and there is no party"),
        (VirtualClock({"0": 0.0}), "The speed of party '0' must be a number > 0. Got 0.0"),
        (VirtualClock(jitter=-1.0), "The 'jitter' of VirtualClock must be >= 0"),
    ],
)
def test_invalid_clock_is_rejected(clock: VirtualClock, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        ran(made(FedAsync(), clock), 1)


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(
        SettingError, match="The 'staleness' of FedAsync must be one of 'constant', 'polynomial', 'hinge'"
    ):
        FedAsync(staleness="linear")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"The 'quorum' of FedBuff must be a whole number >= 1. Got 0"):
        ran(made(FedBuff(0)), 1)
