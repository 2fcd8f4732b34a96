"""A recipe: one TOML file that says what is run, with the settings of the functions that it names.

version = 1
title = "Two methods on digits"
[run]       rounds = 20, seeds = 3                        (`Length`)
[parties]   population = "digits", and its keywords       (`parties.POPULATIONS`, or "module:function")
[model]     net = "logistic", and its keywords            (`problems.NETS`, or "module:function")
[work]      lr, steps or epochs, batch, attend, ...       (`Sgd` and `Attendance`)
[method]    algorithm = "fedavg+", and its keywords       (`algorithms.ALGORITHMS`): what `descant run` runs
[vault]     folder, key: where parties' coresets are kept; share, count: what they agreed to (`VaultAt`, `Agreed`):
            for `descant run`
[[methods]] the same, once a method                       what `descant compare` compares
[[wrap]]    by = "matching", and its keywords             (`algorithms.WRAPPERS`, or "module:function"): wraps every
            method, local too; wrap = [{by = ...}, ...] in a method's table wraps that one, after these
            (for keywords that may be None, "none" is that)
[quick]     what a short form changes, table by table;    [sweep] lists of values to go through
[[paper]]   what the paper prints                         (`Figure`)

The paths of a schedule, of a vault and of parties' files are relative to the recipe's folder. A run keeps what a
schedule says, and where the others are.

Light to import: torch waits until something is made.
"""

from typing import TYPE_CHECKING

from ..core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .recipe import Recipe, read
    from .resume_command import how_to_end, resumable, resuming, server_of
    from .sections import Attendance, Figure, Length
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".recipe": ("Recipe", "read"),
            ".resume_command": ("how_to_end", "resumable", "resuming", "server_of"),
            ".sections": ("Attendance", "Figure", "Length"),
        },
    )

__all__ = [
    "Attendance",
    "Figure",
    "Length",
    "Recipe",
    "how_to_end",
    "read",
    "resumable",
    "resuming",
    "server_of",
]
