"""A fixed decay of learning rate and work, as in the baselines of representation matching; it gives no numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.algorithm import Algorithm, TuneContext, TuneResult
from ..core.settings import check_settings, document_parameters, setting
from ..errors import SettingError
from .components import fixed_hyper
from .fedavg_and_baselines import FedAvg


@dataclass(frozen=True)
class DecayTuner:
    """A tuner that multiplies learning rate and work by a factor every ``interval`` rounds, down to a floor."""

    lr_factor: float = setting(
        1.0, "the factor on the learning rate at each decay; not from the paper", above=0, most=1
    )
    work_factor: float = setting(1.0, "the factor on the work at each decay; not from the paper", above=0, most=1)
    interval: int = setting(1, "rounds between decays; not from the paper", least=1, whole=True)
    min_lr: float = setting(0.0, "the lowest learning rate; not from the paper", least=0)
    min_work: int = setting(1, "the least work; not from the paper", least=0, whole=True)

    def __call__(self, context: TuneContext) -> TuneResult:
        hyper = context.hyper
        decay_count = (context.round - 1) // self.interval
        lr = max(hyper.lr * self.lr_factor**decay_count, min(self.min_lr, hyper.lr))
        work = max(round(hyper.work * self.work_factor**decay_count), min(self.min_work, hyper.work))
        return TuneResult(replace(hyper, lr=lr, work=work), context.tuner_state)


@document_parameters(DecayTuner, base="the method to wrap")
def DecaySchedule(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    lr_factor: float = 1.0,
    work_factor: float = 1.0,
    interval: int = 1,
    min_lr: float = 0.0,
    min_work: int = 1,
) -> Algorithm:
    """Wrap a method with a fixed decay of learning rate and work, as the paper's baselines have (§4).

    The paper gives no numbers.

    >>> DecaySchedule(lr_factor=0.99).tune.lr_factor
    0.99
    """
    tuner = DecayTuner(lr_factor, work_factor, interval, min_lr=min_lr, min_work=min_work)
    check_settings(tuner, "DecaySchedule")
    if base.tune is not fixed_hyper:
        raise SettingError(f"DecaySchedule cannot tune {base.name}, which is tuned already.")
    return replace(base, tune=tuner)
