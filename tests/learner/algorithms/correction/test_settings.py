"""Settings of the correction: defaults that depend on each other, and combinations that can't work."""

from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.configs.schema.learner import CorrectionConfig

TOKEN_K1 = {"level": "token", "estimator": "k1", "high": 2.0}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"cap": 2.0, "band": (0.5, 2.0)}, "cap and band"),
        ({"band": (2.0, 0.5)}, r"band=\[2.0, 0.5\]"),
        ({"weight": "none", "cap": 2.0, "normalise": True}, "cap, normalise"),
        ({"proximal": "behaviour", "weight": "token"}, "proximal.* weight"),
        ({"proximal": "behaviour", "veto": 1e-4, "rejections": [TOKEN_K1]}, "rejections, veto"),
        ({"proximal": "interpolate", "normalise": True}, "proximal: interpolate"),
        ({"rejections": [TOKEN_K1, {**TOKEN_K1, "high": 3.0}]}, "token_k1"),
        ({"rejections": [{**TOKEN_K1, "high": 0.9}]}, "high=0.9"),
        ({"rejections": [{**TOKEN_K1, "estimator": "k2", "low": 0.1}]}, "low.* k2"),
        ({"rejections": [{**TOKEN_K1, "low": 2.0}]}, "low=2"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        CorrectionConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "weight", "cap"),
    [
        ({}, "token", 2.0),
        ({"band": (0.5, 2.0)}, "token", None),
        ({"weight": "none"}, "none", None),
        ({"proximal": "behaviour"}, "none", None),
        ({"cap": None}, "token", None),
    ],
)
def test_dependent_defaults_survive_dump(keys: dict[str, Any], weight: str, cap: float | None) -> None:
    config = CorrectionConfig.model_validate(keys)
    assert (config.weight, config.cap) == (weight, cap)
    assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"weight": "sequence"}, False),
        ({"normalise": True}, True),
        ({"rejections": [TOKEN_K1]}, True),
        ({"second_moment": 0.04}, True),
        ({"veto": 1e-4}, True),
    ],
)
def test_rules_over_step_need_proximal_first(keys: dict[str, Any], first: bool) -> None:
    assert CorrectionConfig.model_validate(keys).needs_proximal_first is first
