"""Finds the policy loss that the configuration names."""

from collections.abc import Callable
from functools import partial
from typing import Final

from slipstream.configs.plugins import find_function
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.algorithms import LossConfig
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms, PolicyLoss
from slipstream.learner.algorithms.losses.clipped import cispo, dro, kimi, ppo, reinforce, sapo, topr
from slipstream.learner.algorithms.losses.covariance import clip_cov, kl_cov
from slipstream.learner.algorithms.losses.divergence import dppo_kl, dppo_tv
from slipstream.learner.algorithms.losses.sequence import gmpo, gspo
from slipstream.learner.algorithms.plugin_tensors import require_shape

BUILT_IN: Final[dict[str, PolicyLoss]] = {
    "ppo": ppo,
    "decoupled_ppo": ppo,  # the decoupling is in the behaviour weight, which comes afterwards
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


def build_loss(config: LossConfig) -> Callable[[LossInputs], LossTerms]:
    """The loss of that name with its arguments, a function of the inputs alone; a plug-in's terms are checked.

    Raises: ConfigError if there is none of that name, or a plug-in does not take its options.
    """
    loss = find_function("loss", config.name, BUILT_IN, config.arguments)
    return loss if config.name in BUILT_IN else partial(_checked, f"loss {config.name!r}", loss)


def _checked(plugin: str, loss: Callable[[LossInputs], object], inputs: LossInputs) -> LossTerms:
    terms = loss(inputs)
    if not isinstance(terms, LossTerms):
        raise ConfigError(f"{plugin} must return LossTerms, not {type(terms).__name__}")
    require_shape(plugin, "loss_BT", terms.loss_BT, inputs.mask_BT)
    require_shape(plugin, "clipped_BT", terms.clipped_BT, inputs.mask_BT)
    if inputs.logprobs_BT.requires_grad and not terms.loss_BT.requires_grad:
        raise ConfigError(f"{plugin} gave loss_BT without a gradient; compute it from LossInputs.logprobs_BT")
    return terms
