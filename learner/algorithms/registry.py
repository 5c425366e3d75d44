"""Built-in and plug-in advantages and losses by their configured names.

# B rows, T actions of the longest
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from slipstream.configs.plugins import find_function
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.algorithms import AdvantageConfig, LossConfig
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
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms, PolicyLoss
from slipstream.learner.algorithms.losses.clipped import cispo, dro, gmpo, gspo, kimi, ppo, reinforce, sapo, topr
from slipstream.learner.algorithms.losses.selective import clip_cov, dppo_kl, dppo_tv, kl_cov

ADVANTAGES: Final[dict[str, Advantage]] = {
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

LOSSES: Final[dict[str, PolicyLoss]] = {
    "ppo": ppo,
    "decoupled_ppo": ppo,  # the decoupling is in the importance weight, which comes afterwards
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "reinforce": reinforce,
    "topr": topr,
    "kimi": kimi,
}


def build_advantage(config: AdvantageConfig) -> Callable[[AdvantageInputs], Tensor]:
    """The configured advantage as a function of its inputs, without gradient; a plug-in's output is checked.

    Raises: ConfigError if there is none of that name, or it can't be called with those settings.
    """
    advantage = find_function("advantage", config.name, ADVANTAGES, config.arguments)
    if config.name not in ADVANTAGES:
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
    loss = find_function("loss", config.name, LOSSES, config.arguments)
    return loss if config.name in LOSSES else partial(_checked_terms, f"loss {config.name!r}", loss)


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
