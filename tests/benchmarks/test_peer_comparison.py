"""The bench: the same work for everybody, honest rows for those who fail, and ratios that are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from descant.errors import SettingError
from peer_comparison import BenchSettings, check_settings
from peer_comparison.contestants import Peer, find_peer
from peer_comparison.environments import PeerUnavailableError, python_for, python_or_reason
from peer_comparison.peers.plain import PlainLoop
from peer_comparison.peers.with_descant import DescantContestant
from peer_comparison.peers.work import Workload, open_shared
from peer_comparison.process import PeerProcess
from peer_comparison.race import PeerMeasurement, TurnSchedule, initial_loss, run_turns
from peer_comparison.results import FILES, WorkloadResult, write
from peer_comparison.workloads import WORKLOADS, sizes
from peer_comparison.workloads import write as write_work

HERE = Path(sys.executable)
# Everybody takes part with all samples in every step: nothing is drawn, so two honest contestants agree exactly.
TINY = replace(WORKLOADS["W1"], parties=5, present=5, mean=20, batch=1000, steps=4, contrast=0.3, rho=0.05, alpha=1.0)
QUICK = TurnSchedule(turns=1, rounds=2, cold_rounds=3, timeout=60)


def quiet(sentence: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Workload], Path]:
    return lambda work: write_work(work, tmp_path / work.name)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_the_sizes_that_were_asked(name: str) -> None:
    work = WORKLOADS[name]
    assert (work.parties, work.participants) == (1000 if name.startswith("W1") else 100, 10)
    each = sizes(work)
    assert len(each) == work.parties and each.min() >= work.min_samples
    assert each.mean() == pytest.approx(work.mean_samples, rel=0.02)
    if name.startswith("W1"):
        assert each.min() == 10 or each.min() < 15
        logs = np.log(each - 9.5)
        assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 1.0  # log-normal: no tail left in the logs


def test_a_workload_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    first, again = (write_work(TINY, tmp_path / name) for name in ("first", "again"))
    other = write_work(replace(TINY, seed=1), tmp_path / "other")
    for name in ("x", "y", "probe_x"):
        assert (first / f"{name}.npy").read_bytes() == (again / f"{name}.npy").read_bytes()
        assert (first / f"{name}.npy").read_bytes() != (other / f"{name}.npy").read_bytes()
    one = open_shared(first).initial()
    two = open_shared(again).initial()
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_the_written_cnn_fits_its_module(written: Callable[[Workload], Path]) -> None:
    work = replace(WORKLOADS["W3"], parties=2, mean=3, least=3)
    shared = open_shared(written(work))
    assert shared.x.shape == (6, 1, 28, 28) and shared.cuts() == [slice(0, 3), slice(3, 6)]
    assert initial_loss(shared.folder) == pytest.approx(np.log(10), rel=0.05)


def test_the_plain_loop_and_descant_do_the_same_work(written: Callable[[Workload], Path]) -> None:
    folder = written(TINY)
    names = ("plain", "descant")
    measured = run_turns([find_peer(name) for name in names], dict.fromkeys(names, HERE), folder, folder, QUICK, quiet)
    assert [m.reason for m in measured] == ["", ""]
    plain, ours = measured
    assert ours.loss == pytest.approx(plain.loss, rel=1e-4)
    assert plain.loss is not None and plain.loss < 0.95 * initial_loss(folder)
    for m in measured:
        assert len(m.seconds) == len(m.processor) == 1 and m.seconds[0] > 0
        assert m.cold_seconds is not None and m.warmup is not None and 0 < m.warmup < m.cold_seconds
        assert m.memory is not None and m.memory > 50e6


def test_both_have_the_same_fed_plus(written: Callable[[Workload], Path]) -> None:
    shared = open_shared(written(replace(TINY, method="FedGeoMed+")))
    plain = PlainLoop(shared)
    ours = DescantContestant(shared)
    for contestant in (plain, ours):
        contestant.rounds(3)  # from the second on, parties have models of their own and are drawn back
    for name, expected in plain.weights().items():
        np.testing.assert_allclose(ours.weights()[name], expected, rtol=1e-3, atol=1e-5)


def test_who_fails_is_a_row_with_a_reason_and_the_others_go_on(
    written: Callable[[Workload], Path], tmp_path: Path
) -> None:
    lost = Peer("lost", "Lost", "peers.plain", installs=(("there-is-no-such-package",),))
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "lost").write_text("a file, where its environment should be")
    peers = [Peer("dying", "Dying", "peers.nowhere"), lost, find_peer("plain")]
    pythons = {p.name: python_or_reason(p, tmp_path / "envs", True, quiet) for p in peers}
    dying, lost_too, plain = run_turns(peers, pythons, written(TINY), tmp_path / "logs", QUICK, quiet)
    assert "status 1" in dying.reason and "peers.nowhere" in dying.reason
    assert "Not a directory" in lost_too.reason and "-m venv" in lost_too.reason
    assert not plain.reason and plain.seconds
    notes = [row["note"] for row in WorkloadResult(TINY, 2.3, (dying, lost_too, plain)).rows()]
    assert notes[0].startswith("out: ended") and notes[1].startswith("out: Error") and notes[2] == ""


def test_nothing_is_installed_where_that_is_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="not allowed"):
        python_for(find_peer("pfl"), tmp_path / "envs", False, quiet)
    assert not (tmp_path / "envs").exists()


def test_a_contestant_that_takes_too_long_is_given_up(written: Callable[[Workload], Path]) -> None:
    folder = written(TINY)
    hasty = replace(QUICK, patience=0.2)
    (slow,) = run_turns([find_peer("plain")], {"plain": HERE}, folder, folder, hasty, quiet)
    assert slow.reason.startswith("no answer within") and slow.seconds == ()


def test_an_interrupt_leaves_no_process_behind(written: Callable[[Workload], Path], tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        PeerProcess(find_peer("plain"), HERE, written(TINY), tmp_path / "log") as running,
    ):
        started = running.processes()
        raise KeyboardInterrupt
    assert started and not any(psutil.pid_exists(process.pid) for process in started)


def test_who_is_not_on_turn_takes_no_time_from_the_others(written: Callable[[Workload], Path], tmp_path: Path) -> None:
    with PeerProcess(find_peer("plain"), HERE, written(TINY), tmp_path / "log") as running:
        running.read_answer(60.0)
        running.suspend()
        with pytest.raises(PeerUnavailableError, match="no answer"):
            running.send_command("rounds 3", 0.3)
        running.resume()
        assert running.read_answer(60.0)["seconds"] > 0  # it answers what it was asked while it stood still


def test_ratios_are_of_medians_to_the_plain_loop() -> None:
    plain = PeerMeasurement(
        "plain", "plain", (0.4, 0.1, 0.2), (0.2, 0.2, 0.2), warmup=1.0, cold_seconds=3.0, memory=2e6, loss=1.0
    )
    fast = PeerMeasurement("descant", "Descant", (0.05, 0.01, 0.9), (0.1, 0.1, 0.4), loss=1.01)
    other = replace(fast, name="pfl", title="pfl", seconds=(), processor=(), loss=2.0)
    rows = WorkloadResult(TINY, 2.0, (plain, fast, other)).rows()
    assert [row["× plain, wall"] for row in rows] == [1.0, pytest.approx(4.0), None]
    assert [row["× plain, CPU"] for row in rows] == [1.0, pytest.approx(2.0), None]
    assert rows[0]["wall ms/round"] == pytest.approx(200) and rows[0]["peak MB"] == pytest.approx(2)
    assert rows[1]["note"] == "" and "not the same work" in rows[2]["note"]
    alone = WorkloadResult(TINY, 2.0, (fast,)).rows()[0]
    assert alone["× plain, wall"] is None and alone["wall ms/round"] == pytest.approx(50)


def test_the_files_are_written_together(tmp_path: Path) -> None:
    plain = PeerMeasurement("plain", "plain", (0.2,), (0.2,), warmup=1.0, cold_seconds=3.0, memory=2e6, loss=1.0)
    out = PeerMeasurement("pfl", "pfl", reason="it | broke")
    where = {"processor": "a chip", "cores": 2, "python": "3", "load at the start": 0.1}
    write([WorkloadResult(TINY, 2.0, (plain, out))], QUICK, where, tmp_path / "bench")
    assert sorted(file.name for file in (tmp_path / "bench").iterdir()) == sorted(FILES)
    text = (tmp_path / "bench" / "bench.md").read_text()
    assert "| plain | 200.0 | 200.0 | 1.00 | 1.00 | 1.0 | 3.0 | 2 |  |" in text and "out: it / broke" in text
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert found["workloads"][0]["rows"][0]["× plain, wall"] == 1.0


@pytest.mark.parametrize("bad", [{"workloads": ("W9",)}, {"workloads": ()}, {"peers": ("flwr",)}, {"turns": 0}])
def test_settings_are_checked_before_anything_is_installed(bad: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        check_settings(BenchSettings(**bad))  # type: ignore[arg-type]
