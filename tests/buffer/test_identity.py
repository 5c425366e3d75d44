"""Identity of a run: settings that may not change after its start."""

from collections.abc import Mapping

import pytest

from slipstream.buffer.identity import config_identity, require_same_identity
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError


def rewarding(**weights: float) -> RunConfig:
    rewards = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return RunConfig.model_validate({"run": {"name": "r"}, "model": {"build": "digits"}, "rewards": rewards})


BEGUN = rewarding(exact_match=1.0, digit_match=0.0)


def test_added_weighted_reward_is_refused() -> None:
    refusal = "the list of rewards with a weight is 'digit_match, exact_match', but 'exact_match' since the run began"
    with pytest.raises(ConfigError, match=refusal):
        require_same_identity(rewarding(exact_match=1.0, digit_match=0.5), config_identity(BEGUN))


@pytest.mark.parametrize(
    "weights",
    [{"exact_match": 0.5, "digit_match": 0.0}, {"exact_match": 1.0}, {"digit_match": 0.0, "exact_match": 1.0}],
    ids=["another weight", "without what is only recorded", "another order"],
)
def test_reward_weights_may_change(weights: Mapping[str, float]) -> None:
    require_same_identity(rewarding(**weights), config_identity(BEGUN))


def test_unfixed_settings_are_accepted() -> None:
    require_same_identity(BEGUN, {"run.seed": "0"})
