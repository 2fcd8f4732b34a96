"""A recipe: one TOML file that says what is run, with the settings of the functions that it names.

version = 1
title = "Two methods on digits"
[run]       rounds = 20, seeds = 3                        (`Length`)
[parties]   population = "digits", and its keywords       (`parties.POPULATIONS`, or "module:function")
[model]     net = "logistic", and its keywords            (`problems.NETS`, or "module:function")
[training]      lr, steps or epochs, batch, attend, ...       (`Sgd` and `Attendance`)
[method]    algorithm = "fedavg+", and its keywords       (`algorithms.ALGORITHMS`): what `descant run` runs
[vault]     folder, key: where parties' coresets are kept; share, count: what they agreed to (`VaultAt`, `Agreed`):
            for `descant run`
[[methods]] the same, once a method                       what `descant compare` compares
[[wrap]]    by = "matching", and its keywords             (`algorithms.WRAPPERS`, or "module:function"): wraps every
            method, local too; wrap = [{wrapper = ...}, ...] in a method's table wraps that one, after these
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
    from .recipe import Recipe, read_recipe
    from .resume_command import is_resumable, resume_hint, run_resume_command, server_folder
    from .sections import PaperFigure, ParticipationSettings, RunSettings
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".recipe": ("Recipe", "read_recipe"),
            ".resume_command": ("resume_hint", "is_resumable", "run_resume_command", "server_folder"),
            ".sections": ("ParticipationSettings", "PaperFigure", "RunSettings"),
        },
    )

__all__ = [
    "ParticipationSettings",
    "PaperFigure",
    "RunSettings",
    "Recipe",
    "resume_hint",
    "read_recipe",
    "is_resumable",
    "run_resume_command",
    "server_folder",
]
