"""A golden file: inputs and outputs of another implementation, and its names for what we call otherwise."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.algorithms.advantages.base import AdvantageInputs, rewards_at_the_end
from slipstream.learner.algorithms.losses.base import LossInputs

Vectors = Mapping[str, Mapping[str, Any]]

SECTIONS: Final = ("inputs", "shape", "advantages", "losses", "kl", "aggregation", "correction")
SETTINGS: Final = {
    "lambda": "lam",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "tau_pos": "tau_positive",
    "tau_neg": "tau_negative",
    "kl_cov_ratio": "ratio",
    "ppo_kl_coef": "coefficient",
    "dro_beta": "beta",
}
"""What the reference calls a setting, and what we call it."""


@dataclass(frozen=True)
class Golden:
    """The file's tensors in float64, and its vectors."""

    tensors: Mapping[str, Tensor]
    group_size: int
    advantages: Vectors
    losses: Vectors
    kl: Mapping[str, Any]
    aggregation: Mapping[str, float]
    correction: Vectors

    @property
    def mask_BT(self) -> Tensor:
        """1.0 where there is an action."""
        return self.tensors["mask"]

    def advantage_inputs(self) -> AdvantageInputs:
        """The batch as advantages see it: each row's reward at its last action."""
        rows = len(self.mask_BT)
        return AdvantageInputs(
            mask_BT=self.mask_BT,
            rewards_BT=rewards_at_the_end(self.tensors["reward"], self.mask_BT),
            group_B=torch.arange(rows) // self.group_size,
            groups=rows // self.group_size,
            greedy_rewards_B=self.tensors["greedy_reward"],
            values_BT=self.tensors["values"],
        )

    def loss_inputs(self) -> LossInputs:
        """The batch as losses see it; the target's log-probs want a gradient."""
        return LossInputs(
            logprobs_BT=self.tensors["target_logprobs"].clone().requires_grad_(),
            proximal_logprobs_BT=self.tensors["proximal_logprobs"],
            behaviour_logprobs_BT=self.tensors["behaviour_logprobs"],
            advantages_BT=self.tensors["advantages_for_losses"],
            mask_BT=self.mask_BT,
        )


def read_golden(path: Path) -> Golden:
    """The golden file. Raises: ConfigError when it can't be read or lacks a section."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as a golden file: {error}") from None
    missing = [section for section in SECTIONS if section not in found]
    if missing:
        raise ConfigError(f"{path} is no golden file: it lacks {', '.join(missing)}")
    return Golden(
        tensors={name: torch.tensor(value, dtype=torch.float64) for name, value in found["inputs"].items()},
        group_size=found["shape"]["group_size"],
        **{section: found[section] for section in SECTIONS[2:]},
    )
