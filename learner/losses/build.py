"""Finds the policy loss that the configuration names."""

from collections.abc import Callable
from typing import Final

from slipstream.configs.plugins import find_function
from slipstream.configs.schema.losses import LossConfig
from slipstream.learner.losses.base import LossInputs, LossTerms, PolicyLoss
from slipstream.learner.losses.clipped import ppo
from slipstream.learner.losses.covariance import clip_cov, kl_cov
from slipstream.learner.losses.divergence import dppo_kl, dppo_tv
from slipstream.learner.losses.gated import sapo
from slipstream.learner.losses.regularised import dro, kimi
from slipstream.learner.losses.sequence import gmpo, gspo
from slipstream.learner.losses.weighted import cispo, reinforce, topr

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
    """The loss of that name with its arguments, a function of the inputs alone.

    Raises: ConfigError if there is none of that name, or a plug-in does not take its options.
    """
    return find_function("loss", config.name, BUILT_IN, config.arguments)
