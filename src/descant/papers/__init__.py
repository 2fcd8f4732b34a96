"""The papers' experiments, one recipe each: found, run, and set beside what the paper prints and what we keep.

Light to import: torch waits for the work.
"""

from typing import TYPE_CHECKING

from ..core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .expected_results import Kept, check_keepable, differences, keep, kept
    from .experiment import Experiment, Point, carry_out, check_folder, legend, means, summary, told
    from .recipe_index import home, keys, recipe_of
    from .sweep_report import MANIFEST, write_sweep
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".expected_results": ("Kept", "check_keepable", "differences", "keep", "kept"),
            ".experiment": ("Experiment", "Point", "carry_out", "check_folder", "legend", "means", "summary", "told"),
            ".recipe_index": ("home", "keys", "recipe_of"),
            ".sweep_report": ("MANIFEST", "write_sweep"),
        },
    )

__all__ = [
    "Experiment",
    "Kept",
    "MANIFEST",
    "Point",
    "carry_out",
    "check_folder",
    "check_keepable",
    "differences",
    "home",
    "keep",
    "kept",
    "keys",
    "legend",
    "means",
    "recipe_of",
    "summary",
    "told",
    "write_sweep",
]
