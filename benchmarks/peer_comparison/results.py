"""Results of a bench: tables, JSON records, and a folder with both and a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from descant import __version__
from descant.reporting.table import Table
from descant.storage import replace_folder
from peer_comparison.measure_in_turns import PeerMeasurement, TurnSchedule
from peer_comparison.peers.work import Workload

FILES = ("bench.json", "bench.md", "bench.png")
REFERENCE_PEER = "plain"
COLUMNS = (
    *("contestant", "wall ms/round", "CPU ms/round", "× plain, wall", "× plain, CPU"),
    *("warm-up s", "from cold s", "peak MB", "note"),
)
COLUMN_DECIMALS = {"wall ms/round": 1, "CPU ms/round": 1, "× plain, wall": 2, "× plain, CPU": 2} | {
    name: 0 if name == "peak MB" else 1 for name in ("warm-up s", "from cold s", "peak MB")
}


@dataclass(frozen=True)
class WorkloadResult:
    """The measurements of all contestants on one workload."""

    work: Workload
    initial: float
    measured: tuple[PeerMeasurement, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per contestant: medians over the turns and their ratios to the plain loop."""
        plain = next((m for m in self.measured if m.name == REFERENCE_PEER), None)
        return [self._row(m, plain) for m in self.measured]

    def _row(self, m: PeerMeasurement, plain: PeerMeasurement | None) -> dict[str, Any]:
        wall = _median(m.seconds)
        cpu = _median(m.processor)
        return {
            "contestant": m.title,
            "wall ms/round": _times(1000, wall),
            "CPU ms/round": _times(1000, cpu),
            "× plain, wall": _ratio(_median(plain.seconds if plain else ()), wall),
            "× plain, CPU": _ratio(_median(plain.processor if plain else ()), cpu),
            "warm-up s": m.warmup,
            "from cold s": m.cold_seconds,
            "peak MB": _times(1e-6, m.memory),
            "note": "; ".join(filter(None, [m.reason and f"out: {m.reason}", self._other_work(m, plain), m.note])),
        }

    def _other_work(self, m: PeerMeasurement, plain: PeerMeasurement | None) -> str:
        """Return a remark if the loss differs from the plain loop's, which suggests other work."""
        if plain is None or plain.loss is None or m.loss is None:
            return ""
        improvement = abs(self.initial - plain.loss)
        if abs(m.loss - plain.loss) <= self.work.loss_tolerance * improvement:
            return ""
        return f"loss {m.loss:.3f}, the plain loop's is {plain.loss:.3f}: not the same work?"

    def losses(self, rounds: int) -> str:
        """Return a sentence on the losses: the same work gives about the same loss."""
        each = [f"{m.title} {m.loss:.3f}" for m in self.measured if m.loss is not None]
        opening = f"Loss on held-out samples, {self.initial:.3f} at first; after {rounds} rounds"
        return f"{opening}: {'; '.join(each)}."

    def table(self) -> Table:
        """Return the records as a table."""
        return Table(COLUMNS, self.rows(), decimals=COLUMN_DECIMALS)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _ratio(whole: float | None, part: float | None) -> float | None:
    return whole / part if whole and part else None


def machine() -> dict[str, Any]:
    """Return the processor, system and load of this machine."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load at the start": load,
    }


def to_json(results: Sequence[WorkloadResult], pace: TurnSchedule, machine_info: Mapping[str, Any]) -> str:
    """Return all measurements, turn by turn, as JSON text."""
    workloads = [
        {
            "work": asdict(result.work),
            "initial loss": result.initial,
            "rows": result.rows(),
            "measured": [asdict(m) for m in result.measured],
        }
        for result in results
    ]
    return json.dumps(
        {"descant": __version__, "machine": machine_info, "pace": asdict(pace), "workloads": workloads},
        indent=1,
        ensure_ascii=False,
    )


def to_markdown(results: Sequence[WorkloadResult], pace: TurnSchedule, machine_info: Mapping[str, Any]) -> str:
    """Return the tables and how to read them as Markdown."""
    parts = [
        "# Descant and its peers, side by side",
        f"Descant {__version__} on {machine_info['processor']}, {machine_info['cores']} cores, "
        f"Python {machine_info['python']}; load {machine_info['load at the start']} at the start. "
        "Written by `scripts/bench`.",
        _about(pace),
    ]
    for result in results:
        parts += [f"## {result.work.name}: {result.work.method}", f"{result.work.title}.", _markdown(result.table())]
        parts += [result.losses(pace.cold_rounds)]
    return "\n\n".join([*parts, "![Speed relative to the plain loop](bench.png)"]) + "\n"


def _about(pace: TurnSchedule) -> str:
    return (
        f"All contestants of a workload are alive at once and take turns, one at a time: {pace.turns} turns, medians "
        "over them. *× plain*: how many times as fast as the plain torch loop on one thread, by wall time and by "
        "processor time of all processes. *warm-up*: start-up (reading the data, compilation, worker start) and the "
        f"first round; *from cold*: the first {pace.cold_rounds} rounds with it. Imports are excluded for all. *peak "
        "MB*: the highest memory sample, data included; pages shared by processes count once. Contestants without a "
        "number of threads or workers have one thread on one core."
    )


def _markdown(table: Table) -> str:
    lines = [" | ".join(table.columns), " | ".join(["---", *["---:"] * (len(table.columns) - 2), "---"])]
    lines += [" | ".join(_cell(row[name], table.decimals.get(name, 0)) for name in table.columns) for row in table.rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any, places: int) -> str:
    text = f"{value:.{places}f}" if isinstance(value, float) else "–" if value is None else str(value)
    return text.replace("|", "/").replace("\n", " ")


def write(results: Sequence[WorkloadResult], pace: TurnSchedule, machine_info: Mapping[str, Any], out: Path) -> None:
    """Write bench.json, bench.md and bench.png, all or none."""
    from peer_comparison.picture import draw

    with replace_folder(out, FILES) as folder:
        (folder / "bench.json").write_text(to_json(results, pace, machine_info), encoding="utf-8")
        (folder / "bench.md").write_text(to_markdown(results, pace, machine_info), encoding="utf-8")
        draw(results, folder / "bench.png")
