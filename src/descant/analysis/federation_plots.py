"""Pictures of one federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..algorithms.components import keep_global_model
from ..core.settings import unknown_name_error
from ..errors import SettingError
from ..portfolio import buy_and_hold, uniform_rebalancing
from ..portfolio.performance_measures import portfolio_values
from ..reporting.figure import BandLine, Numbers, with_footnote
from ..reporting.participation_timeline import ParticipationTimeline, draw_participation
from ..reporting.plots import (
    AGENT_LABELS,
    DESK_LABELS,
    draw_collapse,
    draw_hyperparameters,
    draw_interpolation,
    draw_rewards,
    draw_spikes,
)
from ..reporting.portfolio_plots import HOLD, MAX_PANELS, UNIFORM, draw_values, draw_weights
from ..training.backtest_evaluation import backtest_inputs
from .asset_universes import compare_universes
from .desk_results import are_desks, backtest_paths, desks_of
from .findings import data_note_sentence, detect_collapse
from .interpolation import interpolate

if TYPE_CHECKING:
    from ..federation import Federation


def draw_federation_plot(federation: Federation, kind: str, file: str | Path) -> Path:
    """Draw one of the pictures of a federation into a PNG file."""
    if kind not in _KINDS:
        raise unknown_name_error("picture of a federation", kind, _KINDS)
    with with_footnote(data_note_sentence(federation.population.note)):
        return _KINDS[kind](federation, Path(file))


def spikes(federation: Federation) -> BandLine:
    """Return by round how far aggregation moves the parties' models (Fed+ v2, fig. 1a): mean and standard deviation."""
    rounds, mean, sd = (history_series(federation, name) for name in ("round", "jump", "jump_sd"))
    return BandLine(rounds, mean, mean - sd, high=mean + sd)


def history_series(federation: Federation, name: str) -> Numbers:
    """Return one number per round from the history; nan where it is missing."""
    return np.array([entry.get(name, np.nan) for entry in federation.history_], dtype=float)


def _spikes(federation: Federation, file: Path) -> Path:
    return draw_spikes(file, {federation.algorithm.name: spikes(federation)})


def _collapse(federation: Federation, file: Path) -> Path:
    name = federation.algorithm.name
    rounds = history_series(federation, "round")
    losses, norms = ({name: BandLine(rounds, history_series(federation, what))} for what in ("loss", "norm"))
    finding = detect_collapse(name, federation.history_, federation.plan_.metric.higher_is_better)
    at = None if finding is None or finding.kind != "collapse" else finding.round
    return draw_collapse(file, losses, norms, collapse_rounds={} if at is None else {name: at})


def _interpolation(federation: Federation, file: Path) -> Path:
    name = federation.algorithm.name
    result = interpolate(federation)
    return draw_interpolation(
        file, {name: BandLine(result.shares, result.mean)}, {name: result.mean_previous}, metric=result.metric
    )


def _hyper(federation: Federation, file: Path) -> Path:
    entries = (item for entry in federation.history_ for item in entry.items())
    names = dict.fromkeys(name for name, value in entries if isinstance(value, int | float))
    if "lr" not in names:
        raise SettingError(
            f"There are no hyperparameters to draw: {federation.algorithm.name} was not tuned in any round."
        )
    return draw_hyperparameters(
        file, {federation.algorithm.name: [{name: history_series(federation, name) for name in names}]}
    )


def _presence(federation: Federation, file: Path) -> Path:
    presence_codes = [entry["presence"] for entry in federation.history_ if "presence" in entry]
    if not presence_codes:
        raise SettingError(
            "There is no participation to draw: no round was run, or there are too many parties to show."
        )
    scored = [entry for entry in federation.history_ if "global_model_scores" in entry]
    at = np.array([entry["round"] for entry in scored], dtype=float)
    scores = np.array([entry["global_model_scores"] for entry in scored], dtype=float).reshape(
        len(scored), len(presence_codes[0])
    )
    timeline = ParticipationTimeline(federation.population.names, presence_codes, at, scores=scores)
    return draw_participation(file, {federation.algorithm.name: timeline}, federation.plan_.metric.name)


def _rewards(federation: Federation, file: Path) -> Path:
    agent_entries = [entry for entry in federation.history_ if "steps" in entry]  # a tuner has rewards but no steps
    if not agent_entries:
        raise SettingError("There are no rewards to draw: no round was run by agents or desks.")
    steps = np.cumsum([entry["steps"] for entry in agent_entries])
    rewards = {
        name: np.array([entry["rewards"].get(name, np.nan) for entry in agent_entries], dtype=float)
        for name in federation.population.names
        if all("rewards" in entry for entry in agent_entries)
    }
    if not rewards:  # with many agents, the history holds their mean only
        rewards = {"all": history_series(federation, "reward")[-len(agent_entries) :]}
    aggregates = federation.algorithm.server_update is not keep_global_model
    earners = DESK_LABELS if are_desks(federation.population) else AGENT_LABELS
    return draw_rewards(file, rewards, steps, method=federation.algorithm.name, aggregates=aggregates, labels=earners)


def _portfolio(federation: Federation, file: Path) -> Path:
    desks = desks_of(federation)
    terms = backtest_inputs(desks)
    walks = {
        federation.algorithm.name: backtest_paths(federation, federation.population.names),
        UNIFORM: uniform_rebalancing(*terms),
        HOLD: buy_and_hold(*terms),
    }
    means = {name: portfolio_values(path.growth).mean(0) for name, path in walks.items()}
    return draw_values(file, means, [str(day) for day in desks[0].test_dates])


def _weights(federation: Federation, file: Path) -> Path:
    desks = desks_of(federation)[:MAX_PANELS]
    assets = {f"desk {desk.name}": desk.assets for desk in desks}
    held = dict(zip(assets, backtest_paths(federation, [desk.name for desk in desks]).weights, strict=True))
    return draw_weights(file, held, assets, dates=[str(day) for day in desks[0].test_dates])


def _universes(federation: Federation, file: Path) -> Path:
    return compare_universes(federation).plot(file)


_KINDS: dict[str, Callable[[Federation, Path], Path]] = {
    "spikes": _spikes,
    "collapse": _collapse,
    "interpolation": _interpolation,
    "hyperparameters": _hyper,
    "presence": _presence,
    "rewards": _rewards,
    "portfolio": _portfolio,
    "weights": _weights,
    "universes": _universes,
}
