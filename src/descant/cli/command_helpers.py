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

from ..config import Recipe, resumable, resuming
from ..errors import DescantError

if TYPE_CHECKING:
    from ..papers import Experiment


def option(record: type, name: str) -> Any:
    """A setting as an option: help and default are the record's, and its bounds are checked where work starts."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    default = "" if field.default is None else f" Default: {field.default}."
    return typer.Option(field.default, help=f"{field.metadata['help']}{default}", show_default=False)


def json_option() -> Any:
    """--json, the same everywhere."""
    return typer.Option(False, "--json", help="Print one JSON document and nothing else.")


@contextmanager
def plain_endings(out: Path | None = None, resume: Path | None = None, again: str = "") -> Iterator[None]:
    """One sentence and an exit status for what can go wrong, in place of a traceback.

    `out` is written as a whole, at the end; `resume` is the folder of a run, which can go on; `again` says what does.
    """
    try:
        yield
    except DescantError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        left = "" if out is None else f", and {out} was left as it was"
        then = f"{_go_on(resume)}{_go_on_behind(out)}{again}"
        typer.echo(f"Interrupted: the work was not finished{left}.{then}", err=True)
        raise typer.Exit(130) from error
    except (Exception, SystemExit) as error:
        place = _of_the_user(error)
        if place is None:
            raise
        typer.echo(f"Error: {place} failed: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


def _go_on(folder: Path | None) -> str:
    return "" if folder is None or not resumable(folder) else f" Go on with: {resuming(folder)}"


def kept_beside(out: Path) -> Path:
    """The folder for the trainings that have finished, while others go on."""
    place = out.resolve()
    return place.with_name(f"{place.name}.part")


def _go_on_behind(out: Path | None) -> str:
    if out is None or not any(kept_beside(out).glob("*.json")):
        return ""
    return f" The trainings that have finished are kept in {kept_beside(out)}: the same command goes on behind them."


def _of_the_user(error: BaseException) -> str | None:
    """The last place of the user's own code that an error went through: not ours, nor of what is installed."""
    if isinstance(error, SyntaxError) and error.filename:
        frames = [(error.filename, error.lineno)]
    else:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    paths = sysconfig.get_paths()
    installed = [Path(__file__).parents[1], *(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))]
    installed = [folder.resolve() for folder in installed]
    for name, line in reversed(frames):
        file = Path(name).resolve()
        if file.is_file() and not any(file.is_relative_to(folder) for folder in installed):
            return f"line {line} of {name}"
    return None


def one_thread() -> None:
    """Small models are stacked into one, so that a second thread adds nothing and costs much on busy cores.

    The demo, 10 rounds and 1 seed on two cores: 3.3 s with one, 3.2 s and 8.6 s with two; 30 rounds and 3 seeds with
    others at work: 30 s and 158 s.
    """
    import torch

    torch.set_num_threads(1)


def side_by_side(
    recipe: Recipe,
    folder: Path,
    as_json: bool,
    names: Sequence[str] = (),
    quick: bool = False,
    compared: Callable[[Experiment], Sequence[str]] = lambda done: (),
) -> Experiment:
    """Carry out an experiment, print it and write its report into a folder; what has finished is kept beside it."""
    from ..papers import carry_out
    from ..studies.result_cache import Finished

    kept = Finished(kept_beside(folder))
    found = len(list(kept_beside(folder).glob("*.json")))
    if found and not as_json:
        typer.echo(f"{kept.folder} holds {found} finished trainings: those of this experiment are not done again.\n")
    one_thread()
    done = carry_out(recipe, names, quick, progress=watched(as_json), kept=kept)
    finish(done, folder, as_json, compared(done))
    kept.clear()
    return done


def finish(done: Experiment, folder: Path, as_json: bool, compared: Sequence[str] = ()) -> None:
    """Print what came of an experiment, and save it; what cannot be saved (the disk is full, say) is still printed."""
    told = {**done.to_json(), **({"compared": list(compared)} if compared else {})}
    if not as_json:
        typer.echo("\n\n".join([str(done), *(["\n".join(compared)] if compared else [])]) + "\n")
    try:
        with waiting("drawing the report", as_json):
            page = done.save(folder)
    except DescantError as error:
        if as_json:
            typer.echo(json.dumps({**told, "report": None}))
        raise type(error)(f"{error} The numbers stand above; no report was written.") from error
    typer.echo(json.dumps({**told, "report": str(page)}) if as_json else f"The report with pictures: {page}")


def watched(as_json: bool) -> bool:
    """Whether somebody looks at progress: it goes to stderr, and only to a terminal."""
    return not as_json and sys.stderr.isatty()


@contextmanager
def waiting(what: str, as_json: bool) -> Iterator[None]:
    """Say what takes its time, to whoever looks, until it is done."""
    from ..core.progress import bar

    with bar(disable=not watched(as_json)) as shown:
        shown.add_task(what, total=None, told="–")
        yield


def wrapped(key: str, text: str) -> str:
    """A line of what a piece of work is about, broken for a terminal."""
    return textwrap.fill(f"{key:>6}: {text}", 100, subsequent_indent=" " * 8)
