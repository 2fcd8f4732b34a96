"""What a Ray worker runs, and the form in which things go to it and come back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...parties import Population
from ...rounds.party_side import perform_tasks
from ...rounds.plan import Plan
from ...storage.party_state import total_bytes
from ..processes.engine_worker import (
    WORKER_ENV,
    plan_fingerprint,
    read_plan,
    read_population,
    read_tasks,
    write_task_results,
)
from .remote_state import MIN_REMOTE_BYTES

_MAX_PLANS = 4  # that a worker has at once
RayPayload: TypeAlias = tuple[str, dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]]
"""JSON, and by name an array's type, its shape and its bytes."""


def pack_for_ray(fields: Any, arrays: Mapping[str, Tensor]) -> RayPayload:
    """JSON values and arrays in a form that Ray carries with one copy: into its shared memory."""
    found = {}
    for name, tensor in arrays.items():
        flat = tensor.detach().contiguous().view(-1)
        numbers = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)  # torch sees no bytes in none
        found[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbers)
    return json.dumps(fields), found


def unpack_from_ray(payload: RayPayload) -> tuple[Any, dict[str, Tensor]]:
    """What :func:`packed` put in; the arrays are copies, because Ray's own cannot be written to."""
    text, held = payload
    found = {}
    for name, (dtype, shape, numbers) in held.items():
        kind = getattr(torch, dtype)
        flat = torch.from_numpy(numbers.copy()).view(kind) if len(numbers) else torch.empty(0, dtype=kind)
        found[name] = flat.view(shape)
    return json.loads(text), found


class RayWorker:
    """Does pieces of the plans that it was asked about last, each made when it is first needed."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        os.environ[WORKER_ENV] = "1"
        sys.path += [folder for folder in path if folder not in sys.path]
        torch.set_num_threads(threads)
        self._plans: dict[str, Plan] = {}  # the one that was asked about last is last
        self._population: tuple[str, Population] | None = None  # made last: plans that are compared share them

    def fingerprint(self, plan: str, plan_payload: RayPayload) -> str:
        return plan_fingerprint(self._plan(plan, plan_payload))

    def run_tasks(
        self,
        plan: str,
        plan_payload: RayPayload,
        shared: RayPayload,
        piece_payload: RayPayload,
        *remote_states: RayPayload,
    ) -> Any:
        """The answers to the tasks of a piece; where memories are to stay, each that does is handed to Ray by itself.

        It keeps what is handed over on this machine. ``far`` are those that stayed here or elsewhere before.
        """
        fields, arrays = unpack_from_ray(piece_payload)
        tasks_and_states = read_tasks(
            fields, {**unpack_from_ray(shared)[1], **arrays}, (unpack_from_ray(parcel)[1] for parcel in remote_states)
        )
        results = perform_tasks(self._plan(plan, plan_payload), *tasks_and_states)
        remote_kept = [
            memory if fields["stay"] and memory and total_bytes(memory) >= MIN_REMOTE_BYTES else None
            for _, memory in results
        ]
        answers, tensor_pool = write_task_results(
            [(results[k][0], results[k][1] if stays is None else None) for k, stays in enumerate(remote_kept)]
        )
        parcel = pack_for_ray(
            {"answers": answers, "stays": [total_bytes(memory or {}) for memory in remote_kept]}, tensor_pool.arrays
        )
        return (
            [parcel, *(memory and pack_for_ray(None, memory) for memory in remote_kept)] if fields["stay"] else parcel
        )

    def _plan(self, name: str, plan_payload: RayPayload) -> Plan:
        plan = self._plans.pop(name, None)
        if plan is None:
            text, arrays = unpack_from_ray(plan_payload)
            key = json.dumps(text["data"])
            if self._population is None or self._population[0] != key or arrays:  # arrays are not in the key
                self._population = (key, read_population(text, arrays))
            plan = read_plan(text, arrays, self._population[1])
        self._plans = {**dict(list(self._plans.items())[1 - _MAX_PLANS :]), name: plan}
        return plan
