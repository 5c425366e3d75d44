"""The figures of the mismatch."""

import pytest
import torch

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.correction.apply import correct
from slipstream.learner.algorithms.correction.mismatch import SUMS, mismatch_figures, mismatch_sums
from tests.learner.correction.golden import golden_batch


def test_normalised_weights_have_the_mean_one_and_the_same_sample_size() -> None:
    log_ratio_BT, mask_BT = golden_batch()
    plain, normalised = (
        mismatch_figures(
            mismatch_sums(
                log_ratio_BT,
                correct(log_ratio_BT, mask_BT, CorrectionConfig(normalise=chosen)).importance_weights_BT,
                mask_BT,
            )
        )
        for chosen in (False, True)
    )
    assert normalised["weight_mean"] == pytest.approx(1.0)
    assert plain["weight_mean"] != pytest.approx(1.0, abs=1e-3)
    assert normalised["ess"] == pytest.approx(plain["ess"])


def test_the_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    log_ratio_BT, mask_BT = golden_batch()
    parts = [slice(0, 5), slice(5, None)]
    first, second = (mismatch_sums(log_ratio_BT[part], mask_BT[part], mask_BT[part]) for part in parts)
    added = {name: first[name] + second[name] for name in SUMS}
    torch.testing.assert_close(added, mismatch_sums(log_ratio_BT, mask_BT, mask_BT))


def test_on_policy_nothing_is_lost() -> None:
    zeros_BT, mask_BT = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    figures = mismatch_figures(mismatch_sums(zeros_BT, mask_BT, mask_BT))
    assert figures == {
        "weight_mean": 1.0, "ess": 1.0, "kl_k1": 0.0, "kl_k3": 0.0, "chi2_token": 0.0, "chi2_sequence": 0.0,
    }  # fmt: skip


def test_where_every_weight_is_zero_there_is_no_sample() -> None:
    figures = mismatch_figures(mismatch_sums(torch.full((1, 2), 30.0), torch.zeros(1, 2), torch.ones(1, 2)))
    assert figures["ess"] == 0.0
    assert all(figure < float("inf") for figure in figures.values())


def test_rows_without_actions_do_not_count() -> None:
    log_ratio_BT, mask_BT = golden_batch()
    padding_BT = torch.zeros(3, mask_BT.shape[1])
    padded_ratio_BT, padded_mask_BT = torch.cat([log_ratio_BT, padding_BT]), torch.cat([mask_BT, padding_BT])
    torch.testing.assert_close(
        mismatch_sums(padded_ratio_BT, padded_mask_BT, padded_mask_BT), mismatch_sums(log_ratio_BT, mask_BT, mask_BT)
    )
