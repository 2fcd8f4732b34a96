"""How tasks reach parties; one small file each."""

from .clock import Clocked
from .in_process import InProcess
from .processes import Processes

__all__ = ["Clocked", "InProcess", "Processes"]
