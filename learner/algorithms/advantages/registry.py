"""From the advantage's name in the configuration to the function."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from slipstream.configs.plugins import find_function
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.algorithms import AdvantageConfig
from slipstream.learner.algorithms.advantages.base import Advantage, AdvantageInputs
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
from slipstream.learner.algorithms.advantages.returns import gae, optimal_token_baseline, reinforce_plus_plus, remax
from slipstream.learner.algorithms.plugin_tensors import require_shape

BUILT_IN: Final[dict[str, Advantage]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gpg": gpg,
    "gae": gae,
    "optimal_token_baseline": optimal_token_baseline,
}

NEEDS_COLLISION: Final = frozenset({"optimal_token_baseline"})
"""Built-ins that read `logprobs_BT` and `collision_BT`."""


def build_advantage(config: AdvantageConfig) -> Callable[[AdvantageInputs], Tensor]:
    """The advantages that the section names, with its settings; they have no gradient, and a plug-in's are checked.

    Raises: ConfigError if there is none of that name, or it can't be called with those settings.
    """
    advantage = find_function("advantage", config.name, BUILT_IN, config.arguments)
    if config.name not in BUILT_IN:
        advantage = partial(_checked, f"advantage {config.name!r}", advantage)
    return torch.no_grad()(advantage)


def _checked(plugin: str, advantage: Callable[[AdvantageInputs], Tensor], inputs: AdvantageInputs) -> Tensor:
    advantages_BT = advantage(inputs)
    require_shape(plugin, "advantages", advantages_BT, inputs.mask_BT)
    if not advantages_BT.isfinite().all():
        raise ConfigError(f"{plugin} gave advantages that are not finite")
    return advantages_BT
