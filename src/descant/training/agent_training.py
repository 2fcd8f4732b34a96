"""What solvers of agents share: which of them go together, what each remembers, and how good it is when tested."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import seeds
from ..core.algorithm import LOG, Loss, Memory, Metrics, Term
from ..core.interfaces import Exam, Job, Judgement, Trained
from ..core.metrics import Metric
from ..errors import DescantWarning, ModelError, PartyError
from ..models.flat import Net
from ..rl import Worlds
from ..rl.agent import Agent
from .gradient_descent import Optimised, parts_of, rows_of, threads, together, ways_of, without_moments
from .kernels.layers import Array
from .kernels.traced_kernel import Stack, kernel_of
from .model_probe import probe
from .rl_losses import Sloped
from .stacked_forward import Outputs
from .stacked_gradient import LOOPED, STACKED, VECTORISED
from .stacked_optimizer import age, check_elementwise, maker

LAST = "agent.last"  # the model that the agent ended its last local work with
WORLD, REPLAY = "agent.world", f"{LOG}replay"  # where it is in its episode, and what it remembers of its steps
LONGEST = 10_000  # steps of an episode that is tested, or that a policy gradient learns from
_TESTED = 64  # models that are tested at once
_APART = 10**6  # episodes a round that nobody plays: their numbers are for those whose environment has failed


class Learner(Optimised, Protocol):
    """A solver of agents."""

    def loss(self, actions: int) -> Sloped: ...


def ways_for(
    solver: Learner,
    owner: str,
    net: Net,
    terms: tuple[Term, ...],
    party: Any,
    count: int,
    beside: Sequence[int] = (0,),
) -> dict[str, str]:
    """The ways to compute stacks of agents like this one; a model that cannot act here is an error.

    ``beside`` is how many outputs there may be beyond the actions.
    """
    if not isinstance(party, Agent):
        raise PartyError(f"{owner} trains agents: give it parties.agents(...). Party {party.name!r} has data instead.")
    x, y = acting(owner, net, party, beside), torch.zeros(8, 4)
    reasons = reasons_for(solver, owner, net, solver.loss(party.world.actions), terms, x, y)
    return ways_of(net.layout, reasons, together(net.layout, False), count)


def acting(owner: str, net: Net, agent: Agent, beside: Sequence[int]) -> Tensor:
    """Made-up observations that a model answers as one must who acts in this agent's environment; else an error."""
    world = agent.world
    x, outputs = probing(world.shape), [world.actions + more for more in beside]
    check_outputs(owner, net, x, outputs, f"observations of {world.name}", f", which has {world.actions} actions")
    return x


def probing(shape: Sequence[int]) -> Tensor:
    """Eight made-up observations."""
    return torch.from_numpy(seeds.stream(0, 0, "", "probe").standard_normal((8, *shape))).float()


def check_outputs(owner: str, net: Net, x: Tensor, widths: Sequence[int], seen: str, which: str = "") -> None:
    """Raise for a model that cannot see ``x``, or whose outputs are not of these widths."""
    name = type(net.module).__name__
    if net.layout.width > net.layout.size:
        raise ModelError(f"{name} has running statistics, which {owner} does not keep. Use nn.LayerNorm instead.")
    if net.layout.dtype != torch.float32:
        raise ModelError(f"{name} is {net.layout.dtype}; agents see torch.float32. Use module.to(torch.float32).")
    try:
        found = tuple(net.apply(net.row(), x[:0].flatten(), x)[0].shape)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise ModelError(f"{name} fails on {seen}, {tuple(x.shape)}: {told}") from error
    allowed = [(len(x), width) for width in widths]
    if found not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ModelError(f"For {len(x)} {seen}{which}, {owner} needs outputs {wanted}. {name} gives {list(found)}.")


def reasons_for(
    solver: Optimised, owner: str, net: Net, loss: Loss, terms: tuple[Term, ...], x: Tensor, y: Tensor
) -> dict[str, str]:
    """Why each way of computing a stack cannot be taken; a model that acts by chance is an error."""
    check_elementwise(maker(solver.optimizer, solver.options))
    reasons = probe(net, loss, terms, x, y)
    name = type(net.module).__name__
    if any("random numbers" in reason for reason in reasons.values()):
        raise ModelError(f"{name} draws random numbers (dropout, say), and would act by them. Leave that out.")
    if not _answers_one(net, x):
        raise ModelError(
            f"{name} answers an observation otherwise when others are beside it, as nn.BatchNorm does, and an agent "
            "has one at a time. Use nn.LayerNorm instead."
        )
    return reasons


def _answers_one(net: Net, x: Tensor) -> bool:
    """Whether a model says of one observation by itself what it says of it among others."""
    try:
        alone, among = (net.apply(net.row(), x[:0].flatten(), some)[0] for some in (x[:1], x))
    except Exception:
        return False
    return torch.allclose(alone, among[:1], rtol=1e-3, atol=1e-3)


def by_parts(job: Job, reset: bool, learn: Callable[[Job, Sequence[Life]], Trained]) -> Trained:
    """The local work of agents; one whose environment fails is tried once more, in other episodes.

    What has failed would fail in the same way for ever: an episode is its key. So an agent by itself (of a stack, each
    is tried by itself) leaves the episode that it is in, and plays those that are for this round alone.
    """
    lives = [Life.of(memory) for memory in job.memories]
    try:
        return in_parts(job, lives, reset, learn)
    except PartyError as error:
        if len(lives) > 1:
            raise
        failure = error
    memory, life = _elsewhere(job.memories[0], lives[0], job.round)
    trained = in_parts(replace(job, memories=[memory]), [life], reset, learn)
    warnings.warn(f"{failure} The agent went on in other episodes.", DescantWarning, stacklevel=2)
    return trained


def _elsewhere(memory: Memory, life: Life, round: int) -> tuple[Memory, Life]:
    """What an agent remembers when it has left its episode: in its replay that was broken off."""
    left = {name: tensor for name, tensor in memory.items() if name != WORLD}
    if REPLAY in left:
        left[REPLAY] = left[REPLAY].clone()
        left[REPLAY][-1:, -1] = 1
    return left, replace(life, episode=life.episode + _APART * round, so_far=0.0)


def in_parts(
    job: Job,
    lives: Sequence[Life],
    reset: bool,
    learn: Callable[[Job, Sequence[Life]], Trained],
    at_once: int | None = None,
    kinds: Sequence[float] | None = None,
) -> Trained:
    """The local work of agents, as many at once as the way allows, or ``at_once``; those of unlike kinds apart.

    A stack has one clock: in it are agents at one step of their lives, with equal work and moments of one age. A lone
    agent is worked on twice where it could have been with others, because one rounds otherwise than many.
    """
    memories = [without_moments(m) if reset and moved(job, k) else m for k, m in enumerate(job.memories)]
    job = replace(job, memories=memories)
    each = zip(lives, job.hypers, memories, kinds or [0.0] * len(lives), strict=True)
    keys = [(life.clock, h.work, h.lr, age(m), kind) for life, h, m, kind in each]
    stacked = together(job.net.layout, False) if at_once is None else at_once
    most = {STACKED: max(2, stacked), VECTORISED: len(keys)}.get(job.way, 1)
    rows = torch.empty_like(job.start, memory_format=torch.contiguous_format)
    kept: list[Memory] = [{}] * len(keys)
    metrics: list[Metrics] = [{}] * len(keys)
    with threads(job.way, False), np.errstate(all="ignore"), torch.no_grad():  # what overflows is the gate's business
        for part in parts_of(sorted(range(len(keys)), key=keys.__getitem__), keys, most):
            stack = part * 2 if len(part) == 1 and job.way == STACKED else part
            trained = learn(rows_of(job, stack), [lives[k] for k in stack])
            rows[part] = trained.rows[: len(part)]
            for k, memory, found in zip(part, trained.memories, trained.metrics, strict=False):
                kept[k], metrics[k] = memory, found
    return Trained(rows, kept, metrics)


def moved(job: Job, k: int) -> bool:
    """Whether an agent's model is another than it ended its last work with: whether merging has changed it."""
    last = job.memories[k].get(LAST)
    return last is not None and not torch.equal(last, job.start[k])


@dataclass(frozen=True)
class Life:
    """How far an agent is, as it remembers it; its reward is the one that FedRL weighs by (§3)."""

    clock: int = 0  # steps that it has taken, or batches that it has learned from
    episode: int = 0  # the number of the episode that it is in
    so_far: float = 0.0  # the return of that episode so far
    reward: float = 0.0  # the mean return in the last round in which an episode ended
    rounds: int = 0  # in how many rounds an episode has ended

    @classmethod
    def of(cls, memory: Memory) -> Life:
        found = memory.get("agent.life")
        if found is None:
            return cls()
        clock, episode, so_far, reward, rounds = found.tolist()
        return cls(int(clock), int(episode), so_far, reward, int(rounds))

    def after(self, steps: int, episode: int, so_far: float, returns: Sequence[float]) -> Life:
        """The same after a round in which episodes ended with these returns."""
        reward = sum(returns) / len(returns) if returns else self.reward
        return Life(self.clock + steps, episode, so_far, reward, self.rounds + bool(returns))

    def memory(self) -> dict[str, Tensor]:
        return {"agent.life": torch.tensor(astuple(self), dtype=torch.float64)}

    def metrics(self) -> dict[str, float]:
        """Its reward: of this round, or else the last that is known; none before its first episode has ended."""
        return {"reward": self.reward} if self.rounds else {}


def episode(job: Job, k: int, number: int) -> int:
    """The key of an episode of one of the agents."""
    return seeds.key(job.seed, number, job.parties[k].name, "episode")


def worlds_of(job: Job, each: int = 1) -> Worlds:
    """The worlds of a stack of agents, ``each`` for every agent; the same objects as last time, if they are alike."""
    agents = [agent for agent in job.parties for _ in range(each)]
    before = job.net.kept.get("worlds")
    if before is None or before[0] != agents:
        before = job.net.kept["worlds"] = (agents, _beside(job.net, agents, "environments"))
    worlds: Worlds = before[1]
    return worlds


def _beside(net: Net, agents: Sequence[Agent], kept: str) -> Worlds:
    worlds, names = [agent.world for agent in agents], [agent.name for agent in agents]
    return worlds[0].beside(worlds, names, net.kept.setdefault(kept, {}))


# ── how good are they? ────────────────────────────────────────────────────────────────────────────────────────────────


def in_test_episodes(exam: Exam) -> list[Judgement]:
    """Each model in its agent's test episodes, acting by its largest output; and acting at random, beside."""
    pairs = [(k, row) for k, rows in enumerate(exam.rows) for row in rows if exam.parties[k].tests]
    found: list[list[float]] = [[] for _ in exam.parties]
    for first in range(0, len(pairs), _TESTED):
        some = pairs[first : first + _TESTED]
        scores = _played(exam, [exam.parties[k] for k, _ in some], [row for _, row in some])
        for (k, _), score in zip(some, scores, strict=True):
            found[k].append(score)
    return [
        Judgement(agent.tests, scores, _at_random(exam, agent) if exam.trivial and agent.tests else None)
        for agent, scores in zip(exam.parties, found, strict=True)
    ]


@torch.no_grad()
def _played(exam: Exam, agents: Sequence[Agent], rows: Sequence[Tensor]) -> list[float]:
    """What models come to in the test episodes of their agents, all at once; as two, where there is one."""
    count, tests = len(rows), max(agent.tests for agent in agents)
    if count == 1:
        agents, rows = [*agents, *agents], [*rows, *rows]
    way = LOOPED if isinstance(kernel_of(exam.net, 1), str) else STACKED
    outputs = Outputs(exam.net, way, Stack(exam.net.layout, [torch.stack(list(rows))]))

    def choose(seen: Array, step: int) -> Array:
        actions: Array = outputs(seen)[..., : agents[0].world.actions].argmax(-1)
        return actions

    with np.errstate(all="ignore"):
        returns, lengths = _episodes(exam.net, agents, tests, choose)
    return [_mean(exam.metric, returns[k, : agents[k].tests], lengths[k, : agents[k].tests]) for k in range(count)]


def _at_random(exam: Exam, agent: Agent) -> float:
    """What acting at random comes to in an agent's test episodes; reckoned once."""
    if exam.metric not in agent.known:
        draws = seeds.stream(agent.seed, 0, agent.name, "random policy")

        def choose(seen: Array, step: int) -> Array:
            return draws.integers(agent.world.actions, size=seen.shape[:2])

        returns, lengths = _episodes(exam.net, [agent], agent.tests, choose)
        agent.known[exam.metric] = _mean(exam.metric, returns[0], lengths[0])
    return agent.known[exam.metric]


def _mean(metric: Metric, returns: Array, lengths: Array) -> float:
    return float(torch.as_tensor(metric.value(torch.from_numpy(returns), torch.from_numpy(lengths))).double().mean())


def _episodes(
    net: Net, agents: Sequence[Agent], tests: int, choose: Callable[[Array, int], Array]
) -> tuple[Array, Array]:
    """The returns and lengths ``[agents, tests]`` of the test episodes of some agents, side by side."""
    shape = (len(agents), tests)
    each = [agent for agent in agents for _ in range(tests)]
    worlds = _beside(net, each, "tested environments")
    for at, agent in enumerate(each):
        worlds.begin(at, agent.test(at % tests))
    returns, lengths, alive = np.zeros(len(each)), np.zeros(len(each)), np.ones(len(each), dtype=bool)
    step = 0
    while alive.any() and step < LONGEST:
        seen = worlds.observations
        found = worlds.step(choose(seen.reshape(*shape, *seen.shape[1:]), step).reshape(-1), alive)
        returns += found.rewards
        lengths += alive
        alive &= ~(found.terminated | found.truncated)
        step += 1
    return returns.reshape(shape), lengths.reshape(shape)
