"""How tasks reach parties; one small file each."""

from .clock import Clocked
from .in_process import InProcess
from .processes import Processes
from .ray import Ray

__all__ = ["Clocked", "InProcess", "Processes", "Ray"]
