"""The reference implementation's batch, and its figures for the correction."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "algorithms.json").read_text("utf-8"))
VECTORS: dict[str, Any] = GOLDEN["correction"]


def golden_input(name: str) -> Tensor:
    return torch.tensor(GOLDEN["inputs"][name])


def golden_batch() -> tuple[Tensor, Tensor]:
    """log π_prox/μ, with something outside the mask that must not count, and the mask."""
    mask_BT = golden_input("mask")
    log_ratio_BT = golden_input("proximal_logprobs") - golden_input("behaviour_logprobs")
    return torch.where(mask_BT > 0, log_ratio_BT, 7.0), mask_BT
