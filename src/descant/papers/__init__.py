"""The papers' experiments, one recipe each: found, run, and set beside what the paper prints and what we keep.

Light to import: torch waits for the work.
"""

from .expected_results import Kept, check_keepable, differences, keep, kept
from .experiment import Experiment, Point, carry_out, check_folder, legend, means, summary, told
from .recipe_index import home, keys, recipe_of
from .sweep_report import MANIFEST, write_sweep

__all__ = [
    "MANIFEST",
    "Experiment",
    "Kept",
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
