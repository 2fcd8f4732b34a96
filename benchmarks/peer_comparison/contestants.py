"""The contestants: their packages and the commands that start them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from descant.core.settings import unknown_name_error

HERE = Path(__file__).parent
TORCH = ("torch==2.13.0",)  # alone and first: an open range pulls gigabytes of GPU packages


@dataclass(frozen=True)
class Peer:
    """A contestant. ``installs`` are pip calls in order; without any it runs in Descant's environment."""

    name: str
    title: str
    module: str
    installs: tuple[tuple[str, ...], ...] = ()
    methods: tuple[str, ...] = ("FedAvg",)
    threads: int = 1  # of computation: threads in one process, or worker processes of one thread each
    workers: bool = False  # ``threads`` counts processes
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables
    note: str = ""

    def command(self, python: Path, folder: Path) -> list[str]:
        """Return the command that starts its process on the workload in a folder."""
        return [str(python), "-m", self.module, str(folder), "--threads", str(self.threads)]

    def environment(self) -> dict[str, str]:
        """Return its environment variables: ours without Python's, plus its own."""
        is_descant = self.module.startswith("peer_comparison.")
        threads = "1" if self.workers else str(self.threads)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {
            **inherited,
            "PYTHONPATH": str(HERE.parent if is_descant else HERE),
            "PYTHONUNBUFFERED": "1",
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"), threads),
            **{name: value.format(threads=threads) for name, value in self.settings.items()},
        }


BOTH_METHODS = ("FedAvg", "FedGeoMed+")

ALL_PEERS = (
    Peer("plain", "plain torch loop", "peers.plain", methods=BOTH_METHODS),
    Peer("descant", "Descant", "peer_comparison.peers.with_descant", methods=BOTH_METHODS),
    Peer(
        "processes",
        "Descant, processes",
        "peer_comparison.peers.with_processes",
        methods=BOTH_METHODS,
        threads=2,
        workers=True,
    ),
    Peer("pfl", "pfl 0.6.0", "peers.with_pfl", installs=(TORCH, ("pfl==0.6.0",))),
    Peer(
        "fedjax",
        "FedJAX 0.0.17",
        "peers.with_fedjax",
        installs=(("fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2", "dm-haiku==0.0.17"),),
        settings={
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads={threads}",
        },
        note="jax.tree_map restored, which FedJAX calls and JAX has removed",
    ),
    Peer(
        "fedlab",
        "FedLab 1.3.0",
        "peers.with_fedlab",
        installs=(
            TORCH,
            ("numpy", "pandas", "pillow", "scikit-learn", "tqdm", "munch", "pynvml", "setuptools"),
            ("--no-deps", "fedlab==1.3.0"),
        ),
        note="without torchvision, which it imports",
    ),
    Peer(
        "flower",
        "Flower 1.41.0",
        "peers.with_flower",
        installs=(TORCH, ("flwr[simulation]==1.41.0",)),
        threads=2,
        workers=True,
        settings={
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_worker_niceness": "0",  # by default Ray's workers run at low priority
        },
    ),
)
PEERS = {peer.name: peer for peer in ALL_PEERS}
DEFAULT_PEERS = ("plain", "descant", "processes", "pfl", "fedjax", "fedlab", "flower")
LARGE_MODEL_PEERS = (
    "plain",
    "plain@2",
    "descant",
    "descant@2",
    *DEFAULT_PEERS[2:],
)  # a second thread helps with large models only


def find_peer(name: str) -> Peer:
    """Return a contestant by name; "pfl@2" is pfl with two threads, "flower@4" Flower with four workers.

    >>> find_peer("plain@2").title
    'plain torch loop, 2 threads'
    """
    base, _, count = name.partition("@")
    if base not in PEERS or (count and not (count.isdecimal() and int(count) >= 1)):
        raise unknown_name_error("contestant", name, [*PEERS, "plain@2"])
    peer = PEERS[base]
    threads = int(count) if count else peer.threads
    unit = "worker" if peer.workers else "thread"
    suffix = f", {threads} {unit}{'s' if threads > 1 else ''}" if peer.workers or count else ""
    title = peer.title.replace(", processes", "") + suffix
    return replace(peer, name=name, title=title, threads=threads)


def current_python() -> Path:
    return Path(sys.executable)
