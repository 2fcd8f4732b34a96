"""Policy gradients over a stack of agents: one stack of networks, all episodes side by side.

Williams (1992), Simple statistical gradient-following algorithms; Schulman et al. (2016), High-dimensional continuous
control using generalized advantage estimation; Schulman et al. (2017), Proximal policy optimization algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from ..core import seeds
from ..core.algorithm import Hyper, Loss, LossTerm, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult, TrainJob, TrainResult
from ..core.metrics import EPISODE_RETURN, Metric
from ..core.settings import check_settings, document_parameters, setting
from ..models.flat import Net
from ..rl import VectorEnvironment
from .agent_solver_helpers import (
    LAST_MODEL,
    MAX_EPISODE_STEPS,
    AgentProgress,
    agent_execution_modes,
    episode_key,
    evaluate_test_episodes,
    train_with_fallback,
    vector_environment,
)
from .kernels.layers import Array
from .rl_losses import ClippedSurrogate, log_softmax
from .stacked_descent import GradientDescent, StackedProximalStep, collect_party_states, freeze_parameters, mean_losses
from .stacked_forward import KeyedUniform, StackedForward


@document_parameters(optimizer="the torch optimizer, by name or class", options="its other arguments, such as momentum")
@dataclass(frozen=True)
class PolicyGradient:
    """Policy gradient: each agent plays episodes, then makes actions with a positive advantage more likely; repeatedly.

    A network has one output per action. One more output is a value estimate, which gives the advantages (actor-critic);
    without it they are rewards-to-go, compared with their mean. ``gradient_steps=1`` is REINFORCE; with more, the
    change is limited by ``clip_ratio``. It also produces the "locally trained model" of FedRL's Algorithm 1.

    >>> PolicyGradient(iterations=2).hyper
    Hyper(lr=0.003, work=2)
    """

    lr: float = setting(3e-3, "the learning rate η", above=0)
    iterations: int = setting(1, "iterations of playing and learning per round", least=0, whole=True)
    episodes: int = setting(8, "episodes per iteration", least=1, whole=True)
    gradient_steps: int = setting(16, "gradient steps per iteration", least=1, whole=True)
    batch: int = setting(256, "steps of the agent per gradient step", least=1, whole=True)
    gamma: float = setting(0.99, "γ: the discount of later rewards", above=0, most=1)
    gae_lambda: float = setting(
        0.95, "λ of generalized advantage estimation: 1 uses rewards alone; only with a value output", least=0, most=1
    )
    clip_ratio: float = setting(0.2, "the largest relative change of an action's probability per iteration", above=0)
    entropy_coefficient: float = setting(0.0, "the weight of the entropy bonus", least=0)
    value_coefficient: float = setting(0.01, "the weight of the squared error of the value", least=0)
    normalize_advantages: bool = setting(
        True, "standardize the advantages of an iteration to mean 0 and deviation 1", one_of=(True, False)
    )
    max_grad_norm: float = setting(0.5, "the largest norm of an agent's gradient", above=0)
    optimizer: str | type[Optimizer] = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimizer's moments after aggregation changed the model", one_of=("keep", "reset")
    )

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.iterations)

    @property
    def metric(self) -> Metric:
        """The mean episode return."""
        return EPISODE_RETURN

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Any, count: int
    ) -> dict[str, str]:
        """Return the execution modes for a stack of agents; the given loss is not used, the solver has its own."""
        check_settings(self)
        return agent_execution_modes(
            self, "PolicyGradient", net, terms=terms, party=party, count=count, extra_outputs=(0, 1)
        )

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """Evaluate models in the agents' test episodes."""
        return evaluate_test_episodes(job)

    def loss(self, actions: int) -> ClippedSurrogate:
        """Return the loss that gradient steps minimize."""
        return ClippedSurrogate(actions, self.clip_ratio, self.entropy_coefficient, self.value_coefficient)

    def train(self, job: TrainJob) -> TrainResult:
        """Train every agent of the job."""
        job = replace(job, loss=self.loss(job.parties[0].environment.actions))
        return train_with_fallback(job, self.moments == "reset", self._train_stack)

    def _train_stack(self, job: TrainJob, progress: Sequence[AgentProgress]) -> TrainResult:
        """Train a stack of agents that are at the same iteration."""
        clock = progress[0].clock
        work = job.hyperparameters[0].work
        count = len(progress)
        descent = GradientDescent(self, job, [0] * count)
        outputs = StackedForward(job.net, job.execution_mode, descent.stack)
        proximal_step = StackedProximalStep(job, descent.w)
        environments = vector_environment(job, self.episodes)
        all_alive = [True] * count
        returns: list[list[float]] = [[] for _ in progress]
        steps = np.zeros(count, dtype=np.int64)
        steps_done = 0
        for iteration in range(clock, clock + work):
            first_episodes = [agent.episode + (iteration - clock) * self.episodes for agent in progress]
            rollouts = collect_rollouts(
                self, job, iteration, first_episodes=first_episodes, environments=environments, outputs=outputs
            )
            for k, rollout in enumerate(rollouts):
                returns[k] += rollout.returns.tolist()
                steps[k] += len(rollout.x)
            for x, y in self._batches(job, iteration, rollouts):
                descent.stack_gradient(torch.from_numpy(x), torch.from_numpy(y))
                descent.clip_gradients(self.max_grad_norm)
                with freeze_parameters(descent.stack, job, steps_done, lengths=[work * self.gradient_steps] * count):
                    descent.optimizer.step(all_alive)
                    proximal_step(all_alive)
                steps_done += 1
        party_states = list[NamedTensors]()
        metrics = list[dict[str, float]]()
        losses = mean_losses(descent, steps_done)
        for k, (before, state) in enumerate(zip(progress, collect_party_states(descent, job), strict=True)):
            after = before.after_round(work, before.episode + work * self.episodes, 0.0, returns[k])
            party_states.append({**state, **after.to_state(), LAST_MODEL: descent.w[k].clone()})
            metrics.append({"loss": losses[k], "samples": max(1, int(steps[k])), **after.metrics()})
        return TrainResult(descent.w.clone(), party_states, metrics)

    def _batches(self, job: TrainJob, iteration: int, rollouts: Sequence[Rollout]) -> Any:
        """Yield batches ``[K, batch, ...]``: each agent's own steps, in new random orders until there are enough."""
        needed = self.gradient_steps * self.batch
        chosen = []
        for agent, rollout in zip(job.parties, rollouts, strict=True):
            rng = seeds.stream(job.seed, iteration, agent.name, "batch")
            n = len(rollout.x)
            orders = [rng.permutation(n) for _ in range(-(-needed // n))]
            chosen.append(np.concatenate(orders)[:needed].reshape(self.gradient_steps, self.batch))
        for rows in zip(*chosen, strict=True):
            pairs = list(zip(rollouts, rows, strict=True))
            yield np.stack([r.x[indices] for r, indices in pairs]), np.stack([r.y[indices] for r, indices in pairs])


@dataclass(frozen=True)
class Rollout:
    """The steps of one agent in one iteration, with the targets of its loss."""

    x: Array  # [steps, *shape]
    y: Array  # [steps, 4]: action, advantage, log-probability, return
    returns: Array  # [episodes]


def collect_rollouts(
    solver: PolicyGradient,
    job: TrainJob,
    iteration: int,
    first_episodes: Sequence[int],
    environments: VectorEnvironment,
    outputs: StackedForward,
) -> list[Rollout]:
    """Play episodes of all agents side by side to their ends; ``first_episodes`` are the agents' first numbers."""
    count = len(job.parties)
    episodes = solver.episodes
    actions = job.parties[0].environment.actions
    for index in range(count * episodes):
        k, e = divmod(index, episodes)
        environments.reset(index, episode_key(job, k, first_episodes[k] + e))
    draws = KeyedUniform(job.seed, [agent.name for agent in job.parties], "act", shape=(episodes,))
    observations = environments.observations
    alive = np.ones(count * episodes, dtype=bool)
    truncated = np.zeros_like(alive)  # cut off by a time limit, so there is a value beyond the end
    history = list[tuple[Array, ...]]()
    while alive.any() and len(history) < MAX_EPISODE_STEPS:
        output = outputs(observations.reshape(count, episodes, *observations.shape[1:]))
        log_probabilities = log_softmax(output[..., :actions])
        draw = draws[iteration * MAX_EPISODE_STEPS + len(history)]
        actions_taken = np.minimum((draw[..., None] >= np.exp(log_probabilities).cumsum(-1)).sum(-1), actions - 1)
        log_probability = np.take_along_axis(log_probabilities, actions_taken[..., None], -1)[..., 0]
        result = environments.step(actions_taken.reshape(-1), alive)
        values = output[..., actions] if output.shape[-1] > actions else np.zeros_like(log_probability)
        history.append(
            (
                observations,
                actions_taken.reshape(-1),
                log_probability.reshape(-1),
                values.reshape(-1),
                result.rewards,
                alive,
            )
        )
        truncated |= alive & result.truncated & ~result.terminated
        alive = alive & ~(result.terminated | result.truncated)
        observations = result.observations
    output = outputs(observations.reshape(count, episodes, *observations.shape[1:]))
    bootstrap_values = np.where(truncated | alive, output[..., -1].reshape(-1) if output.shape[-1] > actions else 0, 0)
    return compute_advantages(
        solver if output.shape[-1] > actions else replace(solver, gae_lambda=1.0),
        history,
        bootstrap_values,
        count=count,
    )


def compute_advantages(
    solver: PolicyGradient, history: Sequence[tuple[Array, ...]], bootstrap_values: Array, count: int
) -> list[Rollout]:
    """Return rollouts with generalized advantages.

    The advantage is A = Σ (γλ)^i (r + γV' - V) up to the end of an episode, and the return A + V.
    """
    observations, actions, log_probabilities, values, rewards, alive = (
        np.stack(part) for part in zip(*history, strict=True)
    )  # [T, N, ...]
    advantages = np.zeros_like(values)
    next_advantage = np.zeros_like(bootstrap_values)
    next_value = bootstrap_values.astype(values.dtype)
    for t in range(len(history) - 1, -1, -1):
        next_advantage = (
            rewards[t] + solver.gamma * next_value - values[t] + solver.gamma * solver.gae_lambda * next_advantage
        )
        advantages[t] = next_advantage = np.where(alive[t], next_advantage, 0)
        next_value = np.where(alive[t], values[t], next_value)
    rollouts = []
    for episode_indices in np.split(np.arange(observations.shape[1]), count):
        active = alive[:, episode_indices].T  # [episodes, T]: an agent's steps in order, independent of other agents

        def flatten_steps(values: Array, columns: Array = episode_indices, mask: Array = active) -> Array:
            return np.ascontiguousarray(np.swapaxes(values[:, columns], 0, 1)[mask])

        advantage = flatten_steps(advantages)
        value = flatten_steps(values)
        columns = (
            flatten_steps(actions),
            standardize(advantage) if solver.normalize_advantages else advantage,
            flatten_steps(log_probabilities),
            advantage + value,
        )
        y = np.stack(columns, -1).astype(values.dtype)
        rollouts.append(Rollout(flatten_steps(observations), y, rewards[:, episode_indices].sum(0)))
    return rollouts


def standardize(values: Array) -> Array:
    """Return the values scaled to mean 0 and deviation 1 (all 0 if they are equal)."""
    centered = values - values.mean()
    standardized: Array = centered / (centered.std() + 1e-8)
    return standardized
