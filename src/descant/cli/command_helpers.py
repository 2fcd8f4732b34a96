"""Helpers shared by all commands: settings as options, JSON output, and errors as one sentence."""

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
    """Return an option with the help and default of a setting; its bounds are checked when work starts."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    default = "" if field.default is None else f" Default: {field.default}."
    return typer.Option(field.default, help=f"{field.metadata['help']}{default}", show_default=False)


def json_option() -> Any:
    return typer.Option(False, "--json", help="Print one JSON document and nothing else.")


@contextmanager
def handle_errors(out: Path | None = None, resume: Path | None = None, resume_hint: str = "") -> Iterator[None]:
    """Turn errors and interrupts into one sentence and an exit status, without a traceback.

    ``out`` is a folder that is written as a whole at the end. ``resume`` is the folder of a run that can be resumed.
    ``resume_hint`` is the sentence that says how to go on.
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
    """Return the folder that keeps finished trainings while others still run."""
    target = out.resolve()
    return target.with_name(f"{target.name}.part")


def cache_resume_note(out: Path | None) -> str:
    if out is None or not any(cache_folder(out).glob("*.json")):
        return ""
    return f" Finished trainings are kept in {cache_folder(out)}: the same command continues after them."


def user_code_location(error: BaseException) -> str | None:
    """Return the last line of the user's own code that an error passed, or None if there is none."""
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
    """Limit torch to one thread: small models are stacked, so a second thread gains nothing and is slow on busy cores.

    The demo, 10 rounds and 1 seed on two cores: 3.3 s with one thread, 3.2 s and 8.6 s with two; 30 rounds and 3 seeds
    on busy cores: 30 s and 158 s.
    """
    import torch

    torch.set_num_threads(1)


def run_and_report(
    recipe: Recipe,
    folder: Path,
    as_json: bool,
    names: Sequence[str] = (),
    quick: bool = False,
    compare_results: Callable[[Experiment], Sequence[str]] = lambda experiment: (),
) -> Experiment:
    """Run an experiment, print it and write its report; finished trainings are cached beside the folder."""
    from ..papers import run_experiment
    from ..studies.result_cache import ResultCache

    cache = ResultCache(cache_folder(folder))
    cached_count = len(list(cache_folder(folder).glob("*.json")))
    if cached_count and not as_json:
        typer.echo(f"{cache.folder} holds {cached_count} finished trainings: those of this experiment are reused.\n")
    use_one_thread()
    experiment = run_experiment(recipe, names, quick, progress=show_progress(as_json), cache=cache)
    print_and_save(experiment, folder, as_json, compared=compare_results(experiment))
    cache.clear()
    return experiment


def print_and_save(experiment: Experiment, folder: Path, as_json: bool, compared: Sequence[str] = ()) -> None:
    """Print an experiment and save its report; the numbers are printed even if saving fails."""
    output = {**experiment.to_json(), **({"compared": list(compared)} if compared else {})}
    if not as_json:
        typer.echo("\n\n".join([str(experiment), *(["\n".join(compared)] if compared else [])]) + "\n")
    try:
        with progress_until_done("drawing the report", as_json):
            page = experiment.save(folder)
    except DescantError as error:
        if as_json:
            typer.echo(json.dumps({**output, "report": None}))
        raise type(error)(f"{error} The numbers are above; no report was written.") from error
    typer.echo(json.dumps({**output, "report": str(page)}) if as_json else f"The report with pictures: {page}")


def show_progress(as_json: bool) -> bool:
    """Return whether to show progress: on stderr, and only on a terminal."""
    return not as_json and sys.stderr.isatty()


@contextmanager
def progress_until_done(description: str, as_json: bool) -> Iterator[None]:
    """Show a progress line until the block ends."""
    from ..core.progress import progress_bar

    with progress_bar(disable=not show_progress(as_json)) as shown:
        shown.add_task(description, total=None, summary="–")
        yield


def wrap_line(key: str, text: str) -> str:
    """Return a labeled line, wrapped for a terminal."""
    return textwrap.fill(f"{key:>6}: {text}", 100, subsequent_indent=" " * 8)
