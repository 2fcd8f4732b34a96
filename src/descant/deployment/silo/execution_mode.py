"""How a team's own model is computed: the server names a way that it has tried with its own, and the two may differ."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ...core.messages import Task
from ...models.flat import MODULE_LOCK
from ...rounds.plan import Plan

_CACHE_KEY = "silo execution modes"
_ASSUMED_PARTIES = (
    2  # parties, so that no way is left out because somebody works alone: the server knows how many there are
)


def with_supported_mode(plan: Plan, task: Task, has_failed: bool = False) -> Task:
    """The task, by a way that the team's own model goes: found once the server's has failed, and kept from then on.

    Models with tensors of the same names and shapes can be written otherwise: with layers of the team's own, or with
    dropout.
    """
    requested_mode = task.settings.get("execution_mode")
    cached_modes = plan.net.solver_cache.setdefault(_CACHE_KEY, {})
    if has_failed:
        with suppress(Exception):  # what fails by every way is said already
            cached_modes[requested_mode] = _supported_mode(plan, requested_mode)
    mode = cached_modes.get(requested_mode, requested_mode)
    return task if mode == requested_mode else replace(task, settings={**task.settings, "execution_mode": mode})


def _supported_mode(plan: Plan, requested_mode: object) -> object:
    """The same way, where the model goes by it, or the best one that it goes by."""
    [party] = plan.population.values()
    with MODULE_LOCK, torch.inference_mode(False), torch.enable_grad():
        failures_by_mode = plan.solver.execution_modes(plan.net, plan.loss, plan.terms, party, _ASSUMED_PARTIES)
    return (
        next(one for one, reason in failures_by_mode.items() if not reason)
        if failures_by_mode.get(str(requested_mode))
        else requested_mode
    )
