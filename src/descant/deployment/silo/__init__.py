"""A team on its own machine: its file, its folder, and the desk at which letters are answered.

Nothing that comes from outside is executed here: letters hold numbers and names, and what a name stands for is
Descant's own. Model and data come from the team's own file.
"""

from typing import TYPE_CHECKING

from ...core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .silo_file import SiloFile
    from .task_handler import TaskHandler
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".silo_file": ("SiloFile",),
            ".task_handler": ("TaskHandler",),
        },
    )

__all__ = [
    "TaskHandler",
    "SiloFile",
]
