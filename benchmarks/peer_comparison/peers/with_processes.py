"""Descant over worker processes of one thread each."""

from __future__ import annotations

from dataclasses import replace

from descant.engines import Processes
from descant.engines.processes.process_engine import ProcessEngine
from peer_comparison.peers.protocol import serve, told
from peer_comparison.peers.with_descant import Ours
from peer_comparison.peers.work import Shared


def start(shared: Shared) -> Ours:
    """The same federation; its workers make the model and the parties for themselves, by the names of the functions."""
    return Ours(replace(shared, threads=1), engine=Processes(workers=shared.threads, threads=1))


def main() -> None:
    federations: list[Ours] = []

    def begin() -> Ours:
        federations.append(start(shared))
        return federations[0]

    def settle() -> None:
        engine = federations[0].federation.engine_
        assert isinstance(engine, ProcessEngine)
        engine.wait()

    shared = told()
    serve(begin, settle=settle)


if __name__ == "__main__":
    main()
