"""One experiment of a paper: its studies, and our numbers beside the printed ones."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import PaperFigure, Recipe
from ..reporting.table import Table
from .sweep_report import MANIFEST, PAGE, PICTURE, point_name, write_sweep

if TYPE_CHECKING:
    from ..studies.result_cache import ResultCache
    from ..studies.study import Study

SWEEP_FILES = (MANIFEST, PICTURE, PAGE, "*=*")  # files of a sweep's folder; "*=*" are the studies


@dataclass(frozen=True)
class SweepPoint:
    """The study at one combination of the sweep's values; without a sweep ``at`` is empty."""

    at: dict[str, Any]
    study: Study

    @property
    def name(self) -> str:
        return point_name(self.at)


@dataclass(frozen=True)
class Experiment:
    """The results of a recipe."""

    recipe: Recipe
    points: tuple[SweepPoint, ...]
    seconds: float
    quick: bool = False

    def paper_table(self) -> Table:
        """Return the table of printed numbers, their sources and our numbers with the spread over seeds."""
        import numpy as np

        rows = []
        for figure in self.recipe.paper_figures:
            for ours in self._measured_values(figure):
                row = {"the paper says": figure.description, "where": figure.source, "paper": float(figure.value)}
                spread = float(np.std(ours)) if len(ours) > 1 else float("nan")
                rows.append({**row, "ours": float(np.mean(ours)), "± seeds": spread})
        note = "Ours are of the quick form, which is smaller and shorter than the paper's." if self.quick else ""
        return Table(("the paper says", "where", "paper", "ours", "± seeds"), rows, note)

    def _measured_values(self, figure: PaperFigure) -> Iterator[Sequence[float]]:
        """Yield our numbers, one a seed, at each point that a figure belongs to."""
        for point in self.points:
            if all(point.at.get(key) == value for key, value in figure.at.items()):
                means_by_method = method_means(point.study)
                if not {*figure.methods, *figure.minus} <= set(means_by_method):
                    continue  # the figure needs methods that were not run
                yield [
                    _mean([means_by_method[name][i] for name in figure.methods])
                    - (_mean([means_by_method[name][i] for name in figure.minus]) if figure.minus else 0.0)
                    for i in range(len(self.recipe.seeds))
                ]

    def __str__(self) -> str:
        """Return the tables, the paper's figures beside ours, the legend and the cost."""
        parts = [(f"{point.name}\n" if point.at else "") + study_summary(point.study) for point in self.points]
        figures = self.paper_table()
        parts += [str(figures)] if figures.rows else []
        return "\n\n".join([*parts, table_legend(), self.cost_sentence()])

    def cost_sentence(self) -> str:
        """Return the cost of the experiment as a sentence."""
        trained = sum(len(point.study.results) for point in self.points)
        at = f" at {len(self.points)} points" if len(self.points) > 1 else ""
        return f"{self.seconds:.0f} s for {trained} trainings{at}: every method with every seed."

    def with_paper_values(self) -> Experiment:
        """Return the experiment with the paper's numbers added to the settings of its studies: reports show them."""
        sentences = [
            f"{row['the paper says']} ({row['where']}): {row['paper']:.3f}, ours {row['ours']:.3f}"
            for row in self.paper_table().rows
        ]
        if not sentences:
            return self
        points = [
            replace(p, study=replace(p.study, settings={**p.study.settings, "the paper": sentences}))
            for p in self.points
        ]
        return replace(self, points=tuple(points))

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values, without the parties' data."""
        from ..studies.summary import helpful_methods

        points = [
            {
                "at": dict(one.at),
                "note": one.study.note,
                "helped": helpful_methods(one.study),
                **json.loads(one.study.to_json()),
            }
            for one in self.points
        ]
        head = {"descant": __version__, "recipe": self.recipe.name, "quick": self.quick, "seconds": self.seconds}
        texts = {"title": self.recipe.title, "about": self.recipe.about, "cost": self.cost_sentence()}
        return {**head, **texts, "figures": self.paper_table().to_json_rows(), "points": points}

    def save(self, folder: Path) -> Path:
        """Write the report; a sweep has one report a point and one of all points."""
        from ..reporting.figure import with_footnote
        from ..storage import replace_folder
        from ..studies.study_report import write_study

        if not self.recipe.has_sweep:
            write_study(self.points[0].study, folder)
            return folder / PAGE
        with replace_folder(folder, SWEEP_FILES) as new:
            (new / MANIFEST).write_text(json.dumps(self.to_json()), encoding="utf-8")
            with with_footnote(self.points[0].study.note):
                self._draw_sweep_plot(new / PICTURE)
            for point in self.points:
                write_study(point.study, new / point.name)
            write_sweep(new)
        return folder / PAGE

    def _draw_sweep_plot(self, file: Path) -> Path:
        """Draw lines if all swept values are numbers, else one column of markers per point of the sweep."""
        from ..reporting.figure import BandLine
        from ..reporting.plots import draw_cells, draw_sweep

        means_by_point = [method_means(point.study) for point in self.points]
        positions = range(len(means_by_point))
        common_methods = [method for method in means_by_point[0] if all(method in found for found in means_by_point)]
        lines = {
            method: BandLine.from_repeats(
                positions, list(zip(*(found[method] for found in means_by_point), strict=True))
            )
            for method in common_methods
        }
        paper_points = [
            (figure, place)
            for figure in self.recipe.paper_figures
            for place in positions
            if figure.at and figure.at.items() <= self.points[place].at.items()
        ]
        metric = self.points[0].study.results[0].scores.metric
        trivial_rows = [point.study.table().rows[0] for point in self.points]  # the majority class, say
        if all(row["mean"] == row["mean"] for row in trivial_rows):
            lines = {
                trivial_rows[0]["method"]: BandLine.from_repeats(positions, [[row["mean"] for row in trivial_rows]]),
                **lines,
            }
        if all(isinstance(value, int | float) for point in self.points for value in point.at.values()):
            names = [point.name for point in self.points]
            stars = [(at, float(one.value)) for one, at in paper_points]
            return draw_sweep(file, lines, names, metric=metric, paper_values=stars, title=self.recipe.title)
        paper_values = {
            (one.methods[0], at): float(one.value)
            for one, at in paper_points
            if len(one.methods) == 1 and not one.minus
        }
        cells = [", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in p.at.items()) for p in self.points]
        return draw_cells(file, lines, cells, metric=metric, paper_values=paper_values, title=self.recipe.title)


def study_summary(study: Study) -> str:
    """Return the table, the verdict and the findings, wrapped for a terminal."""
    from ..studies.portfolio_tables import has_backtests, portfolio_table

    tables = [replace(study.table(), verdict="", notes=()), *([portfolio_table(study)] if has_backtests(study) else [])]
    return "\n\n".join([*map(str, tables), findings_text(study)])


def findings_text(study: Study) -> str:
    """Return the verdict and the findings, wrapped for a terminal."""
    lines = [study.verdict(), *(f"- {finding}" for finding in study.findings())]
    return "\n".join(textwrap.fill(text, 110, subsequent_indent="  " * text.startswith("- ")) for text in lines)


def table_legend() -> str:
    """Return the legend of the table, wrapped for a terminal."""
    from ..studies.study_report import LEGEND

    return textwrap.fill(LEGEND, 110)


def run_experiment(
    recipe: Recipe,
    names: Sequence[str] = (),
    quick: bool = False,
    progress: bool = True,
    cache: ResultCache | None = None,
) -> Experiment:
    """Compare the methods of a recipe (or the named ones) at all its points; errors in the recipe come first.

    ``cache`` keeps finished trainings: an interrupted experiment continues after them.
    """
    recipe.check(names)
    started = time.perf_counter()
    points = [SweepPoint(at, one.study(names, progress, cache)) for at, one in recipe.sweep_points()]
    seconds = time.perf_counter() - started + (0.0 if cache is None else cache.saved_seconds)
    return Experiment(recipe, tuple(points), seconds, quick=quick).with_paper_values()


def check_report_folder(recipe: Recipe, folder: Path) -> None:
    """Raise if the report of a recipe could not be written to a folder; call it before the run."""
    from ..storage import check_replaceable
    from ..studies.study_report import STUDY_FILES

    check_replaceable(folder, SWEEP_FILES if recipe.has_sweep else STUDY_FILES)


def method_means(study: Study) -> dict[str, list[float]]:
    """Return the mean over parties of every method, one number a seed."""
    return {method: [result.scores.personal.mean for result in study.of(method)] for method in study.methods}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
