"""The command line: fast help, one JSON document, and sentences in place of tracebacks."""

import errno
import json
import os
import shlex
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from rich.progress import Progress

from descant import CoresetLimit, VaultLocation, __version__
from descant.cli import app, format_warning, typer
from descant.config import read_recipe
from descant.errors import DescantWarning, StateError
from descant.studies.run_versus_local import evaluate_run, study_from_run
from descant.studies.study_report import available_plots
from descant.studies.training_result import make_result
from descant.tracking import Run
from descant.tracking import read_run as recorded
from tiny_recipe import TINY_RECIPE

DEMO_METHODS = ["majority class", "Local", "FedAvg", "RFA", "FedAvgPlus", "FedGeoMedPlus"]


def descant(*arguments):
    return CliRunner().invoke(typer.main.get_command(app), list(arguments))


def descant_process(*arguments, cwd, code="from descant.cli import main; main()"):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_help_and_version_import_nothing_heavy(tmp_path):
    code = (
        "import atexit, sys; from descant.cli import main\n"
        "heavy = {'torch', 'matplotlib', 'sklearn', 'numpy'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        "main()"
    )
    shown = descant_process("--help", cwd=tmp_path, code=code)
    assert shown.returncode == 0 and "demo" in shown.stdout and "heavy: []" in shown.stdout
    shown = descant_process("--version", cwd=tmp_path, code=code)
    assert shown.stdout.splitlines() == [f"descant {__version__}", "heavy: []"]


def test_package_runs_as_a_module(tmp_path):
    shown = descant_process("--version", cwd=tmp_path, code="import runpy; runpy.run_module('descant', alter_sys=True)")
    assert shown.stdout == f"descant {__version__}\n"


def test_descant_warning_is_printed_without_its_code_location():
    assert format_warning("x is y.", DescantWarning, "a.py", lineno=3, line=None) == "Warning: x is y.\n"
    assert "a.py:3" in format_warning("x is y.", UserWarning, "a.py", lineno=3, line=None)


def test_help_names_every_option_with_its_default():
    shown = descant("demo", "--help").stdout
    assert all(option in shown for option in ("--rounds", "--seeds", "--out", "--json", "Default: 30"))


def test_demo_as_json_is_one_document_with_six_rows(tmp_path):
    """In a process of its own, on a terminal that cannot even print α."""
    result = descant_process("demo", "--json", "--rounds", "2", "--seeds", "1", "--out", "made/here", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["method"] for row in found["table"]] == DEMO_METHODS
    assert all(0 <= row["mean"] <= 1 and 0 <= row["gained"] <= 10 for row in found["table"])
    assert found["settings"]["rounds"] == 2 and len(found["results"]) == 5
    assert len(found["results"][0]["personal"]) == 10
    assert (tmp_path / found["report"]).read_text("utf-8").startswith("<!doctype html>")
    assert result.stderr == ""


def test_demo_prints_a_table(tmp_path):
    out = tmp_path / "report"
    shown = descant("demo", "--rounds", "1", "--seeds", "2", "--out", str(out))
    assert shown.exit_code == 0 and shown.stderr == ""
    lines = shown.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert {"mean", "worst", "spread", "gained"} <= set(lines[header].split())
    assert [line.split("  ")[0] for line in lines[header + 1 : header + 7]] == DEMO_METHODS
    assert "1 rounds, 2 seeds" in shown.stdout and "parties gained by joining" in " ".join(shown.stdout.split())
    assert lines[-1].endswith(str(out / "report.html")) and (out / "report.html").exists()


def forbid_work(monkeypatch):
    def work(*arguments, **settings):
        raise AssertionError("the work began")

    monkeypatch.setattr("descant.cli.demo_study.run_demo", work)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["demo", "--rounds", "0"], 1, "The 'rounds' of demo must be >= 1. Got 0."),
        (["demo", "--seeds", "-2", "--json"], 1, "The 'seeds' of demo must be >= 1. Got -2."),
        (["demo", "--rounds", "many"], 2, "'many' is not a valid integer"),
        (["demo", "--round", "1", "--frobnicate"], 2, "No such option"),
        (["demos"], 2, "No such command 'demos'"),
    ],
)
def test_invalid_input_gives_a_sentence_and_an_exit_status(monkeypatch, arguments, status, message):
    forbid_work(monkeypatch)
    shown = descant(*arguments)
    assert shown.exit_code == status
    assert message in shown.stderr and "Traceback" not in shown.output
    assert shown.stdout == ""


def test_unwritable_folder_is_rejected_before_training(tmp_path, monkeypatch):
    forbid_work(monkeypatch)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path):
        shown = descant("demo", "--json", "--out", str(out))
        assert shown.exit_code == 1 and shown.stdout == ""
        assert shown.stderr.startswith(f"Error: {out} ") and "Traceback" not in shown.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_interrupt_gives_a_sentence_and_exit_status_130(tmp_path, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("descant.cli.demo_study.run_demo", interrupted)
    shown = descant("demo", "--json", "--out", str(tmp_path / "out"))
    assert shown.exit_code == 130 and shown.stdout == ""
    assert shown.stderr.startswith("Interrupted:") and not (tmp_path / "out").exists()


USER_FILE = """
from torch import nn
from descant import parties

def net():
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

def wide():
    return nn.Sequential(nn.Linear(64, 5000), nn.LayerNorm(5000), nn.Linear(5000, 10))

def dropped():
    return nn.Sequential(nn.Linear(64, 10), nn.Dropout())

def population():
    return parties.digits(count=3)
"""


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("net", "your model runs stacked: many parties at once"),
        ("wide", "not stacked: because one model of 1.5 MB fills the cache by itself"),
        ("dropped", "your model runs looped: one party after another"),
        ("dropped", "because it draws random numbers"),
    ],
)
def test_doctor_shows_the_execution_mode_of_a_model(tmp_path, model, note):
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    shown = descant("doctor", f"{file}:{model}", "--parties", f"{file}:population")
    assert shown.exit_code == 0, shown.output
    assert note in shown.stdout and "torch uses" in shown.stdout
    found = json.loads(descant("doctor", f"{file}:{model}", "--parties", f"{file}:population", "--json").stdout)
    assert {"model", "parties", "execution mode"} <= {finding["subject"] for finding in found}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "mine:net"], "Give a model and --parties together"),
        (["doctor", "nowhere:net", "--parties", "nowhere:population"], "There is no module 'nowhere'"),
        (["doctor", "nowhere.py:net", "--parties", "nowhere.py:population"], "There is no file nowhere.py"),
    ],
)
def test_doctor_names_what_it_cannot_find(arguments, message):
    shown = descant(*arguments)
    assert shown.exit_code == 1 and message in shown.stderr and "Traceback" not in shown.output


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    return "tiny.toml"


def test_compare_prints_a_table_and_writes_a_report(tiny, tmp_path):
    shown = descant("compare", tiny, "--algorithms", "local,fedavg,fed+v1", "--seeds", "1", "--set", "run.rounds=1")
    assert shown.exit_code == 0, shown.output
    assert "Two methods on digits" in shown.stdout and "Ten parties would be too many" in shown.stdout
    assert all(name in shown.stdout for name in ("majority class", "Local", "FedAvg", "RFA+", "trainings"))
    found = json.loads(descant("report", "descant-study", "--json").stdout)
    assert found["report"] == "descant-study/report.html" and found["verdict"]
    again = descant("compare", tiny, "--quick", "--json", "--out", "again")
    document = json.loads(again.stdout)
    assert again.stderr == "" and document["quick"] and document["points"][0]["settings"]["rounds"] == 1
    assert (tmp_path / document["report"]).exists()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_finished_comparison_is_printed_even_if_saving_fails(tiny, monkeypatch, form):
    def full(*given, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    shown = descant("compare", tiny, "--algorithms", "fedavg", "--seeds", "1", "--set", "run.rounds=1", *form)
    assert shown.exit_code == 1 and "No space left on device" in shown.stderr and "Traceback" not in shown.output
    assert "The numbers are above; no report was written." in shown.stderr and "FedAvg" in shown.stdout
    assert not form or json.loads(shown.stdout)["report"] is None


def test_resumed_run_ends_like_an_uninterrupted_one(tiny, tmp_path):
    whole = json.loads(descant("run", tiny, "--out", "whole", "--json").stdout)
    assert descant("run", tiny, "--out", "part", "--set", "run.rounds=1").exit_code == 0
    part = json.loads(descant("run", tiny, "--out", "part", "--resume", "--json").stdout)
    assert part["hash"] == whole["hash"] and part["rounds"] == 3
    summaries = [
        [{name: row[name] for name in ("party", "personal", "local")} for row in result["table"]]
        for result in (whole, part)
    ]
    assert summaries[0] == summaries[1]
    assert 'population = "digits"' in (tmp_path / "part" / "run.toml").read_text()
    rows = json.loads(descant("runs", "--json").stdout)
    assert {row["run"]: row["state"] for row in rows} == {"whole": "finished", "part": "finished"}
    assert "FedGeoMedPlus" in descant("runs").stdout


def test_progress_of_a_run_shows_the_round_summary(tiny, monkeypatch):
    shown = []

    class Watched(Progress):
        def update(self, *given, summary, **named):
            shown.append(summary)
            super().update(*given, summary=summary, **named)

    monkeypatch.setattr("descant.core.progress.Progress", Watched)
    assert descant("run", tiny, "--out", "seen").exit_code == 0
    losses = recorded("seen").numbers.metrics["loss"]
    assert shown[:3] == [f"loss {loss:.4f}" for loss in losses]  # then training alone


SEALED = TINY_RECIPE.replace("participation = 3", 'last_rounds = {"1" = 2}').replace(
    'algorithm = "fedgeomed+"\nalpha = {start = 1.0, factor = 0.9}\nrho = 0.1',
    'algorithm = "fedavg"\nwrap = [{wrapper = "coreset_proxies"}]\n[vault]\nfolder = "v"\nkey = "v.key"\nshare = 0.05',
)


def test_run_uses_the_vault_beside_its_recipe_and_resumes_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "sealed.toml").write_text(SEALED)
    assert descant("vault", "init", "sub/v", "--key", "sub/v.key").exit_code == 0
    shown = descant("run", "sub/sealed.toml", "--out", "out", "--set", "run.rounds=2", "--json")
    assert shown.exit_code == 0, shown.output
    held = json.loads(descant("vault", "list", "sub/v", "--json").stdout)
    assert [(row["party"], row["state"], row["opened"]) for row in held] == [(p, "sealed", 0) for p in "0123"]
    kept = read_recipe("out/run.toml").with_values("run.rounds=4").text
    monkeypatch.chdir(tmp_path / "out")
    (tmp_path / "out" / "run.toml").write_text(kept)
    assert descant("run", "run.toml", "--out", ".", "--resume").exit_code == 0
    held = json.loads(descant("vault", "list", "../sub/v", "--json").stdout)
    assert [row["opened"] for row in held] == [0, 2, 0, 0] and not recorded(tmp_path / "out").events[-1]["reason"]


def test_coreset_limit_needs_no_vault():
    assert read_recipe(SEALED).federation().coreset_limit == CoresetLimit(share=0.05)
    assert read_recipe(SEALED).federation().vault == VaultLocation("v", "v.key")
    only = read_recipe(SEALED).with_values("vault={count=3}").federation()
    assert only.vault is None and only.coreset_limit == CoresetLimit(share=None, count=3)


def test_report_of_a_run_repeats_its_verdict(tiny, tmp_path):
    result = json.loads(descant("run", tiny, "--out", "r", "--json").stdout)
    (tmp_path / "r" / "report.html").unlink()
    shown = descant("report", "r")
    means = {name: sum(row[name] for row in result["table"]) / len(result["table"]) for name in ("personal", "local")}
    verdict = f"{means['personal']:.3f} accuracy against {means['local']:.3f} with local training"
    assert verdict in " ".join(shown.stdout.split())
    assert "FedGeoMedPlus" in (tmp_path / "r" / "report.html").read_text("utf-8")


def test_note_on_the_data_is_in_every_output(tiny, tmp_path):
    code = "from descant.parties import Population, digits\n\ndef noted(count: int):\n    made = digits(count)\n"
    (tmp_path / "stand_in.py").write_text(code + "    return Population(map(made._source, made), 'digits stand in')\n")
    here = ["--set", "parties.population=stand_in:noted", "--set", "run.rounds=1"]
    note = "Data: digits stand in."
    shown = [descant(command, tiny, *here, "--out", command) for command in ("run", "compare")]
    assert all(one.exit_code == 0 and one.stdout.count(note) == 1 for one in shown), shown[0].output + shown[1].output
    assert all(note in (tmp_path / one / "report.html").read_text("utf-8") for one in ("run", "compare"))
    assert recorded("run").settings["note"] == "digits stand in" and note in recorded("run").warnings
    assert note in json.loads(descant("run", tiny, *here, "--out", "r", "--json").stdout)["findings"]
    found = json.loads(descant("compare", tiny, *here, "--out", "c", "--json").stdout)["points"][0]
    assert found["findings"].count(note) == 1
    for folder in ("run", "compare"):
        text = (tmp_path / folder / "report.html").read_text("utf-8")
        assert text.count(note) == 1 and text.index(note) < text.index("<img"), "before the pictures"
        assert descant("report", folder).stdout.count(note) == 1
        again = json.loads(descant("report", folder, "--json").stdout)
        assert again["note"] == note and again["findings"].count(note) == 1


def test_report_on_an_unscored_run_says_how_to_go_on(tiny):
    with Run.start("r", read_recipe(tiny).federation()) as run:
        shown = descant("report", "r")
        assert shown.exit_code == 1 and "The run in r has no scores yet" in shown.stderr
        assert "still running (process" in shown.stderr and "resume" not in shown.stderr
        list(run.rounds(1, score_every=1))
        shown = descant("report", "r")
        assert shown.exit_code == 1 and "still running (process" in shown.stderr and "resume" not in shown.stderr
    shown = descant("report", "r")
    assert shown.exit_code == 1 and "has no scores of local training yet" in shown.stderr
    assert "Run.resume('r', federation)" in shown.stderr, "there is no recipe in the folder"
    assert descant("run", tiny, "--out", "r", "--resume").exit_code == 0
    assert descant("report", "r").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.toml"], "The recipe nowhere.toml cannot be read: No such file"),
        (["run", "tiny.toml", "--set", "training.leer=1"], "Did you mean 'lr'"),
        (["run", "tiny.toml", "--set", "sweep.training.lr=[1.0]"], "is a sweep over values: use descant compare"),
        (["run", "tiny.toml", "--resume", "--out", "new"], "new holds no run to resume"),
        (["run", "tiny.toml", "--engine", "spark"], "must be one of 'in-process', 'processes', 'ray'"),
        (["run", "tiny.toml", "--set", "run.workers=2"], "'workers' in [run] is for the engines 'processes' and 'ray'"),
        (["run", "tiny.toml", "--address", "127.0.0.1:6379"], "An 'address' in [run] is for the engine 'ray'"),
        (["compare", "tiny.toml", "--algorithms", "fedavgg"], "Did you mean 'fedavg'"),
        (["compare", "tiny.toml", "--out", "tiny.toml"], "tiny.toml is a file. A folder is needed"),
        (["report", "nowhere"], "nowhere does not hold a study"),
        (["runs", "nowhere"], "There is no folder nowhere"),
        (["compare", "tiny.toml", "--seeds", "0"], "The 'seeds' of [run] must be a whole number >= 1. Got 0"),
        (["compare", "tiny.toml", "--set", "sweep.trainig.lr=[0.1,0.2]"], "no part of tiny 'trainig'"),
        (["papers", "run", "fed_plus/synthetic", "--seeds", "0"], "The 'seeds' of [run] must be a whole number >= 1"),
        (["papers", "run", "fed_plus/synthetic", "--seeds", "1", "--update-expected"], "give at least --seeds 2"),
        (["compare", "tiny.toml", "--set", "vault.folder=v"], "[vault] of tiny is for descant run"),
        (["contributions", "tiny.toml", "--set", "vault.folder=v"], "[vault] of tiny is for descant run"),
        (["run", "tiny.toml", "--set", "vault.folder=v"], "FedGeoMedPlus has no coreset proxies to use a vault"),
        (["run", "tiny.toml", "--set", "vault.fodler=v"], "no key of [vault] 'fodler'. Did you mean 'folder'"),
        (["run", "tiny.toml", "--set", "vault.key=k"], "[vault] lacks 'folder'"),
        (["run", "tiny.toml", "--set", "vault.share=2"], "The 'share' of [vault] must be >= 0 and <= 1. Got 2"),
        (["papers", "run", "fed_plus/mnst"], "Did you mean 'fed_plus/mnist'"),
        (["papers", "run", "fed_plus/mnist", "--set", "run.rounds=0"], "The 'rounds' of [run] must be"),
    ],
)
def test_recipe_command_names_the_error(tiny, monkeypatch, arguments, message):
    monkeypatch.setattr("descant.studies.study.compare", None)
    shown = descant(*arguments)
    assert shown.exit_code == 1, shown.output
    assert message in shown.stderr and "Traceback" not in shown.output and shown.stdout == ""


@pytest.mark.parametrize("key", ["run.ronds=1", "parties.cuont=1", "training.leer=1.0"])
def test_invalid_short_form_is_reported_even_if_unused(tiny, tmp_path, key, monkeypatch):
    monkeypatch.setattr("descant.studies.study.compare", None)
    (tmp_path / "short.toml").write_text(read_recipe(tiny).with_values(f"quick.{key}").text)
    for arguments in (["short.toml", "--seeds", "1"], [tiny, "--set", f"quick.{key}"]):
        shown = descant("compare", *arguments)
        assert shown.exit_code == 1 and "There is no key of" in shown.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def net(:\n", "line 1 of {file} failed: SyntaxError"),
        ("import nowhere_at_all\n", "line 1 of {file} failed: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def net():\n    return {}['layers']\n", "line 2 of {file} failed: KeyError: 'layers'"),
        ("net = 5\n", "The 'net' of [model] must be \"module:function\""),
    ],
)
def test_error_in_user_code_names_its_line(tiny, tmp_path, code, message):
    file = tmp_path / "broken_net.py"
    file.write_text(code)
    shown = descant("run", tiny, "--set", f"model={{net='{file}:net'}}")
    assert shown.exit_code == 1 and message.format(file=file) in shown.stderr and "Traceback" not in shown.output


def test_internal_error_keeps_its_traceback(tiny, monkeypatch):
    monkeypatch.setattr("descant.federation.Federation.rounds", None)
    with pytest.raises(TypeError):
        CliRunner().invoke(typer.main.get_command(app), ["run", tiny], catch_exceptions=False)


def test_interrupted_run_prints_the_resume_command(tiny, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("descant.studies.run_versus_local.evaluate_run", interrupted)
        shown = descant("run", tiny, "--out", "my run", "--set", "training.lr=0.2")
    command = "descant run 'my run/run.toml' --out 'my run' --resume"
    assert shown.exit_code == 130 and shown.stderr.strip().endswith(f"Go on with: {command}")
    assert command in descant("runs").stdout and command in descant("report", "my run").stderr
    (row,) = json.loads(descant("runs", "--json").stdout)
    assert row["state"] == "interrupted" and row["how to go on"].endswith(command)
    assert descant(*shlex.split(command)[1:]).exit_code == 0, "the recipe in the folder has the change in it"
    assert "resume" not in descant("runs").stdout


def test_help_texts_contain_no_markup():
    def commands(group, *path):
        yield path
        for name, command in getattr(group, "commands", {}).items():
            yield from commands(command, *path, name)

    found = list(commands(typer.main.get_command(app)))
    assert ("server", "init") in found and ("silo", "forget") in found
    for path in found:
        shown = descant(*path, "--help").stdout
        assert "Usage:" in shown and "\\[" not in shown and "None" not in shown, path


def test_report_of_a_run_has_all_parts_of_a_study(tiny, tmp_path):
    assert descant("run", tiny, "--out", "r").exit_code == 0
    local, method = study_from_run(tmp_path / "r").results
    assert study_from_run(tmp_path / "r").settings["parties"] == 4
    assert available_plots(study_from_run(tmp_path / "r")) == ("curves", "parties", "spikes", "collapse", "presence")
    live = read_recipe(tiny).federation()
    for _ in live.rounds(3):
        live.scores()
    whole = make_result(live, (), 0.0, interpolation=None)
    for name, values in whole.series.items():
        np.testing.assert_array_equal(method.series[name], values)
    live.table()
    np.testing.assert_array_equal(local.series["loss"], [entry["loss"] for entry in live._twin.history_])
    assert (local.series["jump"] == 0).all(), "local training has no jumps"
    assert [at for at, _, _ in local.curve] == [at for at, _, _ in method.curve] == [1, 2, 3]
    assert {own for _, own, _ in local.curve} == {local.scores.personal.mean}
    assert "scored at the end of the run only" in (tmp_path / "r" / "report.html").read_text("utf-8")


def test_recorded_collapse_is_in_the_verdict_and_warnings_are_findings(tiny, tmp_path):
    """A loss that falls and then stays high, put into the folder's own tables."""
    losses = [*np.linspace(2, 0.2, 12), *[5.0] * 6]
    with Run.start("r", read_recipe(tiny).federation()) as run:
        for round in run.rounds(len(losses), score_every=6):
            run._metrics.add_round(round.index, {"loss": losses[round.index - 1], "change": 1.0}, {})
            if round.index in (3, 5):
                run.log("warning", round=round.index, text="It rained.")
        run.log("local", round=6, personal={})
        run.log("warning", text="This was so at round 6.")
        run.log("snapshot", round=run.round)
        run.log("warning", text="My own.")
        evaluate_run(run)
    study = study_from_run(tmp_path / "r")
    assert (
        study.collapse_rounds() == {"FedGeoMedPlus": 13} and "FedGeoMedPlus collapsed at round 13." in study.verdict()
    )
    summaries = study.findings()
    assert "It rained. (2 rounds, the first 3)" in summaries and "My own." in summaries
    assert "This was so at round 6." not in summaries, "an earlier evaluation is outdated"
    assert len(summaries) == len(set(summaries)) and "warnings" not in study.settings and "recipe" not in study.settings


def test_rejections_of_repeated_rounds_count_once(tiny, tmp_path):
    with Run.start("r", read_recipe(tiny).federation()) as run:
        list(run.rounds(1, score_every=1))
        for _ in range(2):
            run.log("rejected", round=1, text="p: too long")
        evaluate_run(run)
    assert study_from_run(tmp_path / "r").results[1].rejected == 1


def test_papers_list_shows_the_experiments():
    found = json.loads(descant("papers", "list", "--json").stdout)
    mine = next(row for row in found if row["experiment"] == "fed_plus/synthetic")
    assert mine["parties"] == "synthetic" and "v2 §8.1" in mine["title"] and {"quick", "full"} <= mine.keys()
    assert "fed_plus/synthetic" in descant("papers", "list").stdout


def test_experiment_is_compared_with_its_expected_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shelf = tmp_path / "shelf" / "mine"
    shelf.mkdir(parents=True)
    figure = '[[paper]]\ndescription = "it"\nsource = "table 7"\nvalue = 0.25\nmethods = ["FedAvg"]\n'
    (shelf / "tiny.toml").write_text(TINY_RECIPE + figure)
    monkeypatch.setattr("descant.papers.recipe_index.PACKAGED_FOLDER", shelf.parent)
    first = descant("papers", "run", "mine/tiny", "--quick", "--update-expected")
    assert first.exit_code == 0, first.output
    assert (
        "table 7" in first.stdout and "0.250" in first.stdout and f"Kept in {shelf / 'expected.json'}" in first.stdout
    )
    assert (tmp_path / "descant-papers" / "mine" / "tiny-quick" / "report.html").exists()
    again = json.loads(descant("papers", "run", "mine/tiny", "--quick", "--json").stdout)
    assert again["compared"] == ["All 3 means are within the range of the expected results (2 seeds, ± 0.005)."]
    assert again["figures"][0]["paper"] == 0.25
    assert json.loads(descant("papers", "list", "--json").stdout)[0]["quick"] > 0
    monkeypatch.setattr(
        "descant.cli.papers_commands.write_expected", mock.Mock(side_effect=StateError("it cannot be written"))
    )
    lost = descant("papers", "run", "mine/tiny", "--quick", "--update-expected")
    assert lost.exit_code == 1 and "it cannot be written" in lost.stderr and "table 7" in lost.stdout


def test_report_of_a_sweep_is_one_page_for_all_values(tiny, tmp_path):
    made = descant("compare", "tiny.toml", "--set", "sweep.training.lr=[0.1, 0.2]", "--seeds", "1")
    assert made.exit_code == 0 and "report.html" in made.stdout, made.output
    page = tmp_path / "descant-study" / "report.html"
    before = page.read_text()
    page.unlink()
    shown = descant("report", "descant-study")
    assert shown.exit_code == 0 and page.read_text() == before and "2 values" in shown.stdout
    assert json.loads(descant("report", "descant-study", "--json").stdout)["report"].endswith("report.html")
