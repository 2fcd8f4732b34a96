"""Policy gradients over a stack of agents: all networks are one stack, and all their episodes run side by side.

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
from ..core.algorithm import Hyper, Loss, Memory, Term
from ..core.interfaces import Exam, Job, Judgement, Trained
from ..core.metrics import RETURN, Metric
from ..core.settings import check, setting
from ..models.flat import Net
from ..rl import Worlds
from .agent_training import LAST, LONGEST, Life, by_parts, episode, in_test_episodes, ways_for, worlds_of
from .gradient_descent import Pulling, Slope, held, losses_of, memories_of
from .kernels.layers import Array
from .rl_losses import Clipped, log_softmax
from .stacked_forward import Keyed, Outputs


@dataclass(frozen=True)
class PolicyGradient:
    """Each agent plays some episodes, and then makes what turned out better than expected more likely; again and again.

    A network has one output an action; with one more, that is the value which it expects, and what is better is told by
    it (an actor and a critic), else by the mean of the rewards to come. With ``updates`` = 1 it is REINFORCE; with more
    it goes on as far as ``clip`` lets it. It makes the "locally trained model" of FedRL's Algorithm 1, too.

    >>> PolicyGradient(iterations=2).hyper
    Hyper(lr=0.003, work=2)
    """

    lr: float = setting(3e-3, "the learning rate η", above=0)
    iterations: int = setting(1, "times a round that an agent plays and learns", least=0, whole=True)
    episodes: int = setting(8, "episodes that it plays each time", least=1, whole=True)
    updates: int = setting(16, "gradient steps each time", least=1, whole=True)
    batch: int = setting(256, "of its steps, how many a gradient step takes", least=1, whole=True)
    gamma: float = setting(0.99, "γ: the discount of a later reward", above=0, most=1)
    trace: float = setting(0.95, "λ, with a value: how far rewards are trusted before it is", least=0, most=1)
    clip: float = setting(0.2, "how much more or less likely an action becomes each time, at most", above=0)
    entropy: float = setting(0.0, "the bonus for acting at random", least=0)
    value: float = setting(0.01, "how much the squared error of the value counts", least=0)
    normalise: bool = setting(
        True, "whether advantages of an iteration have mean 0 and deviation 1", one_of=(True, False)
    )
    most: float = setting(0.5, "the norm of an agent's gradient, at most", above=0)
    optimizer: str | type[Optimizer] = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimiser's memory where merging changed the model", one_of=("keep", "reset")
    )

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.iterations)

    @property
    def metric(self) -> Metric:
        """The return."""
        return RETURN

    def ways(self, net: Net, loss: Loss, terms: tuple[Term, ...], party: Any, count: int) -> dict[str, str]:
        """As for data; the loss is the solver's own."""
        check(self)
        return ways_for(self, "PolicyGradient", net, terms, party, count, beside=(0, 1))

    def examine(self, exam: Exam) -> Sequence[Judgement]:
        """In the agents' test episodes."""
        return in_test_episodes(exam)

    def loss(self, actions: int) -> Clipped:
        """What its steps go down."""
        return Clipped(actions, self.clip, self.entropy, self.value)

    def train(self, job: Job) -> Trained:
        """The local work of every agent in the job."""
        job = replace(job, loss=self.loss(job.parties[0].world.actions))
        return by_parts(job, self.moments == "reset", self._learn)

    def _learn(self, job: Job, lives: Sequence[Life]) -> Trained:
        """The work of a stack of agents that are at the same iteration."""
        clock, work, count = lives[0].clock, job.hypers[0].work, len(lives)
        slope = Slope(self, job, [0] * count)
        outputs, pull = Outputs(job.net, job.way, slope.stack), Pulling(job, slope.w)
        worlds, everybody = worlds_of(job, self.episodes), [True] * count
        returns: list[list[float]] = [[] for _ in lives]
        steps, done = np.zeros(count, dtype=np.int64), 0
        for iteration in range(clock, clock + work):
            first = [life.episode + (iteration - clock) * self.episodes for life in lives]
            played = play(self, job, iteration, first, worlds, outputs)
            for k, one in enumerate(played):
                returns[k] += one.returns.tolist()
                steps[k] += len(one.x)
            for x, y in self._batches(job, iteration, played):
                slope.descent(torch.from_numpy(x), torch.from_numpy(y))
                slope.clip(self.most)
                with held(slope.stack, job, done, [work * self.updates] * count):
                    slope.moments.step(everybody)
                    pull(everybody)
                done += 1
        memories, metrics, losses = list[Memory](), list[dict[str, float]](), losses_of(slope, done)
        for k, (life, memory) in enumerate(zip(lives, memories_of(slope, job), strict=True)):
            after = life.after(work, life.episode + work * self.episodes, 0.0, returns[k])
            memories.append({**memory, **after.memory(), LAST: slope.w[k].clone()})
            metrics.append({"loss": losses[k], "samples": max(1, int(steps[k])), **after.metrics()})
        return Trained(slope.w.clone(), memories, metrics)

    def _batches(self, job: Job, iteration: int, played: Sequence[Played]) -> Any:
        """Batches ``[K, batch, ...]`` in which every agent takes its own steps in a new order, as often as need be."""
        needed, chosen = self.updates * self.batch, []
        for agent, one in zip(job.parties, played, strict=True):
            rng, n = seeds.stream(job.seed, iteration, agent.name, "batch"), len(one.x)
            orders = [rng.permutation(n) for _ in range(-(-needed // n))]
            chosen.append(np.concatenate(orders)[:needed].reshape(self.updates, self.batch))
        for rows in zip(*chosen, strict=True):
            pairs = list(zip(played, rows, strict=True))
            yield np.stack([one.x[at] for one, at in pairs]), np.stack([one.y[at] for one, at in pairs])


@dataclass(frozen=True)
class Played:
    """The steps of one agent in one iteration, and what its loss says of them."""

    x: Array  # [steps, *shape]
    y: Array  # [steps, 4]: action, advantage, log-probability, return
    returns: Array  # [episodes]


def play(
    solver: PolicyGradient, job: Job, iteration: int, first: Sequence[int], worlds: Worlds, outputs: Outputs
) -> list[Played]:
    """Episodes of all agents side by side, each until it ends; ``first`` is the number of an agent's first one."""
    count, each, actions = len(job.parties), solver.episodes, job.parties[0].world.actions
    for at in range(count * each):
        k, e = divmod(at, each)
        worlds.begin(at, episode(job, k, first[k] + e))
    draws = Keyed(job.seed, [agent.name for agent in job.parties], "act", (each,))
    seen, alive = worlds.observations, np.ones(count * each, dtype=bool)
    cut = np.zeros_like(alive)  # broken off, so that there is a value beyond the end
    story = list[tuple[Array, ...]]()
    while alive.any() and len(story) < LONGEST:
        told = outputs(seen.reshape(count, each, *seen.shape[1:]))
        chances = log_softmax(told[..., :actions])
        draw = draws[iteration * LONGEST + len(story)]
        chosen = np.minimum((draw[..., None] >= np.exp(chances).cumsum(-1)).sum(-1), actions - 1)
        chance = np.take_along_axis(chances, chosen[..., None], -1)[..., 0]
        found = worlds.step(chosen.reshape(-1), alive)
        values = told[..., actions] if told.shape[-1] > actions else np.zeros_like(chance)
        story.append((seen, chosen.reshape(-1), chance.reshape(-1), values.reshape(-1), found.rewards, alive))
        cut |= alive & found.truncated & ~found.terminated
        alive = alive & ~(found.terminated | found.truncated)
        seen = found.observations
    told = outputs(seen.reshape(count, each, *seen.shape[1:]))
    beyond = np.where(cut | alive, told[..., -1].reshape(-1) if told.shape[-1] > actions else 0, 0)
    return told_of(solver if told.shape[-1] > actions else replace(solver, trace=1.0), story, beyond, count)


def told_of(solver: PolicyGradient, story: Sequence[tuple[Array, ...]], beyond: Array, count: int) -> list[Played]:
    """What is learned from a story: A = Σ (γλ)^i (r + γV' - V) up to the end, and the return A + V."""
    seen, chosen, chances, values, rewards, alive = (np.stack(part) for part in zip(*story, strict=True))  # [T, N, ...]
    advantages, ahead, later = np.zeros_like(values), np.zeros_like(beyond), beyond.astype(values.dtype)
    for t in range(len(story) - 1, -1, -1):
        ahead = rewards[t] + solver.gamma * later - values[t] + solver.gamma * solver.trace * ahead
        advantages[t] = ahead = np.where(alive[t], ahead, 0)
        later = np.where(alive[t], values[t], later)
    played = []
    for own in np.split(np.arange(seen.shape[1]), count):
        mine = alive[:, own].T  # [episodes, T]: an agent's steps in order, whatever the others did

        def part(values: Array, own: Array = own, mine: Array = mine) -> Array:
            return np.ascontiguousarray(np.swapaxes(values[:, own], 0, 1)[mine])

        advantage, value = part(advantages), part(values)
        columns = (part(chosen), normal(advantage) if solver.normalise else advantage, part(chances), advantage + value)
        y = np.stack(columns, -1).astype(values.dtype)
        played.append(Played(part(seen), y, rewards[:, own].sum(0)))
    return played


def normal(values: Array) -> Array:
    """With mean 0 and deviation 1, as far as they differ."""
    centred = values - values.mean()
    found: Array = centred / (centred.std() + 1e-8)
    return found
