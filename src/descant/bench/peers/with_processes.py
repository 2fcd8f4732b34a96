"""Descant over worker processes of one thread each."""

from __future__ import annotations

from dataclasses import replace

from descant.bench.peers.protocol import serve, told
from descant.bench.peers.with_descant import Ours
from descant.bench.peers.work import Shared
from descant.engines import Processes


def start(shared: Shared) -> Ours:
    """The same federation; its workers make the model and the parties for themselves, by the names of the functions."""
    return Ours(replace(shared, threads=1), engine=Processes(workers=shared.threads, threads=1))


if __name__ == "__main__":
    shared = told()
    serve(lambda: start(shared))
