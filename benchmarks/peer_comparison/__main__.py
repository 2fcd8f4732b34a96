"""Compare Descant with its peers: ``bash scripts/bench --help``."""

from __future__ import annotations

from pathlib import Path

import typer

from descant.cli.command_helpers import handle_errors, json_option, settings_option
from peer_comparison import PEERS, BenchSettings, run_bench

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def bench(
    workloads: str = typer.Option("W1,W1+,W2,W3", help="The workloads. Default: W1,W1+,W2,W3.", show_default=False),
    peers: str = typer.Option("", help=f"The contestants, of {', '.join(PEERS)}; pfl@2 has 2 threads. Default: all."),
    turns: int = settings_option(BenchSettings, "turns"),
    rounds: int | None = settings_option(BenchSettings, "rounds"),
    cold_rounds: int = settings_option(BenchSettings, "cold_rounds"),
    install: bool = typer.Option(
        True,
        "--install/--no-install",
        help="Create missing environments. Default: install.",
        show_default=False,
    ),
    environments: Path | None = typer.Option(  # noqa: B008
        None, help="The folder for the environments. Default: ~/.cache/descant/bench."
    ),
    out: Path = typer.Option(  # noqa: B008
        "descant-bench",
        help="The folder for bench.json, bench.md and bench.png. Default: descant-bench.",
        show_default=False,
    ),
    as_json: bool = json_option(),
) -> None:
    """Run the same work with Descant and its peers, side by side; takes about half an hour.

    W1: logistic regression, 1,000 parties, FedAvg (W1+: FedGeoMed+). W2: a network of 784-200-200-10, 100 parties.
    W3: two convolutions, 100 parties. Missing peers are installed into separate environments (4 GB).
    """
    workload_names, names = (
        tuple(name.strip() for name in text.split(",") if name.strip()) for text in (workloads, peers)
    )
    chosen = BenchSettings(
        workload_names,
        names,
        turns=turns,
        rounds=rounds,
        cold_rounds=cold_rounds,
        install=install,
        environments=environments,
    )
    with handle_errors():
        results = run_bench(chosen, out)
        if as_json:
            typer.echo((out / "bench.json").read_text(encoding="utf-8"))
            return
        for result in results:
            typer.echo(f"{result.work.name}, {result.work.method}: {result.work.title}\n{result.table()}\n")
        typer.echo(f"The tables and the picture: {out / 'bench.md'}, {out / 'bench.png'}")


if __name__ == "__main__":
    app()
