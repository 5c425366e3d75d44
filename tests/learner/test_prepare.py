"""What advantages are told of the answers of a step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.configs import RunConfig
from slipstream.learner.advantages.base import AdvantageInputs
from slipstream.learner.distributed import World
from slipstream.learner.prepare import Preparation
from tests.learner.recorded import build_trainer, recorded_step

MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize("normalise", [False, True])
def test_an_advantage_gets_the_log_probs_of_all_actions_or_none(
    normalise: bool, world: World, make_config: MakeConfig, groups: Path
) -> None:
    """Zeros, which stand for those that nobody has worked out, would be a probability of 1."""
    told: list[Tensor | None] = []

    def advantage(inputs: AdvantageInputs) -> Tensor:
        told.append(inputs.logprobs_BT)
        return torch.zeros_like(inputs.mask_BT)

    config = make_config(
        updates_per_step=2, correction={"weight": "token", "cap": 2.0, "normalise": True} if normalise else {}
    )
    trainer = build_trainer(config, world)
    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    prepare = Preparation(config, world, advantage, trainer.model, None, None)
    prepare(data.rows, data.updates, consuming_version=0, kl_coefficient=0.0)
    (logprobs_BT,) = told
    assert (logprobs_BT is not None) == normalise
    assert logprobs_BT is None or (logprobs_BT[data.rows.mask_BT > 0] < 0).all()
