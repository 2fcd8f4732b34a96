"""Markets, and what a portfolio makes of them: prices, fees, a day-by-day walk, and the measures it is judged by.

>>> path = uniform(generated(assets=3, years=1).relatives, c=0.002)
>>> path.weights.shape, float(path.turnover[0])
((259, 4), 1.0)
"""

from . import performance_measures, transaction_costs
from .backtest import Path, drift, follow, hold, uniform
from .market import Market, generated
from .price_files import read

__all__ = [
    "Market",
    "Path",
    "drift",
    "transaction_costs",
    "follow",
    "generated",
    "hold",
    "performance_measures",
    "read",
    "uniform",
]
