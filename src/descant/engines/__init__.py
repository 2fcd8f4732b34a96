"""How tasks reach parties; one small file each."""

from .in_process import InProcess
from .processes.process_engine import Processes
from .ray.ray_engine import Ray
from .virtual_clock import Clocked

__all__ = ["Clocked", "InProcess", "Processes", "Ray"]
