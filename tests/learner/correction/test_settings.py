"""Which settings of the correction go together."""

from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.configs.schema.learner import CorrectionConfig

TOKEN_K1 = {"level": "token", "estimator": "k1", "high": 2.0}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"cap": 2.0, "band": (0.5, 2.0)}, "cap and band exclude each other"),
        ({"band": (2.0, 0.5)}, r"band=\[2.0, 0.5\]"),
        ({"weight": "none", "cap": 2.0, "normalise": True}, "leaves nothing for cap, normalise"),
        ({"proximal": "behaviour", "weight": "token"}, "so weight can't do anything"),
        ({"proximal": "behaviour", "veto": 1e-4, "rejections": [TOKEN_K1]}, "so rejections, veto can't"),
        ({"rejections": [TOKEN_K1, {**TOKEN_K1, "high": 3.0}]}, "token_k1 2 times"),
        ({"rejections": [{**TOKEN_K1, "high": 0.9}]}, "must be more than 1"),
        ({"rejections": [{**TOKEN_K1, "estimator": "k2", "low": 0.1}]}, "has only high"),
        ({"rejections": [{**TOKEN_K1, "low": 2.0}]}, "must be less than"),
    ],
)
def test_settings_that_can_not_work_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CorrectionConfig.model_validate(keys)


@pytest.mark.parametrize(
    "keys", [{}, {"band": (0.5, 2.0)}, {"weight": "none"}, {"proximal": "behaviour"}, {"cap": None}]
)
def test_a_configuration_that_was_written_out_reads_back_the_same(keys: dict[str, Any]) -> None:
    config = CorrectionConfig.model_validate(keys)
    assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config


def test_a_cap_holds_only_where_there_is_a_weight_to_cap() -> None:
    assert CorrectionConfig().cap == 2.0
    assert CorrectionConfig(band=(0.5, 2.0)).cap is None
    assert CorrectionConfig(weight="none").cap is None
    assert CorrectionConfig(proximal="behaviour").weight == "none"


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({}, False),
        ({"weight": "sequence"}, False),
        ({"normalise": True}, True),
        ({"rejections": [TOKEN_K1]}, True),
        ({"second_moment": 0.04}, True),
        ({"veto": 1e-4}, True),
    ],
)
def test_what_is_judged_over_the_step_needs_the_proximal_policy_first(keys: dict[str, Any], first: bool) -> None:
    assert CorrectionConfig.model_validate(keys).needs_proximal_first is first
