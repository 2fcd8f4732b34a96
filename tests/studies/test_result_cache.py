"""The result cache: an interrupted comparison continues after its finished trainings and gives the same result."""

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
TRAININGS = 8  # two methods and their two baselines, with two seeds


class Interruption(Exception):
    """Ends a comparison early."""


def study(cache: Path | None, **changes: Any) -> Study:
    settings = {"rounds": 4, "seeds": 2, "points": 2, "lr": 0.1, "steps": 2, "batch": 8}
    model = changes.pop("model", NET)
    return compare(METHODS, model, parties.digits(count=4), progress=False, cache=cache, **{**settings, **changes})


def interrupt_after(
    monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException] = Interruption
) -> Callable[[], int]:
    """Raise in every training after the first ``after``; return a function that counts the started trainings."""
    import descant.studies.study

    run_and_score = descant.studies.study.run_and_score
    started = []

    def counted(*arguments: Any) -> Any:
        started.append(1)
        if len(started) > after:
            raise error
        return run_and_score(*arguments)

    monkeypatch.setattr("descant.studies.study.run_and_score", counted)
    return lambda: len(started)


def content(found: Study) -> Any:
    """Return everything in a study except its seconds."""
    results = [{k: v for k, v in result.to_json().items() if k != "seconds"} for result in found.results]
    return json.dumps([results, found.settings, found.findings(), str(found.table())])


@pytest.fixture(scope="module")
def whole() -> Any:
    return content(study(None))


@pytest.mark.parametrize("after", range(TRAININGS))
def test_an_interruption_after_any_training_gives_the_same_study(tmp_path, monkeypatch, whole, after):
    with monkeypatch.context() as patched:
        interrupt_after(patched, after)
        with pytest.raises(Interruption):
            study(tmp_path / "kept")
    started = interrupt_after(monkeypatch, TRAININGS)
    assert content(study(tmp_path / "kept")) == whole
    assert started() == TRAININGS - after


def scaled(output: Tensor, y: Tensor, by: float = 1.0) -> Tensor:
    return nn.functional.cross_entropy(by * output, y)


class Tempered(nn.Module):
    """A module with a setting that shows neither in its text nor in its weights."""

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
def test_another_comparison_reuses_nothing(tmp_path, monkeypatch, before, changes):
    study(tmp_path, **before)
    started = interrupt_after(monkeypatch, 2 * TRAININGS)
    study(tmp_path, **{**before, **changes})
    assert started() == TRAININGS
    study(tmp_path, **before)
    assert started() == TRAININGS


def test_changed_code_is_trained_again(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    code = "from torch import nn\ndef net():\n    return nn.Linear(64, 10)\n"
    started = interrupt_after(monkeypatch, 99)
    for text, trained in ((code, TRAININGS), (code, TRAININGS), (f"{code}# another\n", 2 * TRAININGS)):
        file.write_text(text)
        study(tmp_path / "kept", model=f"{file}:net")
        assert started() == trained


@pytest.mark.parametrize("changes", [{"loss": lambda output, y: scaled(output, y)}, {"model": nn.Linear(64, 10)}])
def test_settings_without_an_import_name_are_not_cached(tmp_path, changes):
    with pytest.warns(DescantWarning, match="not kept for a restart"):
        study(tmp_path / "kept", **changes)
    assert not (tmp_path / "kept").exists()


def test_an_added_method_trains_only_that_method(tmp_path, monkeypatch):
    study(tmp_path)
    started = interrupt_after(monkeypatch, 2)
    monkeypatch.setattr("test_result_cache.METHODS", [*METHODS, algorithms.RFA()])
    study(tmp_path)
    assert started() == 2


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


def test_the_same_command_continues_after_an_interruption(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    command = ["compare", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3, KeyboardInterrupt)
        shown = CliRunner().invoke(get_command(app), command)
    assert shown.exit_code == 130
    assert f"kept in {tmp_path / 'out.part'}: the same command continues after them" in shown.stderr
    assert len(list((tmp_path / "out.part").glob("*.json"))) == 3 and not (tmp_path / "out").exists()

    started = interrupt_after(monkeypatch, 99)
    shown = CliRunner().invoke(get_command(app), command)
    assert shown.exit_code == 0 and f"{tmp_path / 'out.part'} holds 3 finished" in shown.stdout
    assert started() == 6 - 3 and (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out.part").exists()


def test_files_of_other_comparisons_are_kept(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    part = tmp_path / "out.part"
    part.mkdir()
    (part / "notes.json").write_text('{"seconds": 1000}')
    recipe = read_recipe(tmp_path / "tiny.toml")
    run_experiment(
        recipe.with_values("training.lr=0.3"), progress=False, cache=ResultCache(part)
    )  # another comparison, which was interrupted
    others = sorted(part.glob("*.json"))
    shown = CliRunner().invoke(
        get_command(app), ["compare", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    )
    assert shown.exit_code == 0 and f"holds {len(others)} finished trainings" in shown.stdout
    assert sorted(part.glob("*")) == others


def test_a_file_in_place_of_the_folder_raises_before_any_training(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 0)
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(StateError, match=r"kept is a file"):
        study(tmp_path / "kept")


@pytest.mark.parametrize("n", range(1, 4))
def test_a_full_disk_loses_the_cache_but_not_the_study(tmp_path, whole, n):
    with (
        inject_faults(n, True, disk_full_error),
        pytest.warns(DescantWarning, match="A finished training cannot be kept"),
    ):
        assert content(study(tmp_path / "kept")) == whole


def test_cached_trainings_count_in_the_seconds(tmp_path):
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
