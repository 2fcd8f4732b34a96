"""How a team's own model is computed: the server names a way that it has tried with its own, and the two may differ."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ...core.messages import Task
from ...models.flat import ONE_AT_A_TIME
from ...rounds.plan import Plan

_KNOWN = "ways of a silo"
_MANY = 2  # parties, so that no way is left out because somebody works alone: the server knows how many there are


def suited(plan: Plan, task: Task, failed: bool = False) -> Task:
    """The task, by a way that the team's own model goes: found once the server's has failed, and kept from then on.

    Models with tensors of the same names and shapes can be written otherwise: with layers of the team's own, or with
    dropout.
    """
    way, known = task.settings.get("way"), plan.net.kept.setdefault(_KNOWN, {})
    if failed:
        with suppress(Exception):  # what fails by every way is said already
            known[way] = _own(plan, way)
    own = known.get(way, way)
    return task if own == way else replace(task, settings={**task.settings, "way": own})


def _own(plan: Plan, way: object) -> object:
    """The same way, where the model goes by it, or the best one that it goes by."""
    [party] = plan.people.values()
    with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
        found = plan.solver.ways(plan.net, plan.loss, plan.terms, party, _MANY)
    return next(one for one, reason in found.items() if not reason) if found.get(str(way)) else way
