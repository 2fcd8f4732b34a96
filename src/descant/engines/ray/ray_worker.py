"""The Ray actor that runs pieces, and the payload format between it and the engine."""

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
from ...storage.party_store import total_bytes
from ..processes.engine_worker import (
    WORKER_ENV,
    plan_fingerprint,
    read_plan,
    read_population,
    read_tasks,
    write_task_results,
)
from .remote_state import MIN_REMOTE_BYTES

_MAX_PLANS = 4  # per worker; the least recently used is dropped
RayPayload: TypeAlias = tuple[str, dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]]
"""JSON text, and the type, shape and bytes of each array by name."""


def pack_for_ray(fields: Any, arrays: Mapping[str, Tensor]) -> RayPayload:
    """Return JSON values and arrays in a form that Ray copies only once, into its shared memory."""
    packed = {}
    for name, tensor in arrays.items():
        flat = tensor.detach().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)  # torch cannot view an empty one
        packed[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    return json.dumps(fields), packed


def unpack_from_ray(payload: RayPayload) -> tuple[Any, dict[str, Tensor]]:
    """Return the values and arrays from :func:`pack_for_ray`; arrays are copied because Ray's are read-only."""
    text, packed = payload
    arrays = {}
    for name, (dtype_name, shape, data) in packed.items():
        dtype = getattr(torch, dtype_name)
        flat = torch.from_numpy(data.copy()).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
        arrays[name] = flat.view(shape)
    return json.loads(text), arrays


class RayWorker:
    """A worker process: it runs pieces of rounds, and keeps the plans used last, each built when first needed."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        os.environ[WORKER_ENV] = "1"
        sys.path += [folder for folder in path if folder not in sys.path]
        torch.set_num_threads(threads)
        self._plans: dict[str, Plan] = {}  # in the order of their last use
        self._population: tuple[str, Population] | None = None  # made last; the plans of a comparison share it

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
        """Return the results of a piece.

        With "keep_remote", each large party state is an object of its own, which Ray keeps on this machine.
        ``remote_states`` are the states that were kept before, here or on other machines.
        """
        fields, arrays = unpack_from_ray(piece_payload)
        tasks, party_states = read_tasks(
            fields, {**unpack_from_ray(shared)[1], **arrays}, (unpack_from_ray(state)[1] for state in remote_states)
        )
        results = perform_tasks(self._plan(plan, plan_payload), tasks, party_states)
        kept_states = [
            state if fields["keep_remote"] and state and total_bytes(state) >= MIN_REMOTE_BYTES else None
            for _, state in results
        ]
        encoded, pool = write_task_results(
            [
                (reply, state if kept is None else None)
                for (reply, state), kept in zip(results, kept_states, strict=True)
            ]
        )
        remote_bytes = [total_bytes(state or {}) for state in kept_states]
        payload = pack_for_ray({"results": encoded, "remote_bytes": remote_bytes}, pool.arrays)
        if not fields["keep_remote"]:
            return payload
        return [payload, *(state and pack_for_ray(None, state) for state in kept_states)]

    def _plan(self, name: str, plan_payload: RayPayload) -> Plan:
        plan = self._plans.pop(name, None)
        if plan is None:
            encoded, arrays = unpack_from_ray(plan_payload)
            data_key = json.dumps(encoded["data"])
            if self._population is None or self._population[0] != data_key or arrays:  # arrays are not in the key
                self._population = (data_key, read_population(encoded, arrays))
            plan = read_plan(encoded, arrays, self._population[1])
        self._plans = {**dict(list(self._plans.items())[1 - _MAX_PLANS :]), name: plan}
        return plan
