"""A comparison that is broken off goes on behind the trainings that had finished, and comes to the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn
from typer.main import get_command

from descant import Study, algorithms, compare, parties
from descant.algorithms import AdaptiveHyper
from descant.cli import app
from descant.errors import StateError
from recipes import TINY

METHODS = [
    algorithms.FedAvg(),
    AdaptiveHyper(algorithms.FedAvgPlus(alpha=0.5), lr=(0.05, 0.1, 0.2), work=(1, 2, 4), reward="clients"),
]
NET = nn.Linear(64, 10)
TRAININGS = 8  # two methods, and each with its own yardstick, with two seeds


class Broken(Exception):
    """What ends a comparison before its time."""


def study(kept: Path | None, **changes: Any) -> Study:
    settings = {"rounds": 4, "seeds": 2, "points": 2, "lr": 0.1, "steps": 2, "batch": 8}
    return compare(METHODS, NET, parties.digits(count=4), progress=False, kept=kept, **{**settings, **changes})


def breaking(monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException] = Broken) -> Callable[[], int]:
    """Trainings end by an error from the n-th on; how many began is told."""
    import descant.study

    carry_out, began = descant.study.carry_out, []

    def counted(*arguments: Any) -> Any:
        began.append(1)
        if len(began) > after:
            raise error
        return carry_out(*arguments)

    monkeypatch.setattr("descant.study.carry_out", counted)
    return lambda: len(began)


def told(found: Study) -> Any:
    """All of it but the time that it took."""
    results = [{k: v for k, v in result.to_json().items() if k != "seconds"} for result in found.results]
    return json.dumps([results, found.settings, found.findings(), str(found.table())])


@pytest.fixture(scope="module")
def whole() -> Any:
    return told(study(None))


@pytest.mark.parametrize("after", range(TRAININGS))
def test_broken_off_anywhere_it_goes_on_and_comes_to_the_same(tmp_path, monkeypatch, whole, after):
    with monkeypatch.context() as patched:
        breaking(patched, after)
        with pytest.raises(Broken):
            study(tmp_path / "kept")
    began = breaking(monkeypatch, TRAININGS)
    assert told(study(tmp_path / "kept")) == whole
    assert began() == TRAININGS - after


@pytest.mark.parametrize(
    "changes",
    [{"rounds": 3}, {"points": 1}, {"lr": 0.2}, {"seeds": [5, 6]}, {"loss": lambda out, y: out.square().mean()}],
)
def test_another_comparison_takes_nothing_of_it(tmp_path, monkeypatch, changes):
    study(tmp_path)
    began = breaking(monkeypatch, TRAININGS)
    study(tmp_path, **changes)
    assert began() == TRAININGS


def test_one_method_more_trains_that_method_alone(tmp_path, monkeypatch):
    study(tmp_path)
    began = breaking(monkeypatch, 2)
    monkeypatch.setattr("test_finished.METHODS", [*METHODS, algorithms.RFA()])
    study(tmp_path)
    assert began() == 2


def test_a_damaged_file_is_named(tmp_path):
    study(tmp_path)
    file = sorted(tmp_path.glob("*.json"))[0]
    file.write_text(file.read_text()[:-10])
    with pytest.raises(StateError, match=f"{file.name} does not hold a finished training.*Remove it to train again"):
        study(tmp_path)
    file.unlink()
    study(tmp_path)


def test_the_same_command_goes_on(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ["compare", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        breaking(patched, 3, KeyboardInterrupt)
        shown = CliRunner().invoke(get_command(app), command)
    assert shown.exit_code == 130
    assert f"kept in {tmp_path / 'out.part'}: the same command goes on behind them" in shown.stderr
    assert len(list((tmp_path / "out.part").glob("*.json"))) == 3 and not (tmp_path / "out").exists()

    began = breaking(monkeypatch, 99)
    shown = CliRunner().invoke(get_command(app), command)
    assert shown.exit_code == 0 and f"{tmp_path / 'out.part'} (3)" in shown.stdout
    assert began() == 6 - 3 and (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out.part").exists()


def test_what_was_kept_counts_in_the_time(tmp_path):
    from descant.config import read
    from descant.papers import carry_out

    (tmp_path / "tiny.toml").write_text(TINY)
    recipe, kept = read(tmp_path / "tiny.toml"), tmp_path / "kept"
    carry_out(recipe, progress=False, kept=kept)
    for file in kept.glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": 100.0}))
    assert 600 < carry_out(recipe, progress=False, kept=kept).seconds < 700
