"""The papers' experiments, one recipe each: run them and compare with printed and expected numbers.

Light to import: torch is loaded by the run.
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .experiment import (
        Experiment,
        SweepPoint,
        check_report_folder,
        findings_text,
        method_means,
        run_experiment,
        study_summary,
        table_legend,
    )
    from .recipe_index import experiment_keys, load_recipe, papers_folder
    from .recorded_results import ExpectedResult, check_recordable, compare_with_expected, read_expected, write_expected
    from .sweep_report import MANIFEST, write_sweep
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".recorded_results": (
                "ExpectedResult",
                "check_recordable",
                "compare_with_expected",
                "write_expected",
                "read_expected",
            ),
            ".experiment": (
                "Experiment",
                "SweepPoint",
                "run_experiment",
                "check_report_folder",
                "table_legend",
                "method_means",
                "study_summary",
                "findings_text",
            ),
            ".recipe_index": ("papers_folder", "experiment_keys", "load_recipe"),
            ".sweep_report": ("MANIFEST", "write_sweep"),
        },
    )

__all__ = [
    "Experiment",
    "ExpectedResult",
    "MANIFEST",
    "SweepPoint",
    "run_experiment",
    "check_report_folder",
    "check_recordable",
    "compare_with_expected",
    "papers_folder",
    "write_expected",
    "read_expected",
    "experiment_keys",
    "table_legend",
    "method_means",
    "load_recipe",
    "study_summary",
    "findings_text",
    "write_sweep",
]
