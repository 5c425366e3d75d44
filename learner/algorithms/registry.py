"""Algorithms of the envs, of built-in and plug-in advantages and losses by their configured names.

# B rows, T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.advantages import ADVANTAGES, AdvantageConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.losses import LOSSES, LossConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms


@dataclass(frozen=True)
class Algorithm:
    """The parts of the objective of some groups."""

    learner: LearnerConfig
    """Settings of the learner, with those of the groups' env."""
    advantage: Callable[[AdvantageInputs], Tensor]
    loss: Callable[[LossInputs], LossTerms]

    @classmethod
    def of(cls, learner: LearnerConfig) -> Self:
        """The algorithm of these settings. Raises: ConfigError as `build_advantage` and `build_loss`."""
        return cls(learner, build_advantage(learner.advantage), build_loss(learner.loss))


def build_advantage(config: AdvantageConfig) -> Callable[[AdvantageInputs], Tensor]:
    """The configured advantage as a function of its inputs, without gradient; a plug-in's output is checked.

    Raises: ConfigError if there is none of that name, or it can't be called with those settings.
    """
    advantage = ADVANTAGES.bind(config.name, config.arguments)
    if config.name not in ADVANTAGES.built_in:
        advantage = partial(_checked_advantages, f"advantage {config.name!r}", advantage)
    return torch.no_grad()(advantage)


def _checked_advantages(plugin: str, advantage: Callable[[AdvantageInputs], Tensor], inputs: AdvantageInputs) -> Tensor:
    advantages_BT = advantage(inputs)
    _require_shape(plugin, "advantages", advantages_BT, inputs.mask_BT)
    if not advantages_BT.isfinite().all():
        raise ConfigError(f"{plugin} returned advantages that are not finite")
    return advantages_BT


def build_loss(config: LossConfig) -> Callable[[LossInputs], LossTerms]:
    """The configured loss as a function of its inputs; a plug-in's output is checked.

    Raises: ConfigError if there is none of that name, or a plug-in does not take its options.
    """
    loss = LOSSES.bind(config.name, config.arguments)
    return loss if config.name in LOSSES.built_in else partial(_checked_terms, f"loss {config.name!r}", loss)


def _checked_terms(plugin: str, loss: Callable[[LossInputs], object], inputs: LossInputs) -> LossTerms:
    terms = loss(inputs)
    if not isinstance(terms, LossTerms):
        raise ConfigError(f"{plugin} must return LossTerms, not {type(terms).__name__}")
    _require_shape(plugin, "loss_BT", terms.loss_BT, inputs.mask_BT)
    _require_shape(plugin, "clipped_BT", terms.clipped_BT, inputs.mask_BT)
    if inputs.logprobs_BT.requires_grad and not terms.loss_BT.requires_grad:
        raise ConfigError(f"{plugin} returned loss_BT without a gradient; compute it from LossInputs.logprobs_BT")
    return terms


def _require_shape(plugin: str, what: str, output: object, mask_BT: Tensor) -> None:
    """Requires that a plug-in's output has the mask's shape: another one could broadcast and change the loss.

    Args:
        plugin: kind and name of the function.
        what: name of its output.

    Raises: ConfigError.
    """
    if not isinstance(output, Tensor):
        raise ConfigError(f"{plugin} returned {what} as {type(output).__name__}, not as a tensor")
    if output.shape != mask_BT.shape:
        raise ConfigError(
            f"{plugin} returned {what} of shape {list(output.shape)}; here it must be [B, T] = {list(mask_BT.shape)}, "
            "a number for each action"
        )
