"""Write the result tables of docs/fed-plus.md and the other papers' pages from papers/*/expected.json.

python docs/results.py            # rewrites the tables in the pages
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

HERE = Path(__file__).parent
PAPERS = HERE.parent / "papers"
BEGIN = "<!-- made by docs/results.py -->\n"
END = "<!-- end -->\n"
MAJORITY = "majority class"
PORTFOLIO = HERE / "portfolio.md"
LEFT = 0.8  # share of all rounds; a party present after that has not left
HEAD = ("method", "mean ± seeds", "of those that trained")


def spread(values: Sequence[float]) -> str:
    """Return the mean over seeds and its standard deviation."""
    return f"{mean(values):.3f} ± {pstdev(values):.3f}"


def table(point: Mapping[str, Any], trivial: str = MAJORITY) -> str:
    """Return the table of one study: a row per method, after the trivial baseline."""
    better = [name for name in point if name.startswith("above ")]  # older numbers have fewer of them
    rows = [(trivial, f"{point['majority']:.3f}", *[""] * (1 + len(better)))]
    for method, values in point["personal"].items():
        counts = [str(point[name].get(method, "")) for name in better]
        rows.append((method, spread(values), spread(point["personal_trained"][method]), *counts))
    head = (*HEAD, *(f"parties {name}" for name in better))
    lines = [" | ".join(row) for row in (head, ("---", *["---:"] * (len(head) - 1)), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def sweep(points: Sequence[Mapping[str, Any]], trivial: str = MAJORITY) -> str:
    """Return the table of several studies: a column per value, a row per method."""
    names = [", ".join(f"{key}={value}" for key, value in point["at"].items()) for point in points]
    lines = [["method", *names], ["---", *["---:"] * len(names)]]
    lines.append([trivial, *(f"{point['majority']:.3f}" for point in points)])
    for method in points[0]["personal"]:
        lines.append([method, *(spread(p["personal"][method]) if method in p["personal"] else "" for p in points)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def silos(point: Mapping[str, Any]) -> str:
    """Return the table of silos that leave: the global model's score on the test set of each one that left."""
    names = point["names"]
    curves = point["global_model_curves"]
    head = (
        "method",
        "party that left",
        "when it left",
        "at the end",
        "drop",
        "below Ideal",
        "local",
        "parties that stayed, at the end",
    )
    rows = [head, ("---", "---", *["---:"] * (len(head) - 2))]
    ideal = curves.get("Ideal")
    for method, curve in curves.items():
        for party, at in curve["left"].items():
            k = names.index(party)
            mean = curve["mean"][k]
            deviation = curve["sd"][k]
            if at > LEFT * curve["rounds"][-1]:  # it may return: without waiting, a party is in few rounds
                continue
            index = max(sum(scored <= at for scored in curve["rounds"]) - 1, 0)  # of the last evaluation before
            others = [curve["mean"][j][-1] for j in range(len(names)) if j != k]
            behind = "" if ideal is None else f"{ideal['mean'][k][-1] - mean[-1]:.3f}"
            end = f"{mean[-1]:.3f} ± {deviation[-1]:.3f}"
            left = f"{mean[index]:.3f}"
            drop = f"{mean[index] - mean[-1]:+.3f}"
            local = f"{point['local'][k]:.3f}"
            rows.append((method, party, left, end, drop, behind, local, f"{sum(others) / len(others):.3f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def portfolio_table(point: Mapping[str, Any]) -> str:
    """Return the test results of portfolio desks: a row per method, after the trivial baseline."""
    rows = point["portfolio"]
    columns = list(next(reversed(rows.values())))
    lines = [["method", *columns], ["---", *["---:"] * len(columns)]]
    for method, row in rows.items():
        lines.append([method, *(_cell(name, row.get(name)) for name in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if name == "above uniform" else f"{value:.2f}" if name == "Sharpe ratio" else f"{value:.3f}"


def section(key: str, forms: Mapping[str, Any]) -> str:
    """Return the section of one experiment, paper/name: its full form if it was run, else the quick one."""
    form = "full" if "full" in forms else "quick"
    found = forms[form]
    points = found["points"]
    seeds = len(found["seeds"])
    size = f"{points[0]['parties']} parties, {seeds} seeds, {found['seconds']:.0f} s"
    trivial = "random policy" if key.startswith("fedrl/") else MAJORITY
    tables = [table(points[0], trivial) if len(points) == 1 else sweep(points, trivial)]
    tables += [silos(points[0])] if len(points) == 1 and "global_model_curves" in points[0] else []
    if "portfolio" in points[0]:
        tables = [portfolio_table(points[0]) if len(points) == 1 else sweep(points, "uniform rebalancing")]
    return "\n\n".join([f"#### {key}, {form} form: {size}", *tables]) + "\n"


def block(paper: str, page: Path) -> str:
    """Return the sections of a paper's experiments on a page; portfolio experiments have their own page."""
    experiments = json.loads((PAPERS / paper / "expected.json").read_text(encoding="utf-8"))["experiments"]
    here = {name: forms for name, forms in experiments.items() if name.startswith("portfolio") == (page == PORTFOLIO)}
    return "\n".join(section(f"{paper}/{name}", forms) for name, forms in here.items())


def pages() -> list[tuple[str, Path]]:
    """Return the papers that have a page of results, with its path."""
    found = [
        (file.parent.name, HERE / f"{file.parent.name.replace('_', '-')}.md") for file in PAPERS.glob("*/expected.json")
    ]
    return [(paper, page) for paper, page in sorted(found) if page.exists()] + [("fed_plus", PORTFOLIO)]


def main() -> None:
    for paper, page in pages():
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        made = before + BEGIN + "\n" + block(paper, page) + "\n" + END + rest.split(END)[1]
        page.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
