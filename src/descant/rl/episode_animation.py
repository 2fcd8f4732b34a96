"""A trained policy at work, to be looked at: a GIF, or a strip of pictures."""

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

_FRAMES = 8  # of a strip
_EVERY = 4  # steps between two frames of a film


def film(policy: nn.Module, world: CartPole, file: str | Path, seed: int = 0) -> Path:
    """One episode of greedy play on CartPole, as a GIF or, into a PNG file, as a strip of eight moments.

    ``policy`` is what a federation has learned (`fed.center_`, or one of `fed.models_`), and ``world`` where it acts
    (`people["0"].world`).
    """
    if not isinstance(world, CartPole):
        raise SettingError(f"Only CartPole can be filmed here. Got {world!r:.80}.")
    file = Path(file)
    if file.suffix not in (".gif", ".png"):
        raise SettingError(f"A film is a .gif file, or a strip in a .png file. Got {file.name!r}.")
    places = _played(policy, world, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    _strip(places, world, file) if file.suffix == ".png" else _gif(places, world, file)
    return file


@torch.no_grad()
def _played(policy: nn.Module, world: CartPole, seed: int) -> list[Array]:
    """Where cart and pole are, step by step, until the episode is over."""
    worlds, before = world.beside([world], ["0"]), policy.training
    policy.eval()
    worlds.begin(0, seed)
    places, over = [worlds.observations[0]], False
    while not over:
        seen = torch.from_numpy(worlds.observations)
        moved = worlds.step(policy(seen)[:, : world.actions].argmax(1).numpy())
        places.append(moved.observations[0])
        over = bool(moved.terminated[0] or moved.truncated[0])
    policy.train(before)
    return places


def _strip(places: Sequence[Array], world: CartPole, file: Path) -> None:
    from matplotlib.figure import Figure  # here, because it takes a second

    figure = Figure(figsize=(12.0, 1.2), dpi=150, layout="constrained")
    steps = np.linspace(0, len(places) - 1, _FRAMES).round().astype(int)
    for axes, step in zip(figure.subplots(1, _FRAMES), steps, strict=True):
        _draw(axes, places[step], world, f"step {step}")
    figure.savefig(file, format="png", backend="agg")


def _gif(places: Sequence[Array], world: CartPole, file: Path) -> None:
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0, 3.0), dpi=80)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(0, len(places), _EVERY)

    def draw(step: int) -> list[Any]:
        axes.clear()
        _draw(axes, places[step], world, f"step {step}")
        return []

    moving = FuncAnimation(figure, draw, frames=steps)
    moving.save(file, writer=PillowWriter(fps=round(1 / (world.tau * _EVERY))))


def _draw(axes: Axes, place: Array, world: CartPole, title: str) -> None:
    """Cart, pole and track; 12 degrees from upright or 2.4 m from the middle, an episode is over."""
    from matplotlib.patches import Rectangle

    x, angle, length = float(place[0]), float(place[2]), 2 * world.length
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
