"""`scripts/bench`: equal work for all contestants, a row with a reason for each failure, and correct ratios."""

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
from peer_comparison import BenchSettings, peers_by_workload
from peer_comparison.contestants import Peer, find_peer
from peer_comparison.environments import PeerUnavailableError, python_for, python_or_reason
from peer_comparison.measure_in_turns import PeerMeasurement, TurnSchedule, initial_loss, run_turns
from peer_comparison.peers.plain import PlainLoop
from peer_comparison.peers.with_descant import DescantContestant
from peer_comparison.peers.work import Workload, open_shared
from peer_comparison.process import PeerProcess
from peer_comparison.results import FILES, WorkloadResult, write
from peer_comparison.workloads import WORKLOADS, sizes
from peer_comparison.workloads import write as write_work

HERE = Path(sys.executable)
# All parties use all samples in every step: nothing is random, so two correct contestants agree.
TINY = replace(
    WORKLOADS["W1"],
    parties=5,
    participants=5,
    mean_samples=20,
    batch=1000,
    steps=4,
    contrast=0.3,
    rho=0.05,
    alpha=1.0,
)
QUICK = TurnSchedule(turns=1, rounds=2, cold_rounds=3, timeout=60)


def ignore_progress(sentence: str) -> None:
    """Drop a progress line."""


@pytest.fixture
def write_to_disk(tmp_path: Path) -> Callable[[Workload], Path]:
    return lambda work: write_work(work, tmp_path / work.name)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_the_requested_sizes(name: str) -> None:
    work = WORKLOADS[name]
    assert (work.parties, work.participants) == (1000 if name.startswith("W1") else 100, 10)
    samples = sizes(work)
    assert len(samples) == work.parties and samples.min() >= work.min_samples
    assert samples.mean() == pytest.approx(work.mean_samples, rel=0.02)
    if name.startswith("W1"):
        assert samples.min() == 10 or samples.min() < 15
        logs = np.log(samples - 9.5)
        assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 1.0  # log-normal: no tail left in the logs


def test_a_workload_is_determined_by_its_seed(tmp_path: Path) -> None:
    first, again = (write_work(TINY, tmp_path / name) for name in ("first", "again"))
    other = write_work(replace(TINY, seed=1), tmp_path / "other")
    for name in ("x", "y", "probe_x"):
        assert (first / f"{name}.npy").read_bytes() == (again / f"{name}.npy").read_bytes()
        assert (first / f"{name}.npy").read_bytes() != (other / f"{name}.npy").read_bytes()
    first_weights = open_shared(first).initial()
    weights_again = open_shared(again).initial()
    assert all(np.array_equal(first_weights[name], weights_again[name]) for name in first_weights)


def test_the_stored_cnn_weights_fit_its_module(write_to_disk: Callable[[Workload], Path]) -> None:
    work = replace(WORKLOADS["W3"], parties=2, mean_samples=3, min_samples=3)
    shared = open_shared(write_to_disk(work))
    assert shared.x.shape == (6, 1, 28, 28) and shared.cuts() == [slice(0, 3), slice(3, 6)]
    assert initial_loss(shared.folder) == pytest.approx(np.log(10), rel=0.05)


def test_the_plain_loop_and_descant_reach_the_same_loss(write_to_disk: Callable[[Workload], Path]) -> None:
    folder = write_to_disk(TINY)
    names = ("plain", "descant")
    measured = run_turns(
        [find_peer(name) for name in names], dict.fromkeys(names, HERE), folder, folder, QUICK, ignore_progress
    )
    assert [m.reason for m in measured] == ["", ""]
    plain, descant = measured
    assert descant.loss == pytest.approx(plain.loss, rel=1e-4)
    assert plain.loss is not None and plain.loss < 0.95 * initial_loss(folder)
    for m in measured:
        assert len(m.seconds) == len(m.processor) == 1 and m.seconds[0] > 0
        assert m.cold_seconds is not None and m.warmup is not None and 0 < m.warmup < m.cold_seconds
        assert m.memory is not None and m.memory > 50e6


def test_the_plain_loop_and_descant_compute_the_same_fed_plus_model(write_to_disk: Callable[[Workload], Path]) -> None:
    shared = open_shared(write_to_disk(replace(TINY, method="FedGeoMed+")))
    plain = PlainLoop(shared)
    descant = DescantContestant(shared)
    for contestant in (plain, descant):
        contestant.rounds(3)  # from the second on, personal models differ and the proximal step acts
    for name, expected in plain.weights().items():
        np.testing.assert_allclose(descant.weights()[name], expected, rtol=1e-3, atol=1e-5)


def test_a_failing_contestant_is_a_row_with_a_reason_and_the_others_continue(
    write_to_disk: Callable[[Workload], Path], tmp_path: Path
) -> None:
    lost = Peer("lost", "Lost", "peers.plain", installs=(("there-is-no-such-package",),))
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "lost").write_text("a file in place of its environment")
    peers = [Peer("dying", "Dying", "peers.nowhere"), lost, find_peer("plain")]
    pythons = {p.name: python_or_reason(p, tmp_path / "envs", True, ignore_progress) for p in peers}
    dying, not_installed, plain = run_turns(
        peers, pythons, write_to_disk(TINY), tmp_path / "logs", QUICK, ignore_progress
    )
    assert "status 1" in dying.reason and "peers.nowhere" in dying.reason
    assert "Not a directory" in not_installed.reason and "-m venv" in not_installed.reason
    assert not plain.reason and plain.seconds
    notes = [row["note"] for row in WorkloadResult(TINY, 2.3, (dying, not_installed, plain)).rows()]
    assert notes[0].startswith("out: ended") and notes[1].startswith("out: Error") and notes[2] == ""


def test_nothing_is_installed_without_permission(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="not allowed"):
        python_for(find_peer("pfl"), tmp_path / "envs", False, ignore_progress)
    assert not (tmp_path / "envs").exists()


def test_a_contestant_that_exceeds_the_timeout_is_dropped(write_to_disk: Callable[[Workload], Path]) -> None:
    folder = write_to_disk(TINY)
    schedule = replace(QUICK, timeout=0.2)
    (slow,) = run_turns([find_peer("plain")], {"plain": HERE}, folder, folder, schedule, ignore_progress)
    assert slow.reason.startswith("no answer within") and slow.seconds == ()


def test_an_interrupt_leaves_no_process_behind(write_to_disk: Callable[[Workload], Path], tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        PeerProcess(find_peer("plain"), HERE, write_to_disk(TINY), tmp_path / "log") as running,
    ):
        started = running.processes()
        raise KeyboardInterrupt
    assert started and not any(psutil.pid_exists(process.pid) for process in started)


def test_a_suspended_contestant_does_not_run(write_to_disk: Callable[[Workload], Path], tmp_path: Path) -> None:
    with PeerProcess(find_peer("plain"), HERE, write_to_disk(TINY), tmp_path / "log") as running:
        running.read_answer(60.0)
        running.suspend()
        with pytest.raises(PeerUnavailableError, match="no answer"):
            running.send_command("rounds 3", 0.3)
        running.resume()
        assert running.read_answer(60.0)["seconds"] > 0  # the command sent while it was suspended


def test_ratios_compare_medians_with_the_plain_loop() -> None:
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


def test_all_result_files_are_written(tmp_path: Path) -> None:
    plain = PeerMeasurement("plain", "plain", (0.2,), (0.2,), warmup=1.0, cold_seconds=3.0, memory=2e6, loss=1.0)
    out = PeerMeasurement("pfl", "pfl", reason="it | broke")
    machine = {"processor": "a chip", "cores": 2, "python": "3", "load at the start": 0.1}
    write([WorkloadResult(TINY, 2.0, (plain, out))], QUICK, machine, tmp_path / "bench")
    assert sorted(file.name for file in (tmp_path / "bench").iterdir()) == sorted(FILES)
    text = (tmp_path / "bench" / "bench.md").read_text()
    assert "| plain | 200.0 | 200.0 | 1.00 | 1.00 | 1.0 | 3.0 | 2 |  |" in text and "out: it / broke" in text
    saved = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert saved["workloads"][0]["rows"][0]["× plain, wall"] == 1.0


@pytest.mark.parametrize("bad", [{"workloads": ("W9",)}, {"workloads": ()}, {"peers": ("flwr",)}, {"turns": 0}])
def test_settings_are_checked_before_any_installation(bad: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        peers_by_workload(BenchSettings(**bad))  # type: ignore[arg-type]
