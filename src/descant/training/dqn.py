"""Deep Q-learning over a stack of agents: all networks are one stack, and all environments are side by side.

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

from ..core.algorithm import Hyper, Loss, Memory, Term
from ..core.interfaces import Exam, Job, Judgement, Trained
from ..core.metrics import RETURN, Metric
from ..core.settings import check, setting
from ..models.flat import Net
from .agent_training import LAST, REPLAY, WORLD, Life, by_parts, episode, in_test_episodes, moved, ways_for, worlds_of
from .gradient_descent import Pulling, Slope, held, losses_of, memories_of
from .kernels.layers import Array
from .kernels.traced_kernel import Stack
from .replay_buffer import Replay, Transitions
from .rl_losses import TemporalDifference
from .stacked_forward import Keyed, Outputs

_TARGET = "agent.target"


@dataclass(frozen=True)
class Dqn:
    """Each agent acts in its environment for some steps, and learns from what it remembers of them.

    It makes the "locally trained model" of FedRL's Algorithm 1. Networks have one output an action. All that an agent
    has (moments, target network, replay, the environment's state) is its own, stays with it from round to round and
    goes on where it was: two rounds of 50 steps are one of 100.

    >>> Dqn(steps=400).hyper
    Hyper(lr=0.0005, work=400)
    """

    lr: float = setting(5e-4, "the learning rate η", above=0)
    steps: int = setting(1000, "steps in its environment that an agent takes a round", least=0, whole=True)
    batch: int = setting(64, "transitions a gradient step", least=1, whole=True)
    gamma: float = setting(0.99, "γ: the discount of a later reward", above=0, most=1)
    n_step: int = setting(10, "rewards that are counted before the target network is asked", least=1, whole=True)
    every: int = setting(1, "steps between two times of learning", least=1, whole=True)
    updates: int = setting(1, "gradient steps each time", least=1, whole=True)
    begin: int = setting(1000, "steps before the first gradient step", least=1, whole=True)
    replay: int = setting(10_000, "transitions that an agent remembers", least=1, whole=True)
    target_every: int = setting(100, "gradient steps between two moves of the target network", least=1, whole=True)
    tau: float = setting(1.0, "how far the target network moves to the model: 1 copies it", above=0, most=1)
    explore: float = setting(1.0, "ε at first: how often an agent acts at random", least=0, most=1)
    explore_last: float = setting(0.02, "ε at last", least=0, most=1)
    explore_steps: int = setting(5000, "steps in which ε goes from the first to the last", least=1, whole=True)
    huber: float = setting(100.0, "errors of Q beyond it count linearly, not squared", above=0)
    double: bool = setting(
        True, "whether the model chooses the action whose value the target network tells", one_of=(True, False)
    )
    clip: float = setting(10.0, "the norm of an agent's gradient, at most", above=0)
    optimizer: str | type[Optimizer] = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimiser's memory where merging changed the model", one_of=("keep", "reset")
    )
    target: Literal["sync", "keep"] = setting(
        "sync",
        "the target network where merging changed the model: it becomes the model, or stays",
        one_of=("sync", "keep"),
    )

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.steps)

    @property
    def metric(self) -> Metric:
        """The return."""
        return RETURN

    def ways(self, net: Net, loss: Loss, terms: tuple[Term, ...], party: Any, count: int) -> dict[str, str]:
        """As for data; the loss is the solver's own."""
        check(self)
        return ways_for(self, "Dqn", net, terms, party, count)

    def loss(self, actions: int) -> TemporalDifference:
        """What its steps go down."""
        return TemporalDifference(self.huber)

    def examine(self, exam: Exam) -> Sequence[Judgement]:
        """In the agents' test episodes."""
        return in_test_episodes(exam)

    def train(self, job: Job) -> Trained:
        """The local work of every agent in the job."""
        job = replace(job, loss=self.loss(job.parties[0].world.actions))
        return by_parts(job, self.moments == "reset", self._learn)

    def epsilon(self, step: int) -> float:
        """ε at a step of an agent's life."""
        return self.explore + (self.explore_last - self.explore) * min(1.0, step / self.explore_steps)

    def learning(self, step: int) -> range:
        """The numbers of the gradient steps that follow a step, in an agent's life."""
        first = (step // self.every - 1) * self.updates
        return range(first, first + self.updates if step >= self.begin and step % self.every == 0 else first)

    def _learn(self, job: Job, lives: Sequence[Life]) -> Trained:
        """The work of a stack of agents that are at the same step."""
        clock, work = lives[0].clock, job.hypers[0].work
        acting = _Acting(self, job, lives)
        taught = sum(len(self.learning(step)) for step in range(clock + 1, clock + work + 1))
        learning = _Learning(self, job, taught)
        for step in range(clock + 1, clock + work + 1):
            acting.act(learning.outputs, step - 1)
            for number in self.learning(step):
                learning.learn(acting.replay, number)
        return acting.kept(learning.trained(), work)


class _Acting:
    """Agents in their environments: what they do, what they remember of it, and what it brings them."""

    def __init__(self, solver: Dqn, job: Job, lives: Sequence[Life]) -> None:
        self._solver, self._job, self._lives = solver, job, lives
        names = [agent.name for agent in job.parties]
        self._worlds, self._actions = worlds_of(job), job.parties[0].world.actions
        self._draws = Keyed(job.seed, names, "act", (2,))
        self._episodes = [life.episode for life in lives]
        self._so_far = np.array([life.so_far for life in lives])
        self._returns: list[list[float]] = [[] for _ in lives]
        logs = [memory.get(REPLAY) for memory in job.memories]
        self.replay = Replay(logs, job.parties[0].world.shape, solver.replay, job.hypers[0].work)
        for k, memory in enumerate(job.memories):
            key = episode(job, k, self._episodes[k])
            self._worlds.restore(k, key, memory[WORLD]) if WORLD in memory else self._worlds.begin(k, key)
        self._seen = self._worlds.observations

    def act(self, outputs: Outputs, step: int) -> None:
        """One step of every agent: at random as often as ε says, else what promises most."""
        chance, which = self._draws[step].T
        best = outputs(self._seen[:, None])[:, 0].argmax(-1)
        explores = chance < self._solver.epsilon(step)
        actions = np.where(explores, (which * self._actions).astype(np.int64), best)
        found = self._worlds.step(actions)
        ended = found.terminated | found.truncated
        self.replay.add(self._seen, found.observations, actions, found.rewards, found.terminated, ended)
        self._so_far += found.rewards
        self._seen = found.observations
        if ended.any():
            for k in np.flatnonzero(ended).tolist():
                self._returns[k].append(float(self._so_far[k]))
                self._so_far[k], self._episodes[k] = 0.0, self._episodes[k] + 1
                self._worlds.begin(k, episode(self._job, k, self._episodes[k]))
            self._seen = self._worlds.observations

    def kept(self, trained: Trained, work: int) -> Trained:
        """What came of it, with what the agents remember of their environments."""
        memories, metrics = list[Memory](), list[dict[str, float]]()
        for k, (log, life) in enumerate(zip(self.replay.logs(), self._lives, strict=True)):
            after = life.after(work, self._episodes[k], float(self._so_far[k]), self._returns[k])
            own = {REPLAY: log, WORLD: self._worlds.state(k), LAST: trained.rows[k].clone()}
            memories.append({**trained.memories[k], **own, **after.memory()})
            metrics.append({**trained.metrics[k], **after.metrics(), "samples": max(1, work)})
        return Trained(trained.rows, memories, metrics)


class _Learning:
    """Their networks, and the target networks that they learn by."""

    def __init__(self, solver: Dqn, job: Job, taught: int) -> None:
        self._solver, self._job, self._taught, self._done = solver, job, taught, 0
        self._slope = Slope(solver, job, [0] * len(job.parties))
        self._w = self._slope.w
        self._target = Stack(job.net.layout, [_targets(job, solver.target == "sync")], self._slope.stack.lead)
        self.outputs = Outputs(job.net, job.way, self._slope.stack)
        self._told = Outputs(job.net, job.way, self._target)
        self._pull = Pulling(job, self._w)
        names = [agent.name for agent in job.parties]
        self._draws = Keyed(job.seed, names, "batch", (solver.batch,))

    def learn(self, replay: Replay, number: int) -> None:
        """One gradient step of every agent, the so many-th of its life."""
        everybody = [True] * len(self._w)
        found = replay.sample(self._draws[number], self._solver.n_step, self._solver.gamma)
        told = self._told(found.after)
        best = self.outputs(found.after) if self._solver.double else told
        self._slope.descent(torch.from_numpy(found.x), torch.from_numpy(targets_of(found, best, told)))
        self._slope.clip(self._solver.clip)
        with held(self._slope.stack, self._job, self._done, [self._taught] * len(self._w)):
            self._slope.moments.step(everybody)
            self._pull(everybody)
        self._done += 1
        if (number + 1) % self._solver.target_every == 0:
            self._target.columns.lerp_(self._w, self._solver.tau)

    def trained(self) -> Trained:
        """The networks, and what their agents remember of how they were learned."""
        kept = zip(memories_of(self._slope, self._job), self._target.columns, strict=True)
        memories = [{**memory, _TARGET: row.clone()} for memory, row in kept]
        return Trained(self._w.clone(), memories, [{"loss": loss} for loss in losses_of(self._slope, self._done)])


def targets_of(found: Transitions, choosing: Array, telling: Array) -> Array:
    """The actions, and Σ γ^i r + γ^n Q(s', a') where one network chooses a' and the other tells its value."""
    best = choosing.argmax(-1)[..., None]
    value = np.take_along_axis(telling, best, -1)[..., 0]
    return np.stack([found.actions, found.rewards + found.discount * value], -1)


def _targets(job: Job, sync: bool) -> Tensor:
    """The target networks ``[K, d]``: remembered, or the model where there is none or where merging has changed it."""
    rows = [
        job.start[k] if _TARGET not in memory or (sync and moved(job, k)) else memory[_TARGET]
        for k, memory in enumerate(job.memories)
    ]
    return torch.stack(rows)
