"""Figures of the mismatch."""

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.correction import correct
from slipstream.learner.algorithms.divergence import (
    SUMS,
    answer_weight_sums,
    learning_rate_factor,
    mismatch_metrics,
    mismatch_sums,
)
from tests.learner.algorithms.golden import golden_log_ratio


def test_normalised_weights_have_mean_1_and_same_sample_size() -> None:
    log_ratio_BT, mask_BT = golden_log_ratio()

    def figures(*, normalise: bool) -> dict[str, float]:
        weights_BT = correct(log_ratio_BT, mask_BT, CorrectionConfig(normalise=normalise)).importance_weights_BT
        return mismatch_metrics(mismatch_sums(log_ratio_BT, weights_BT, mask_BT))

    plain, normalised = figures(normalise=False), figures(normalise=True)
    assert normalised["weight_mean"] == pytest.approx(1.0)
    assert plain["weight_mean"] != pytest.approx(1.0, abs=1e-3)
    assert normalised["ess"] == pytest.approx(plain["ess"])


def test_sums_of_parts_add_up() -> None:
    log_ratio_BT, mask_BT = golden_log_ratio()
    log_ratio_BT, mask_BT = (torch.cat([each, torch.zeros(3, each.shape[1])]) for each in (log_ratio_BT, mask_BT))
    first, second = (
        mismatch_sums(log_ratio_BT[part], mask_BT[part], mask_BT[part]) for part in (slice(0, 5), slice(5, None))
    )
    added = {name: first[name] + second[name] for name in SUMS}
    without_empty_rows = mismatch_sums(log_ratio_BT[:-3], mask_BT[:-3], mask_BT[:-3])
    torch.testing.assert_close(added, without_empty_rows)


@pytest.mark.parametrize(
    ("log_ratio_BT", "weights_BT", "expected"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3), {"weight_mean": 1.0, "ess": 1.0, "kl_k3": 0.0, "chi2_sequence": 0.0}),
        (torch.full((2, 3), 30.0), torch.zeros(2, 3), {"weight_mean": 0.0, "ess": 0.0}),
    ],
    ids=["on policy", "all weights 0"],
)
def test_figures_at_extremes(log_ratio_BT: Tensor, weights_BT: Tensor, expected: dict[str, float]) -> None:
    figures = mismatch_metrics(mismatch_sums(log_ratio_BT, weights_BT, torch.ones(2, 3)))
    assert figures | expected == figures
    assert all(figure < float("inf") for figure in figures.values())


@pytest.mark.parametrize(("reference", "factor"), [(1.0, (2 / 3) ** 0.5), (0.8, (2 / 3 / 0.8) ** 0.5), (0.5, 1.0)])
def test_learning_rate_falls_with_sample_size_of_answers(reference: float, factor: float) -> None:
    """Ratios 4, 1 and 1 of three answers: (4 + 1 + 1)² / (3 · (16 + 1 + 1)) = 2/3."""
    log_ratio_BT = torch.tensor([[8.0, 0.5, 1.0], [1.0, 9.0, 9.0], [2.0, 0.5, 1.0], [9.0, 9.0, 9.0]]).log()
    mask_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    sums = sum(answer_weight_sums(log_ratio_BT[part], mask_BT[part]) for part in (slice(0, 1), slice(1, 4)))
    assert isinstance(sums, Tensor)
    assert learning_rate_factor(sums, reference) == pytest.approx(factor)
    assert learning_rate_factor(torch.zeros(3), reference) == 1.0
