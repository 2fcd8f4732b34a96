"""A team on its own machine: its file, its folder, and the desk at which letters are answered.

Nothing that comes from outside is executed here: letters hold numbers and names, and what a name stands for is
Descant's own. Model and data come from the team's own file.
"""

from .silo_file import SiloFile
from .task_handler import Desk

__all__ = ["Desk", "SiloFile"]
