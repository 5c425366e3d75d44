"""What a rejection rule judges."""

import math
from typing import Any

import pytest
import torch

from slipstream.configs.schema.learner import RejectionConfig
from slipstream.learner.algorithms.correction.rejection import rejected, vetoed

LOG_RATIO_BT = torch.tensor([[0.5, -0.1, 0.0], [0.2, 0.2, 0.2], [-0.6, 0.6, 0.0]])
MASK_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
NONE, FIRST, ALL = [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]
BOTH = [1.0, 1.0, 0.0]
"""All actions of an answer of two."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"level": "token", "estimator": "k1", "high": math.exp(0.4)}, [FIRST, NONE, BOTH]),
        ({"level": "token", "estimator": "k1", "low": 0, "high": math.exp(0.55)}, [NONE, NONE, [0.0, 1.0, 0.0]]),
        ({"level": "token", "estimator": "k2", "high": 0.1}, [FIRST, NONE, BOTH]),
        # e^0.5 - 1.5 = 0.149, e^-0.6 - 0.4 = 0.149, e^0.6 - 1.6 = 0.222
        ({"level": "token", "estimator": "k3", "high": 0.2}, [NONE, NONE, [0.0, 1.0, 0.0]]),
        ({"level": "sequence_mean", "estimator": "k1", "high": math.exp(0.195)}, [BOTH, ALL, NONE]),
        ({"level": "sequence_mean", "estimator": "k2", "high": 0.1}, [NONE, NONE, BOTH]),
        ({"level": "sequence_sum", "estimator": "k1", "high": math.exp(0.45)}, [NONE, ALL, NONE]),
        ({"level": "sequence_sum", "estimator": "k3", "high": 0.16}, [NONE, NONE, BOTH]),
        ({"level": "sequence_max", "estimator": "k1", "high": math.exp(0.4)}, [BOTH, NONE, BOTH]),
        ({"level": "sequence_max", "estimator": "k3", "high": 0.2}, [NONE, NONE, BOTH]),
    ],
)
def test_a_rule_judges_actions_or_whole_answers(rule: dict[str, Any], expected: list[list[float]]) -> None:
    assert rejected(LOG_RATIO_BT, MASK_BT, RejectionConfig.model_validate(rule)).tolist() == expected


def test_one_action_below_the_veto_costs_its_whole_answer() -> None:
    assert vetoed(LOG_RATIO_BT, MASK_BT, math.exp(-0.5)).tolist() == [NONE, NONE, BOTH]
    assert vetoed(LOG_RATIO_BT, MASK_BT, math.exp(-0.7)).tolist() == [NONE, NONE, NONE]


def test_an_answer_without_actions_is_not_left_out() -> None:
    for level in ("sequence_mean", "sequence_sum", "sequence_max"):
        rule = RejectionConfig.model_validate({"level": level, "estimator": "k1", "high": 1.1})
        assert rejected(torch.zeros(1, 2), torch.zeros(1, 2), rule).tolist() == [[0.0, 0.0]]
