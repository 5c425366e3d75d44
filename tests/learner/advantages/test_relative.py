"""Group-relative advantages by hand, and the properties that make them group-relative."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.advantages.group_relative import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from slipstream.learner.algorithms.advantages.groups import group_sum
from tests.learner.advantages.batches import batch

EPSILON = 1e-6
ALL: dict[str, Callable[[AdvantageInputs], Tensor]] = {
    "grpo": partial(grpo, epsilon=EPSILON),
    "dr_grpo": dr_grpo,
    "grpo_passk": partial(grpo_passk, divide_by_std=True, epsilon=EPSILON),
    "rloo": rloo,
    "opo": opo,
    "gpg": partial(gpg, scale_up_for="no_advantage"),
}
CENTRED = [ALL[name] for name in ("grpo", "dr_grpo", "rloo", "gpg")]
GROUPS = st.lists(st.lists(st.integers(-9, 9).map(lambda tenths: tenths / 10), min_size=1, max_size=5), min_size=1)


def of_answers(advantages_BT: Tensor) -> Tensor:
    """Each answer's advantage, which all of its actions share."""
    return advantages_BT[:, 0]


def answers(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_grpo_is_the_deviation_in_units_of_the_samples_deviation() -> None:
    # Mean 2, squared deviations 1 + 0 + 0 + 1, divided by 3 (not by 4).
    ours_B = of_answers(grpo(batch([[1.0, 2.0, 2.0, 3.0]]), epsilon=EPSILON))
    torch.testing.assert_close(ours_B, answers(-1, 0, 0, 1) / (sqrt(2 / 3) + EPSILON))


def test_one_right_answer_in_four_is_worth_three_wrong_ones() -> None:
    ours_B = of_answers(grpo(batch([[0.0, 0.0, 1.0, 0.0]]), epsilon=EPSILON))
    torch.testing.assert_close(ours_B, answers(-0.5, -0.5, 1.5, -0.5), rtol=1e-5, atol=0)


def test_every_action_has_its_answers_advantage() -> None:
    ours_BT = dr_grpo(batch([[0.0, 1.0]], lengths=[1, 3]))
    torch.testing.assert_close(ours_BT.tolist(), [[-0.5, 0.0, 0.0], [0.5, 0.5, 0.5]])


def test_dr_grpo_is_the_deviation_itself() -> None:
    ours_B = of_answers(dr_grpo(batch([[1.0, 2.0, 6.0], [5.0, 3.0]])))
    torch.testing.assert_close(ours_B, answers(-2, -1, 3, 1, -1))


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; 1 - 5, 5 - 1; nothing to compare with
    ours_B = of_answers(rloo(batch([[1.0, 2.0, 6.0], [1.0, 5.0], [7.0]])))
    torch.testing.assert_close(ours_B, answers(-3, -1.5, 4.5, -4, 4, 0))


def test_opo_gives_long_answers_more_say_in_the_mean() -> None:
    # (1 * 0 + 3 * 1) / 4 = 0.75
    ours_B = of_answers(opo(batch([[0.0, 1.0]], lengths=[1, 3])))
    torch.testing.assert_close(ours_B, answers(-0.75, 0.25))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.2, 0.9, 0.5], [0.0, 0.4, 0.0]),
        ([0.9, 0.9, 0.5], [0.0, 0.0, 0.0]),
        ([-2.0, -1.0], [0.0, 1.0]),
        ([0.7], [0.0]),
    ],
    ids=["a clear first", "a shared first", "negative rewards", "one answer"],
)
def test_pass_at_k_counts_the_best_answers_lead(rewards: list[float], expected: list[float]) -> None:
    ours_B = of_answers(grpo_passk(batch([[5.0, 4.0], rewards]), divide_by_std=False, epsilon=EPSILON))
    torch.testing.assert_close(ours_B, answers(1.0, 0.0, *expected))


def test_pass_at_k_is_scaled_by_the_spread_if_asked_for() -> None:
    ours_B = of_answers(grpo_passk(batch([[0.0, 1.0, 2.0]]), divide_by_std=True, epsilon=0.5))
    torch.testing.assert_close(ours_B, answers(0, 0, 1 / 1.5))


def test_gdpo_scales_each_term_by_itself_and_whitens_their_sum_over_answers() -> None:
    inputs = replace(
        batch([[0.0, 0.0], [0.0, 0.0]], lengths=[1, 9, 1, 1]),
        terms_KB=torch.stack([answers(0, 1, 0, 0), answers(100, 0, 0, 200)]),
        term_weights_K=answers(1, 3),
    )
    # Two different values are ∓1/√2 of their deviation apart from the mean, whatever their scale. So the sums are, in
    # units of 1/√2, (-1 + 3, 1 - 3, -3, 3); mean 0, variance (4 + 4 + 9 + 9) / 3.
    expected_B = answers(2, -2, -3, 3) / sqrt(26 / 3)
    torch.testing.assert_close(of_answers(gdpo(inputs, epsilon=1e-12)), expected_B)


def test_gdpo_tells_apart_what_grpo_does_not() -> None:
    # Both groups' rewards are (0, 2) and (0, 1): the same to grpo, although the one fulfils two terms.
    terms_KB = torch.stack([answers(0, 1, 0, 1), answers(0, 1, 0, 0)])
    inputs = replace(batch([[0.0, 2.0], [0.0, 1.0]]), terms_KB=terms_KB, term_weights_K=answers(1, 1))
    by_grpo_B = of_answers(grpo(inputs, epsilon=EPSILON))
    by_gdpo_B = of_answers(gdpo(inputs, epsilon=EPSILON))
    torch.testing.assert_close(by_grpo_B[1], by_grpo_B[3], rtol=1e-5, atol=0)
    torch.testing.assert_close(by_gdpo_B[1], 2 * by_gdpo_B[3], rtol=1e-5, atol=0)


def test_gpg_makes_up_for_the_groups_without_spread() -> None:
    # Of 5 answers 2 are in groups without spread, which leaves 3; an answer at the mean of its group is not idle.
    ours_B = of_answers(gpg(batch([[1.0, 2.0, 3.0], [1.0], [0.0]]), scale_up_for="no_advantage"))
    torch.testing.assert_close(ours_B, 5 / 3 * answers(-1, 0, 1, 0, 0))


def test_gpg_makes_up_for_the_answers_without_reward_if_told_to() -> None:
    # Of 6 answers 4 have a reward; 3 are in a group with spread.
    ours_B = of_answers(gpg(batch([[0.0, 0.0, 3.0], [1.0, 1.0, 1.0]]), scale_up_for="no_reward"))
    torch.testing.assert_close(ours_B, 6 / 4 * answers(-1, -1, 2, 0, 0, 0))


@pytest.mark.parametrize("scale_up_for", ["no_advantage", "no_reward"])
def test_gpg_of_answers_that_all_failed_is_nothing(scale_up_for: str) -> None:
    assert gpg(batch([[0.0, 0.0], [0.0]]), scale_up_for=scale_up_for).abs().max() == 0


def test_the_baseline_of_reinforce_plus_plus_is_whitened_over_actions() -> None:
    # Deviations -1, 1, 1, 1 of the actions: mean 0.5, variance (2.25 + 3 * 0.25) / 3 = 1.
    ours_BT = reinforce_plus_plus_baseline(batch([[1.0, 3.0]], lengths=[1, 3]))
    torch.testing.assert_close(ours_BT[1], answers(0.5, 0.5, 0.5))
    torch.testing.assert_close(ours_BT[0], answers(-1.5, 0, 0))


@pytest.mark.parametrize("advantage", ALL.values(), ids=ALL)
@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 6, [0.7]], ids=str)
def test_a_group_without_spread_has_no_advantage(
    advantage: Callable[[AdvantageInputs], Tensor], rewards: list[float]
) -> None:
    ours_BT = advantage(batch([rewards, [0.0, 1.0]], dtype=torch.float32))
    assert ours_BT[: len(rewards)].abs().max() == 0
    assert ours_BT[len(rewards) :].abs().max() > 0


@settings(deadline=None, max_examples=50)
@given(GROUPS)
def test_the_advantages_of_a_group_sum_to_nothing(groups: list[list[float]]) -> None:
    inputs = batch(groups)
    for advantage in CENTRED:
        sums_B = group_sum(of_answers(advantage(inputs)), inputs)
        torch.testing.assert_close(sums_B, torch.zeros_like(sums_B), rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(GROUPS, st.sampled_from([-3.0, 0.5, 64.0]))
def test_a_constant_added_to_all_rewards_changes_nothing(groups: list[list[float]], constant: float) -> None:
    shifted = batch([[reward + constant for reward in group] for group in groups])
    # Rewards stay tenths plus rounding, so that only equal ones can be first together.
    inputs = batch([[reward + constant - constant for reward in group] for group in groups])
    for advantage in ALL.values():
        torch.testing.assert_close(advantage(shifted), advantage(inputs), rtol=0, atol=1e-6)
