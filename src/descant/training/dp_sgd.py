"""Differentially private SGD at sample level: per-sample clipping, noise, and accounting.

Abadi et al. (2016), Deep learning with differential privacy, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import seeds
from ..core.algorithm import Hyper, Loss, LossTerm, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult, TrainJob, TrainResult
from ..core.settings import check_settings, document_parameters, setting
from ..errors import ModelError, SettingError
from ..models.flat import Net
from ..parties.population import Party
from ..privacy import gaussian_mechanism
from ..privacy.gaussian_mechanism import NoiseSource, PrivacySettings
from ..rounds.validation import is_finite
from .evaluation import evaluate_test_sets
from .stacked_descent import StackedProximalStep, subset_job

PER_SAMPLE = "per sample"
_SECRET = "noise.secret"  # a key of the party state
_MAX_GRADIENT_NUMBERS = 2**24  # numbers of per-sample gradients in memory at once


@document_parameters()
@dataclass(frozen=True)
class DpSgd:
    """SGD with (ε, δ)-differential privacy for each sample of a party; ε is computed by `dp-accounting`.

    No other party need be trusted, not even the server: each step takes every sample with probability ``batch``/n,
    clips its gradient to ``clip``, and adds noise of deviation ``noise``·clip to the sum. Any method may therefore
    process the model, including personal models and medians. Neighboring data sets differ by the presence of one
    sample (n is public). No loss is reported.

    Not from the paper: the defaults.

    >>> DpSgd(lr=0.1, steps=5).hyper
    Hyper(lr=0.1, work=5)
    """

    lr: float = setting(0.01, "the learning rate η", above=0)
    steps: int = setting(20, "local steps per round", least=0, whole=True)
    batch: int = setting(10, "samples per step, on average", least=1, whole=True)
    clip: float = setting(1.0, "C: the largest norm of a sample's gradient; not from the paper", above=0)
    noise: float = setting(1.0, "z: the deviation of the noise in units of clip; not from the paper", least=0)
    delta: float = setting(1e-5, "δ, at which ε is reported: below 1/samples", above=0, below=1)
    budget: float | None = setting(
        None, "the largest ε; the run ends before exceeding it; None: ε is only reported", above=0
    )
    source: NoiseSource = setting(
        "system", "the source of batches and noise: the system, or the run's seed", one_of=("system", "seed")
    )

    unit = "steps"

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.steps)

    @property
    def privacy(self) -> PrivacySettings:
        """The privacy settings of this solver."""
        return PrivacySettings(
            "sample", self.clip, self.noise, delta=self.delta, budget=self.budget, source=self.source
        )

    @property
    def metric(self) -> None:
        """None: the metric follows from the loss."""

    def sampling_rate(self, samples: int) -> float:
        """Return the probability that a step takes a sample."""
        return min(1.0, self.batch / samples)

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """Evaluate models on the test sets of the parties."""
        return evaluate_test_sets(job)

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Party, count: int
    ) -> dict[str, str]:
        """Return the only mode, one party after another; raise if per-sample gradients are impossible."""
        check_settings(self)
        if self.budget is not None and not self.noise:
            raise SettingError("DpSgd cannot keep a budget without noise. Set 'noise', or leave 'budget' out.")
        if terms:
            raise SettingError(
                f"DpSgd clips the gradients of samples, but the loss term {terms[0].name!r} belongs to "
                "a whole batch. Use a method without terms: FedAvg, Fed+, or FedPlusFixed(1.0) for FedProx."
            )
        net.module.train()
        try:
            _per_sample_gradients(net, loss)(
                net.copy_initial_row()[: net.layout.trainable_width], party.x[:2].clone(), party.y[:2].clone()
            )
        except Exception as error:
            raise ModelError(
                f"DpSgd needs the gradient of every single sample, which {type(net.module).__name__} does not give "
                f"(a module that draws random numbers or mixes samples cannot): {error}"
            ) from error
        return {PER_SAMPLE: ""}

    @torch.no_grad()
    def train(self, job: TrainJob) -> TrainResult:
        """Train every party of the job."""
        job.net.module.train()
        results = [self._run_steps(subset_job(job, [k])) for k in range(len(job.parties))]
        metrics = [{"samples": party.samples} for party in job.parties]  # a loss would not be private
        return TrainResult(torch.stack([row for row, _ in results]), [state for _, state in results], metrics)

    def _run_steps(self, job: TrainJob) -> tuple[Tensor, NamedTensors]:
        (party,), (hyper,), (state,) = job.parties, job.hyperparameters, job.party_states
        state = {_SECRET: state.get(_SECRET, gaussian_mechanism.new_secret())} if self.source == "system" else {}
        draws = self._draws(job, state.get(_SECRET))
        rate = self.sampling_rate(party.samples)
        w = job.start[:, : job.net.layout.trainable_width].clone()  # [1, d]
        gradients = _per_sample_gradients(job.net, job.loss)
        proximal_step = StackedProximalStep(job, w)
        for step in range(hyper.work):
            uniform, normal = draws(step, party.samples, w[0])
            sampled = uniform < rate
            total = self.privacy.noise_std * normal
            if sampled.any():
                total += clipped_sum(self.privacy, gradients(w[0], party.x[sampled], party.y[sampled]))
            step_vector = (hyper.lr / (rate * party.samples) * total).to(w.dtype)
            w -= (
                step_vector
                if job.freeze is None
                else step_vector * job.freeze.trainable_mask(step, [hyper.work], len(step_vector))
            )
            proximal_step([True])
        return w[0], state

    def _draws(self, job: TrainJob, secret: Tensor | None) -> Callable[[int, int, Tensor], tuple[Tensor, Tensor]]:
        """Return (step, samples, w) -> uniform numbers for the samples, normal numbers for the columns."""
        name = job.parties[0].name
        round = job.round
        if secret is None:
            rng = seeds.stream(job.seed, round, name, "noise")

            def by_seed(step: int, n: int, w: Tensor) -> tuple[Tensor, Tensor]:
                return torch.from_numpy(rng.random(n)), torch.from_numpy(rng.standard_normal(len(w)))

            return by_seed
        key = secret.numpy().tobytes()

        def by_secret(step: int, n: int, w: Tensor) -> tuple[Tensor, Tensor]:
            uniform = gaussian_mechanism.secret_uniform(key, round, f"{name}/{step}/batch", w, n)
            return uniform, gaussian_mechanism.secret_noise(key, round, f"{name}/{step}", w)

        return by_secret


def _per_sample_gradients(net: Net, loss: Loss) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return (w [d], x [n, ...], y [n, ...]) -> the gradient of every single sample, [n, d]."""
    no_statistics = net.copy_initial_row()[net.layout.trainable_width :]

    def sample_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        output, _ = net.apply(w, no_statistics, x.unsqueeze(0))
        return loss(output, y.unsqueeze(0)).mean()

    chunk_size = max(1, _MAX_GRADIENT_NUMBERS // net.layout.trainable_width)
    per_sample: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.vmap(
        torch.func.grad(sample_loss), in_dims=(None, 0, 0), chunk_size=chunk_size
    )
    return per_sample


def clipped_sum(privacy: PrivacySettings, gradients: Tensor) -> Tensor:
    """Return Σ g_i·min(1, C/‖g_i‖) in float64; non-finite gradients count as 0, so that they reveal nothing."""
    if not is_finite(gradients):
        gradients = torch.where(gradients.isfinite().all(1, keepdim=True), gradients, 0.0)
    double_gradients = gradients.double()
    return privacy.clip_factors(torch.linalg.vector_norm(double_gradients, dim=1)) @ double_gradients
