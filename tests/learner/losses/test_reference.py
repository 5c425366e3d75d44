"""Every loss against the reference implementation: value and gradient."""

from typing import Any

import pytest
import torch

from slipstream.learner.aggregation import aggregate, totals_of
from slipstream.learner.losses.build import build_loss
from slipstream.learner.losses.value import value_loss
from tests.learner.losses.examples import GOLDEN, golden, golden_inputs, gradient, section

PPO = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_token-mean", {"name": "ppo", **PPO}),
    ("ppo_seq-mean-token-sum", {"name": "ppo", **PPO, "aggregation": "seq-mean-token-sum"}),
    ("ppo_seq-mean-token-mean", {"name": "ppo", **PPO, "aggregation": "seq-mean-token-mean"}),
    ("ppo_seq-mean-token-sum-norm", {"name": "ppo", **PPO, "aggregation": "seq-mean-token-sum-norm"}),
    ("ppo_clip_higher", {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}),
    ("ppo_decoupled_tis2", {"name": "decoupled_ppo", **PPO}),
    ("gspo", {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04}),
    ("cispo", {"name": "cispo", "clip_low": 0.2, "clip_high": 0.2}),
    ("gmpo", {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4}),
    ("sapo", {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
    ("kl_cov", {"name": "kl_cov", "ratio": 0.1, "coefficient": 1.0}),
    ("dro", {"name": "dro", "beta": 0.5}),
    ("dppo_tv", {"name": "dppo_tv", "clip_low": 0.1, "clip_high": 0.1}),
    ("dppo_kl", {"name": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05}),
    ("reinforce", {"name": "reinforce"}),
]


def test_no_reference_figure_is_left_out() -> None:
    assert {name for name, _ in CASES} | {"value_clipped"} == set(GOLDEN["losses"])


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_loss_and_gradient_are_those_of_the_reference_implementation(name: str, settings: dict[str, Any]) -> None:
    config, inputs = section(**settings), golden_inputs()
    loss_BT = build_loss(config)(inputs).loss_BT
    if name == "ppo_decoupled_tis2":
        loss_BT = loss_BT * golden("behaviour_weight_token_cap2")
    loss = aggregate(
        loss_BT,
        inputs.mask_BT,
        config.aggregation,
        totals_of(inputs.mask_BT),
        horizon=inputs.mask_BT.shape[1],
        constant=None,
    )
    assert loss.item() == pytest.approx(GOLDEN["losses"][name]["loss"], abs=1e-5)
    expected_BT = torch.tensor(GOLDEN["losses"][name]["grad"], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss, inputs), expected_BT, atol=1e-5, rtol=0)


def test_the_value_loss_is_that_of_the_reference_implementation() -> None:
    mask_BT = golden("mask")
    returns_BT = golden("reward")[:, None] * mask_BT  # the reward comes with the last action
    terms = value_loss(golden("new_values"), golden("values"), returns_BT, clip_range=0.2)
    loss = aggregate(terms.loss_BT, mask_BT, "token-mean", totals_of(mask_BT), horizon=1, constant=None)
    assert loss.item() == pytest.approx(GOLDEN["losses"]["value_clipped"]["loss"], abs=1e-5)
