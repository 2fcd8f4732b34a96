"""Markets and back-tests: prices, transaction costs, daily portfolio simulation, and performance measures.

>>> result = uniform_rebalancing(generate_market(assets=3, years=1).relatives, c=0.002)
>>> result.weights.shape, float(result.turnover[0])
((259, 4), 1.0)
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import performance_measures, transaction_costs
    from .backtest import BacktestResult, buy_and_hold, drift, run_backtest, uniform_rebalancing
    from .market import Market, generate_market
    from .price_files import read_market
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".": ("performance_measures", "transaction_costs"),
            ".backtest": ("BacktestResult", "drift", "run_backtest", "buy_and_hold", "uniform_rebalancing"),
            ".market": ("Market", "generate_market"),
            ".price_files": ("read_market",),
        },
    )

__all__ = [
    "Market",
    "BacktestResult",
    "drift",
    "run_backtest",
    "generate_market",
    "buy_and_hold",
    "performance_measures",
    "read_market",
    "transaction_costs",
    "uniform_rebalancing",
]
