"""Markets, and what a portfolio makes of them: prices, fees, a day-by-day walk, and the measures it is judged by.

>>> path = uniform(generated(assets=3, years=1).relatives, c=0.002)
>>> path.weights.shape, float(path.turnover[0])
((259, 4), 1.0)
"""

from typing import TYPE_CHECKING

from ..core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from . import performance_measures, transaction_costs
    from .backtest import Path, drift, follow, hold, uniform
    from .market import Market, generated
    from .price_files import read
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".": ("performance_measures", "transaction_costs"),
            ".backtest": ("Path", "drift", "follow", "hold", "uniform"),
            ".market": ("Market", "generated"),
            ".price_files": ("read",),
        },
    )

__all__ = [
    "Market",
    "Path",
    "drift",
    "follow",
    "generated",
    "hold",
    "performance_measures",
    "read",
    "transaction_costs",
    "uniform",
]
