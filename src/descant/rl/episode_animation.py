"""Animations of a trained policy: a GIF, or a strip of pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..errors import SettingError
from .cartpole import CartPole
from .environment import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRIP_FRAMES = 8
_STEPS_PER_FRAME = 4  # of a GIF


def film(policy: nn.Module, environment: CartPole, file: str | Path, seed: int = 0) -> Path:
    """Save one greedy episode on CartPole as a GIF, or as a PNG strip of eight moments.

    `policy` is a trained model (`fed.global_model_`, or one of `fed.models_`). `environment` is the one it acts in
    (`population["0"].environment`). The suffix of `file` (.gif or .png) selects the format.
    """
    if not isinstance(environment, CartPole):
        raise SettingError(f"Only CartPole can be filmed here. Got {environment!r:.80}.")
    file = Path(file)
    if file.suffix not in (".gif", ".png"):
        raise SettingError(f"film writes a .gif file, or a strip of pictures as a .png file. Got {file.name!r}.")
    states = _run_episode(policy, environment, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    save = _save_strip if file.suffix == ".png" else _save_gif
    save(states, environment, file)
    return file


@torch.no_grad()
def _run_episode(policy: nn.Module, environment: CartPole, seed: int) -> list[Array]:
    """Return the observation after each step of one episode."""
    vector = environment.make_vector([environment], ["0"])
    was_training = policy.training
    policy.eval()
    vector.reset(0, seed)
    states = [vector.observations[0]]
    done = False
    while not done:
        observations = torch.from_numpy(vector.observations)
        result = vector.step(policy(observations)[:, : environment.actions].argmax(1).numpy())
        states.append(result.observations[0])
        done = bool(result.terminated[0] or result.truncated[0])
    policy.train(was_training)
    return states


def _save_strip(states: Sequence[Array], environment: CartPole, file: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12.0, 1.2), dpi=150, layout="constrained")
    steps = np.linspace(0, len(states) - 1, _STRIP_FRAMES).round().astype(int)
    for axes, step in zip(figure.subplots(1, _STRIP_FRAMES), steps, strict=True):
        _draw(axes, states[step], environment, title=f"step {step}")
    figure.savefig(file, format="png", backend="agg")


def _save_gif(states: Sequence[Array], environment: CartPole, file: Path) -> None:
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0, 3.0), dpi=80)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(0, len(states), _STEPS_PER_FRAME)

    def draw(step: int) -> list[Any]:
        axes.clear()
        _draw(axes, states[step], environment, title=f"step {step}")
        return []

    animation = FuncAnimation(figure, draw, frames=steps)
    animation.save(file, writer=PillowWriter(fps=round(1 / (environment.tau * _STEPS_PER_FRAME))))


def _draw(axes: Axes, state: Array, environment: CartPole, title: str) -> None:
    """Draw cart, pole and track; an episode ends 12 degrees from upright or 2.4 m from the middle."""
    from matplotlib.patches import Rectangle

    x = float(state[0])
    angle = float(state[2])
    length = 2 * environment.length
    axes.axhline(0, color="#999999", linewidth=1.0)
    axes.add_patch(Rectangle((x - 0.25, 0), 0.5, 0.3, color="#0072B2"))
    tip = (x + length * math.sin(angle), 0.3 + length * math.cos(angle))
    axes.plot([x, tip[0]], [0.3, tip[1]], color="#D55E00", linewidth=4, solid_capstyle="round")
    axes.set_xlim(-2.8, 2.8)
    axes.set_ylim(-0.2, 0.5 + max(1.0, length))
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=8)
