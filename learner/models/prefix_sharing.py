"""The models' ability to compute a prefix once that several sequences share, and when that is worth it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slipstream.learner.data.prefix_tree import PrefixSharing
from slipstream.learner.models.attention import FLASH
from slipstream.learner.models.attention_kernels import BLOCK
from slipstream.learner.models.flops import ModelFlops

WITHOUT_TREES = (*FLASH, "varlen")
"""Values of `learner.attention` whose kernels know sequences, but no trees."""
NODE_OPERATIONS = 4e7
"""Work of matrix products that a CPU does in the time of a layer's calls for one more node."""
_ATTRIBUTE = "prefix_sharing"


def least_tokens(model: Any, device: torch.device) -> int:
    """Number of tokens that a node must save to be worth its calls of kernels.

    Args:
        model: of transformers.
    """
    if device.type != "cpu":
        return BLOCK  # of one kernel's mask; a node may leave parts of two blocks unused
    flops = ModelFlops.of_model(model)
    of_token = (flops.trained_weights + flops.frozen_weights) / max(1, sum(flops.windows.values()))
    return max(1, math.ceil(NODE_OPERATIONS / (6 * of_token)))


def share_prefixes_of(model: nn.Module, sharing: PrefixSharing | None) -> None:
    """Sets the rule for a model's sequences; None: it can't compute shared prefixes."""
    setattr(model, _ATTRIBUTE, sharing)


def common_sharing(models: Sequence[nn.Module]) -> PrefixSharing | None:
    """The rule for sequences that all of these models compute; None if one of them can't."""
    rules: list[PrefixSharing | None] = [getattr(model, _ATTRIBUTE, None) for model in models]
    least = [rule.least_tokens for rule in rules if rule is not None]
    return PrefixSharing(max(least)) if least and len(least) == len(rules) else None
