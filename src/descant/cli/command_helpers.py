"""What every command has in common: settings as options, one JSON document, one sentence when something goes wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..config import Recipe, is_resumable, run_resume_command
from ..errors import DescantError

if TYPE_CHECKING:
    from ..papers import Experiment


def settings_option(record: type, name: str) -> Any:
    """A setting as an option: help and default are the record's, and its bounds are checked where work starts."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    default = "" if field.default is None else f" Default: {field.default}."
    return typer.Option(field.default, help=f"{field.metadata['help']}{default}", show_default=False)


def json_option() -> Any:
    """--json, the same everywhere."""
    return typer.Option(False, "--json", help="Print one JSON document and nothing else.")


@contextmanager
def handle_errors(out: Path | None = None, resume: Path | None = None, resume_hint: str = "") -> Iterator[None]:
    """One sentence and an exit status for what can go wrong, in place of a traceback.

    `out` is written as a whole, at the end; `resume` is the folder of a run, which can go on; `again` says what does.
    """
    try:
        yield
    except DescantError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        unchanged_note = "" if out is None else f", and {out} was left as it was"
        resume_note = f"{run_resume_note(resume)}{cache_resume_note(out)}{resume_hint}"
        typer.echo(f"Interrupted: the work was not finished{unchanged_note}.{resume_note}", err=True)
        raise typer.Exit(130) from error
    except (Exception, SystemExit) as error:
        user_location = user_code_location(error)
        if user_location is None:
            raise
        typer.echo(f"Error: {user_location} failed: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


def run_resume_note(folder: Path | None) -> str:
    return "" if folder is None or not is_resumable(folder) else f" Go on with: {run_resume_command(folder)}"


def cache_folder(out: Path) -> Path:
    """The folder for the trainings that have finished, while others go on."""
    target = out.resolve()
    return target.with_name(f"{target.name}.part")


def cache_resume_note(out: Path | None) -> str:
    if out is None or not any(cache_folder(out).glob("*.json")):
        return ""
    return f" The trainings that have finished are kept in {cache_folder(out)}: the same command goes on behind them."


def user_code_location(error: BaseException) -> str | None:
    """The last place of the user's own code that an error went through: not ours, nor of what is installed."""
    if isinstance(error, SyntaxError) and error.filename:
        frames = [(error.filename, error.lineno)]
    else:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    paths = sysconfig.get_paths()
    installed_folders = [Path(__file__).parents[1], *(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))]
    installed_folders = [folder.resolve() for folder in installed_folders]
    for name, line in reversed(frames):
        file = Path(name).resolve()
        if file.is_file() and not any(file.is_relative_to(folder) for folder in installed_folders):
            return f"line {line} of {name}"
    return None


def use_one_thread() -> None:
    """Small models are stacked into one, so that a second thread adds nothing and costs much on busy cores.

    The demo, 10 rounds and 1 seed on two cores: 3.3 s with one, 3.2 s and 8.6 s with two; 30 rounds and 3 seeds with
    others at work: 30 s and 158 s.
    """
    import torch

    torch.set_num_threads(1)


def run_and_report(
    recipe: Recipe,
    folder: Path,
    as_json: bool,
    names: Sequence[str] = (),
    quick: bool = False,
    compare_results: Callable[[Experiment], Sequence[str]] = lambda done: (),
) -> Experiment:
    """Carry out an experiment, print it and write its report into a folder; what has finished is kept beside it."""
    from ..papers import run_experiment
    from ..studies.result_cache import ResultCache

    cache = ResultCache(cache_folder(folder))
    cached_count = len(list(cache_folder(folder).glob("*.json")))
    if cached_count and not as_json:
        typer.echo(
            f"{cache.folder} holds {cached_count} finished trainings: those of this experiment are not done again.\n"
        )
    use_one_thread()
    experiment = run_experiment(recipe, names, quick, progress=show_progress(as_json), cache=cache)
    print_and_save(experiment, folder, as_json, compared=compare_results(experiment))
    cache.clear()
    return experiment


def print_and_save(experiment: Experiment, folder: Path, as_json: bool, compared: Sequence[str] = ()) -> None:
    """Print what came of an experiment, and save it; what cannot be saved (the disk is full, say) is still printed."""
    output = {**experiment.to_json(), **({"compared": list(compared)} if compared else {})}
    if not as_json:
        typer.echo("\n\n".join([str(experiment), *(["\n".join(compared)] if compared else [])]) + "\n")
    try:
        with progress_until_done("drawing the report", as_json):
            page = experiment.save(folder)
    except DescantError as error:
        if as_json:
            typer.echo(json.dumps({**output, "report": None}))
        raise type(error)(f"{error} The numbers stand above; no report was written.") from error
    typer.echo(json.dumps({**output, "report": str(page)}) if as_json else f"The report with pictures: {page}")


def show_progress(as_json: bool) -> bool:
    """Whether somebody looks at progress: it goes to stderr, and only to a terminal."""
    return not as_json and sys.stderr.isatty()


@contextmanager
def progress_until_done(description: str, as_json: bool) -> Iterator[None]:
    """Say what takes its time, to whoever looks, until it is done."""
    from ..core.progress import progress_bar

    with progress_bar(disable=not show_progress(as_json)) as shown:
        shown.add_task(description, total=None, summary="–")
        yield


def wrap_line(key: str, text: str) -> str:
    """A line of what a piece of work is about, broken for a terminal."""
    return textwrap.fill(f"{key:>6}: {text}", 100, subsequent_indent=" " * 8)
