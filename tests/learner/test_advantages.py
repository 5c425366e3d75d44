"""Group-relative advantages: by hand, and as the reference implementation has them."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.learner.advantages import grpo

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "algorithms.json").read_text(encoding="utf-8"))


def test_advantages_are_deviations_from_the_mean_in_units_of_the_samples_deviation() -> None:
    # Mean 2, squared deviations 1 + 0 + 0 + 1, divided by 3 (not by 4).
    np.testing.assert_allclose(grpo([1.0, 2.0, 2.0, 3.0]), np.array([-1, 0, 0, 1]) / (np.sqrt(2 / 3) + 1e-6))


def test_one_right_answer_in_four() -> None:
    np.testing.assert_allclose(grpo([0.0, 0.0, 1.0, 0.0]), [-0.5, -0.5, 1.5, -0.5], rtol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_answers_that_all_got_the_same_reward_have_no_advantage(reward: float) -> None:
    np.testing.assert_allclose(grpo([reward] * 6), np.zeros(6), atol=1e-9)


def test_advantages_are_those_of_the_reference_implementation() -> None:
    size = GOLDEN["shape"]["group_size"]
    rewards = np.array(GOLDEN["inputs"]["reward"]).reshape(-1, size)
    ours = np.concatenate([grpo(group.tolist()) for group in rewards])
    mask = np.array(GOLDEN["inputs"]["mask"])
    np.testing.assert_allclose(ours[:, None] * mask, GOLDEN["advantages"]["grpo"]["out"], atol=1e-5)
