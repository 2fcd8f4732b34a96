"""Commands that need no recipe: the demo, the doctor, the bench."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..bench import PEERS, Bench, run_bench
from ..demo import ABOUT, Demo
from ..errors import SettingError
from ..papers import legend, summary
from ..settings import check
from .common import json_option, one_thread, option, plain_endings, watched, wrapped

if TYPE_CHECKING:
    from ..study import Study

LOSS = "torch.nn.functional:cross_entropy"


def demo(
    rounds: int = option(Demo, "rounds"),
    seeds: int = option(Demo, "seeds"),
    out: Path = typer.Option(  # noqa: B008
        "descant-demo", help="The folder for report.html and the pictures. Default: descant-demo.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Compare six methods on ten parties with unlike handwritten digits: under a minute, nothing to download."""
    with plain_endings(out):
        chosen = Demo(rounds, seeds)
        check(chosen, "demo")
        if not as_json:
            for key, text in {**ABOUT, "length": f"{rounds} rounds, {seeds} seeds"}.items():
                typer.echo(wrapped(key, f"{text}."))
            typer.echo()
        study = _run(chosen, out, progress=watched(as_json))
        if as_json:
            typer.echo(json.dumps({**json.loads(study.to_json()), "report": str(out / "report.html")}))
        else:
            report = f"The report with pictures: {out / 'report.html'}"
            typer.echo("\n\n".join([summary(study), legend(), report]))


def doctor(
    model: str = typer.Argument("", help="What makes your model: package.module:name, or file.py:name."),
    people: str = typer.Option("", "--parties", help="What makes your parties, in the same form."),
    loss: str = typer.Option(LOSS, help=f"The loss. Default: {LOSS}.", show_default=False),
    attend: int = typer.Option(10, help="Parties a round. Default: 10.", show_default=False),
    batch: int = typer.Option(10, help="Samples a step. Default: 10.", show_default=False),
    as_json: bool = json_option(),
) -> None:
    """Say what is installed here, and how your model would be computed: stacked, single, vectorised or looped."""
    with plain_endings():
        if bool(model) != bool(people):
            raise SettingError("Give a model and --parties together: a model is tried on a batch of their data.")
        sys.path.insert(0, "")  # as python -c and python -m have it: modules in this folder are found
        from ..doctor import explain, look

        findings = look()
        if model:
            from ..address import find
            from ..algorithms import FedAvg
            from ..federation import Federation

            settings: dict[str, Any] = {"loss": find(loss), "attend": attend, "batch": batch}
            findings += explain(Federation(model, people, FedAvg(), **settings))
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        else:
            typer.echo("\n".join(map(str, findings)))


def bench(
    workloads: str = typer.Option("W1,W1+,W2,W3", help="The workloads. Default: W1,W1+,W2,W3.", show_default=False),
    peers: str = typer.Option("", help=f"The contestants, of {', '.join(PEERS)}; pfl@2 has 2 threads. Default: all."),
    turns: int = option(Bench, "turns"),
    rounds: int | None = option(Bench, "rounds"),
    cold: int = option(Bench, "cold"),
    install: bool = typer.Option(
        True,
        "--install/--no-install",
        help="Make the environments that are missing. Default: install.",
        show_default=False,
    ),
    environments: Path | None = typer.Option(None, help="Their folder. Default: ~/.cache/descant/bench."),  # noqa: B008
    out: Path = typer.Option(  # noqa: B008
        "descant-bench",
        help="The folder for bench.json, bench.md and bench.png. Default: descant-bench.",
        show_default=False,
    ),
    as_json: bool = json_option(),
) -> None:
    """Run the same work by Descant and its peers, side by side: a table and a picture. About half an hour.

    W1: logistic regression, 1,000 parties, FedAvg (W1+: FedGeoMed+). W2: a network of 784-200-200-10, 100 parties.
    W3: two convolutions, 100 parties. Peers that are missing are installed into environments of their own (4 GB).
    """
    works, names = (tuple(name.strip() for name in text.split(",") if name.strip()) for text in (workloads, peers))
    chosen = Bench(works, names, turns, rounds, cold, install, environments=environments)
    with plain_endings():
        results = run_bench(chosen, out)
        if as_json:
            typer.echo((out / "bench.json").read_text(encoding="utf-8"))
            return
        for result in results:
            typer.echo(f"{result.work.name}, {result.work.method}: {result.work.title}\n{result.table()}\n")
        typer.echo(f"The tables and the picture: {out / 'bench.md'}, {out / 'bench.png'}")


def _run(chosen: Demo, out: Path, progress: bool) -> Study:
    from ..report import FILES, write
    from ..store import check_replaceable

    check_replaceable(out, FILES)
    from ..demo import run_demo

    one_thread()
    study = run_demo(chosen, progress=progress)
    write(study, out)
    return study
