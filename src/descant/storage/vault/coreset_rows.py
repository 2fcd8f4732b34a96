"""Coreset rows: the limit on how many may leave a party, their encoding, and their checks when decoded.

No message shows a value: errors are described in names, counts and shapes.
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

_HEADER_BYTES = 1024  # bytes that safetensors may use to describe three tensors


class CoresetRows(NamedTuple):
    """A coreset: m rows, their targets and their weights."""

    x: Tensor  # [m, ...]
    y: Tensor  # [m, ...]
    weights: Tensor  # [m] float64


@dataclass(frozen=True)
class CoresetLimit:
    """Limit on the rows that leave a party in a run, over all its coresets; if both fields are given, both apply.

    A share above 0 allows at least one row. With 0 no row leaves: the party trains with the others and has no proxy.
    """

    share: float | None = setting(0.05, "maximum share of the party's rows that may ever leave", least=0, most=1)
    count: int | None = setting(None, "maximum number of rows that may ever leave", least=0, whole=True)

    def max_rows(self, samples: int) -> int:
        """Return how many of a party's rows may leave.

        >>> CoresetLimit().max_rows(1000), CoresetLimit(share=1, count=30).max_rows(1000)
        (50, 30)
        >>> CoresetLimit().max_rows(3), CoresetLimit(share=0).max_rows(3)
        (1, 0)
        """
        check_settings(self)
        share_limit = samples if self.share is None else math.ceil(self.share * samples - 1e-9)
        share_limit = max(share_limit, 1) if self.share else share_limit
        return min(share_limit, samples if self.count is None else self.count)


def check_coreset_limit(
    party: str, rows: int, samples: int, coreset_limit: CoresetLimit, deposited_rows: int = 0
) -> None:
    """Raise, at the party and before encryption, if more rows would leave than the limit allows.

    `deposited_rows` counts other rows that left before: they stay known, even when later rows replace them.
    """
    max_rows = coreset_limit.max_rows(samples)
    if rows + deposited_rows > max_rows:
        more = f" that have not left before, besides {deposited_rows} that have" if deposited_rows else ""
        raise VaultError(
            f"The coreset of party {party!r} has {rows} of its {samples} rows{more}. Its limit is {max_rows}. "
            "No row of it has left: choose fewer rows, or let the party raise its limit."
        )


@dataclass(frozen=True)
class ExpectedCoreset:
    """The properties that the run requires of a coreset before it is opened."""

    sample_spec: SampleSpec  # of one row
    max_rows: int
    classes: int | None = None  # labels are 0 to classes - 1; None: targets are not labels

    @property
    def max_bytes(self) -> int:
        """The maximum size of such rows in bytes."""
        x, y = (
            math.prod(shape) * dtype.itemsize
            for shape, dtype in (
                (self.sample_spec.x_shape, self.sample_spec.x_dtype),
                (self.sample_spec.y_shape, self.sample_spec.y_dtype),
            )
        )
        return self.max_rows * (x + y + 8) + _HEADER_BYTES

    def check_size(self, size: int, party: str) -> None:
        """Raise if there are more bytes than that, before reading them."""
        if size > self.max_bytes:
            raise VaultError(
                f"The coreset of party {party!r} has {size} bytes. The {self.max_rows} rows that are allowed take at "
                f"most {self.max_bytes}. It is rejected: let the party encrypt a smaller one."
            )


def pack_rows(rows: CoresetRows) -> bytes:
    """Encode rows as safetensors.

    >>> rows = CoresetRows(torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64))
    >>> expected = ExpectedCoreset(SampleSpec((3,), torch.float32, (), torch.int64), max_rows=2, classes=2)
    >>> unpack_rows(pack_rows(rows), expected, "a").y
    tensor([0, 1])
    """
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in rows._asdict().items()})


def unpack_rows(plaintext: bytes, expected: ExpectedCoreset, party: str) -> CoresetRows:
    """Decode rows, and raise unless the run can train on them and their number is within the limit."""
    label = f"The coreset of party {party!r}"
    expected.check_size(len(plaintext), party)
    try:
        tensors = load(plaintext)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise VaultError(f"{label} is encrypted correctly, but does not hold tensors. It is rejected.") from None
    if tensors.keys() != set(CoresetRows._fields):
        raise VaultError(
            f"{label} holds {len(tensors)} tensors. It must hold {', '.join(CoresetRows._fields)}, and no other."
        )
    rows = CoresetRows(**tensors)
    _check_shapes(label, rows, expected)
    _check_values(label, rows, expected.classes)
    return rows


def _check_shapes(label: str, rows: CoresetRows, expected: ExpectedCoreset) -> None:
    sample_spec = expected.sample_spec
    m = len(rows.weights) if rows.weights.ndim else 0
    if not 1 <= m <= expected.max_rows:
        raise VaultError(f"{label} has {m} rows. From 1 to {expected.max_rows} are allowed.")
    for name, tensor, shape, dtype in (
        ("x", rows.x, sample_spec.x_shape, sample_spec.x_dtype),
        ("y", rows.y, sample_spec.y_shape, sample_spec.y_dtype),
        ("weights", rows.weights, (), torch.float64),
    ):
        if tuple(tensor.shape) != (m, *shape) or tensor.dtype != dtype:
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise VaultError(f"{label} has {name} {found}. The model takes {[m, *shape]} of {dtype}. It is rejected.")


def _check_values(label: str, rows: CoresetRows, classes: int | None) -> None:
    for name, tensor in rows._asdict().items():
        if tensor.is_floating_point() and not is_finite(tensor):
            invalid_count = int((~torch.isfinite(tensor)).sum())
            raise VaultError(f"{label} has {invalid_count} numbers in {name} that are not finite. It is rejected.")
    if bool((rows.weights < 0).any()) or not float(rows.weights.sum()) > 0:
        raise VaultError(f"{label} has weights below 0, or none above 0. It is rejected.")
    if classes is not None and not rows.y.is_floating_point():
        invalid_count = int(((rows.y < 0) | (rows.y >= classes)).sum())
        if invalid_count:
            raise VaultError(
                f"{label} has {invalid_count} labels that the model does not know: they must be 0 to {classes - 1}. "
                "It is rejected."
            )
