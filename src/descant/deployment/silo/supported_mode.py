"""The execution mode of a silo: the requested one, or another if the silo's model does not support that."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ...core.messages import Task
from ...models.flat import MODULE_LOCK
from ...rounds.plan import Plan

_CACHE_KEY = "silo execution modes"
_ASSUMED_PARTIES = 2  # more than one, so that no mode is excluded for a lone party: the server knows the real count


def with_supported_mode(plan: Plan, task: Task, has_failed: bool = False) -> Task:
    """Return the task with an execution mode that the silo's model supports.

    The mode is determined once, after the requested one has failed, and cached. Models with tensors of the same names
    and shapes can differ in code: they can have custom layers, or dropout.
    """
    requested_mode = task.settings.get("execution_mode")
    cached_modes = plan.net.solver_cache.setdefault(_CACHE_KEY, {})
    if has_failed:
        with suppress(Exception):  # the failure was already reported
            cached_modes[requested_mode] = _supported_mode(plan, requested_mode)
    mode = cached_modes.get(requested_mode, requested_mode)
    return task if mode == requested_mode else replace(task, settings={**task.settings, "execution_mode": mode})


def _supported_mode(plan: Plan, requested_mode: object) -> object:
    """Return the requested mode if the model supports it, else the best mode that it supports."""
    [party] = plan.population.values()
    with MODULE_LOCK, torch.inference_mode(False), torch.enable_grad():
        failures_by_mode = plan.solver.execution_modes(plan.net, plan.loss, plan.terms, party, _ASSUMED_PARTIES)
    return (
        next(one for one, reason in failures_by_mode.items() if not reason)
        if failures_by_mode.get(str(requested_mode))
        else requested_mode
    )
