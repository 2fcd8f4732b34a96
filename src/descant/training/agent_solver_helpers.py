"""Shared parts of the solvers of agents: stacking, party state, and evaluation in test episodes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import seeds
from ..core.algorithm import APPEND_ONLY, Loss, LossTerm, Metrics, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult, TrainJob, TrainResult
from ..core.metrics import Metric
from ..errors import DescantWarning, ModelError, PartyError
from ..models.flat import Net
from ..rl import VectorEnvironment
from ..rl.agent_parties import Agent
from .kernels.layers import Array
from .kernels.traced_kernel import Stack, kernel_of
from .model_probe import probe_model
from .rl_losses import LossWithGradient
from .stacked_descent import (
    GradientSolver,
    drop_optimizer_state,
    limit_threads,
    rank_modes,
    split_stacks,
    stack_capacity,
    subset_job,
)
from .stacked_forward import StackedForward
from .stacked_gradient import LOOPED, STACKED, VECTORIZED
from .stacked_optimizer import check_elementwise, grouping_key, optimizer_factory

LAST_MODEL = "agent.last_model"  # the model after the last local training
ENVIRONMENT_STATE = "agent.environment"  # the position within the current episode
REPLAY = f"{APPEND_ONLY}replay"  # the log of steps
MAX_EPISODE_STEPS = 10_000  # steps of a test episode, or of an episode that a policy gradient learns from
_TEST_BATCH = 64  # models evaluated at once
_FALLBACK_EPISODES = 10**6  # per round; offset of the episode numbers used after an environment has failed


class AgentSolver(GradientSolver, Protocol):
    """A solver of agents."""

    def loss(self, actions: int) -> LossWithGradient: ...


def agent_execution_modes(
    solver: AgentSolver,
    owner: str,
    net: Net,
    terms: tuple[LossTerm, ...],
    party: Any,
    count: int,
    extra_outputs: Sequence[int] = (0,),
) -> dict[str, str]:
    """Return the execution modes for stacks of agents like this one; raise if the model cannot act here.

    ``extra_outputs`` are the allowed numbers of outputs beyond the actions.
    """
    if not isinstance(party, Agent):
        raise PartyError(f"{owner} trains agents: give it parties.agents(...). Party {party.name!r} has data instead.")
    x = probe_observations(owner, net, party, extra_outputs=extra_outputs)
    y = torch.zeros(8, 4)
    reasons = mode_obstacles(solver, owner, net, loss=solver.loss(party.environment.actions), terms=terms, x=x, y=y)
    return rank_modes(net.layout, reasons, stack_capacity(net.layout, False), count=count)


def probe_observations(owner: str, net: Net, agent: Agent, extra_outputs: Sequence[int]) -> Tensor:
    """Return random observations for an agent's environment; raise if the model's outputs do not fit its actions."""
    environment = agent.environment
    x = random_probe(environment.observation_shape)
    outputs = [environment.actions + more for more in extra_outputs]
    check_outputs(
        owner,
        net,
        x,
        widths=outputs,
        input_kind=f"observations of {environment.name}",
        detail=f", which has {environment.actions} actions",
    )
    return x


def random_probe(shape: Sequence[int]) -> Tensor:
    """Return eight random inputs of this shape."""
    return torch.from_numpy(seeds.stream(0, 0, "", "probe").standard_normal((8, *shape))).float()


def check_outputs(owner: str, net: Net, x: Tensor, widths: Sequence[int], input_kind: str, detail: str = "") -> None:
    """Raise if a model fails on ``x``, or its outputs have none of these widths."""
    name = type(net.module).__name__
    if net.layout.width > net.layout.trainable_width:
        raise ModelError(f"{name} has running statistics, which {owner} does not keep. Use nn.LayerNorm instead.")
    if net.layout.dtype != torch.float32:
        raise ModelError(f"{name} is {net.layout.dtype}; agents see torch.float32. Use module.to(torch.float32).")
    try:
        output_shape = tuple(net.apply(net.copy_initial_row(), x[:0].flatten(), x)[0].shape)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{name} fails on {input_kind}, {tuple(x.shape)}: {reason}") from error
    allowed = [(len(x), width) for width in widths]
    if output_shape not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ModelError(
            f"For {len(x)} {input_kind}{detail}, {owner} needs outputs {wanted}. {name} gives {list(output_shape)}."
        )


def mode_obstacles(
    solver: GradientSolver, owner: str, net: Net, loss: Loss, terms: tuple[LossTerm, ...], x: Tensor, y: Tensor
) -> dict[str, str]:
    """Return why each execution mode is impossible; raise if the model is random or mixes samples."""
    check_elementwise(optimizer_factory(solver.optimizer, solver.options))
    reasons = probe_model(net, loss, terms, x=x, y=y)
    name = type(net.module).__name__
    if any("random numbers" in reason for reason in reasons.values()):
        raise ModelError(
            f"{name} draws random numbers (dropout, say), which would make its actions random. Remove that layer."
        )
    if not _is_batch_independent(net, x):
        raise ModelError(
            f"{name} gives other outputs for an observation in a batch than for the same one alone, as nn.BatchNorm "
            "does. An agent has one observation at a time. Use nn.LayerNorm instead."
        )
    return reasons


def _is_batch_independent(net: Net, x: Tensor) -> bool:
    """Return whether outputs for one observation are the same alone and in a batch."""
    try:
        single, batched = (net.apply(net.copy_initial_row(), x[:0].flatten(), some)[0] for some in (x[:1], x))
    except Exception:
        return False
    return torch.allclose(single, batched[:1], rtol=1e-3, atol=1e-3)


def train_with_fallback(
    job: TrainJob, reset: bool, learn: Callable[[TrainJob, Sequence[AgentProgress]], TrainResult]
) -> TrainResult:
    """Train agents; an agent whose environment fails is retried once, in other episodes.

    An episode is determined by its key, so the same failure would repeat. A lone agent therefore leaves its current
    episode and plays episodes reserved for this round. An error of a larger stack is raised: its agents are retried
    one by one.
    """
    progress = [AgentProgress.from_state(state) for state in job.party_states]
    try:
        return train_stacks(job, progress, reset, learn=learn)
    except PartyError as error:
        if len(progress) > 1:
            raise
        failure = error
    state, new_progress = _leave_episode(job.party_states[0], progress[0], job.round)
    trained = train_stacks(replace(job, party_states=[state]), [new_progress], reset, learn=learn)
    warnings.warn(f"{failure} The agent continued in other episodes.", DescantWarning, stacklevel=2)
    return trained


def _leave_episode(state: NamedTensors, progress: AgentProgress, round: int) -> tuple[NamedTensors, AgentProgress]:
    """Return the state and progress of an agent that leaves its episode; its replay marks it as ended."""
    state = {name: tensor for name, tensor in state.items() if name != ENVIRONMENT_STATE}
    if REPLAY in state:
        state[REPLAY] = state[REPLAY].clone()
        state[REPLAY][-1:, -1] = 1
    return state, replace(progress, episode=progress.episode + _FALLBACK_EPISODES * round, episode_return=0.0)


def train_stacks(
    job: TrainJob,
    progress: Sequence[AgentProgress],
    reset: bool,
    learn: Callable[[TrainJob, Sequence[AgentProgress]], TrainResult],
    max_stack_size: int | None = None,
    groups: Sequence[float] | None = None,
) -> TrainResult:
    """Train agents in stacks, as large as execution mode or ``max_stack_size`` allows; no stack spans two groups.

    A stack has one clock: its agents have taken equally many steps and have equal work and optimizer states of one
    age. In stacked mode a lone agent is computed twice: in a stack of one, floating-point rounding would differ.
    """
    states = [
        drop_optimizer_state(state) if reset and model_changed(job, k) else state
        for k, state in enumerate(job.party_states)
    ]
    job = replace(job, party_states=states)
    agents = zip(progress, job.hyperparameters, states, groups or [0.0] * len(progress), strict=True)
    keys = [(p.clock, h.work, h.lr, grouping_key(state), group) for p, h, state, group in agents]
    default_capacity = stack_capacity(job.net.layout, False) if max_stack_size is None else max_stack_size
    capacity = {STACKED: max(2, default_capacity), VECTORIZED: len(keys)}.get(job.execution_mode, 1)
    rows = torch.empty_like(job.start, memory_format=torch.contiguous_format)
    party_states: list[NamedTensors] = [{}] * len(keys)
    metrics: list[Metrics] = [{}] * len(keys)
    # overflows are left to the validation of updates
    with limit_threads(job.execution_mode, False), np.errstate(all="ignore"), torch.no_grad():
        for indices in split_stacks(sorted(range(len(keys)), key=keys.__getitem__), keys, capacity):
            stack = indices * 2 if len(indices) == 1 and job.execution_mode == STACKED else indices
            trained = learn(subset_job(job, stack), [progress[k] for k in stack])
            rows[indices] = trained.models[: len(indices)]
            for k, state, values in zip(indices, trained.party_states, trained.metrics, strict=False):
                party_states[k], metrics[k] = state, values
    return TrainResult(rows, party_states, metrics)


def model_changed(job: TrainJob, k: int) -> bool:
    """Return whether aggregation has changed an agent's model since its last local training."""
    last = job.party_states[k].get(LAST_MODEL)
    return last is not None and not torch.equal(last, job.start[k])


@dataclass(frozen=True)
class AgentProgress:
    """Progress of an agent, kept in its party state; its reward is the one by which FedRL weighs agents (§3)."""

    clock: int = 0  # steps taken, or batches learned from
    episode: int = 0  # number of the current episode
    episode_return: float = 0.0  # return of the current episode so far
    mean_return: float = 0.0  # mean return in the last round in which an episode ended
    rounds_with_returns: int = 0  # rounds in which an episode has ended

    @classmethod
    def from_state(cls, state: NamedTensors) -> AgentProgress:
        saved = state.get("agent.progress")
        if saved is None:
            return cls()
        clock, episode, episode_return, mean_return, rounds = saved.tolist()
        return cls(int(clock), int(episode), episode_return, mean_return, int(rounds))

    def after_round(
        self, steps_taken: int, episode: int, episode_return: float, returns: Sequence[float]
    ) -> AgentProgress:
        """Return the progress after a round in which episodes ended with these returns."""
        reward = sum(returns) / len(returns) if returns else self.mean_return
        return AgentProgress(
            self.clock + steps_taken,
            episode,
            episode_return,
            mean_return=reward,
            rounds_with_returns=self.rounds_with_returns + bool(returns),
        )

    def to_state(self) -> dict[str, Tensor]:
        return {"agent.progress": torch.tensor(astuple(self), dtype=torch.float64)}

    def metrics(self) -> dict[str, float]:
        """Return the reward of the last round in which an episode ended; empty before the first one."""
        return {"reward": self.mean_return} if self.rounds_with_returns else {}


def episode_key(job: TrainJob, k: int, number: int) -> int:
    """Return the key of an episode of one of the agents."""
    return seeds.stream_key(job.seed, number, job.parties[k].name, "episode")


def vector_environment(job: TrainJob, copies: int = 1) -> VectorEnvironment:
    """Return the environments of a stack, ``copies`` per agent; cached for the same agents."""
    agents = [agent for agent in job.parties for _ in range(copies)]
    cached = job.net.solver_cache.get("worlds")
    if cached is None or cached[0] != agents:
        cached = job.net.solver_cache["worlds"] = (agents, _make_vector_environment(job.net, agents, "environments"))
    environments: VectorEnvironment = cached[1]
    return environments


def _make_vector_environment(net: Net, agents: Sequence[Agent], cache_name: str) -> VectorEnvironment:
    environments = [agent.environment for agent in agents]
    names = [agent.name for agent in agents]
    return environments[0].make_vector(environments, names, net.solver_cache.setdefault(cache_name, {}))


def evaluate_test_episodes(job: EvaluationJob) -> list[EvaluationResult]:
    """Evaluate each model, acting greedily in its agent's test episodes, with a random policy as the baseline."""
    pairs = [(k, row) for k, rows in enumerate(job.models) for row in rows if job.parties[k].test_count]
    scores_by_agent: list[list[float]] = [[] for _ in job.parties]
    for first in range(0, len(pairs), _TEST_BATCH):
        batch = pairs[first : first + _TEST_BATCH]
        scores = _test_scores(job, [job.parties[k] for k, _ in batch], [row for _, row in batch])
        for (k, _), score in zip(batch, scores, strict=True):
            scores_by_agent[k].append(score)
    return [
        EvaluationResult(
            agent.test_count, scores, _random_policy_score(job, agent) if job.trivial and agent.test_count else None
        )
        for agent, scores in zip(job.parties, scores_by_agent, strict=True)
    ]


@torch.no_grad()
def _test_scores(job: EvaluationJob, agents: Sequence[Agent], rows: Sequence[Tensor]) -> list[float]:
    """Return the scores of models in test episodes, side by side; a lone model is computed twice."""
    count = len(rows)
    tests = max(agent.test_count for agent in agents)
    if count == 1:
        agents = [*agents, *agents]
        rows = [*rows, *rows]
    mode = LOOPED if isinstance(kernel_of(job.net, 1), str) else STACKED
    outputs = StackedForward(job.net, mode, Stack(job.net.layout, [torch.stack(list(rows))]))

    def choose(observations: Array, step: int) -> Array:
        actions: Array = outputs(observations)[..., : agents[0].environment.actions].argmax(-1)
        return actions

    with np.errstate(all="ignore"):
        returns, lengths = _run_episodes(job.net, agents, tests, choose=choose)
    return [
        _mean_metric(job.metric, returns[k, : agents[k].test_count], lengths[k, : agents[k].test_count])
        for k in range(count)
    ]


def _random_policy_score(job: EvaluationJob, agent: Agent) -> float:
    """Return the score of random actions in an agent's test episodes; cached."""
    if job.metric not in agent.cache:
        draws = seeds.stream(agent.seed, 0, agent.name, "random policy")

        def choose(observations: Array, step: int) -> Array:
            return draws.integers(agent.environment.actions, size=observations.shape[:2])

        returns, lengths = _run_episodes(job.net, [agent], agent.test_count, choose=choose)
        agent.cache[job.metric] = _mean_metric(job.metric, returns[0], lengths[0])
    return agent.cache[job.metric]


def _mean_metric(metric: Metric, returns: Array, lengths: Array) -> float:
    return float(torch.as_tensor(metric.value(torch.from_numpy(returns), torch.from_numpy(lengths))).double().mean())


def _run_episodes(
    net: Net, agents: Sequence[Agent], count: int, choose: Callable[[Array, int], Array]
) -> tuple[Array, Array]:
    """Return the returns and lengths ``[agents, tests]`` of test episodes, run side by side."""
    shape = (len(agents), count)
    repeated_agents = [agent for agent in agents for _ in range(count)]
    environments = _make_vector_environment(net, repeated_agents, "tested environments")
    for at, agent in enumerate(repeated_agents):
        environments.reset(at, agent.test_episode_key(at % count))
    returns = np.zeros(len(repeated_agents))
    lengths = np.zeros(len(repeated_agents))
    alive = np.ones(len(repeated_agents), dtype=bool)
    step = 0
    while alive.any() and step < MAX_EPISODE_STEPS:
        observations = environments.observations
        actions = choose(observations.reshape(*shape, *observations.shape[1:]), step)
        result = environments.step(actions.reshape(-1), alive)
        returns += result.rewards
        lengths += alive
        alive &= ~(result.terminated | result.truncated)
        step += 1
    return returns.reshape(shape), lengths.reshape(shape)
