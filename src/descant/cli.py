"""The command line. It imports nothing heavy: torch, numpy and the rest wait until a command needs them."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .bench import PEERS, Bench, run_bench
from .demo import ABOUT, Demo
from .errors import DescantError, SettingError
from .settings import check

if TYPE_CHECKING:
    from .study import Study

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts faster
    pretty_exceptions_enable=False,  # a traceback with local values would show a party's data
)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        typer.echo(f"descant {__version__}")
        raise typer.Exit


@app.callback()
def descant(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Federated learning for parties that differ: own models, robust centres, and numbers that say who gained."""


def _option(record: type, name: str) -> Any:
    """A setting as an option: help and default are the record's, and its bounds are checked where work starts."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    return typer.Option(field.default, help=f"{field.metadata['help']} Default: {field.default}.", show_default=False)


@app.command()
def demo(
    rounds: int = _option(Demo, "rounds"),
    seeds: int = _option(Demo, "seeds"),
    out: Path = typer.Option(  # noqa: B008
        "descant-demo", help="The folder for report.html and the pictures. Default: descant-demo.", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document and nothing else."),
) -> None:
    """Compare six methods on ten parties with unlike handwritten digits: under a minute, nothing to download."""
    with _plain_endings(out):
        chosen = Demo(rounds, seeds)
        check(chosen, "demo")
        if not as_json:
            for key, text in {**ABOUT, "length": f"{rounds} rounds, {seeds} seeds"}.items():
                typer.echo(textwrap.fill(f"{key:>6}: {text}.", 100, subsequent_indent=" " * 8))
            typer.echo()
        study = _run(chosen, out, progress=not as_json and sys.stderr.isatty())
        if as_json:
            typer.echo(json.dumps({**json.loads(study.to_json()), "report": str(out / "report.html")}))
        else:
            typer.echo(_summary(study, out))


@app.command()
def doctor(
    model: str = typer.Argument("", help="What makes your model: package.module:name, or file.py:name."),
    people: str = typer.Option("", "--parties", help="What makes your parties, in the same form."),
    loss: str = typer.Option("torch.nn.functional:cross_entropy", help="The loss."),
    attend: int = typer.Option(10, help="Parties a round."),
    batch: int = typer.Option(10, help="Samples a step."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document and nothing else."),
) -> None:
    """Say what is installed here, and how your model would be computed: stacked, single, vectorised or looped."""
    with _plain_endings(None):
        if bool(model) != bool(people):
            raise SettingError("Give a model and --parties together: a model is tried on a batch of their data.")
        sys.path.insert(0, "")  # as python -c and python -m have it: modules in this folder are found
        from .doctor import explain, look

        findings = look()
        if model:
            from .address import find
            from .algorithms import FedAvg
            from .federation import Federation

            settings: dict[str, Any] = {"loss": find(loss), "attend": attend, "batch": batch}
            findings += explain(Federation(model, people, FedAvg(), **settings))
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        else:
            typer.echo("\n".join(map(str, findings)))


@app.command()
def bench(
    workloads: str = typer.Option("W1,W1+,W2,W3", help="The workloads. Default: W1,W1+,W2,W3.", show_default=False),
    peers: str = typer.Option("", help=f"The contestants, of {', '.join(PEERS)}; pfl@2 has 2 threads. Default: all."),
    turns: int = _option(Bench, "turns"),
    rounds: int | None = _option(Bench, "rounds"),
    cold: int = _option(Bench, "cold"),
    install: bool = typer.Option(True, "--install/--no-install", help="Make the environments that are missing."),
    environments: Path | None = typer.Option(None, help="Their folder. Default: ~/.cache/descant/bench."),  # noqa: B008
    out: Path = typer.Option(  # noqa: B008
        "descant-bench",
        help="The folder for bench.json, bench.md and bench.png. Default: descant-bench.",
        show_default=False,
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document and nothing else."),
) -> None:
    """Run the same work by Descant and its peers, side by side: a table and a picture. About half an hour.

    W1: logistic regression, 1,000 parties, FedAvg (W1+: FedGeoMed+). W2: a network of 784-200-200-10, 100 parties.
    W3: two convolutions, 100 parties. Peers that are missing are installed into environments of their own (4 GB).
    """
    works, names = (tuple(name.strip() for name in text.split(",") if name.strip()) for text in (workloads, peers))
    chosen = Bench(works, names, turns, rounds, cold, install, environments=environments)
    with _plain_endings(None):
        results = run_bench(chosen, out)
        if as_json:
            typer.echo((out / "bench.json").read_text(encoding="utf-8"))
            return
        for result in results:
            typer.echo(f"{result.work.name}, {result.work.method}: {result.work.title}\n{result.table()}\n")
        typer.echo(f"The tables and the picture: {out / 'bench.md'}, {out / 'bench.png'}")


def _run(chosen: Demo, out: Path, progress: bool) -> Study:
    from .report import FILES, write
    from .store import check_replaceable

    check_replaceable(out, FILES)
    import torch

    from .demo import run_demo

    # The models are small and stacked into one, so a second thread adds nothing (10 rounds, 1 seed, two cores: 3.3 s
    # with one, 3.2 s and 8.6 s with two) and costs much on busy cores (30 rounds, 3 seeds: 30 s and 158 s).
    torch.set_num_threads(1)
    study = run_demo(chosen, progress=progress)
    write(study, out)
    return study


def _summary(study: Study, out: Path) -> str:
    from .report import LEGEND

    table = dataclasses.replace(study.table(), verdict="", notes=())
    found = "\n".join([study.verdict(), *(f"- {finding}" for finding in study.findings())])
    return f"{table}\n\n{textwrap.fill(LEGEND, 110)}\n\n{found}\n\nThe report with pictures: {out / 'report.html'}"


@contextmanager
def _plain_endings(out: Path | None) -> Iterator[None]:
    """One sentence and an exit status for what can go wrong, in place of a traceback."""
    try:
        yield
    except DescantError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        left = "" if out is None else f", and {out} was left as it was"
        typer.echo(f"Interrupted: the work was not finished{left}.", err=True)
        raise typer.Exit(130) from error


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± or α still gets its table
    app()
