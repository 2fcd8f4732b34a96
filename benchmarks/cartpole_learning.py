"""Learning speed of single agents on CartPole-v1: default solvers, ten seeds each, evaluated in 100 greedy episodes.

An agent has solved the task at the first evaluation in which its latest model has a mean return of 475 or more.
Evaluations are 5,000 steps apart. Nothing is aggregated: ten agents of one stack, each with its own network, episodes
and random draws, are ten seeds. Stable-Baselines3 runs at its tuned settings, in another Python that has it:

    python benchmarks/cartpole_learning.py [--seeds 10] [--sb3 /path/to/python]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial

import numpy as np

STEPS_PER_EVALUATION = 5000
EPISODES = 100
SOLVED_RETURN = 475

SB3 = f"""
import gymnasium, json, sys, torch
torch.set_num_threads(1)
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
model = DQN("MlpPolicy", "CartPole-v1", learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000,
            gamma=0.99, target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
            exploration_final_eps=0.04, policy_kwargs=dict(net_arch=[256, 256]), device="cpu", seed=int(sys.argv[1]))
curve = []
for evaluation in range(10):
    model.exploration_schedule = lambda left: max(0.04, 1 - 0.96 * min(1, model.num_timesteps / 8000))
    model.learn({STEPS_PER_EVALUATION}, reset_num_timesteps=evaluation == 0)
    curve.append(float(evaluate_policy(model, gymnasium.make("CartPole-v1"), {EPISODES}, warn=False)[0]))
print(json.dumps(curve))
"""


def descant_curves(name: str, seeds: int) -> np.ndarray:
    """Return steps and mean returns ``[2, evaluations, seeds]`` of the latest models of a default solver."""
    from descant import Dqn, Federation, PolicyGradient, algorithms, models, parties

    solver = Dqn(steps=STEPS_PER_EVALUATION) if name == "Dqn" else PolicyGradient(iterations=2)
    population = parties.agents("CartPole-v1", count=seeds, test_episodes=EPISODES)
    net = partial(models.mlp, 4, 2, (64, 64))
    fed, *others = (Federation(net, population, algorithms.Local(), solver=solver, seed=seed) for seed in range(seeds))
    for agent, other in zip(population, (fed, *others), strict=True):
        fed.state.personal_models.stage(agent, {"model": other.state.global_model})
    fed.state.personal_models.commit(0, list(population))
    steps = np.zeros(seeds)
    evaluated_steps = []
    scores = []
    while len(evaluated_steps) < (6 if name == "Dqn" else 24):
        scored = next(iter(fed.rounds(1, evaluate_local_in=())))
        steps += [scored.round.metrics[agent]["samples"] for agent in population]
        if steps.mean() >= STEPS_PER_EVALUATION * (len(evaluated_steps) + 1):
            evaluated_steps.append(steps.copy())
            scores.append(scored.scores.personal.values)
    return np.array([evaluated_steps, scores])


def sb3_curves(python: str, seeds: int) -> np.ndarray:
    curves = []
    for seed in range(seeds):
        result = subprocess.run([python, "-c", SB3, str(seed)], capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"Stable-Baselines3 cannot be run by {python}:\n{result.stderr[-2000:]}")
        curves.append(json.loads(result.stdout.splitlines()[-1]))
    scores = np.array(curves).T
    return np.array(
        [np.broadcast_to(STEPS_PER_EVALUATION * np.arange(1, len(scores) + 1)[:, None], scores.shape), scores]
    )


def print_curves(name: str, curves: np.ndarray, seconds: float) -> None:
    evaluated_steps, scores = curves
    first = [
        row[good.argmax()] if good.any() else np.inf
        for row, good in zip(evaluated_steps.T, (scores >= SOLVED_RETURN).T, strict=True)
    ]
    print(f"\n{name}: {int(np.isfinite(first).sum())} of {len(first)} seeds solved it, half of them by "
          f"{np.median(first):,.0f} steps; {seconds:.0f} s of processor time")  # fmt: skip
    for at, row in zip(evaluated_steps, scores, strict=True):
        solved = f"{int((row >= SOLVED_RETURN).sum())} at {SOLVED_RETURN} or more"
        print(f"  {at.mean():>8,.0f} steps: mean {row.mean():5.1f}, worst {row.min():5.1f}, {solved}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sb3", default="", help="a Python that has stable-baselines3")
    given = parser.parse_args()
    for name in ("Dqn", "PolicyGradient"):
        began = time.process_time()
        curves = descant_curves(name, given.seeds)
        print_curves(f"Descant's {name}, default settings", curves, time.process_time() - began)
    if given.sb3:
        began = time.perf_counter()
        curves = sb3_curves(given.sb3, given.seeds)
        print_curves("Stable-Baselines3's DQN at the zoo's settings", curves, time.perf_counter() - began)


if __name__ == "__main__":
    main()
