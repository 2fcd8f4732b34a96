"""The tables of docs/fed-plus.md and its like, from the numbers that runs have kept in papers/*/expected.json.

python docs/results.py            # writes them into the pages
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
LEFT = 0.8  # of all rounds: who was there after that has not left
HEAD = ("method", "mean ± seeds", "of those that trained")


def spread(values: Sequence[float]) -> str:
    """The mean over seeds and its standard deviation."""
    return f"{mean(values):.3f} ± {pstdev(values):.3f}"


def table(point: Mapping[str, Any], trivial: str = MAJORITY) -> str:
    """One study: a row a method, what is reached without learning first."""
    better = [name for name in point if name.startswith("above ")]  # numbers kept earlier have fewer of them
    rows = [(trivial, f"{point['majority']:.3f}", *[""] * (1 + len(better)))]
    for method, values in point["personal"].items():
        counts = [str(point[name].get(method, "")) for name in better]
        rows.append((method, spread(values), spread(point["personal_trained"][method]), *counts))
    head = (*HEAD, *(f"parties {name}" for name in better))
    lines = [" | ".join(row) for row in (head, ("---", *["---:"] * (len(head) - 1)), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def sweep(points: Sequence[Mapping[str, Any]], trivial: str = MAJORITY) -> str:
    """Several studies: a column for each value, a row a method."""
    names = [", ".join(f"{key}={value}" for key, value in point["at"].items()) for point in points]
    lines = [["method", *names], ["---", *["---:"] * len(names)]]
    lines.append([trivial, *(f"{point['majority']:.3f}" for point in points)])
    for method in points[0]["personal"]:
        lines.append([method, *(spread(p["personal"][method]) if method in p["personal"] else "" for p in points)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def silos(point: Mapping[str, Any]) -> str:
    """Where silos leave: what becomes of the centre's score on the test set of the one that left."""
    names = point["names"]
    courses = point["global_model_curves"]
    head = (
        "method",
        "who left",
        "when it left",
        "at the end",
        "fall",
        "below Ideal",
        "local",
        "who stayed, at the end",
    )
    rows = [head, ("---", "---", *["---:"] * (len(head) - 2))]
    ideal = courses.get("Ideal")
    for method, course in courses.items():
        for party, at in course["left"].items():
            k = names.index(party)
            mean = course["mean"][k]
            deviation = course["sd"][k]
            if at > LEFT * course["rounds"][-1]:  # it may come again: who does not wait has somebody in few rounds
                continue
            place = max(sum(scored <= at for scored in course["rounds"]) - 1, 0)  # where it was last scored before
            others = [course["mean"][j][-1] for j in range(len(names)) if j != k]
            behind = "" if ideal is None else f"{ideal['mean'][k][-1] - mean[-1]:.3f}"
            end = f"{mean[-1]:.3f} ± {deviation[-1]:.3f}"
            left = f"{mean[place]:.3f}"
            fall = f"{mean[place] - mean[-1]:+.3f}"
            alone = f"{point['local'][k]:.3f}"
            rows.append((method, party, left, end, fall, behind, alone, f"{sum(others) / len(others):.3f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ledger(point: Mapping[str, Any]) -> str:
    """What portfolio desks made of their test: a row a method, what needs no skill first."""
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
    """One experiment, by its key paper/name: its full form if it was run, else the quick one."""
    form = "full" if "full" in forms else "quick"
    found = forms[form]
    points = found["points"]
    seeds = len(found["seeds"])
    size = f"{points[0]['parties']} parties, {seeds} seeds, {found['seconds']:.0f} s"
    trivial = "random policy" if key.startswith("fedrl/") else MAJORITY
    told = [table(points[0], trivial) if len(points) == 1 else sweep(points, trivial)]
    told += [silos(points[0])] if len(points) == 1 and "global_model_curves" in points[0] else []
    if "portfolio" in points[0]:
        told = [ledger(points[0]) if len(points) == 1 else sweep(points, "uniform rebalancing")]
    return "\n\n".join([f"#### {key}, {form} form: {size}", *told]) + "\n"


def block(paper: str, page: Path) -> str:
    """All that is kept of a paper's experiments; those with portfolios have a page of their own."""
    experiments = json.loads((PAPERS / paper / "expected.json").read_text(encoding="utf-8"))["experiments"]
    here = {name: forms for name, forms in experiments.items() if name.startswith("portfolio") == (page == PORTFOLIO)}
    return "\n".join(section(f"{paper}/{name}", forms) for name, forms in here.items())


def pages() -> list[tuple[str, Path]]:
    """The papers that have a page of results, and where it is."""
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
