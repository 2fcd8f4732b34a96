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

from ...core.settings import check_settings, setting
from ...errors import VaultError
from ...parties.party import SampleSpec
from ...rounds.validation import is_finite

_HEADER_BYTES = 1024  # bytes that safetensors may use to say where three tensors lie


class CoresetRows(NamedTuple):
    """A coreset: m rows, their targets, and what each of them counts for."""

    x: Tensor  # [m, ...]
    y: Tensor  # [m, ...]
    weights: Tensor  # [m] float64


@dataclass(frozen=True)
class CoresetLimit:
    """How much of its data a party lets go in a run, in all its coresets together; where both are given, both hold.

    Above 0 it is one row at least; 0 is none: whoever agrees to that trains with the others and is not stood in for.
    """

    share: float | None = setting(0.05, "most rows that ever leave, as a share of the party's", least=0, most=1)
    count: int | None = setting(None, "most rows that ever leave", least=0, whole=True)

    def max_rows(self, samples: int) -> int:
        """How many of a party's rows may leave.

        >>> Agreed().most(1000), Agreed(share=1, count=30).most(1000), Agreed().most(3), Agreed(share=0).most(3)
        (50, 30, 1, 0)
        """
        check_settings(self)
        share_limit = samples if self.share is None else math.ceil(self.share * samples - 1e-9)
        share_limit = max(share_limit, 1) if self.share else share_limit
        return min(share_limit, samples if self.count is None else self.count)


def check_coreset_limit(
    party: str, rows: int, samples: int, coreset_limit: CoresetLimit, deposited_rows: int = 0
) -> None:
    """Refuse, on the party's side and before anything is sealed, to let more rows go than was agreed.

    `left` are others that have gone before: what left once stays known, whatever takes its place.
    """
    max_rows = coreset_limit.max_rows(samples)
    if rows + deposited_rows > max_rows:
        more = f" that have not left before, beside {deposited_rows} that have" if deposited_rows else ""
        raise VaultError(
            f"The coreset of party {party!r} has {rows} of its {samples} rows{more}, and at most {max_rows} were agreed "
            "on. No row of it has left: choose fewer rows, or let the party agree to more."
        )


@dataclass(frozen=True)
class ExpectedCoreset:
    """What the run knows of a coreset before it is opened."""

    sample_spec: SampleSpec  # of one row
    max_rows: int  # at most
    classes: int | None = None  # labels are 0 to classes - 1; None: targets are no labels

    @property
    def max_bytes(self) -> int:
        """The most bytes that such rows take."""
        x, y = (
            math.prod(shape) * dtype.itemsize
            for shape, dtype in (
                (self.sample_spec.x_shape, self.sample_spec.x_dtype),
                (self.sample_spec.y_shape, self.sample_spec.y_dtype),
            )
        )
        return self.max_rows * (x + y + 8) + _HEADER_BYTES

    def check_size(self, size: int, party: str) -> None:
        """Refuse more bytes than that, before they are looked at."""
        if size > self.max_bytes:
            raise VaultError(
                f"The coreset of party {party!r} has {size} bytes. The {self.max_rows} rows that were agreed on take at "
                f"most {self.max_bytes}. It is refused: let the party seal a smaller one."
            )


def pack_rows(rows: CoresetRows) -> bytes:
    """Rows as safetensors.

    >>> rows = Rows(torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64))
    >>> form = Form((3,), torch.float32, (), torch.int64)
    >>> unpack(pack(rows), Expected(form, rows=2, classes=2), "a").y
    tensor([0, 1])
    """
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in rows._asdict().items()})


def unpack_rows(plaintext: bytes, expected: ExpectedCoreset, party: str) -> CoresetRows:
    """The rows in these bytes, if they are what the run can train on and no more than was agreed."""
    label = f"The coreset of party {party!r}"
    expected.check_size(len(plaintext), party)
    try:
        tensors = load(plaintext)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise VaultError(f"{label} is sealed as it should be, but does not hold tensors. It is refused.") from None
    if tensors.keys() != set(CoresetRows._fields):
        raise VaultError(
            f"{label} holds {len(tensors)} tensors. It must hold {', '.join(CoresetRows._fields)}, no other."
        )
    rows = CoresetRows(**tensors)
    _check_shapes(label, rows, expected)
    _check_values(label, rows, expected.classes)
    return rows


def _check_shapes(label: str, rows: CoresetRows, expected: ExpectedCoreset) -> None:
    sample_spec = expected.sample_spec
    m = len(rows.weights) if rows.weights.ndim else 0
    if not 1 <= m <= expected.max_rows:
        raise VaultError(f"{label} has {m} rows. From 1 to {expected.max_rows} were agreed on.")
    for name, tensor, shape, dtype in (
        ("x", rows.x, sample_spec.x_shape, sample_spec.x_dtype),
        ("y", rows.y, sample_spec.y_shape, sample_spec.y_dtype),
        ("weights", rows.weights, (), torch.float64),
    ):
        if tuple(tensor.shape) != (m, *shape) or tensor.dtype != dtype:
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise VaultError(f"{label} has {name} {found}. The model takes {[m, *shape]} of {dtype}. It is refused.")


def _check_values(label: str, rows: CoresetRows, classes: int | None) -> None:
    for name, tensor in rows._asdict().items():
        if tensor.is_floating_point() and not is_finite(tensor):
            invalid_count = int((~torch.isfinite(tensor)).sum())
            raise VaultError(f"{label} has {invalid_count} numbers in {name} that are not finite. It is refused.")
    if bool((rows.weights < 0).any()) or not float(rows.weights.sum()) > 0:
        raise VaultError(f"{label} has weights below 0, or none above it. It is refused.")
    if classes is not None and not rows.y.is_floating_point():
        invalid_count = int(((rows.y < 0) | (rows.y >= classes)).sum())
        if invalid_count:
            raise VaultError(
                f"{label} has {invalid_count} labels that the model does not know: they must be 0 to {classes - 1}. It is refused."
            )
