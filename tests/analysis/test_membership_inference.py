"""Membership inference: ROC curves match scikit-learn, and attacks find known leaks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor, nn

from descant import parties
from descant.analysis import RocCurve, attack_membership
from descant.analysis.membership_inference import MODEL_AND_CORESET, MODEL_ONLY
from descant.errors import PartyError
from descant.parties import Party, Selection

numbers = st.lists(st.integers(-3, 3), min_size=2, max_size=20)


@given(numbers, numbers)
@settings(max_examples=25, deadline=None)
def test_the_roc_curve_and_auc_match_scikit_learn(members: list[int], others: list[int]) -> None:
    found = RocCurve.from_scores(np.array(members, dtype=float), np.array(others, dtype=float))
    labels = [1] * len(members) + [0] * len(others)
    assert found.auc == pytest.approx(roc_auc_score(labels, members + others))
    false, true, _ = roc_curve(labels, members + others, drop_intermediate=False)
    np.testing.assert_allclose(found.false_positive_rates, false)
    np.testing.assert_allclose(found.true_positive_rates, true)
    assert np.trapezoid(found.true_positive_rates, found.false_positive_rates) == pytest.approx(found.auc)
    mirrored = RocCurve.from_scores(-np.array(members, dtype=float), -np.array(others, dtype=float))
    assert mirrored.auc == pytest.approx(1 - found.auc) and mirrored.auc_error == pytest.approx(found.auc_error)


def test_the_auc_error_is_its_spread_over_samples() -> None:
    rng = np.random.default_rng(0)
    found = [RocCurve.from_scores(rng.normal(0.5, 1, 60), rng.normal(0, 1, 40)) for _ in range(400)]
    assert np.std([one.auc for one in found]) == pytest.approx(np.mean([one.auc_error for one in found]), rel=0.1)


def random_party(rows: int = 200, tested: int = 200) -> Party:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows + tested, 3, generator=generator)
    y = torch.arange(rows + tested) % 2
    return parties.from_arrays({"a": (x[:rows], y[:rows], x[rows:], y[rows:])})["a"]


def test_an_untrained_model_leaks_nothing_and_a_coreset_leaks_its_own_rows() -> None:
    party = random_party()
    chosen = Selection(share=0.1).choose(party, seed=0)
    found = attack_membership(nn.Linear(3, 2), party, chosen.coreset)
    model = found.roc_curves[MODEL_ONLY]
    both = found.roc_curves[MODEL_AND_CORESET]
    assert abs(model.auc - 0.5) < 3 * model.auc_error
    assert both.recall_at(0.0) >= 20 / 200 and both.auc > model.auc
    assert both.recall_at(0.0) <= 20 / 200 + model.recall_at(0.0) + 0.01  # the coreset rows and no more
    assert found.coreset_rows == 20 and "of 20 rows" in found.table().verdict


def test_a_model_that_memorizes_its_rows_leaks_all() -> None:
    party = random_party()

    def remembered(output: Tensor, target: Tensor) -> Tensor:
        known = (output[:, None] == party.x[None]).all(-1).any(-1)
        return 1.0 - known.double()

    found = attack_membership(nn.Identity(), party, loss=remembered)
    assert list(found.roc_curves) == [MODEL_ONLY]
    roc = found.roc_curves[MODEL_ONLY]
    assert (roc.auc, roc.recall_at(), roc.advantage) == (1.0, 1.0, 1.0)


def test_a_test_row_equal_to_a_coreset_row_is_a_false_alarm() -> None:
    x = torch.arange(8.0)[:, None]
    y = torch.zeros(8).long()
    party = parties.from_arrays({"a": (x[:4], y[:4], x[3:], y[3:])})["a"]
    everything = Selection(share=1)(party, seed=0)
    found = attack_membership(nn.Linear(1, 2), party, everything).roc_curves[MODEL_AND_CORESET]
    assert found.true_positive_rates[1] == 1.0 and found.false_positive_rates[1] == pytest.approx(1 / 5)


def test_dropped_columns_are_not_compared() -> None:
    party = random_party(20, 20)
    selection = Selection(count=5, drop_columns=(1,))
    coreset = selection(party, seed=0)
    with_drop, without = (
        attack_membership(nn.Linear(3, 2), party, coreset, drop, loss=zero_loss).roc_curves[MODEL_AND_CORESET]
        for drop in (selection.drop_columns, ())
    )
    assert with_drop.recall_at(0.0) == 5 / 20 and without.recall_at(0.0) == 0


def zero_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * 0


def test_the_module_is_unchanged_and_a_nan_loss_separates_nothing() -> None:
    party = random_party(6, 6)
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    module[2].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attack_membership(module, party)
    assert module.training and not module[2].training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())

    def broken(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * torch.nan

    assert attack_membership(module, party, loss=broken).roc_curves[MODEL_ONLY].auc == 0.5


def test_a_party_without_a_test_set_raises() -> None:
    party = parties.from_arrays({"a": ([[0.0], [1.0]], [0, 1])}, test=0)["a"]
    with pytest.raises(PartyError, match="has no test set"):
        attack_membership(nn.Linear(1, 2), party)


def test_the_picture_is_written_and_the_table_names_its_limits(tmp_path: Path) -> None:
    party = random_party(30, 20)
    found = attack_membership(nn.Linear(3, 2), party, Selection(share=0.1)(party, seed=0))
    assert found.plot(tmp_path / "made" / "roc.png").read_bytes()[:4] == b"\x89PNG"
    assert [row["attacker holds"] for row in found.table().rows] == [MODEL_ONLY, MODEL_AND_CORESET]
    assert "only 20 rows" in str(found.table()) and "only" not in str(
        attack_membership(nn.Linear(3, 2), random_party()).table()
    )
