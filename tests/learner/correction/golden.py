"""The correction's part of the reference figures' batch."""

import torch
from torch import Tensor

from tests.learner.golden import INPUTS


def golden_batch() -> tuple[Tensor, Tensor]:
    """log π_prox/μ, with something outside the mask that must not count, and the mask."""
    mask_BT = INPUTS["mask"].float()
    log_ratio_BT = (INPUTS["proximal_logprobs"] - INPUTS["behaviour_logprobs"]).float()
    return torch.where(mask_BT > 0, log_ratio_BT, 7.0), mask_BT
