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

from ...parties import People
from ...rounds.party_side import work
from ...rounds.plan import Plan
from ...storage.party_state import size
from ..processes.engine_worker import INSIDE, asked, made, mark_of, people_of, told
from .remote_state import LARGE

_PLANS = 4  # that a worker has at once
Parcel: TypeAlias = tuple[str, dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]]
"""JSON, and by name an array's type, its shape and its bytes."""


def packed(fields: Any, arrays: Mapping[str, Tensor]) -> Parcel:
    """JSON values and arrays in a form that Ray carries with one copy: into its shared memory."""
    found = {}
    for name, tensor in arrays.items():
        flat = tensor.detach().contiguous().view(-1)
        numbers = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)  # torch sees no bytes in none
        found[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbers)
    return json.dumps(fields), found


def unpacked(parcel: Parcel) -> tuple[Any, dict[str, Tensor]]:
    """What :func:`packed` put in; the arrays are copies, because Ray's own cannot be written to."""
    text, held = parcel
    found = {}
    for name, (dtype, shape, numbers) in held.items():
        kind = getattr(torch, dtype)
        flat = torch.from_numpy(numbers.copy()).view(kind) if len(numbers) else torch.empty(0, dtype=kind)
        found[name] = flat.view(shape)
    return json.loads(text), found


class Hand:
    """Does pieces of the plans that it was asked about last, each made when it is first needed."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        os.environ[INSIDE] = "1"
        sys.path += [folder for folder in path if folder not in sys.path]
        torch.set_num_threads(threads)
        self._plans: dict[str, Plan] = {}  # the one that was asked about last is last
        self._people: tuple[str, People] | None = None  # made last: plans that are compared share them

    def mark(self, plan: str, spelled: Parcel) -> str:
        return mark_of(self._plan(plan, spelled))

    def work(self, plan: str, spelled: Parcel, shared: Parcel, own: Parcel, *far: Parcel) -> Any:
        """The answers to the tasks of a piece; where memories are to stay, each that does is handed to Ray by itself.

        It keeps what is handed over on this machine. ``far`` are those that stayed here or elsewhere before.
        """
        fields, arrays = unpacked(own)
        before = asked(fields, {**unpacked(shared)[1], **arrays}, (unpacked(parcel)[1] for parcel in far))
        done = work(self._plan(plan, spelled), *before)
        kept = [memory if fields["stay"] and memory and size(memory) >= LARGE else None for _, memory in done]
        answers, crate = told([(done[k][0], done[k][1] if stays is None else None) for k, stays in enumerate(kept)])
        parcel = packed({"answers": answers, "stays": [size(memory or {}) for memory in kept]}, crate.arrays)
        return [parcel, *(memory and packed(None, memory) for memory in kept)] if fields["stay"] else parcel

    def _plan(self, name: str, spelled: Parcel) -> Plan:
        plan = self._plans.pop(name, None)
        if plan is None:
            text, arrays = unpacked(spelled)
            key = json.dumps(text["data"])
            if self._people is None or self._people[0] != key or arrays:  # arrays are not in the key
                self._people = (key, people_of(text, arrays))
            plan = made(text, arrays, self._people[1])
        self._plans = {**dict(list(self._plans.items())[1 - _PLANS :]), name: plan}
        return plan
