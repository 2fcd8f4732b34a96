"""How tasks reach parties; one small file each."""

from .in_process import InProcess
from .processes import Processes

__all__ = ["InProcess", "Processes"]
