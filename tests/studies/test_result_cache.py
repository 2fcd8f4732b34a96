"""A comparison that is broken off goes on behind the trainings that had finished, and comes to the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch import Tensor, nn
from typer.main import get_command

from descant import DescantWarning, Study, algorithms, compare, parties
from descant.algorithms import AdaptiveHyper
from descant.cli import app
from descant.config import read_recipe
from descant.core.metrics import Metric, accuracy
from descant.errors import StateError
from descant.papers import run_experiment
from descant.studies.result_cache import ResultCache
from tiny_recipe import TINY_RECIPE
from write_faults import disk_full_error, inject_faults

METHODS = [
    algorithms.FedAvg(),
    AdaptiveHyper(algorithms.FedAvgPlus(alpha=0.5), lr=(0.05, 0.1, 0.2), work=(1, 2, 4), reward="clients"),
]
NET = partial(nn.Linear, 64, 10)
TRAININGS = 8  # two methods, and each with its own yardstick, with two seeds


class Broken(Exception):
    """What ends a comparison before its time."""


def study(kept: Path | None, **changes: Any) -> Study:
    settings = {"rounds": 4, "seeds": 2, "points": 2, "lr": 0.1, "steps": 2, "batch": 8}
    model = changes.pop("model", NET)
    return compare(METHODS, model, parties.digits(count=4), progress=False, cache=kept, **{**settings, **changes})


def breaking(monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException] = Broken) -> Callable[[], int]:
    """Trainings end by an error from the n-th on; how many began is told."""
    import descant.studies.study

    carry_out = descant.studies.study.run_and_score
    began = []

    def counted(*arguments: Any) -> Any:
        began.append(1)
        if len(began) > after:
            raise error
        return carry_out(*arguments)

    monkeypatch.setattr("descant.studies.study.run_and_score", counted)
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


def scaled(output: Tensor, y: Tensor, by: float = 1.0) -> Tensor:
    return nn.functional.cross_entropy(by * output, y)


class Tempered(nn.Module):
    """A setting that neither shows in its text nor in its weights."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self._temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) / self._temperature
        return output


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ({}, {"rounds": 3}),
        ({}, {"points": 1}),
        ({}, {"lr": 0.2}),
        ({}, {"seeds": [5, 6]}),
        ({"loss": partial(scaled, by=1.0)}, {"loss": partial(scaled, by=2.0)}),
        ({"model": partial(Tempered, 1.0)}, {"model": partial(Tempered, 2.0)}),
        ({"metric": Metric("m", accuracy, True)}, {"metric": Metric("m", accuracy, False)}),
    ],
)
def test_another_comparison_takes_nothing_of_it(tmp_path, monkeypatch, before, changes):
    study(tmp_path, **before)
    began = breaking(monkeypatch, 2 * TRAININGS)
    study(tmp_path, **{**before, **changes})
    assert began() == TRAININGS
    study(tmp_path, **before)
    assert began() == TRAININGS


def test_code_that_was_changed_is_trained_anew(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    code = "from torch import nn\ndef net():\n    return nn.Linear(64, 10)\n"
    began = breaking(monkeypatch, 99)
    for text, trained in ((code, TRAININGS), (code, TRAININGS), (f"{code}# another\n", 2 * TRAININGS)):
        file.write_text(text)
        study(tmp_path / "kept", model=f"{file}:net")
        assert began() == trained


@pytest.mark.parametrize("changes", [{"loss": lambda output, y: scaled(output, y)}, {"model": nn.Linear(64, 10)}])
def test_what_could_be_taken_for_another_is_not_kept(tmp_path, changes):
    with pytest.warns(DescantWarning, match="not kept on the way"):
        study(tmp_path / "kept", **changes)
    assert not (tmp_path / "kept").exists()


def test_one_method_more_trains_that_method_alone(tmp_path, monkeypatch):
    study(tmp_path)
    began = breaking(monkeypatch, 2)
    monkeypatch.setattr("test_result_cache.METHODS", [*METHODS, algorithms.RFA()])
    study(tmp_path)
    assert began() == 2


@pytest.mark.parametrize(
    "damaged", [lambda text: text[:-10], lambda text: text.replace('"rejected": 0', '"rejected": 1')]
)
def test_a_damaged_file_is_named(tmp_path, damaged):
    study(tmp_path)
    file = sorted(tmp_path.glob("*.json"))[0]
    file.write_text(damaged(file.read_text()))
    with pytest.raises(StateError, match=f"{file.name} does not hold a finished training.*Remove it to train again"):
        study(tmp_path)
    file.unlink()
    study(tmp_path)


def test_the_same_command_goes_on(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    command = ["compare", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        breaking(patched, 3, KeyboardInterrupt)
        shown = CliRunner().invoke(get_command(app), command)
    assert shown.exit_code == 130
    assert f"kept in {tmp_path / 'out.part'}: the same command continues after them" in shown.stderr
    assert len(list((tmp_path / "out.part").glob("*.json"))) == 3 and not (tmp_path / "out").exists()

    began = breaking(monkeypatch, 99)
    shown = CliRunner().invoke(get_command(app), command)
    assert shown.exit_code == 0 and f"{tmp_path / 'out.part'} holds 3 finished" in shown.stdout
    assert began() == 6 - 3 and (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out.part").exists()


def test_nothing_of_others_is_removed(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    part = tmp_path / "out.part"
    part.mkdir()
    (part / "notes.json").write_text('{"seconds": 1000}')
    recipe = read_recipe(tmp_path / "tiny.toml")
    run_experiment(
        recipe.with_values("training.lr=0.3"), progress=False, cache=ResultCache(part)
    )  # another one, which was broken off
    others = sorted(part.glob("*.json"))
    shown = CliRunner().invoke(
        get_command(app), ["compare", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    )
    assert shown.exit_code == 0 and f"holds {len(others)} finished trainings" in shown.stdout
    assert sorted(part.glob("*")) == others


def test_a_file_in_the_place_of_the_folder_is_named_before_the_work(tmp_path, monkeypatch):
    breaking(monkeypatch, 0)
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(StateError, match=r"kept is a file"):
        study(tmp_path / "kept")


@pytest.mark.parametrize("n", range(1, 4))
def test_a_full_disk_costs_what_was_kept_and_not_the_work(tmp_path, whole, n):
    with (
        inject_faults(n, True, disk_full_error),
        pytest.warns(DescantWarning, match="A finished training cannot be kept"),
    ):
        assert told(study(tmp_path / "kept")) == whole


def test_what_was_kept_counts_in_the_time(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    recipe = read_recipe(tmp_path / "tiny.toml")
    kept = tmp_path / "kept"
    first = run_experiment(recipe, progress=False, cache=ResultCache(kept))
    again = ResultCache(kept)
    assert (
        again.saved_seconds == 0
        and run_experiment(recipe, progress=False, cache=again).seconds > again.saved_seconds > 0
    )
    assert again.saved_seconds < first.seconds
