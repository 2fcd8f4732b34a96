"""The same work by Descant and its peers, side by side (``scripts/bench``). Light to import."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from descant.core.settings import check_settings, setting, unknown_name_error
from descant.errors import DescantError, SettingError
from peer_comparison.contestants import DEFAULT_PEERS, LARGE_MODEL_PEERS, PEERS, Peer, find_peer

if TYPE_CHECKING:
    from peer_comparison.results import WorkloadResult

__all__ = ["BenchSettings", "PEERS", "run_bench"]

NAMES = ("W1", "W1+", "W2", "W3")


@dataclass(frozen=True)
class BenchSettings:
    """The workloads, contestants and duration of a bench."""

    workloads: tuple[str, ...] = setting(NAMES, "The workloads, of W1, W1+, W2 and W3.")
    peers: tuple[str, ...] = setting((), f"The contestants, of {', '.join(PEERS)}; plain@2: with two threads.")
    turns: int = setting(5, "Turns of every contestant.", least=1, whole=True)
    rounds: int | None = setting(None, "Rounds in a turn (by default 50, 50, 5 and 2).", least=1, whole=True)
    cold_rounds: int = setting(20, "Rounds in the run from a cold start.", least=2, whole=True)
    install: bool = setting(True, "Create missing environments.")
    timeout: float = setting(900.0, "Seconds without an answer after which a contestant is dropped.", above=0)
    environments: Path | None = field(default=None, metadata={"help": "The folder for the peers' environments."})


def print_progress(sentence: str) -> None:
    """Print a progress line to stderr, because stdout is for results."""
    print(sentence, file=sys.stderr, flush=True)


def run_bench(bench: BenchSettings, out: Path, log: Callable[[str], None] = print_progress) -> list[WorkloadResult]:
    """Measure, and write bench.json, bench.md and bench.png into a folder."""
    chosen_peers = peers_by_workload(bench)
    from descant.storage import check_replaceable
    from peer_comparison import environments, results
    from peer_comparison.measure_in_turns import TurnSchedule, initial_loss, run_turns
    from peer_comparison.workloads import WORKLOADS, write

    check_replaceable(out, results.FILES)
    schedule = TurnSchedule(bench.turns, bench.rounds, bench.cold_rounds, bench.timeout)
    machine_info = results.machine()
    cache = bench.environments or environments.CACHE
    log(f"The peers' environments are in {cache}; missing ones are created first.")
    all_peers = {peer.name: peer for peers in chosen_peers.values() for peer in peers}
    pythons = {name: environments.python_or_reason(peer, cache, bench.install, log) for name, peer in all_peers.items()}
    results_by_workload = []
    for name, peers in chosen_peers.items():
        with tempfile.TemporaryDirectory(prefix="descant-bench-") as scratch:
            work = WORKLOADS[name]
            folder = Path(scratch)
            log(f"{name}: writing the data of {work.title}")
            write(work, folder)
            supporting_peers = [peer for peer in peers if work.method in peer.methods]
            measured = run_turns(supporting_peers, pythons, folder, cache / "logs", schedule, log)
            results_by_workload.append(results.WorkloadResult(work, initial_loss(folder), tuple(measured)))
        results.write(results_by_workload, schedule, machine_info, out)  # after each workload, so that none is lost
    return results_by_workload


def peers_by_workload(bench: BenchSettings) -> dict[str, list[Peer]]:
    """Return the contestants of each workload, after a check of all settings."""
    check_settings(bench, "bench")
    for name in bench.workloads:
        if name not in NAMES:
            raise unknown_name_error("workload", name, NAMES)
    if not bench.workloads:
        raise SettingError(f"The bench needs at least one workload, of {', '.join(NAMES)}. Got none.")
    try:
        import psutil  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise DescantError("The bench needs psutil: pip install 'descant[bench]'.") from error
    chosen = {
        name: bench.peers or (LARGE_MODEL_PEERS if name in ("W2", "W3") else DEFAULT_PEERS) for name in bench.workloads
    }
    return {name: [find_peer(one) for one in dict.fromkeys(names)] for name, names in chosen.items()}
