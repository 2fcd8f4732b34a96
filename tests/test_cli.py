"""The command line: fast help, one JSON document, and sentences in place of tracebacks."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from descant import __version__
from descant.cli import app, typer
from descant.config import read
from descant.record import Run
from descant.record import read as recorded
from recipes import TINY

SIX = ["majority class", "Local", "FedAvg", "RFA", "FedAvgPlus", "FedGeoMedPlus"]


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


def test_help_names_every_option_with_its_default():
    shown = descant("demo", "--help").stdout
    assert all(option in shown for option in ("--rounds", "--seeds", "--out", "--json", "Default: 30"))


def test_demo_as_json_is_one_document_with_six_rows(tmp_path):
    """In a process of its own, on a terminal that cannot even print α."""
    ran = descant_process("demo", "--json", "--rounds", "2", "--seeds", "1", "--out", "made/here", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [row["method"] for row in found["table"]] == SIX
    assert all(0 <= row["mean"] <= 1 and 0 <= row["gained"] <= 10 for row in found["table"])
    assert found["settings"]["rounds"] == 2 and len(found["results"]) == 5
    assert len(found["results"][0]["own"]) == 10
    assert (tmp_path / found["report"]).read_text("utf-8").startswith("<!doctype html>")
    assert ran.stderr == ""


def test_demo_for_people(tmp_path):
    out = tmp_path / "report"
    shown = descant("demo", "--rounds", "1", "--seeds", "2", "--out", str(out))
    assert shown.exit_code == 0 and shown.stderr == ""
    lines = shown.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert {"mean", "worst", "spread", "gained"} <= set(lines[header].split())
    assert [line.split("  ")[0] for line in lines[header + 1 : header + 7]] == SIX
    assert "1 rounds, 2 seeds" in shown.stdout and "parties gained by joining" in " ".join(shown.stdout.split())
    assert lines[-1].endswith(str(out / "report.html")) and (out / "report.html").exists()


def forbid_work(monkeypatch):
    def work(*arguments, **settings):
        raise AssertionError("the work began")

    monkeypatch.setattr("descant.demo.run_demo", work)


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
def test_bad_input_is_a_sentence_and_a_status(monkeypatch, arguments, status, message):
    forbid_work(monkeypatch)
    shown = descant(*arguments)
    assert shown.exit_code == status
    assert message in shown.stderr and "Traceback" not in shown.output
    assert shown.stdout == ""


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    forbid_work(monkeypatch)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path):
        shown = descant("demo", "--json", "--out", str(out))
        assert shown.exit_code == 1 and shown.stdout == ""
        assert shown.stderr.startswith(f"Error: {out} ") and "Traceback" not in shown.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_interrupt_is_a_sentence_and_130(tmp_path, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("descant.demo.run_demo", interrupted)
    shown = descant("demo", "--json", "--out", str(tmp_path / "out"))
    assert shown.exit_code == 130 and shown.stdout == ""
    assert shown.stderr.startswith("Interrupted:") and not (tmp_path / "out").exists()


MINE = """
from torch import nn
from descant import parties

def net():
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

def wide():
    return nn.Sequential(nn.Linear(64, 5000), nn.LayerNorm(5000), nn.Linear(5000, 10))

def dropped():
    return nn.Sequential(nn.Linear(64, 10), nn.Dropout())

def people():
    return parties.digits(count=3)
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("net", "your model runs stacked: many parties at once"),
        ("wide", "not stacked: because one model of 1.5 MB fills the cache by itself"),
        ("dropped", "your model runs looped: one party after another"),
        ("dropped", "because it draws random numbers"),
    ],
)
def test_the_doctor_says_how_a_model_would_run(tmp_path, model, said):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    shown = descant("doctor", f"{file}:{model}", "--parties", f"{file}:people")
    assert shown.exit_code == 0, shown.output
    assert said in shown.stdout and "torch uses" in shown.stdout
    found = json.loads(descant("doctor", f"{file}:{model}", "--parties", f"{file}:people", "--json").stdout)
    assert {"model", "parties", "way"} <= {finding["what"] for finding in found}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "mine:net"], "Give a model and --parties together"),
        (["doctor", "nowhere:net", "--parties", "nowhere:people"], "There is no module 'nowhere'"),
        (["doctor", "nowhere.py:net", "--parties", "nowhere.py:people"], "There is no file nowhere.py"),
    ],
)
def test_the_doctor_names_what_it_cannot_find(arguments, message):
    shown = descant(*arguments)
    assert shown.exit_code == 1 and message in shown.stderr and "Traceback" not in shown.output


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
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


def test_a_run_that_is_resumed_ends_like_one_that_was_not_disturbed(tiny, tmp_path):
    whole = json.loads(descant("run", tiny, "--out", "whole", "--json").stdout)
    assert descant("run", tiny, "--out", "part", "--set", "run.rounds=1").exit_code == 0
    part = json.loads(descant("run", tiny, "--out", "part", "--resume", "--json").stdout)
    assert part["hash"] == whole["hash"] and part["rounds"] == 3
    told = [[{name: row[name] for name in ("party", "own", "alone")} for row in ran["table"]] for ran in (whole, part)]
    assert told[0] == told[1]
    assert 'population = "digits"' in (tmp_path / "part" / "run.toml").read_text()
    rows = json.loads(descant("runs", "--json").stdout)
    assert {row["run"]: row["state"] for row in rows} == {"whole": "ended", "part": "ended"}
    assert "FedGeoMedPlus" in descant("runs").stdout


def test_the_report_of_a_run_says_what_the_run_said(tiny, tmp_path):
    ran = json.loads(descant("run", tiny, "--out", "r", "--json").stdout)
    (tmp_path / "r" / "report.html").unlink()
    shown = descant("report", "r")
    means = {name: sum(row[name] for row in ran["table"]) / len(ran["table"]) for name in ("own", "alone")}
    assert f"{means['own']:.3f} accuracy against {means['alone']:.3f} alone" in shown.stdout
    assert "FedGeoMedPlus" in (tmp_path / "r" / "report.html").read_text("utf-8")


def test_what_must_be_known_of_the_data_is_in_every_output(tiny, tmp_path):
    code = "from descant.parties import People, digits\n\ndef noted(count: int):\n    made = digits(count)\n"
    (tmp_path / "stand_in.py").write_text(code + "    return People(map(made._source, made), 'digits stand in')\n")
    here = ["--set", "parties.population=stand_in:noted", "--set", "run.rounds=1"]
    said = "Of the data: digits stand in."
    shown = [descant(command, tiny, *here, "--out", command) for command in ("run", "compare")]
    assert all(one.exit_code == 0 and one.stdout.count(said) == 1 for one in shown), shown[0].output + shown[1].output
    assert all(said in (tmp_path / one / "report.html").read_text("utf-8") for one in ("run", "compare"))
    assert recorded("run").settings["note"] == "digits stand in" and said in recorded("run").warnings
    assert said in json.loads(descant("run", tiny, *here, "--out", "r", "--json").stdout)["findings"]
    found = json.loads(descant("compare", tiny, *here, "--out", "c", "--json").stdout)["points"][0]
    assert found["findings"].count(said) == 1


def test_a_run_that_was_not_judged_says_how_to(tiny):
    with Run.start("r", read(tiny).federation()) as run:
        shown = descant("report", "r")
        assert shown.exit_code == 1 and "The run in r has no scores yet" in shown.stderr
        list(run.rounds(1, score_every=1))
    shown = descant("report", "r")
    assert shown.exit_code == 1 and "nobody has trained alone beside it" in shown.stderr
    assert descant("run", tiny, "--out", "r", "--resume").exit_code == 0
    assert descant("report", "r").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.toml"], "The recipe nowhere.toml cannot be read: No such file"),
        (["run", "tiny.toml", "--set", "work.leer=1"], "Did you mean 'lr'"),
        (["run", "tiny.toml", "--set", "sweep.work.lr=[1.0]"], "goes through values: use descant compare"),
        (["run", "tiny.toml", "--resume", "--out", "new"], "new holds no run that could be resumed"),
        (["run", "tiny.toml", "--engine", "ray"], "must be one of 'in-process', 'processes'"),
        (["compare", "tiny.toml", "--algorithms", "fedavgg"], "Did you mean 'fedavg'"),
        (["compare", "tiny.toml", "--out", "tiny.toml"], "tiny.toml is a file, and a folder is needed"),
        (["report", "nowhere"], "nowhere does not hold a study"),
        (["runs", "nowhere"], "There is no folder nowhere"),
        (["papers", "run", "fed_plus/mnst"], "Did you mean 'fed_plus/mnist'"),
        (["papers", "run", "fed_plus/mnist", "--set", "run.rounds=0"], "The 'rounds' of [run] must be"),
    ],
)
def test_a_command_on_recipes_names_what_is_wrong(tiny, monkeypatch, arguments, message):
    monkeypatch.setattr("descant.study.compare", None)
    shown = descant(*arguments)
    assert shown.exit_code == 1, shown.output
    assert message in shown.stderr and "Traceback" not in shown.output and shown.stdout == ""


# ── the papers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_papers_are_listed():
    found = json.loads(descant("papers", "list", "--json").stdout)
    mine = next(row for row in found if row["experiment"] == "fed_plus/synthetic")
    assert mine["parties"] == "synthetic" and "v2 §8.1" in mine["title"] and {"quick", "full"} <= mine.keys()
    assert "fed_plus/synthetic" in descant("papers", "list").stdout


def test_an_experiment_is_run_kept_and_compared_with_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shelf = tmp_path / "shelf" / "mine"
    shelf.mkdir(parents=True)
    figure = '[[paper]]\nsays = "it"\nwhere = "table 7"\nvalue = 0.25\nmethods = ["FedAvg"]\n'
    (shelf / "tiny.toml").write_text(TINY + figure)
    monkeypatch.setattr("descant.papers.shelf.PACKED", shelf.parent)
    first = descant("papers", "run", "mine/tiny", "--quick", "--expect")
    assert first.exit_code == 0, first.output
    assert (
        "table 7" in first.stdout and "0.250" in first.stdout and f"Kept in {shelf / 'expected.json'}" in first.stdout
    )
    assert (tmp_path / "descant-papers" / "mine" / "tiny-quick" / "report.html").exists()
    again = json.loads(descant("papers", "run", "mine/tiny", "--quick", "--json").stdout)
    assert again["compared"] == ["All 3 means are within what the kept runs span (2 seeds, ± 0.005)."]
    assert again["figures"][0]["paper"] == 0.25
    assert json.loads(descant("papers", "list", "--json").stdout)[0]["quick"] > 0
