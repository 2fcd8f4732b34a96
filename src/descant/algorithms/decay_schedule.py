"""A fixed schedule of learning rate and work, as the baselines of representation matching have; it gives no numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.algorithm import Algorithm, Tuned, Tuning
from ..core.settings import check, setting
from ..errors import SettingError
from .components import fixed
from .fedavg import FedAvg


@dataclass(frozen=True)
class Decays:
    """Learning rate and work times a factor, every so many rounds, down to a floor."""

    lr: float = setting(1.0, "the factor of the learning rate; not from the paper", above=0, most=1)
    work: float = setting(1.0, "the factor of the work; not from the paper", above=0, most=1)
    every: int = setting(1, "rounds from one decay to the next; not from the paper", least=1, whole=True)
    least_lr: float = setting(0.0, "the floor of the learning rate; not from the paper", least=0)
    least_work: int = setting(1, "the floor of the work; not from the paper", least=0, whole=True)

    def __call__(self, tuning: Tuning) -> Tuned:
        hyper, times = tuning.hyper, (tuning.round - 1) // self.every
        lr = max(hyper.lr * self.lr**times, min(self.least_lr, hyper.lr))
        work = max(round(hyper.work * self.work**times), min(self.least_work, hyper.work))
        return Tuned(replace(hyper, lr=lr, work=work), tuning.memory)


def Decaying(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    lr: float = 1.0,
    work: float = 1.0,
    every: int = 1,
    least_lr: float = 0.0,
    least_work: int = 1,
) -> Algorithm:
    """Any method with a fixed decay of learning rate and work, as the paper's baselines have (§4); it gives no numbers.

    >>> Decaying(lr=0.99).tune.lr
    0.99
    """
    tuner = Decays(lr, work, every, least_lr, least_work)
    check(tuner, "Decaying")
    if base.tune is not fixed:
        raise SettingError(f"Decaying cannot tune {base.name}, which is tuned already.")
    return replace(base, tune=tuner)
