"""Descant over worker processes of one thread each."""

from __future__ import annotations

from dataclasses import replace

from descant.engines import Processes
from descant.engines.processes.process_engine import ProcessEngine

from .contestant_process import parse_workload, serve
from .with_descant import DescantContestant
from .work import SharedWorkload


def start(shared: SharedWorkload) -> DescantContestant:
    """Return the federation with worker processes, which build model and parties from importable functions."""
    return DescantContestant(replace(shared, threads=1), engine=Processes(workers=shared.threads, threads=1))


def main() -> None:
    federations: list[DescantContestant] = []

    def begin() -> DescantContestant:
        federations.append(start(shared))
        return federations[0]

    def settle() -> None:
        engine = federations[0].federation.engine_
        assert isinstance(engine, ProcessEngine)
        engine.wait()

    shared = parse_workload()
    serve(begin, settle=settle)


if __name__ == "__main__":
    main()
