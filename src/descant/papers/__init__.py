"""The papers' experiments, one recipe each: found, run, and set beside what the paper prints and what we keep.

Light to import: torch waits for the work.
"""

from .expected import Kept, differences, keep, kept
from .experiment import LEGEND, Experiment, Point, carry_out, check_folder
from .shelf import home, keys, recipe_of

__all__ = [
    "Experiment",
    "Kept",
    "LEGEND",
    "Point",
    "carry_out",
    "check_folder",
    "differences",
    "home",
    "keep",
    "kept",
    "keys",
    "recipe_of",
]
