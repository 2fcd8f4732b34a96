"""How tasks reach parties; one small file each."""

from .in_process import InProcess

__all__ = ["InProcess"]
