"""A run killed at any write, or stopped by a full disk there, ends with the same models and numbers."""

from __future__ import annotations

import csv
import gc
import hashlib
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bytes_engine import BytesEngine
from descant import DescantWarning, Federation, algorithms, parties
from descant.algorithms import Timetable
from descant.core.algorithm import Hyper, Loss, LossTerm
from descant.core.interfaces import TrainJob, TrainResult
from descant.core.messages import Reply, Task
from descant.core.metrics import Metric
from descant.core.seeds import stream
from descant.engines import InProcess
from descant.errors import EngineError, SettingError, StateError
from descant.federation import EngineFactory
from descant.models.flat import Net
from descant.parties.fingerprints import data_fingerprints
from descant.reporting.table import Table
from descant.rounds.checkpoint import digest_of_models
from descant.storage import check_replaceable
from descant.tracking import RecordedRun, Run, find_runs, is_run, metrics_db, read_run
from descant.tracking.run_writer import SnapshotPolicy
from descant.training.evaluation import evaluate_test_sets
from toy_problems import classification_parties, network
from write_faults import SimulatedCrash, disk_full_error, inject_faults, inject_interrupt

ROUNDS = 3
SYNCS: list[SnapshotPolicy] = [2, "always"]


def data(shift: float = 0.0) -> parties.Population:
    rng = np.random.default_rng(0)
    found = {name: (rng.normal(size=(8, 2)) + k, rng.integers(0, 2, 8)) for k, name in enumerate("abc")}
    found["b"][0][0, 0] += shift
    return parties.from_arrays(found)


PEOPLE = data()


@dataclass(frozen=True)
class Walk:
    """A cheap solver: a random step, with the sum of earlier steps as party state."""

    metric = None
    evaluate = staticmethod(evaluate_test_sets)

    @property
    def hyper(self) -> Hyper:
        return Hyper()

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: object, count: int
    ) -> dict[str, str]:
        return {"walk": ""}

    def train(self, job: TrainJob) -> TrainResult:
        steps = [
            stream(job.seed, job.round, party.name, purpose="walk").normal(size=job.start.shape[1])
            for party in job.parties
        ]
        moved = torch.from_numpy(np.array(steps)).float()
        sums = [
            m.get("sum", torch.zeros(moved.shape[1])) + step for m, step in zip(job.party_states, moved, strict=True)
        ]
        metrics = [{"loss": float(row.norm()), "samples": p.samples} for row, p in zip(sums, job.parties, strict=True)]
        return TrainResult(job.start + torch.stack(sums), [{"sum": row} for row in sums], metrics)


def model() -> nn.Module:
    return nn.Linear(2, 2)


def make_federation(
    people: parties.Population = PEOPLE, seed: int = 0, engine: EngineFactory = InProcess
) -> Federation:
    algorithm = algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1)
    return Federation(model, people, algorithm, solver=Walk(), participation=2, seed=seed, engine=engine)


def open_run(folder: Path, sync: SnapshotPolicy, fed: Federation) -> Run:
    return Run.resume(folder, fed) if is_run(folder) else Run.start(folder, fed, "rounds = 3", sync)


def run_to_end(folder: Path, sync: SnapshotPolicy, seen: list[int] | None = None) -> str:
    """Start or resume a run up to the last round, like `descant run --resume`."""
    fed = make_federation()
    with open_run(folder, sync, fed) as run:
        for round in run.rounds(ROUNDS - run.round, score_every=2):
            if seen is not None:
                seen.append(round.index)
    return fed.hash()


def assert_same_records(one: RecordedRun, other: RecordedRun) -> None:
    """Assert that two runs have equal numbers, except for seconds."""
    a = one.numbers
    b = other.numbers
    assert one.recipe == other.recipe and (a.parties, a.metrics.keys()) == (b.parties, b.metrics.keys())
    for x, y in (
        (a.rounds, b.rounds),
        (a.participated, b.participated),
        (a.accepted, b.accepted),
        (a.scored_rounds, b.scored_rounds),
    ):
        np.testing.assert_array_equal(x, y)
    for name in a.metrics.keys() - {"seconds"}:
        np.testing.assert_array_equal(a.metrics[name], b.metrics[name])
    for name in a.scores:
        np.testing.assert_array_equal(a.scores[name], b.scores[name])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RecordedRun]:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fed = make_federation()
    with Run.start(folder, fed, "rounds = 3", 2) as run:
        assert [round.index for round in run.rounds(ROUNDS, score_every=2)] == [1, 2, 3]
    assert fed.hash() == make_federation().fit(ROUNDS, progress=False).hash()  # to record changes nothing
    return fed.hash(), read_run(folder)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs: a killed process, unlike a power cut, loses nothing that was written."""
    connect = metrics_db._connect

    def unsynced(*arguments: Any) -> sqlite3.Connection:
        connection = connect(*arguments)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(metrics_db, "_connect", unsynced)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sync", SYNCS)
def test_run_killed_at_every_write_ends_the_same(
    sync: SnapshotPolicy, whole: tuple[str, RecordedRun], tmp_path: Path
) -> None:
    """Kill before every change to the disk and in the middle of every write; nothing acknowledged is lost."""
    torn = 0
    for n in count():
        for half in (False, True):
            folder = tmp_path / f"{n}{half}"
            seen: list[int] = []
            with inject_faults(n, half) as fault, suppress(SimulatedCrash):
                run_to_end(folder, sync, seen)
            if half and not fault.tore_write:
                continue  # the same as not at all
            torn += half
            if is_run(folder):
                assert read_run(folder).state in (("interrupted", "finished") if fault.reached else ("finished",))
            if sync == "always" and seen:
                assert int(max((folder / "models").glob("*/state.json")).parent.name) >= seen[-1]
            assert run_to_end(folder, sync) == whole[0]
            assert_same_records(read_run(folder), whole[1])
            assert len(list((folder / "models").iterdir())) <= 2
            if not fault.reached:
                assert n > 50 and torn > 10
                return
            shutil.rmtree(folder)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("behind", [False, True])
def test_run_interrupted_at_every_write_ends_the_same(
    sync: SnapshotPolicy, behind: bool, whole: tuple[str, RecordedRun], tmp_path: Path
) -> None:
    """Unlike a kill, an interrupt is followed by more writes: the run is closed, and no line is repeated."""
    for n in count():
        folder = tmp_path / str(n)
        with inject_interrupt(n, behind) as fault, suppress(KeyboardInterrupt):
            run_to_end(folder, sync)
        if is_run(folder):
            read_run(folder)
        assert run_to_end(folder, sync) == whole[0]
        assert_same_records(read_run(folder), whole[1])
        if not fault.reached:
            assert n > 50
            return
        shutil.rmtree(folder)


@pytest.mark.parametrize("lives", [60, 80])
def test_run_killed_repeatedly_ends_the_same(lives: int, whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    for _ in range(20):
        with inject_faults(lives) as fault, suppress(SimulatedCrash):
            assert run_to_end(tmp_path / "run", 1) == whole[0]
        if not fault.reached:
            break
    assert not fault.reached
    assert_same_records(read_run(tmp_path / "run"), whole[1])


SCRIPT = """
import sys
sys.path[:0] = {path}
from pathlib import Path
from test_run_recording_and_recovery import make_federation, Run
with Run.start(Path({folder!r}), make_federation(), sync=2) as run:
    for round in run.rounds(100_000, score_every=5):
        print(round.index, flush=True)
"""


def test_killed_process_releases_its_folder_and_another_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = [str(Path(__file__).parent), *filter(None, sys.path)]
    code = SCRIPT.format(path=path, folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "7":
            assert process.poll() is None
        with pytest.raises(StateError, match=f"in use by process {process.pid} on "):
            Run.resume(folder, make_federation())
        assert (read_run(folder).state, read_run(folder).reason.split(" on ")[0]) == (
            "running",
            f"process {process.pid}",
        )
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert read_run(folder).state == "interrupted"
    fed = make_federation()
    with Run.resume(folder, fed) as run:
        assert run.round >= 6
        for _ in run.rounds(5):
            pass
    assert fed.hash() == make_federation().fit(fed.state.round, progress=False).hash()
    assert read_run(folder).numbers.rounds.tolist() == list(range(1, fed.state.round + 1))


def test_child_that_outlives_its_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from descant.storage.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); child = os.fork()\n"
        "if child == 0: os.close(1); time.sleep(20); os._exit(0)\n"
        "print(child, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    make_federation = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], env=environment, stdout=subprocess.PIPE, check=True
    )
    try:
        from descant.storage.lock import FolderLock, lock_holder

        FolderLock(tmp_path / ".lock").release()
        assert lock_holder(tmp_path / ".lock") == ""
    finally:
        os.kill(int(make_federation.stdout), signal.SIGKILL)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sync", SYNCS)
def test_full_disk_is_an_error_and_loses_nothing_acknowledged(
    sync: SnapshotPolicy, whole: tuple[str, RecordedRun], tmp_path: Path
) -> None:
    """The run continues once there is space again."""
    for n in count(0, 3):
        folder = tmp_path / str(n)
        seen = list[int]()
        with inject_faults(n, tear_write=True, error=disk_full_error) as fault:
            try:
                run_to_end(folder, sync, seen)
            except StateError as error:
                assert "No space left on device" in str(error) and "free some space" in str(error)
        if is_run(folder):
            read_run(folder)  # the log is whole
        if sync == "always" and seen:
            assert int(max((folder / "models").glob("*/state.json")).parent.name) >= seen[-1]
        assert run_to_end(folder, sync) == whole[0]
        assert_same_records(read_run(folder), whole[1])
        if not fault.reached:
            assert n > 50
            return
        shutil.rmtree(folder)


def test_same_process_continues_a_run_once_there_is_space(whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    fed = make_federation()
    with Run.start(tmp_path / "run", fed, "rounds = 3", 1) as run:
        with inject_faults(0, tear_write=True, error=disk_full_error), pytest.raises(StateError, match="No space left"):
            for _ in run.rounds(ROUNDS, score_every=2):
                pass
        for _ in run.rounds(ROUNDS - run.round, score_every=2):
            pass
    assert fed.hash() == whole[0]
    assert_same_records(read_run(tmp_path / "run"), whole[1])


class Breaking(BytesEngine):
    """An engine that fails when parties are to evaluate a round."""

    at = 0

    def submit(self, tasks: Sequence[Task]) -> None:
        if tasks[0].kind == "evaluate" and tasks[0].round == self.at:
            raise EngineError("The line is down")
        super().submit(tasks)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("at", [2, 3])
def test_round_with_interrupted_scoring_is_scored_on_resume(
    whole: tuple[str, RecordedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, sync: SnapshotPolicy
) -> None:
    monkeypatch.setattr(Breaking, "at", at)
    with (
        pytest.raises(EngineError, match="line is down"),
        open_run(tmp_path / "run", sync, make_federation(engine=Breaking)) as run,
    ):
        list(run.rounds(ROUNDS, score_every=2))
    assert run_to_end(tmp_path / "run", sync) == whole[0]
    assert_same_records(read_run(tmp_path / "run"), whole[1])
    again, twin = (make_federation().load(found) for found in (read_run(tmp_path / "run").snapshot, whole[1].snapshot))
    assert [entry.keys() for entry in again.history_] == [entry.keys() for entry in twin.history_]


def test_unwritable_folder_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the system's error is simulated."""
    opening = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).startswith(str(tmp_path)) and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system")
        return opening(path, flags, *rest, **named)

    run_to_end(tmp_path / "old", 2)
    before = read_run(tmp_path / "old").numbers
    monkeypatch.setattr(os, "open", refuse)
    for begin in (
        lambda: Run.start(tmp_path / "new", make_federation()),
        lambda: Run.resume(tmp_path / "old", make_federation()),
    ):
        with pytest.raises(
            StateError, match=r"cannot be written: Read-only file system. Give a folder that you may write"
        ):
            begin()
    assert read_run(tmp_path / "old").numbers.rounds.tolist() == before.rounds.tolist()  # and it can still be read


def test_two_runs_cannot_use_one_folder(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", make_federation()) as run:
        with pytest.raises(StateError, match=f"in use by process {os.getpid()}"):
            Run.resume(tmp_path / "run", make_federation())
        with pytest.raises(StateError, match="already holds a run"):
            Run.start(tmp_path / "run", make_federation())
        assert read_run(tmp_path / "run").state == "running"
        run.close()
        with pytest.raises(StateError, match="is closed"):
            list(run.rounds(1))
    (tmp_path / "run" / ".lock").write_text("not json")
    Run.resume(tmp_path / "run", make_federation()).close()


@pytest.mark.parametrize("name", ["run.toml", "models", "metrics.db", "notes.txt"])
def test_foreign_files_are_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(StateError, match=f"holds '{name}', which Descant did not write"):
        Run.start(tmp_path, make_federation())
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_run_is_written_in_place_so_a_mount_point_or_unwritable_parent_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    making = os.mkdir
    folder.mkdir()

    def refuse(path: Any, *rest: Any) -> None:
        if Path(path).parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        making(path, *rest)

    monkeypatch.setattr(Path, "is_mount", lambda place: place == folder.resolve())
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StateError, match="run is a mount point"):
        check_replaceable(folder, ("study.json",))
    run_to_end(folder, 2)
    assert read_run(folder).state == "finished"
    with pytest.raises(StateError, match="other cannot be written: Permission denied"):
        Run.start(tmp_path / "other", make_federation())


def test_own_files_of_another_kind_are_named_correctly(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run", 2)
    with pytest.raises(StateError, match=r"holds '.lock', which Descant did not write for a result of this kind. Give"):
        check_replaceable(tmp_path / "run", ("study.json", "*.png"))
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "collapse.png").touch()
    with pytest.raises(StateError, match=r"holds 'collapse.png', but no study.json written by Descant"):
        check_replaceable(tmp_path / "left", ("study.json", "*.png"))


def test_hidden_desktop_files_do_not_stop_a_run(whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".DS_Store").touch()
    with pytest.raises(ZeroDivisionError), Run.start(folder, make_federation(), "rounds = 3", 1) as run:
        for round in run.rounds(ROUNDS, score_every=2):
            (folder / "models" / f"{round.index - 1:08d}" / ".DS_Store").touch()
            (folder / "models" / f"{round.index:08d}").mkdir()  # as if it had been forgotten once
            (folder / "models" / f"{round.index:08d}" / ".DS_Store").touch()
            1 / (2 - round.index)
    assert run_to_end(folder, 1) == whole[0]
    assert_same_records(read_run(folder), whole[1])
    assert (folder / "models" / "00000000" / ".DS_Store").exists()
    assert len(list((folder / "models").glob("*/state.json"))) == 2


def test_torn_last_line_is_cut_off(whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_to_end(folder, 2)
    events = folder / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    for torn in (lines[-1][:-1], lines[-1][:9], b"\x00" * 50, b"{}", b"{}\n"):
        events.write_bytes(b"".join(lines[:-1]) + torn)
        assert len(read_run(folder).events) == len(lines) - 1
    with Run.resume(folder, make_federation()):
        pass
    found = read_run(folder).events[len(lines) - 1]
    assert (found["event"], found["torn"]) == ("resumed", 3)


def test_log_cut_before_the_snapshot_is_not_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_to_end(folder, 2)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"event": "round"' in line)
    (folder / "events.jsonl").write_text("".join(lines[:last]))
    with pytest.raises(StateError, match=r"events.jsonl is damaged: it ends at round 2, before .* 3. Restore it"):
        Run.resume(folder, make_federation())
    (folder / "events.jsonl").write_text("".join(lines[: last + 1]))  # as after a kill
    Run.resume(folder, make_federation()).close()


def test_log_truncated_while_it_is_written_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(StateError, match=r"events.jsonl has lost 1 of its"),
        Run.start(tmp_path / "run", make_federation()) as run,
    ):
        file = tmp_path / "run" / "events.jsonl"
        os.truncate(file, file.stat().st_size - 1)
        run.log("mine")
        run.snapshot()


def test_rounds_outside_of_the_recorder_are_no_damage(tmp_path: Path) -> None:
    fed = make_federation()
    run = Run.start(tmp_path / "run", fed)
    fed.fit(2, progress=False)
    run.log("mine", round=7)
    run.snapshot()
    run._metrics.close()
    run._lock.release()  # as a kill would
    assert read_run(tmp_path / "run").round == 2
    Run.resume(tmp_path / "run", make_federation()).close()


class Unknown:
    pass


@pytest.mark.parametrize("fields", [{"v": torch.ones(1)}, {"v": [Unknown()]}, {"v": {(1, 2): 3}}, {"n": 1}, {"at": ""}])
def test_event_that_cannot_be_encoded_changes_nothing(fields: dict[str, Any], tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", make_federation()) as run:
        with pytest.raises(SettingError, match=r"The event 'mine' (cannot be written as JSON|has a field)"):
            run.log("mine", **fields)
        run.log("mine", deep={"a": [float("nan"), (float("inf"),)]}, flat=-float("inf"))
    found = next(event for event in read_run(tmp_path / "run").events if event["event"] == "mine")
    assert (found["deep"], found["flat"]) == ({"a": [None, [None]]}, None)
    Run.resume(tmp_path / "run", make_federation()).close()


@pytest.mark.parametrize("damage", ["changed", "removed", "cut"])
def test_damaged_line_in_the_middle_is_named_by_its_number(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_to_end(folder, 2)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    lines[2] = {"changed": lines[2].replace('"round": ', '"round": 1'), "removed": "", "cut": lines[2][:30]}[damage]
    (folder / "events.jsonl").write_text("".join(lines))
    for reading in (read_run, lambda place: Run.resume(place, make_federation())):
        with pytest.raises(StateError, match=r"Line 3 of .*events.jsonl is damaged"):
            reading(folder)
    (found,) = find_runs(tmp_path)
    assert found.state == "damaged" and "Line 3" in found.reason


def test_damaged_snapshot_is_skipped_only_if_rounds_can_be_repeated(
    whole: tuple[str, RecordedRun], tmp_path: Path
) -> None:
    for sync in SYNCS:
        folder = tmp_path / str(sync)
        run_to_end(folder, sync)
        (center,) = (folder / "models" / "00000003").glob("global_model-*")
        center.write_bytes(center.read_bytes()[:-1])
    with pytest.raises(StateError, match=r"00000003 does not hold a run that can be continued"):
        run_to_end(tmp_path / "always", "always")
    with pytest.warns(DescantWarning, match="The snapshot before it is used"):
        assert run_to_end(tmp_path / "2", 2) == whole[0]
    assert_same_records(read_run(tmp_path / "2"), whole[1])


def test_damaged_metrics_database_is_an_error(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run", 2)
    (tmp_path / "run" / "metrics.db").write_bytes(b"not a database, though long enough to be taken for one" * 100)
    with pytest.raises(StateError, match=r"metrics.db cannot be read"):
        read_run(tmp_path / "run").numbers  # noqa: B018
    with pytest.raises(StateError, match=r"metrics.db is damaged: file is not a database. Restore it from a copy"):
        Run.resume(tmp_path / "run", make_federation())
    (tmp_path / "run" / "metrics.db").write_bytes(b"")
    with pytest.raises(StateError, match=r"metrics.db is damaged: no such table: parties. Restore it from a copy"):
        Run.resume(tmp_path / "run", make_federation())
    (tmp_path / "run" / "metrics.db").unlink()
    with pytest.raises(StateError, match=r"metrics.db is missing. Restore it from a copy"):
        Run.resume(tmp_path / "run", make_federation())


def test_resume_with_another_federation_or_data_is_rejected(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run", 2)
    with pytest.raises(StateError, match="another federation: seed 0, here 1"):
        Run.resume(tmp_path / "run", make_federation(seed=1))
    with pytest.raises(StateError, match=r"another federation: data\.b '"):
        Run.resume(tmp_path / "run", make_federation(data(shift=1e-3)))
    other = make_federation()
    other.metric = Metric("error", lambda output, target: (output.argmax(-1) != target).double(), False)
    with pytest.raises(StateError, match="another federation: metric 'accuracy', here 'error'"):
        Run.resume(tmp_path / "run", other)
    with Run.resume(tmp_path / "run", make_federation(data())):
        pass
    with pytest.raises(StateError, match="holds no run"):
        Run.resume(tmp_path, make_federation())
    with pytest.raises(StateError, match="holds no run"):
        read_run(tmp_path)


def test_run_with_a_party_that_joined_later_equals_one_with_a_late_party(tmp_path: Path) -> None:
    """Party 1 has a proxy in round 3. A new party without a joining round makes another federation."""
    away = [{"party": "1", "from": 1, "to": 2}, {"party": "1", "from": 4}]

    def fed(names: str, spans: list[dict[str, object]], since: dict[str, int] | None = None) -> Federation:
        data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classification_parties(4).items() if name in names}
        people = parties.from_arrays(data)
        people.joined_after = since or {}
        algorithm = replace(
            algorithms.CoresetProxies(algorithms.FedAvgPlus(), share=0.4), participation=Timetable.from_records(spans)
        )
        return Federation(network, people, algorithm, lr=0.1, steps=3, batch=4, seed=7)

    with Run.start(tmp_path / "run", fed("012", away), sync="always") as run:
        for round in run.rounds(2):
            assert len(round.scores.personal.values) == 3
    for since in (None, {"3": 1}, {"2": 2, "3": 2}):
        with pytest.raises(StateError, match="another federation: parties"):
            Run.resume(tmp_path / "run", fed("0123", away, since))
    for rounds in (1, 2):  # the second time it goes on from a snapshot of all four
        with Run.resume(tmp_path / "run", fed("0123", away, {"3": 2})) as run:
            for round in run.rounds(rounds):
                assert len(round.scores.personal.values) == 4
    late = fed("0123", [*away, {"party": "3", "from": 3}]).fit(5, progress=False)
    assert run.federation.hash() == late.hash()
    assert [entry["presence"] for entry in run.federation.history_] == ["ppp.", "ppp.", "pspp", "pppp", "pppp"]
    run.federation.plot("presence", tmp_path / "presence.png")
    held = read_run(tmp_path / "run").numbers
    assert held.parties == tuple("0123") and held.accepted[:, 3].tolist() == [False, False, True, True, True]


def test_snapshot_cost_excludes_the_data_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from descant.parties import fingerprints as fingerprint

    clock = [0.0]
    reckon = fingerprint._party_fingerprint

    def slow(party: parties.Party, every: int) -> str:
        clock[0] += 100
        return reckon(party, every)

    monkeypatch.setattr(fingerprint, "_party_fingerprint", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with Run.start(tmp_path / "run", make_federation(data())) as run:
        assert clock[0] >= 300 and run._snapshot_seconds < 100


def test_fingerprints_read_a_share_of_large_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from descant.parties import fingerprints as fingerprint

    def make_federation(changed: int) -> dict[str, str]:
        x = np.zeros((100, 4), dtype=np.float32)
        x[changed] = 1
        return data_fingerprints(parties.from_arrays({"a": (x, np.zeros(100, dtype=int))}, test=0))

    assert make_federation(0) != make_federation(1)
    monkeypatch.setattr(fingerprint, "_SAMPLED_BYTES", 100 * 16 // 4)
    assert make_federation(1) == make_federation(2) == make_federation(97) != make_federation(4)


def test_recorded_run_can_be_read_without_the_federation(whole: tuple[str, RecordedRun]) -> None:
    found = read_run(whole[1].folder)
    fed = make_federation()
    rows = [(round, round.scores) for round in fed.rounds(ROUNDS)]
    held = found.numbers
    assert (found.state, found.round, found.recipe, found.metric) == ("finished", 3, "rounds = 3", "accuracy")
    assert found.settings["algorithm"]["name"] == "FedGeoMedPlus" and found.higher_is_better
    assert held.parties == PEOPLE.names and held.samples.tolist() == list(PEOPLE.samples.values())
    assert held.rounds.tolist() == [1, 2, 3] and held.scored_rounds.tolist() == [2, 3]
    for r, (round, scores) in enumerate(rows):
        assert [held.parties[k] for k in np.flatnonzero(held.participated[r])] == sorted(round.round.participants)
        assert held.metrics["loss"][r] == round.round.loss
        if round.index in held.scored_rounds:
            s = held.scored_rounds.tolist().index(round.index)
            np.testing.assert_array_equal(held.scores["personal"][s], scores.personal.values)
            np.testing.assert_array_equal(held.scores["majority"][s], scores.majority.values)
    assert [event["n"] for event in found.events] == list(range(1, len(found.events) + 1))
    assert found.events[-1]["snapshot"] == whole[0]
    assert found.events[-1]["hash"] == digest_of_models(fed.state)  # which is what commands print
    assert found.snapshot is not None and make_federation().load(found.snapshot).hash() == whole[0]


def test_copy_of_a_run_can_be_read_and_resumed(whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[1].folder, tmp_path / "copy"))
    assert_same_records(read_run(folder), whole[1])
    fed = make_federation()
    with Run.resume(folder, fed) as run:
        for _ in run.rounds(2):
            pass
    assert fed.hash() == make_federation().fit(ROUNDS + 2, progress=False).hash()
    assert [found.round for found in find_runs(tmp_path)] == [ROUNDS + 2]


def test_scores_requested_by_the_loop_body_are_recorded(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", make_federation()) as run:
        run.log("warning", text="ρ never binds")
        for round in run.rounds(5):
            if round.index == 2:
                assert round.scores.personal.mean >= 0
                break
    found = read_run(tmp_path / "run")
    assert (found.round, found.numbers.scored_rounds.tolist(), found.warnings) == (2, [2], ["ρ never binds"])


def test_error_in_the_loop_body_is_the_reason_of_an_interrupted_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Run.start(tmp_path / "run", make_federation()) as run:
        for round in run.rounds(5):
            1 / (2 - round.index)
    found = read_run(tmp_path / "run")
    assert (found.state, found.round, found.reason) == ("interrupted", 2, "ZeroDivisionError: division by zero")
    with Run.resume(tmp_path / "run", make_federation()) as run:
        assert run.round == 2


def test_rejections_and_notes_are_events(tmp_path: Path) -> None:
    def poisoned(report: Reply) -> list[Reply]:
        return [replace(report, arrays={name: tensor * np.nan for name, tensor in report.arrays.items()})]

    fed = make_federation()
    fed.engine = lambda plan: BytesEngine(plan, tamper=poisoned)
    with pytest.warns(DescantWarning), Run.start(tmp_path / "run", fed) as run:
        for _ in run.rounds(1):
            pass
    found = read_run(tmp_path / "run")
    assert [event["event"] for event in found.events].count("rejected") == 2
    assert "Round 1: no reply was accepted" in found.warnings[0]
    assert found.numbers.participated.sum() == 2 and not found.numbers.accepted.any()


@pytest.mark.usefixtures("quick")
def test_memory_of_a_run_does_not_grow_with_its_rounds(tmp_path: Path) -> None:
    """Neither current nor peak memory grows by more than half a kB per round, with a rejection in each."""

    def half(report: Reply) -> list[Reply]:
        bad = {name: tensor * np.nan for name, tensor in report.arrays.items()}
        return [replace(report, arrays=bad) if report.party == "a" else report]

    fed = Federation(
        model, PEOPLE, algorithms.FedAvg(), solver=Walk(), engine=lambda plan: BytesEngine(plan, tamper=half)
    )
    seen: dict[int, tuple[int, int]] = {}
    tracemalloc.start(1)  # before the first round: what is replaced by another of its kind must not count
    with Run.start(tmp_path / "run", fed, "", "always") as run, pytest.warns(DescantWarning, match="1 of 3 replies"):
        try:
            for round in run.rounds(481):
                if round.index in (32, 160, 480):  # each time as many are not small yet
                    gc.collect()
                    tracemalloc.reset_peak()
                    seen[round.index] = (tracemalloc.get_traced_memory()[0], 0)
                elif round.index - 1 in seen:
                    seen[round.index - 1] = (seen[round.index - 1][0], tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert len(fed.history_) == len(fed.rejections_) == 481
    for before, after in zip(seen[160], seen[480], strict=True):
        assert (after - before) / (480 - 160) < 500


@pytest.mark.usefixtures("quick")
def test_manifest_of_a_long_run_is_plain_json(tmp_path: Path) -> None:
    fed = make_federation()
    rounds = 70
    fed.history_.append({"round": 0, "loss": math.inf, "global_model_scores": [math.nan, 0.5], "presence": "p.ß"})
    with Run.start(tmp_path / "run", fed, "", "always") as run:
        for round in run.rounds(rounds):
            round.scores  # noqa: B018
    text = (tmp_path / "run" / "models" / f"{rounds:08d}" / "state.json").read_text()
    manifest = json.loads(text)
    assert text == json.dumps(manifest, allow_nan=False)
    seal = manifest.pop("seal")
    assert seal == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    assert manifest["history"][0] == {"round": 0, "loss": None, "global_model_scores": [None, 0.5], "presence": "p.ß"}
    assert fed.history_[0]["loss"] == math.inf and math.isnan(fed.history_[0]["global_model_scores"][0])
    other = make_federation()
    for scored in other.rounds(rounds):
        scored.scores  # noqa: B018
    for ours, theirs in zip(fed.history_[1:], other.history_, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0} and list(ours) == list(theirs)
    assert make_federation().load(tmp_path / "run" / "models" / f"{rounds:08d}").history_[1:] == fed.history_[1:]


def test_json_rows_of_a_table_hold_only_finite_numbers() -> None:
    rows = Table(("a", "b"), [{"a": float("inf"), "b": float("nan")}, {"a": 0.5, "b": [-float("inf")]}]).to_json_rows()
    assert json.dumps(rows, allow_nan=False) == '[{"a": null, "b": null}, {"a": 0.5, "b": [null]}]'


def test_export(whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    found = whole[1]
    records = [json.loads(line) for line in found.to_jsonl(tmp_path / "a.jsonl").read_text().splitlines()]
    with found.to_csv(tmp_path / "a.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(records) == len(rows) == ROUNDS + 2 * len(PEOPLE)
    for record, row in zip(records, rows, strict=True):
        assert row["party"] == record.get("party", "")
        assert {name: float(text) for name, text in row.items() if text and name != "party"} == {
            name: value for name, value in record.items() if name != "party" and value is not None
        }


def test_new_score_becomes_a_column(whole: tuple[str, RecordedRun], tmp_path: Path) -> None:
    file = tmp_path / "metrics.db"
    make_federation = metrics_db.MetricsDatabase.create(file, {"a": 1, "b": 2})
    for round in (1, 2):
        make_federation.add_round(round, {"loss": float("nan")}, {"b": True})
        make_federation.add_scores(round, ["b"], {"personal": np.array([0.5]), "before": np.array([np.inf])})
    make_federation.commit()
    make_federation.close()
    held = metrics_db.read_metrics(file)
    assert np.isnan(held.metrics["loss"]).all() and held.participated.tolist() == [[False, True]] * 2
    np.testing.assert_array_equal(held.scores["before"], [[np.nan, np.inf]] * 2)
    assert np.isnan(held.scores["global_model"]).all()
    with sqlite3.connect(file) as connection:  # as in the module's docstring
        sql = "SELECT party, personal, global_model FROM scores JOIN parties USING (id) WHERE round = 2"
        assert connection.execute(sql).fetchall() == [("b", 0.5, None)]
    connection.close()


@pytest.mark.parametrize("sync", [0, -1, True, "sometimes", 1.5])
def test_invalid_sync_is_rejected(sync: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="'sync' must be"):
        Run.start(tmp_path / "run", make_federation(), sync=sync)
    assert not (tmp_path / "run").exists()


def test_reading_does_not_import_torch(whole: tuple[str, RecordedRun]) -> None:
    reading = f"import sys; from descant.tracking import read_run; read_run({str(whole[1].folder)!r}).numbers"
    code = f"{reading}; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
