"""What a model, and a coreset left beside it, give away about who was trained on.

The attacker holds a row and asks whether the party trained on it. With the model alone it guesses from the row's loss:
S. Yeom et al., "Privacy risk in machine learning: analyzing the connection to overfitting" (2018). With the coreset in
hand it looks the row up first: what is in there was trained on, for certain. The figures are a lower bound: a better
attacker (one that trains models of its own, or measures distances to the coreset) learns at least as much. They mean
something only where the party's test rows are drawn like its training rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.algorithm import Loss
from ..coresets.selection import Coreset
from ..errors import PartyError
from ..parties.party import Party
from ..reporting.figure import label, open_figure
from ..reporting.table import Table
from .scores import Numbers

FALSE_POSITIVE_RATE = 0.01  # of the rows that were not trained on, how many the attacker may accuse
BATCH_SIZE = 4096  # rows a forward pass
MODEL_ONLY = "the model"
MODEL_AND_CORESET = "the model and the coreset"


@dataclass(frozen=True)
class RocCurve:
    """How well a number tells members from others, at every threshold."""

    false_positive_rates: Numbers  # [thresholds] of the others, the share above it, from 0 to 1
    true_positive_rates: Numbers  # [thresholds] of the members, the share above it
    auc: float  # the probability that a member has the larger number; a tie counts half
    auc_error: float  # the standard error of auc (DeLong et al. 1988)

    @classmethod
    def from_scores(cls, members: Numbers, others: Numbers) -> RocCurve:
        """Of the attacker's numbers: the larger, the more likely a member.

        >>> found = Roc.of(np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0]))
        >>> round(found.auc, 3), round(found.caught(), 3)
        (0.75, 0.333)
        """
        thresholds = np.unique(np.concatenate([members, others]))[::-1]
        true, false = (np.r_[0.0, 1 - share_below(each, thresholds, "left")] for each in (members, others))
        win_rates = (share_below(others, members, "left") + share_below(others, members, "right")) / 2
        loss_rates = 1 - (share_below(members, others, "left") + share_below(members, others, "right")) / 2
        spread = [each.var(ddof=1) / len(each) if len(each) > 1 else math.nan for each in (win_rates, loss_rates)]
        return cls(false, true, float(win_rates.mean()), math.sqrt(sum(spread)))

    def recall_at(self, false_positive_rate: float = FALSE_POSITIVE_RATE) -> float:
        """Of the members, the share that is found when at most this share of the others is accused."""
        return float(self.true_positive_rates[self.false_positive_rates <= false_positive_rate].max())

    @property
    def advantage(self) -> float:
        """The most by which the share of members found exceeds that of others accused: 0 is guessing, 1 knowing."""
        return float((self.true_positive_rates - self.false_positive_rates).max())


def share_below(values: Numbers, thresholds: Numbers, side: str) -> Numbers:
    """The share of numbers that are below (or, to the right, at most) each of some others."""
    share: Numbers = np.searchsorted(np.sort(values), thresholds, side=side) / len(values)  # type: ignore[call-overload]
    return share


@dataclass(frozen=True)
class MembershipAttack:
    """An attack on the rows of one party, without its coreset and with it."""

    party: str
    members: int  # rows that it trained on
    non_members: int  # rows that it did not: its test set
    coreset_rows: int  # rows in the coreset
    roc_curves: dict[str, RocCurve]  # by what the attacker holds

    def table(self) -> Table:
        """One row for each thing that the attacker may hold."""
        rows: list[dict[str, Any]] = [
            {"attacker holds": held, "auc": roc.auc, "±": roc.auc_error, "found at 1 %": roc.recall_at()}
            | {"advantage": roc.advantage}
            for held, roc in self.roc_curves.items()
        ]
        found = f"{100 * rows[0]['found at 1 %']:.1f} % of the {self.members} rows"
        verdict = f"From {MODEL_ONLY} {found} that party {self.party!r} trained on are found at 1 % false alarms"
        if MODEL_AND_CORESET in self.roc_curves:
            verdict += f", and {100 * rows[1]['found at 1 %']:.1f} % with its coreset of {self.coreset_rows} rows"
        notes = ["A simple attack: a better one finds at least as much. AUC 0.5 and advantage 0 are guessing."]
        if self.non_members < 1 / FALSE_POSITIVE_RATE:
            notes.append(f"There are only {self.non_members} rows to raise a false alarm on: at 1 % none of them may.")
        return Table(tuple(rows[0]), rows, verdict + ".", notes=tuple(notes))

    def plot(self, file: str | Path) -> Path:
        """Draw the share of members found by the share of false alarms, on logarithmic axes, into a PNG file."""
        least = 0.5 / max(self.members, self.non_members)
        with open_figure(Path(file), self.roc_curves, integer_rounds=False) as ((axes,), styles):
            for held, roc in self.roc_curves.items():
                style = {name: styles[held][name] for name in ("color", "linestyle")}
                told = f"{held}\n(AUC {roc.auc:.3f} ± {roc.auc_error:.3f})"
                x, y = (np.maximum(each, least) for each in (roc.false_positive_rates, roc.true_positive_rates))
                axes.plot(x, y, drawstyle="steps-post", linewidth=1.8, label=told, **style)
            even = np.geomspace(least, 1, 50)
            axes.plot(even, even, color="#555555", linestyle=":", linewidth=1.4, label="guessing")
            axes.axvline(FALSE_POSITIVE_RATE, color="#bbbbbb", linewidth=1.0, zorder=0)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("rows not trained on, of which the attacker says that they were (share)")
            axes.set_ylabel("rows trained on that it finds (share)")
            axes.set_title(f"What leaving a coreset shows of party {label(self.party)}", loc="left")
        return Path(file)


def attack_membership(
    module: nn.Module,
    party: Party,
    coreset: Coreset | None = None,
    drop: Sequence[int] = (),
    loss: Loss = functional.cross_entropy,
) -> MembershipAttack:
    """How well training rows of a party are told from its test rows by a model's loss, and with its coreset in hand.

    ``drop`` are the columns that did not leave with the coreset: the attacker compares the others.

    >>> from descant.parties import Selection, digits
    >>> party = digits()["3"]
    >>> found = membership(nn.Linear(64, 10), party, Selection(share=0.1)(party, seed=0))
    >>> found.left, found.attacks["the model and the coreset"].caught() >= 6 / 64
    (6, True)
    """
    if not len(party.x_test):
        raise PartyError(
            f"Party {party.name!r} has no test set, so there are no rows that it did not train on. Give it one, say "
            "parties.from_arrays(..., test=0.2)."
        )
    members, non_members = (
        -row_losses(module, *rows, loss) for rows in ((party.x, party.y), (party.x_test, party.y_test))
    )
    attacks = {MODEL_ONLY: RocCurve.from_scores(members, non_members)}
    if coreset is not None:
        coreset_keys = set(row_keys(coreset.x, coreset.y, drop))
        in_coreset = [np.array([key in coreset_keys for key in row_keys(party.x, party.y, drop)])]
        in_coreset.append(np.array([key in coreset_keys for key in row_keys(party.x_test, party.y_test, drop)]))
        scores = [np.where(seen, np.inf, guess) for seen, guess in zip(in_coreset, (members, non_members), strict=True)]
        attacks[MODEL_AND_CORESET] = RocCurve.from_scores(*scores)
    coreset_rows = 0 if coreset is None else len(coreset.x)
    return MembershipAttack(party.name, len(members), len(non_members), coreset_rows=coreset_rows, roc_curves=attacks)


@torch.no_grad()
def row_losses(module: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> Numbers:
    """The loss of every row by itself; a loss that is no number looks least like a member's."""
    evaluated_module = copy.deepcopy(module).eval()  # the caller's stays in the mode that it is in
    found = []
    for begin in range(0, len(x), BATCH_SIZE):
        output = evaluated_module(x[begin : begin + BATCH_SIZE].clone())
        target = y[begin : begin + BATCH_SIZE]  # a module may write
        rows = (loss(output[i : i + 1], target[i : i + 1]) for i in range(len(target)))
        found += [float(torch.as_tensor(row).double().mean()) for row in rows]
    losses = np.array(found)
    return np.where(np.isnan(losses), np.inf, losses)


def row_keys(x: Tensor, y: Tensor, drop: Sequence[int]) -> list[bytes]:
    """Every row with its target as bytes, 0 in the columns that are dropped."""
    if drop:
        x = x.clone()
        x[:, list(drop)] = 0
    parts = [each.contiguous().reshape(len(each), -1).view(torch.uint8).numpy() for each in (x, y)]
    return [left.tobytes() + right.tobytes() for left, right in zip(*parts, strict=True)]
