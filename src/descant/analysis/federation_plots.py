"""The instruments of one federation as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..algorithms.components import stay
from ..core.settings import unknown
from ..errors import SettingError
from ..portfolio import hold, uniform
from ..portfolio.performance_measures import values
from ..reporting.figure import Line, Numbers, noted
from ..reporting.participation_timeline import Presence, draw_presence
from ..reporting.plots import AGENTS, DESKS, draw_collapse, draw_hyper, draw_rewards, draw_spikes, draw_walk
from ..reporting.portfolio_plots import HOLD, MOST, UNIFORM, draw_values, draw_weights
from ..training.backtest_evaluation import terms_of
from .asset_universes import universes
from .desk_results import are_desks, desks_of, paths
from .findings import collapse, of_the_data
from .interpolation import walk

if TYPE_CHECKING:
    from ..federation import Federation


def draw(federation: Federation, kind: str, file: str | Path) -> Path:
    """Draw one of a federation's pictures into a PNG file."""
    if kind not in _KINDS:
        raise unknown("picture of a federation", kind, _KINDS)
    with noted(of_the_data(federation.people.note)):
        return _KINDS[kind](federation, Path(file))


def spikes(federation: Federation) -> Line:
    """The change at aggregation by round (Fed+ v2, fig. 1a): its mean over parties, and one standard deviation."""
    rounds, mean, sd = (series(federation, name) for name in ("round", "jump", "jump_sd"))
    return Line(rounds, mean, mean - sd, mean + sd)


def series(federation: Federation, name: str) -> Numbers:
    """One number a round, out of the history; nan where it is not known."""
    return np.array([entry.get(name, np.nan) for entry in federation.history_], dtype=float)


def _spikes(federation: Federation, file: Path) -> Path:
    return draw_spikes(file, {federation.algorithm.name: spikes(federation)})


def _collapse(federation: Federation, file: Path) -> Path:
    name, rounds = federation.algorithm.name, series(federation, "round")
    losses, norms = ({name: Line(rounds, series(federation, what))} for what in ("loss", "norm"))
    found = collapse(name, federation.history_, federation.plan_.metric.higher_is_better)
    at = None if found is None or found.kind != "collapse" else found.round
    return draw_collapse(file, losses, norms, {} if at is None else {name: at})


def _walk(federation: Federation, file: Path) -> Path:
    name, found = federation.algorithm.name, walk(federation)
    return draw_walk(file, {name: Line(found.shares, found.mean)}, {name: found.mean_previous}, found.metric)


def _hyper(federation: Federation, file: Path) -> Path:
    entries = (item for entry in federation.history_ for item in entry.items())
    names = dict.fromkeys(name for name, value in entries if isinstance(value, int | float))
    if "lr" not in names:
        raise SettingError(f"There is no path to draw: {federation.algorithm.name} was not tuned in any round.")
    return draw_hyper(file, {federation.algorithm.name: [{name: series(federation, name) for name in names}]})


def _presence(federation: Federation, file: Path) -> Path:
    letters = [entry["presence"] for entry in federation.history_ if "presence" in entry]
    if not letters:
        raise SettingError("There is no presence to draw: no round was run, or there are too many parties to show.")
    scored = [entry for entry in federation.history_ if "centers" in entry]
    at = np.array([entry["round"] for entry in scored], dtype=float)
    scores = np.array([entry["centers"] for entry in scored], dtype=float).reshape(len(scored), len(letters[0]))
    shown = Presence(federation.people.names, letters, at, scores)
    return draw_presence(file, {federation.algorithm.name: shown}, federation.plan_.metric.name)


def _rewards(federation: Federation, file: Path) -> Path:
    known = [entry for entry in federation.history_ if "steps" in entry]  # a tuner has rewards, too
    if not known:
        raise SettingError("There are no rewards to draw: no round was run by agents or desks.")
    steps = np.cumsum([entry["steps"] for entry in known])
    rewards = {
        name: np.array([entry["rewards"].get(name, np.nan) for entry in known], dtype=float)
        for name in federation.people.names
        if all("rewards" in entry for entry in known)
    }
    rewards = rewards or {"all": series(federation, "reward")[-len(known) :]}  # there are too many to show each
    merged = federation.algorithm.advance is not stay
    who = DESKS if are_desks(federation.people) else AGENTS
    return draw_rewards(file, rewards, steps, federation.algorithm.name, merged, who)


def _portfolio(federation: Federation, file: Path) -> Path:
    desks = desks_of(federation)
    terms = terms_of(desks)
    walks = {
        federation.algorithm.name: paths(federation, federation.people.names),
        UNIFORM: uniform(*terms),
        HOLD: hold(*terms),
    }
    means = {name: values(path.growth).mean(0) for name, path in walks.items()}
    return draw_values(file, means, [str(day) for day in desks[0].dates])


def _weights(federation: Federation, file: Path) -> Path:
    desks = desks_of(federation)[:MOST]
    assets = {f"desk {desk.name}": desk.assets for desk in desks}
    held = dict(zip(assets, paths(federation, [desk.name for desk in desks]).weights, strict=True))
    return draw_weights(file, held, assets, [str(day) for day in desks[0].dates])


def _universes(federation: Federation, file: Path) -> Path:
    return universes(federation).plot(file)


_KINDS: dict[str, Callable[[Federation, Path], Path]] = {
    "spikes": _spikes,
    "collapse": _collapse,
    "walk": _walk,
    "hyper": _hyper,
    "presence": _presence,
    "rewards": _rewards,
    "portfolio": _portfolio,
    "weights": _weights,
    "universes": _universes,
}
