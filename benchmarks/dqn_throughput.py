"""Steps per second of deep Q-learning on CartPole: stacked agents, single agents, a plain loop, and Stable-Baselines3.

All use the same network (64-64), batch (64) and frequency (a gradient step every 4 steps), on one thread and in turns;
seconds are processor time. Stable-Baselines3 is measured in another Python, if one is given (`pip install
stable-baselines3` into its own environment):

    python benchmarks/dqn_throughput.py [--steps 2000] [--turns 3] [--sb3 /path/to/python]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

HIDDEN = (64, 64)
BATCH = 64
EVERY = 4
BEGIN = 500

SB3 = f"""
import sys, time, torch
torch.set_num_threads(1)
from stable_baselines3 import DQN
model = DQN("MlpPolicy", "CartPole-v1", learning_rate=1e-3, batch_size={BATCH}, train_freq={EVERY}, gradient_steps=1,
            learning_starts={BEGIN}, buffer_size=50_000, policy_kwargs=dict(net_arch=list({HIDDEN})), device="cpu")
model.learn({BEGIN})
began = time.process_time()
model.learn(int(sys.argv[1]), reset_num_timesteps=False)
print(int(sys.argv[1]) / (time.process_time() - began))
"""


def stacked(count: int, steps: int) -> float:
    """Return the steps per second of all agents of a stack together."""
    from descant import Dqn, Federation, algorithms, models, parties

    solver = Dqn(steps=steps, batch=BATCH, train_every=EVERY, gradient_steps=1, learning_starts=1, n_step=1, lr=1e-3)
    population = parties.agents("CartPole-v1", count=count, test_episodes=0)
    fed = Federation(partial(models.mlp, 4, 2, HIDDEN), population, algorithms.Local(), solver=solver)
    next(iter(fed.rounds(1, evaluate_local_in=())))  # warm-up
    began = time.process_time()
    next(iter(fed.rounds(1, evaluate_local_in=())))
    return count * steps / (time.process_time() - began)


def plain(steps: int) -> float:
    """Return the steps per second of one agent in plain torch and gymnasium, as in a single-file implementation."""
    import gymnasium
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    model = network()
    target = network()
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rng = np.random.default_rng(0)
    x = np.zeros((50_000, 4), np.float32)
    after = np.zeros((50_000, 4), np.float32)
    actions = np.zeros(50_000, np.int64)
    rewards = np.zeros(50_000, np.float32)
    over = np.zeros(50_000, np.float32)
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=0)
    began = 0.0
    for t in range(BEGIN + steps):
        if t == BEGIN:
            began = time.process_time()
        if rng.random() < 0.1:
            action = int(rng.integers(2))
        else:
            with torch.no_grad():
                action = int(model(torch.from_numpy(seen)[None]).argmax())
        x[t] = seen
        seen, reward, terminated, truncated, _ = env.step(action)
        after[t], actions[t], rewards[t], over[t] = seen, action, float(reward), terminated
        if terminated or truncated:
            seen, _ = env.reset()
        if t >= BEGIN and t % EVERY == 0:
            at = rng.integers(t + 1, size=BATCH)
            with torch.no_grad():
                best = model(torch.from_numpy(after[at])).argmax(1, keepdim=True)
                value = target(torch.from_numpy(after[at])).gather(1, best).squeeze(1)
                goal = torch.from_numpy(rewards[at]) + 0.99 * value * (1 - torch.from_numpy(over[at]))
            chosen = model(torch.from_numpy(x[at])).gather(1, torch.from_numpy(actions[at])[:, None]).squeeze(1)
            loss = functional.smooth_l1_loss(chosen, goal)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        if t % 500 == 0:
            target.load_state_dict(model.state_dict())
    return steps / (time.process_time() - began)


def baselines(python: str, steps: int) -> float:
    """Return the steps per second of Stable-Baselines3's DQN, run in its own Python."""
    result = subprocess.run([python, "-c", SB3, str(steps)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"Stable-Baselines3 cannot be run by {python}:\n{result.stderr[-2000:]}")
    return float(result.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per agent")
    parser.add_argument("--turns", type=int, default=3, help="measurements per contestant; the median counts")
    parser.add_argument("--sb3", default="", help="a Python that has stable-baselines3")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    contestants: dict[str, Callable[[], float]] = {
        "one agent at a time": partial(stacked, 1, given.steps),
        "10 agents in a stack": partial(stacked, 10, given.steps),
        "100 agents in a stack": partial(stacked, 100, max(1, given.steps // 4)),
        "plain torch loop": partial(plain, given.steps),
    }
    if given.sb3:
        contestants["Stable-Baselines3"] = partial(baselines, given.sb3, given.steps)
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(given.turns):
        for name, measure in contestants.items():
            measured[name].append(measure())
    rates = {name: median(values) for name, values in measured.items()}
    ten = rates["10 agents in a stack"]
    hundred = rates["100 agents in a stack"]
    print(f"{'':24}{'steps/s':>10}  {'10 agents are':>14}  {'100 agents are':>15}")
    for name, rate in rates.items():
        print(f"{name:24}{rate:>10,.0f}  {ten / rate:>13.1f}×  {hundred / rate:>14.1f}×")
    if not given.sb3:
        print("Stable-Baselines3 is left out: give a Python that has it with --sb3.")


if __name__ == "__main__":
    main()
