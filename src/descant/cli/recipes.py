"""Commands on recipes and on what came of them: run, compare, report, runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from ..config import Recipe, how_to_end, read
from ..errors import SettingError, StateError
from ..papers import MANIFEST, check_folder, told, write_sweep
from ..table import Table
from .common import json_option, one_thread, plain_endings, side_by_side, waiting, watched, wrapped

RECIPE = typer.Argument(hidden=True)
CHANGES = typer.Option([], "--set", help="Another value: table.key=value, such as run.rounds=20. Repeatable.")
QUICK = typer.Option(False, "--quick", help="The recipe's short form.")
ENGINE = typer.Option("", help="in-process, processes for all cores, or ray. Default: as the recipe says.")
ADDRESS = typer.Option("", help="host:port of a Ray cluster. Default: one is started here.", show_default=False)
DATA = typer.Option(None, help="The data folder. Default: DESCANT_DATA.")


def run(
    recipe: Path = RECIPE,
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    engine: str = ENGINE,
    address: str = ADDRESS,
    data: Path | None = DATA,
    out: Path = typer.Option("descant-run", help="The run's folder. Default: descant-run.", show_default=False),  # noqa: B008
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in the folder, where it was broken off."),
    as_json: bool = json_option(),
) -> None:
    """Run the [method] of RECIPE, a TOML file, into a folder, and say party by party whether joining helped."""
    with plain_endings(resume=out):
        chosen = _chosen(recipe, changes, quick, engine, data, address).check(None)
        if chosen.swept:
            raise SettingError(f"{chosen.name} goes through values: use descant compare, or --set 'sweep={{}}'.")
        one_thread()
        table, found = _carried_out(chosen, out, resume, as_json)
        if as_json:
            typer.echo(json.dumps({**found, "verdict": table.verdict, "findings": table.notes, "table": table.plain()}))
        else:
            typer.echo(f"{table}\n\nThe run: {out} ({found['rounds']} rounds, hash {found['hash'][:12]})")
            typer.echo(f"The report with pictures: {found['report']}")


def _carried_out(chosen: Recipe, out: Path, resume: bool, as_json: bool) -> tuple[Table, dict[str, Any]]:
    from ..checkpoint import models_digest
    from ..judged import judge, study_of, write_page
    from ..progress import bar
    from ..record import Run

    federation, length = chosen.federation(), chosen.length
    started = Run.resume(out, federation) if resume else Run.start(out, federation, recipe=chosen.text)
    with started as run, bar(disable=not watched(as_json)) as shown:
        line = shown.add_task(federation.algorithm.name, total=length.rounds, told="–", completed=run.round)
        for round in run.rounds(max(0, length.rounds - run.round), max(1, length.rounds // length.points)):
            shown.update(line, advance=1, told=round.round.told)
        shown.add_task("training alone, to compare with", total=None, told="–")
        table = judge(run)
    found = {"folder": str(out), "rounds": federation.state.round, "hash": models_digest(federation.state)}
    with waiting("drawing the report", as_json):
        return table, {**found, "report": str(write_page(study_of(out), out))}


def compare(
    recipe: Path = RECIPE,
    algorithms: str = typer.Option("", help="Which, such as local,fedavg,fedavg+. Default: as the recipe says."),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    engine: str = ENGINE,
    address: str = ADDRESS,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-study", help="The folder for the report. Default: descant-study.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Compare the [[methods]] of RECIPE, a TOML file, or those you name, with training alone.

    It prints a table and writes a report with pictures. Broken off, the same command goes on behind the trainings that
    had finished.
    """
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    with plain_endings(out):
        more = [] if seeds is None else [f"run.seeds={seeds}"]
        chosen = _chosen(recipe, [*changes, *more], quick, engine, data, address)
        chosen.check(names)
        check_folder(chosen, out)
        if not as_json:
            typer.echo(f"{chosen.title}\n" + (f"\n{wrapped('about', chosen.about)}\n" if chosen.about else ""))
        side_by_side(chosen, out, as_json, names, quick)


def worth(
    recipe: Path = RECIPE,
    permutations: int | None = typer.Option(
        None, help="Orders of arrival to draw. Default: exact up to 10 parties, else 20.", show_default=False
    ),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-worth", help="The folder for scores and picture. Default: descant-worth.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Say what each party of RECIPE is worth by its [method]: what it gains, and what it gives to the others.

    Coalitions of parties train by themselves. Broken off, the same command goes on where it was.
    """
    with plain_endings():
        more = [] if seeds is None else [f"run.seeds={seeds}"]
        chosen = _chosen(recipe, [*changes, *more], quick, "in-process", data).unsealed().check(None)
        if chosen.swept:
            raise SettingError(f"{chosen.name} goes through values: choose one, with --set 'sweep={{}}' and --set.")
        one_thread()
        from ..contribution import worth as reckoned

        found = reckoned(
            chosen.algorithm(),
            chosen.model(),
            chosen.people(),
            rounds=chosen.length.rounds,
            seeds=chosen.seeds,
            permutations=permutations,
            file=out / "coalitions.jsonl",
            progress=watched(as_json),
            **chosen.settings(),
        )
        table, picture = found.table(), found.plot(out / "worth.png")
        if as_json:
            told = {"verdict": table.verdict, "notes": table.notes, "table": table.plain()}
            typer.echo(json.dumps({**told, "between": found.between.tolist(), "picture": str(picture)}))
        else:
            typer.echo(f"{table}\n\nThe picture: {picture}")


def report(
    folder: Path = typer.Argument(hidden=True),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """Write report.html into FOLDER, which descant compare, run or server init made, and print its verdict."""
    with plain_endings():
        from ..config import server_of
        from ..judged import study_of, write_page
        from ..record import is_run
        from ..study import Study

        folder = _training_in(folder)
        if server_of(folder):
            _tell_of_server(folder, as_json)
            return
        if is_run(folder):
            with waiting("drawing the report", as_json):
                study = study_of(folder)
                page = write_page(study, folder)
        elif (folder / MANIFEST).exists():
            verdict, page = write_sweep(folder)
            said = f"{verdict}\n\nThe report with pictures: {page}"
            typer.echo(json.dumps({"report": str(page), "verdict": verdict}) if as_json else said)
            return
        elif not folder.is_dir():
            raise StateError(f"{folder} does not hold a study, a run or a federation: there is no such folder.")
        else:
            with waiting("drawing the report", as_json):
                study = Study.load(folder)
                page = study.save(folder) / "report.html"
        if as_json:
            found = {"verdict": study.verdict(), "note": study.note, "findings": study.findings()}
            typer.echo(json.dumps({"report": str(page), **found}))
        else:
            typer.echo(f"{told(study)}\n\nThe report with pictures: {page}")


def _training_in(folder: Path) -> Path:
    """The run of a federation, where its folder is given; else the same."""
    from ..trust.founding import ROSTER, RUN

    if not (folder / ROSTER).is_file():
        return folder
    from ..server.training import TRAINING

    return folder / RUN / TRAINING


def _tell_of_server(folder: Path, as_json: bool) -> None:
    from ..server.report import write_report

    with waiting("drawing the report", as_json):
        table, page = write_report(folder)
    if as_json:
        found = {"verdict": table.verdict, "findings": table.notes, "table": table.plain()}
        typer.echo(json.dumps({"report": str(page), **found}))
    else:
        typer.echo(f"{table}\n\nThe report with pictures: {page}")


def runs(
    folder: Path = typer.Argument(".", help="Where to look. Default: here.", show_default=False),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """List the runs in a folder: how far each came, and how to go on."""
    with plain_endings():
        from ..record import runs as found_in

        if not folder.is_dir():
            raise StateError(f"There is no folder {folder}.")
        rows: list[dict[str, Any]] = [
            {
                "run": str(found.folder),
                "state": found.state,
                "round": found.round,
                "method": found.settings.get("algorithm", {}).get("name"),
                "begun": found.begun,
                "reason": found.reason,
                "how to go on": how_to_end(found) if found.state == "broken" else "",
            }
            for found in found_in(folder)
        ]
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            shown = ("run", "state", "round", "method", "begun", "reason")
            typer.echo(Table(shown, rows) if rows else f"There are no runs in {folder}.")
            for row in rows:
                if row["how to go on"]:
                    typer.echo(f"\n{row['run']} is broken. {row['how to go on']}")


def _chosen(recipe: Path, changes: list[str], quick: bool, engine: str, data: Path | None, address: str = "") -> Recipe:
    sys.path.insert(0, "")  # as python -c and python -m have it: modules in this folder are found
    found = read(recipe)
    found = found.quick() if quick else found
    by = {"run.engine": engine, "run.address": address}
    found = found.set(*changes, *(f"{key}={json.dumps(value)}" for key, value in by.items() if value))
    if found.tables.get("quick") and all(change.startswith(("run.", "quick.")) for change in changes):
        found.quick().check_tables()  # with other parties or models than the file's, its short form need not fit
    return found.where(data)
