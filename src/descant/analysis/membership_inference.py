"""Membership inference: information about training rows that a model, or a model and a coreset, reveal.

The attacker holds a row and asks whether the party trained on it. With the model alone it guesses from the row's loss:
S. Yeom et al., "Privacy risk in machine learning: analyzing the connection to overfitting" (2018). With the coreset it
looks the row up first: every row in the coreset was trained on. The figures are a lower bound: a better attacker (one
that trains shadow models, or measures distances to the coreset) learns at least as much. They are meaningful only if
the party's test rows are drawn like its training rows.
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

FALSE_POSITIVE_RATE = 0.01  # share of the non-members that the attacker may call members
BATCH_SIZE = 4096  # rows per forward pass
MODEL_ONLY = "the model"
MODEL_AND_CORESET = "the model and the coreset"


@dataclass(frozen=True)
class RocCurve:
    """The ROC curve of a score that separates members from non-members, at every threshold."""

    false_positive_rates: Numbers  # [thresholds] share of non-members above the threshold, 0 to 1
    true_positive_rates: Numbers  # [thresholds] share of members above the threshold
    auc: float  # probability that a member has the larger score; a tie counts half
    auc_error: float  # the standard error of auc (DeLong et al. 1988)

    @classmethod
    def from_scores(cls, members: Numbers, non_members: Numbers) -> RocCurve:
        """Return the curve of the attacker's scores; a larger score means a more likely member.

        >>> curve = RocCurve.from_scores(np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0]))
        >>> round(curve.auc, 3), round(curve.recall_at(), 3)
        (0.75, 0.333)
        """
        thresholds = np.unique(np.concatenate([members, non_members]))[::-1]
        true, false = (np.r_[0.0, 1 - share_below(each, thresholds, "left")] for each in (members, non_members))
        win_rates = (share_below(non_members, members, "left") + share_below(non_members, members, "right")) / 2
        loss_rates = 1 - (share_below(members, non_members, "left") + share_below(members, non_members, "right")) / 2
        spread = [each.var(ddof=1) / len(each) if len(each) > 1 else math.nan for each in (win_rates, loss_rates)]
        return cls(false, true, float(win_rates.mean()), math.sqrt(sum(spread)))

    def recall_at(self, false_positive_rate: float = FALSE_POSITIVE_RATE) -> float:
        """Return the share of members found at this false positive rate or below."""
        return float(self.true_positive_rates[self.false_positive_rates <= false_positive_rate].max())

    @property
    def advantage(self) -> float:
        """The largest difference of true and false positive rate: 0 is guessing, 1 is certainty."""
        return float((self.true_positive_rates - self.false_positive_rates).max())


def share_below(values: Numbers, thresholds: Numbers, side: str) -> Numbers:
    """Return the share of values below each threshold; with side "right", at most the threshold."""
    share: Numbers = np.searchsorted(np.sort(values), thresholds, side=side) / len(values)  # type: ignore[call-overload]
    return share


@dataclass(frozen=True)
class MembershipAttack:
    """An attack on the rows of one party, without its coreset and with it."""

    party: str
    members: int  # number of training rows
    non_members: int  # number of test rows
    coreset_rows: int  # number of rows in the coreset
    roc_curves: dict[str, RocCurve]  # by the attacker's knowledge

    def table(self) -> Table:
        """Return one row for each kind of attacker knowledge."""
        rows: list[dict[str, Any]] = [
            {"attacker holds": held, "auc": roc.auc, "±": roc.auc_error, "found at 1 %": roc.recall_at()}
            | {"advantage": roc.advantage}
            for held, roc in self.roc_curves.items()
        ]
        share = f"{100 * rows[0]['found at 1 %']:.1f} % of the {self.members} training rows of party {self.party!r}"
        verdict = f"From {MODEL_ONLY}, {share} are found at 1 % false alarms"
        if MODEL_AND_CORESET in self.roc_curves:
            verdict += f", and {100 * rows[1]['found at 1 %']:.1f} % with its coreset of {self.coreset_rows} rows"
        notes = ["A simple attack: a better one finds at least as much. AUC 0.5 and advantage 0 are guessing."]
        if self.non_members < 1 / FALSE_POSITIVE_RATE:
            notes.append(f"There are only {self.non_members} rows for false alarms: 1 % of them is less than one row.")
        return Table(tuple(rows[0]), rows, verdict + ".", notes=tuple(notes))

    def plot(self, file: str | Path) -> Path:
        """Draw the ROC curves on logarithmic axes into a PNG file."""
        least = 0.5 / max(self.members, self.non_members)
        with open_figure(Path(file), self.roc_curves, integer_rounds=False) as ((axes,), styles):
            for held, roc in self.roc_curves.items():
                style = {name: styles[held][name] for name in ("color", "linestyle")}
                curve_label = f"{held}\n(AUC {roc.auc:.3f} ± {roc.auc_error:.3f})"
                x, y = (np.maximum(each, least) for each in (roc.false_positive_rates, roc.true_positive_rates))
                axes.plot(x, y, drawstyle="steps-post", linewidth=1.8, label=curve_label, **style)
            even = np.geomspace(least, 1, 50)
            axes.plot(even, even, color="#555555", linestyle=":", linewidth=1.4, label="guessing")
            axes.axvline(FALSE_POSITIVE_RATE, color="#bbbbbb", linewidth=1.0, zorder=0)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("false positive rate (share of the test rows)")
            axes.set_ylabel("true positive rate (share of the training rows)")
            axes.set_title(f"Membership inference against party {label(self.party)}", loc="left")
        return Path(file)


def attack_membership(
    module: nn.Module,
    party: Party,
    coreset: Coreset | None = None,
    drop: Sequence[int] = (),
    loss: Loss = functional.cross_entropy,
) -> MembershipAttack:
    """Attack a party's training rows by the model's loss, and with its coreset if there is one.

    ``drop`` are the columns that the coreset does not contain: the attacker compares the others.

    >>> from descant.parties import Selection, digits
    >>> party = digits()["3"]
    >>> attack = attack_membership(nn.Linear(64, 10), party, Selection(share=0.1)(party, seed=0))
    >>> attack.coreset_rows, attack.roc_curves["the model and the coreset"].recall_at() >= 6 / 64
    (6, True)
    """
    if not len(party.x_test):
        raise PartyError(
            f"Party {party.name!r} has no test set, so there are no non-member rows to compare with. Give it one, e.g. "
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
    """Return the loss of every single row; nan counts as ∞, the least likely member."""
    evaluated_module = copy.deepcopy(module).eval()  # a copy, so that the caller's module keeps its mode
    losses: list[float] = []
    for begin in range(0, len(x), BATCH_SIZE):
        output = evaluated_module(x[begin : begin + BATCH_SIZE].clone())  # a module may write to its input
        target = y[begin : begin + BATCH_SIZE]
        rows = (loss(output[i : i + 1], target[i : i + 1]) for i in range(len(target)))
        losses += [float(torch.as_tensor(row).double().mean()) for row in rows]
    return np.where(np.isnan(losses), np.inf, losses)


def row_keys(x: Tensor, y: Tensor, drop: Sequence[int]) -> list[bytes]:
    """Return every row with its target as bytes, with 0 in the dropped columns."""
    if drop:
        x = x.clone()
        x[:, list(drop)] = 0
    parts = [each.contiguous().reshape(len(each), -1).view(torch.uint8).numpy() for each in (x, y)]
    return [left.tobytes() + right.tobytes() for left, right in zip(*parts, strict=True)]
