"""The batch of the reference figures, which `slipstream conform` compares (tests/tools/test_conform.py)."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

_FILE: Final[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "algorithms.json").read_text("utf-8"))
SHAPE: Final[dict[str, int]] = _FILE["shape"]
INPUTS: Final[dict[str, Tensor]] = {
    name: torch.tensor(values, dtype=torch.float64) for name, values in _FILE["inputs"].items()
}


def golden_log_ratio() -> tuple[Tensor, Tensor]:
    """log π_prox/μ, with values outside the mask that must not count, and the mask."""
    mask_BT = INPUTS["mask"].float()
    log_ratio_BT = (INPUTS["proximal_logprobs"] - INPUTS["behaviour_logprobs"]).float()
    return torch.where(mask_BT > 0, log_ratio_BT, 7.0), mask_BT
