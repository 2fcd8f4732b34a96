"""One experiment of a paper, carried out: its studies, and our numbers beside the printed ones."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import Figure, Recipe
from ..reporting.table import Table
from .sweep_report import MANIFEST, PAGE, PICTURE, name_of, write_sweep

if TYPE_CHECKING:
    from ..studies.result_cache import Finished
    from ..studies.study import Study

SWEPT = (MANIFEST, PICTURE, PAGE, "*=*")  # the folder of an experiment that goes through values: a study for each


@dataclass(frozen=True)
class Point:
    """The study at one combination of the values that are gone through; at none, if there is no sweep."""

    at: dict[str, Any]
    study: Study

    @property
    def name(self) -> str:
        return name_of(self.at)


@dataclass(frozen=True)
class Experiment:
    """What came of a recipe."""

    recipe: Recipe
    points: tuple[Point, ...]
    seconds: float
    quick: bool = False

    def figures(self) -> Table:
        """What the paper prints, where it stands, and ours beside it, with the spread over seeds."""
        import numpy as np

        rows = []
        for figure in self.recipe.figures:
            for ours in self._ours(figure):
                row = {"the paper says": figure.says, "where": figure.where, "paper": float(figure.value)}
                spread = float(np.std(ours)) if len(ours) > 1 else float("nan")
                rows.append({**row, "ours": float(np.mean(ours)), "± seeds": spread})
        note = "Ours are of the quick form, which is smaller and shorter than the paper's." if self.quick else ""
        return Table(("the paper says", "where", "paper", "ours", "± seeds"), rows, note)

    def _ours(self, figure: Figure) -> Iterator[Sequence[float]]:
        """Ours, one number a seed, for the point that a figure belongs to (if it was visited)."""
        for point in self.points:
            if all(point.at.get(key) == value for key, value in figure.at.items()):
                own = means(point.study)
                if not {*figure.methods, *figure.against} <= set(own):
                    continue  # other methods were asked for
                yield [
                    _mean([own[name][i] for name in figure.methods])
                    - (_mean([own[name][i] for name in figure.against]) if figure.against else 0.0)
                    for i in range(len(self.recipe.seeds))
                ]

    def __str__(self) -> str:
        """The tables, the paper's figures beside ours, how to read them, and the cost."""
        parts = [(f"{point.name}\n" if point.at else "") + summary(point.study) for point in self.points]
        figures = self.figures()
        parts += [str(figures)] if figures.rows else []
        return "\n\n".join([*parts, legend(), self.cost()])

    def cost(self) -> str:
        """What it took, in a sentence."""
        trained = sum(len(point.study.results) for point in self.points)
        at = f" at {len(self.points)} points" if len(self.points) > 1 else ""
        return f"{self.seconds:.0f} s for {trained} trainings{at}: every method with every seed."

    def told(self) -> Experiment:
        """The same, its studies carrying what the paper prints, so that every report shows it."""
        said = [
            f"{row['the paper says']} ({row['where']}): {row['paper']:.3f}, ours {row['ours']:.3f}"
            for row in self.figures().rows
        ]
        if not said:
            return self
        points = [
            replace(p, study=replace(p.study, settings={**p.study.settings, "the paper": said})) for p in self.points
        ]
        return replace(self, points=tuple(points))

    def to_json(self) -> dict[str, Any]:
        """Everything in it but the parties, for programs."""
        from ..studies.summary import helped

        points = [
            {"at": dict(one.at), "note": one.study.note, "helped": helped(one.study), **json.loads(one.study.to_json())}
            for one in self.points
        ]
        head = {"descant": __version__, "recipe": self.recipe.name, "quick": self.quick, "seconds": self.seconds}
        told = {"title": self.recipe.title, "about": self.recipe.about, "cost": self.cost()}
        return {**head, **told, "figures": self.figures().plain(), "points": points}

    def save(self, folder: Path) -> Path:
        """Write the report; where values were gone through, one for each, and one of them all."""
        from ..reporting.figure import noted
        from ..storage import replacing
        from ..studies.study_report import write

        if not self.recipe.swept:
            write(self.points[0].study, folder)
            return folder / PAGE
        with replacing(folder, SWEPT) as new:
            (new / MANIFEST).write_text(json.dumps(self.to_json()), encoding="utf-8")
            with noted(self.points[0].study.note):
                self._draw(new / PICTURE)
            for point in self.points:
                write(point.study, new / point.name)
            write_sweep(new)
        return folder / PAGE

    def _draw(self, file: Path) -> Path:
        """Lines where numbers were gone through, else cells: there is no way from one word to another."""
        from ..reporting.figure import Line
        from ..reporting.plots import draw_cells, draw_sweep

        own = [means(point.study) for point in self.points]
        places = range(len(own))
        everywhere = [method for method in own[0] if all(method in found for found in own)]
        lines = {
            method: Line.over(places, list(zip(*(found[method] for found in own), strict=True)))
            for method in everywhere
        }
        printed = [
            (figure, place)
            for figure in self.recipe.figures
            for place in places
            if figure.at and figure.at.items() <= self.points[place].at.items()
        ]
        metric = self.points[0].study.results[0].scores.metric
        unlearned = [point.study.table().rows[0] for point in self.points]  # the majority class, say
        if all(row["mean"] == row["mean"] for row in unlearned):
            lines = {unlearned[0]["method"]: Line.over(places, [[row["mean"] for row in unlearned]]), **lines}
        if all(isinstance(value, int | float) for point in self.points for value in point.at.values()):
            names, stars = [point.name for point in self.points], [(at, float(one.value)) for one, at in printed]
            return draw_sweep(file, lines, names, metric, stars, self.recipe.title)
        of = {
            (one.methods[0], at): float(one.value) for one, at in printed if len(one.methods) == 1 and not one.against
        }
        cells = [", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in p.at.items()) for p in self.points]
        return draw_cells(file, lines, cells, metric, of, self.recipe.title)


def summary(study: Study) -> str:
    """The table, the verdict and the findings, broken for a terminal."""
    from ..studies.portfolio_tables import is_traded, ledger

    tables = [replace(study.table(), verdict="", notes=()), *([ledger(study)] if is_traded(study) else [])]
    return "\n\n".join([*map(str, tables), told(study)])


def told(study: Study) -> str:
    """The verdict and the findings, broken for a terminal."""
    lines = [study.verdict(), *(f"- {finding}" for finding in study.findings())]
    return "\n".join(textwrap.fill(text, 110, subsequent_indent="  " * text.startswith("- ")) for text in lines)


def legend() -> str:
    """How to read the table."""
    from ..studies.study_report import LEGEND

    return textwrap.fill(LEGEND, 110)


def carry_out(
    recipe: Recipe,
    names: Sequence[str] = (),
    quick: bool = False,
    progress: bool = True,
    kept: Finished | None = None,
) -> Experiment:
    """Compare the methods of a recipe (or those named) at all its points; what is wrong with it is an error at once.

    ``kept`` is where trainings that have finished are kept: broken off, the same experiment goes on behind them.
    """
    recipe.check(names)
    began = time.perf_counter()
    points = [Point(at, one.study(names, progress, kept)) for at, one in recipe.sweep()]
    seconds = time.perf_counter() - began + (0.0 if kept is None else kept.spared)
    return Experiment(recipe, tuple(points), seconds, quick).told()


def check_folder(recipe: Recipe, folder: Path) -> None:
    """Raise unless the report of a recipe can be written there: to be asked before the work."""
    from ..storage import check_replaceable
    from ..studies.study_report import FILES

    check_replaceable(folder, SWEPT if recipe.swept else FILES)


def means(study: Study) -> dict[str, list[float]]:
    """The mean over parties of every method, one number a seed."""
    return {method: [result.scores.own.mean for result in study.of(method)] for method in study.methods}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
