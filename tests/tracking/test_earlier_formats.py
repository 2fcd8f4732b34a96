"""Runs and checkpoints of earlier versions are rejected in one clear sentence."""

from pathlib import Path

import pytest

from descant import Federation, algorithms, parties
from descant.core import formats
from descant.errors import StateError
from descant.models import logistic
from descant.rounds import checkpoint
from descant.tracking import Run, read_run, run_reader

MESSAGE = "was written by an earlier version of Descant, whose format this version does not read. Train again"


def federation() -> Federation:
    return Federation(lambda: logistic(64, 10), parties.digits(count=2), algorithms.FedAvg(), lr=0.1, steps=1)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with the version of the format before this one."""
    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoint, "RUN_FORMAT", formats.RUN_FORMAT - 1)
        with Run.start(tmp_path / "run", federation()):
            pass
    return tmp_path / "run"


def test_a_run_folder_of_an_earlier_version_is_not_read(old: Path) -> None:
    with pytest.raises(StateError, match=MESSAGE):
        read_run(old)
    (found,) = run_reader.find_runs(old)
    assert found.state == "damaged" and MESSAGE in found.reason


def test_a_run_folder_of_an_earlier_version_is_not_resumed(old: Path) -> None:
    with pytest.raises(StateError, match=MESSAGE):
        Run.resume(old, federation())


def test_a_checkpoint_of_an_earlier_version_is_not_loaded(old: Path) -> None:
    (snapshot,) = (old / "models").iterdir()
    with pytest.raises(StateError, match=MESSAGE):
        federation().load(snapshot)
