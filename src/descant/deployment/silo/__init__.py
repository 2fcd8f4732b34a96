"""A silo: its Python file, its folder, and the handler that answers the server's tasks.

Nothing that comes from outside is executed here. Tasks hold numbers and names, and every name resolves to Descant's own
code. Model and data come from the silo's own file.
"""

from typing import TYPE_CHECKING

from ...core.lazy_exports import lazy_exports

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
