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
NODE_OF_SHORT = 16
"""Tokens of a small model that take a CPU as long as one more node of a short tree."""
_ATTRIBUTE = "prefix_sharing"


def sharing_of(model: Any, device: torch.device) -> PrefixSharing:
    """The rule by which a node of shared tokens is worth its cost.

    Args:
        model: of transformers.
    """
    if device.type != "cpu":
        return PrefixSharing(BLOCK)  # of one kernel's mask; a node may leave parts of two blocks unused
    flops = ModelFlops.of_model(model)
    of_token = (flops.trained_weights + flops.frozen_weights) / max(1, sum(flops.windows.values()))
    least = max(1, math.ceil(NODE_OPERATIONS / (6 * of_token)))
    return PrefixSharing(least, least_of_short=min(least, NODE_OF_SHORT))


def share_prefixes_of(model: nn.Module, sharing: PrefixSharing | None) -> None:
    """Sets the rule for a model's sequences; None: it can't compute shared prefixes."""
    setattr(model, _ATTRIBUTE, sharing)


def common_sharing(models: Sequence[nn.Module]) -> PrefixSharing | None:
    """The rule for sequences that all of these models compute; None if one of them can't."""
    rules: list[PrefixSharing | None] = [getattr(model, _ATTRIBUTE, None) for model in models]
    able = [rule for rule in rules if rule is not None]
    return max(able, key=lambda rule: rule.least_tokens) if able and len(able) == len(rules) else None
