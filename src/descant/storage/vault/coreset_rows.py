"""Rows that leave a party: how many may, how they become bytes, and what is checked when they are read again.

No message shows a value: what is wrong with a coreset is said in names, counts and shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ...core.settings import check, setting
from ...errors import VaultError
from ...parties.party import Form
from ...rounds.validation import finite

_HEADER = 1024  # bytes that safetensors may use to say where three tensors lie


class Rows(NamedTuple):
    """A coreset: m rows, their targets, and what each of them counts for."""

    x: Tensor  # [m, ...]
    y: Tensor  # [m, ...]
    weights: Tensor  # [m] float64


@dataclass(frozen=True)
class Agreed:
    """How much of its data a party lets go in a run, in all its coresets together; where both are given, both hold.

    Above 0 it is one row at least; 0 is none: whoever agrees to that trains with the others and is not stood in for.
    """

    share: float | None = setting(0.05, "most rows that ever leave, as a share of the party's", least=0, most=1)
    count: int | None = setting(None, "most rows that ever leave", least=0, whole=True)

    def most(self, samples: int) -> int:
        """How many of a party's rows may leave.

        >>> Agreed().most(1000), Agreed(share=1, count=30).most(1000), Agreed().most(3), Agreed(share=0).most(3)
        (50, 30, 1, 0)
        """
        check(self)
        shared = samples if self.share is None else math.ceil(self.share * samples - 1e-9)
        shared = max(shared, 1) if self.share else shared
        return min(shared, samples if self.count is None else self.count)


def check_agreed(party: str, rows: int, samples: int, agreed: Agreed, left: int = 0) -> None:
    """Refuse, on the party's side and before anything is sealed, to let more rows go than was agreed.

    `left` are others that have gone before: what left once stays known, whatever takes its place.
    """
    most = agreed.most(samples)
    if rows + left > most:
        more = f" that have not left before, beside {left} that have" if left else ""
        raise VaultError(
            f"The coreset of party {party!r} has {rows} of its {samples} rows{more}, and at most {most} were agreed "
            "on. No row of it has left: choose fewer rows, or let the party agree to more."
        )


@dataclass(frozen=True)
class Expected:
    """What the run knows of a coreset before it is opened."""

    form: Form  # of one row
    rows: int  # at most
    classes: int | None = None  # labels are 0 to classes - 1; None: targets are no labels

    @property
    def size(self) -> int:
        """The most bytes that such rows take."""
        x, y = (
            math.prod(shape) * dtype.itemsize
            for shape, dtype in ((self.form.x_shape, self.form.x_dtype), (self.form.y_shape, self.form.y_dtype))
        )
        return self.rows * (x + y + 8) + _HEADER

    def check_size(self, size: int, party: str) -> None:
        """Refuse more bytes than that, before they are looked at."""
        if size > self.size:
            raise VaultError(
                f"The coreset of party {party!r} has {size} bytes. The {self.rows} rows that were agreed on take at "
                f"most {self.size}. It is refused: let the party seal a smaller one."
            )


def pack(rows: Rows) -> bytes:
    """Rows as safetensors.

    >>> rows = Rows(torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64))
    >>> form = Form((3,), torch.float32, (), torch.int64)
    >>> unpack(pack(rows), Expected(form, rows=2, classes=2), "a").y
    tensor([0, 1])
    """
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in rows._asdict().items()})


def unpack(plain: bytes, expected: Expected, party: str) -> Rows:
    """The rows in these bytes, if they are what the run can train on and no more than was agreed."""
    what = f"The coreset of party {party!r}"
    expected.check_size(len(plain), party)
    try:
        tensors = load(plain)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise VaultError(f"{what} is sealed as it should be, but does not hold tensors. It is refused.") from None
    if tensors.keys() != set(Rows._fields):
        raise VaultError(f"{what} holds {len(tensors)} tensors. It must hold {', '.join(Rows._fields)}, no other.")
    rows = Rows(**tensors)
    _check_form(what, rows, expected)
    _check_values(what, rows, expected.classes)
    return rows


def _check_form(what: str, rows: Rows, expected: Expected) -> None:
    form, m = expected.form, len(rows.weights) if rows.weights.ndim else 0
    if not 1 <= m <= expected.rows:
        raise VaultError(f"{what} has {m} rows. From 1 to {expected.rows} were agreed on.")
    for name, tensor, shape, dtype in (
        ("x", rows.x, form.x_shape, form.x_dtype),
        ("y", rows.y, form.y_shape, form.y_dtype),
        ("weights", rows.weights, (), torch.float64),
    ):
        if tuple(tensor.shape) != (m, *shape) or tensor.dtype != dtype:
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise VaultError(f"{what} has {name} {found}. The model takes {[m, *shape]} of {dtype}. It is refused.")


def _check_values(what: str, rows: Rows, classes: int | None) -> None:
    for name, tensor in rows._asdict().items():
        if tensor.is_floating_point() and not finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise VaultError(f"{what} has {bad} numbers in {name} that are not finite. It is refused.")
    if bool((rows.weights < 0).any()) or not float(rows.weights.sum()) > 0:
        raise VaultError(f"{what} has weights below 0, or none above it. It is refused.")
    if classes is not None and not rows.y.is_floating_point():
        bad = int(((rows.y < 0) | (rows.y >= classes)).sum())
        if bad:
            raise VaultError(
                f"{what} has {bad} labels that the model does not know: they must be 0 to {classes - 1}. It is refused."
            )
