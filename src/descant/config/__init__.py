"""Recipes: one TOML file describes a run by naming functions and giving their settings.

version = 1
title = "Two methods on digits"
[run]       rounds = 20, seeds = 3                        (`RunSettings`)
[parties]   population = "digits", and its keywords       (`parties.POPULATIONS`, or "module:function")
[model]     net = "logistic", and its keywords            (`models.NETWORKS`, or "module:function")
[training]  lr, steps or epochs, batch, participation, ...  (`Sgd` and `ParticipationSettings`)
[method]    algorithm = "fedavg+", and its keywords       (`algorithms.ALGORITHMS`): what `descant run` runs
[vault]     folder, key: where coresets are kept; share, count: their limit (`VaultLocation`, `CoresetLimit`);
            for `descant run` only
[[methods]] the same, one table a method                  what `descant compare` compares
[[wrap]]    wrapper = "matching", and its keywords        (`algorithms.WRAPPERS`, or "module:function"): wraps every
            method, local too; wrap = [{wrapper = ...}, ...] in a method's table wraps that method, outside these
            ("none" stands for None)
[quick]     changes of the short form, table by table;    [sweep] lists of values
[[paper]]   numbers that the paper prints                 (`PaperFigure`)

Paths of a schedule, of a vault and of parties' files are relative to the recipe's folder. A run stores the content of
a schedule, and absolute paths of the other files.

Light to import: torch is loaded when something is built.
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

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
