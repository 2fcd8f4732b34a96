"""Engines: they decide where the tasks of a round run, and never change the result."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .in_process import InProcess
    from .processes.process_engine import Processes
    from .ray.ray_engine import Ray
    from .virtual_clock import VirtualClock
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".in_process": ("InProcess",),
            ".processes.process_engine": ("Processes",),
            ".ray.ray_engine": ("Ray",),
            ".virtual_clock": ("VirtualClock",),
        },
    )

__all__ = [
    "VirtualClock",
    "InProcess",
    "Processes",
    "Ray",
]
