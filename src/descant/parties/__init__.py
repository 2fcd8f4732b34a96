"""Who takes part, and with which data: readers, splits, and bundled data to begin with.

>>> people = digits(count=10, split="dirichlet", alpha=0.1, seed=0)
>>> len(people), people["3"].name
(10, '3')
"""

from . import splits
from .digits import digits
from .people import Party, People, from_arrays

__all__ = ["Party", "People", "digits", "from_arrays", "splits"]
