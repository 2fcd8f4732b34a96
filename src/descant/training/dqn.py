"""Deep Q-learning over a stack of agents: one stack of networks, all environments side by side.

Mnih et al. (2015), Human-level control through deep reinforcement learning; van Hasselt et al. (2016), Deep
reinforcement learning with double Q-learning; Sutton (1988), Learning to predict by the methods of temporal
differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.algorithm import Hyper, Loss, LossTerm, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult, TrainJob, TrainResult
from ..core.metrics import EPISODE_RETURN, Metric
from ..core.settings import check_settings, document_parameters, setting
from ..models.flat import Net
from .agent_solver_helpers import (
    ENVIRONMENT_STATE,
    LAST_MODEL,
    REPLAY,
    AgentProgress,
    agent_execution_modes,
    episode_key,
    evaluate_test_episodes,
    model_changed,
    train_with_fallback,
    vector_environment,
)
from .kernels.layers import Array
from .kernels.traced_kernel import Stack
from .replay_buffer import ReplayBuffer, Transitions
from .rl_losses import TemporalDifference
from .stacked_descent import GradientDescent, StackedProximalStep, collect_party_states, freeze_parameters, mean_losses
from .stacked_forward import KeyedUniform, StackedForward

_TARGET_NETWORK = "agent.target_network"


@document_parameters(optimizer="the torch optimizer, by name or class", options="its other arguments, such as momentum")
@dataclass(frozen=True)
class Dqn:
    """Deep Q-learning: each agent acts in its environment for some steps and learns from its replay buffer.

    It produces the "locally trained model" of FedRL's Algorithm 1. Networks have one output per action. An agent's
    state (optimizer moments, target network, replay buffer, environment) is private and carries over between rounds:
    two rounds of 50 steps equal one round of 100.

    >>> Dqn(steps=400).hyper
    Hyper(lr=0.0005, work=400)
    """

    lr: float = setting(5e-4, "the learning rate η", above=0)
    steps: int = setting(1000, "environment steps of an agent per round", least=0, whole=True)
    batch: int = setting(64, "transitions per gradient step", least=1, whole=True)
    gamma: float = setting(0.99, "γ: the discount of later rewards", above=0, most=1)
    n_step: int = setting(10, "rewards summed before bootstrapping from the target network", least=1, whole=True)
    train_every: int = setting(1, "environment steps between two training phases", least=1, whole=True)
    gradient_steps: int = setting(1, "gradient steps per training phase", least=1, whole=True)
    learning_starts: int = setting(1000, "environment steps before the first gradient step", least=1, whole=True)
    buffer_size: int = setting(10_000, "transitions kept in the replay buffer", least=1, whole=True)
    target_every: int = setting(100, "gradient steps between two updates of the target network", least=1, whole=True)
    tau: float = setting(1.0, "the share of the model in an update of the target network: 1 copies it", above=0, most=1)
    epsilon_start: float = setting(1.0, "ε at the start: the probability of a random action", least=0, most=1)
    epsilon_end: float = setting(0.02, "ε at the end", least=0, most=1)
    epsilon_steps: int = setting(
        5000, "environment steps over which ε falls from its start to its end", least=1, whole=True
    )
    huber_delta: float = setting(100.0, "the Huber loss is linear beyond this error of Q", above=0)
    double_q: bool = setting(
        True, "double Q-learning: the model chooses the action, the target network rates it", one_of=(True, False)
    )
    max_grad_norm: float = setting(10.0, "the largest norm of an agent's gradient", above=0)
    optimizer: str | type[Optimizer] = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimizer's moments after aggregation changed the model", one_of=("keep", "reset")
    )
    target_network: Literal["sync", "keep"] = setting(
        "sync",
        "the target network after aggregation changed the model: copy the model, or keep it",
        one_of=("sync", "keep"),
    )

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.steps)

    @property
    def metric(self) -> Metric:
        """The mean episode return."""
        return EPISODE_RETURN

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Any, count: int
    ) -> dict[str, str]:
        """Return the execution modes for a stack of agents; the given loss is not used, the solver has its own."""
        check_settings(self)
        return agent_execution_modes(self, "Dqn", net, terms=terms, party=party, count=count)

    def loss(self, actions: int) -> TemporalDifference:
        """Return the loss that gradient steps minimize."""
        return TemporalDifference(self.huber_delta)

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """Evaluate models in the agents' test episodes."""
        return evaluate_test_episodes(job)

    def train(self, job: TrainJob) -> TrainResult:
        """Train every agent of the job."""
        job = replace(job, loss=self.loss(job.parties[0].environment.actions))
        return train_with_fallback(job, self.moments == "reset", self._train_stack)

    def epsilon(self, step: int) -> float:
        """Return ε after a number of environment steps."""
        return self.epsilon_start + (self.epsilon_end - self.epsilon_start) * min(1.0, step / self.epsilon_steps)

    def gradient_step_numbers(self, step: int) -> range:
        """Return the numbers of the gradient steps that follow an environment step, counted over all rounds."""
        first = (step // self.train_every - 1) * self.gradient_steps
        return range(
            first,
            first + self.gradient_steps if step >= self.learning_starts and step % self.train_every == 0 else first,
        )

    def _train_stack(self, job: TrainJob, progress: Sequence[AgentProgress]) -> TrainResult:
        """Train a stack of agents that have taken equally many steps."""
        clock = progress[0].clock
        work = job.hyperparameters[0].work
        actors = _Actors(self, job, progress)
        step_count = sum(len(self.gradient_step_numbers(step)) for step in range(clock + 1, clock + work + 1))
        learners = _Learners(self, job, step_count)
        for step in range(clock + 1, clock + work + 1):
            actors.act(learners.outputs, step - 1)
            for number in self.gradient_step_numbers(step):
                learners.take_step(actors.replay, number)
        return actors.result(learners.result(), work)


class _Actors:
    """Agents in their environments: actions, replay buffers and returns."""

    def __init__(self, solver: Dqn, job: TrainJob, progress: Sequence[AgentProgress]) -> None:
        self._solver = solver
        self._job = job
        self._progress = progress
        names = [agent.name for agent in job.parties]
        self._environments = vector_environment(job)
        self._actions = job.parties[0].environment.actions
        self._draws = KeyedUniform(job.seed, names, "act", shape=(2,))
        self._episodes = [agent.episode for agent in progress]
        self._episode_returns = np.array([agent.episode_return for agent in progress])
        self._returns: list[list[float]] = [[] for _ in progress]
        logs = [state.get(REPLAY) for state in job.party_states]
        self.replay = ReplayBuffer(
            logs, job.parties[0].environment.observation_shape, solver.buffer_size, steps=job.hyperparameters[0].work
        )
        for k, state in enumerate(job.party_states):
            key = episode_key(job, k, self._episodes[k])
            if ENVIRONMENT_STATE in state:
                self._environments.restore(k, key, state[ENVIRONMENT_STATE])
            else:
                self._environments.reset(k, key)
        self._observations = self._environments.observations

    def act(self, outputs: StackedForward, step: int) -> None:
        """Take one ε-greedy step with every agent."""
        explore_draw, action_draw = self._draws[step].T
        best = outputs(self._observations[:, None])[:, 0].argmax(-1)
        explores = explore_draw < self._solver.epsilon(step)
        actions = np.where(explores, (action_draw * self._actions).astype(np.int64), best)
        result = self._environments.step(actions)
        ended = result.terminated | result.truncated
        self.replay.add(self._observations, result.observations, actions, result.rewards, result.terminated, ended)
        self._episode_returns += result.rewards
        self._observations = result.observations
        if ended.any():
            for k in np.flatnonzero(ended).tolist():
                self._returns[k].append(float(self._episode_returns[k]))
                self._episode_returns[k], self._episodes[k] = 0.0, self._episodes[k] + 1
                self._environments.reset(k, episode_key(self._job, k, self._episodes[k]))
            self._observations = self._environments.observations

    def result(self, trained: TrainResult, work: int) -> TrainResult:
        """Return the train result, with the environments and replay buffers added to the party states."""
        party_states = list[NamedTensors]()
        metrics = list[dict[str, float]]()
        for k, (log, before) in enumerate(zip(self.replay.logs(), self._progress, strict=True)):
            after = before.after_round(work, self._episodes[k], float(self._episode_returns[k]), self._returns[k])
            agent_state = {
                REPLAY: log,
                ENVIRONMENT_STATE: self._environments.get_state(k),
                LAST_MODEL: trained.models[k].clone(),
            }
            party_states.append({**trained.party_states[k], **agent_state, **after.to_state()})
            metrics.append({**trained.metrics[k], **after.metrics(), "samples": max(1, work)})
        return TrainResult(trained.models, party_states, metrics)


class _Learners:
    """The networks of a stack of agents, and their target networks."""

    def __init__(self, solver: Dqn, job: TrainJob, step_count: int) -> None:
        self._solver = solver
        self._job = job
        self._step_count = step_count
        self._steps_done = 0
        self._descent = GradientDescent(solver, job, [0] * len(job.parties))
        self._w = self._descent.w
        self._target = Stack(
            job.net.layout, [_target_networks(job, solver.target_network == "sync")], self._descent.stack.lead
        )
        self.outputs = StackedForward(job.net, job.execution_mode, self._descent.stack)
        self._target_forward = StackedForward(job.net, job.execution_mode, self._target)
        self._proximal_step = StackedProximalStep(job, self._w)
        names = [agent.name for agent in job.parties]
        self._draws = KeyedUniform(job.seed, names, "batch", shape=(solver.batch,))

    def take_step(self, replay: ReplayBuffer, number: int) -> None:
        """Take one gradient step with every agent; ``number`` counts over all rounds."""
        all_alive = [True] * len(self._w)
        transitions = replay.sample(self._draws[number], self._solver.n_step, self._solver.gamma)
        target_values = self._target_forward(transitions.next_x)
        choosing_values = self.outputs(transitions.next_x) if self._solver.double_q else target_values
        self._descent.stack_gradient(
            torch.from_numpy(transitions.x), torch.from_numpy(td_targets(transitions, choosing_values, target_values))
        )
        self._descent.clip_gradients(self._solver.max_grad_norm)
        with freeze_parameters(
            self._descent.stack, self._job, self._steps_done, lengths=[self._step_count] * len(self._w)
        ):
            self._descent.optimizer.step(all_alive)
            self._proximal_step(all_alive)
        self._steps_done += 1
        if (number + 1) % self._solver.target_every == 0:
            self._target.columns.lerp_(self._w, self._solver.tau)

    def result(self) -> TrainResult:
        """Return the trained networks, and the optimizer and target-network states."""
        pairs = zip(collect_party_states(self._descent, self._job), self._target.columns, strict=True)
        party_states = [{**state, _TARGET_NETWORK: row.clone()} for state, row in pairs]
        metrics = [{"loss": loss} for loss in mean_losses(self._descent, self._steps_done)]
        return TrainResult(self._w.clone(), party_states, metrics)


def td_targets(transitions: Transitions, choosing_values: Array, target_values: Array) -> Array:
    """Return actions and targets Σ γ^i r + γ^n Q(s', a'); one network chooses a', the other rates it."""
    best = choosing_values.argmax(-1)[..., None]
    value = np.take_along_axis(target_values, best, -1)[..., 0]
    return np.stack([transitions.actions, transitions.rewards + transitions.discount * value], -1)


def _target_networks(job: TrainJob, sync: bool) -> Tensor:
    """Return the target networks ``[K, d]``: stored ones, or the model if there is none or aggregation changed it."""
    rows = [
        job.start[k] if _TARGET_NETWORK not in state or (sync and model_changed(job, k)) else state[_TARGET_NETWORK]
        for k, state in enumerate(job.party_states)
    ]
    return torch.stack(rows)
