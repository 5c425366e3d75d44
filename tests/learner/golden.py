"""The batch of the reference figures, to try things on; `slipstream conform` holds the figures to account."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

_FILE: Final[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "algorithms.json").read_text("utf-8"))
SHAPE: Final[dict[str, int]] = _FILE["shape"]
INPUTS: Final[dict[str, Tensor]] = {
    name: torch.tensor(values, dtype=torch.float64) for name, values in _FILE["inputs"].items()
}
