"""The figures of the mismatch, against the reference implementation's."""

import pytest
import torch

from slipstream.configs.schema.correction import CorrectionConfig
from slipstream.learner.correction.apply import correct
from slipstream.learner.correction.diagnostics import SUMS, mismatch_figures, mismatch_sums
from tests.learner.correction.golden import VECTORS, golden_batch

NAMES = {
    "weight_mean": "rollout_is_mean",
    "ess": "rollout_is_eff_sample_size",
    "kl_k1": "kl",
    "kl_k3": "k3_kl",
    "chi2_token": "chi2_token",
    "chi2_sequence": "chi2_seq",
}
WEIGHTED = {
    "token_tis2": CorrectionConfig(),
    "sequence_tis2": CorrectionConfig(weight="sequence"),
    "token_icepop_0.5_2": CorrectionConfig(band=(0.5, 2.0)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_figures_are_those_of_the_reference(name: str) -> None:
    log_ratio_BT, mask_BT = golden_batch()
    weights_BT = correct(log_ratio_BT, mask_BT, WEIGHTED[name]).weights_BT
    figures = mismatch_figures(mismatch_sums(log_ratio_BT, weights_BT, mask_BT))
    expected = {ours: VECTORS[name]["metrics"][f"rollout_corr/{theirs}"] for ours, theirs in NAMES.items()}
    assert figures == pytest.approx(expected, abs=1e-5)


def test_normalised_weights_have_the_mean_one_and_the_same_sample_size() -> None:
    # The reference reports the mean before it normalises.
    log_ratio_BT, mask_BT = golden_batch()
    weights_BT = correct(log_ratio_BT, mask_BT, CorrectionConfig(normalise=True)).weights_BT
    figures = mismatch_figures(mismatch_sums(log_ratio_BT, weights_BT, mask_BT))
    metrics = VECTORS["token_tis2_batchnorm"]["metrics"]
    assert figures["weight_mean"] == pytest.approx(1.0)
    assert figures["ess"] == pytest.approx(metrics["rollout_corr/rollout_is_eff_sample_size"], abs=1e-5)


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
