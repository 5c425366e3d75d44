"""The learner: batch, loss, optimizer, checkpoints."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.advantages import AdvantageConfig, GrpoConfig
from slipstream.configs.schema.base import Seconds, Section
from slipstream.configs.schema.correction import CorrectionConfig
from slipstream.configs.schema.critic import CriticConfig
from slipstream.configs.schema.kl import KlConfig
from slipstream.configs.schema.losses import LossConfig, PpoConfig
from slipstream.configs.schema.optimizer import OptimizerConfig
from slipstream.configs.schema.throttle import ThrottleConfig


class CheckpointConfig(Section):
    """Checkpoints of model, optimizer and step (torch.distributed.checkpoint)."""

    every_steps: int = Field(default=100, ge=1)
    """Save each time this many steps are done, and after the last; right after a skipped update, one step later."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints to keep."""


class LearnerConfig(Section):
    """What the learner does with the groups that it leases."""

    steps: int = Field(default=1000, ge=1)
    """Training steps."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups leased for one step."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per step: the groups are split into that many mini-batches."""
    token_budget: int = Field(default=16384, ge=8)
    """Most tokens in one packed micro-batch."""
    advantage: AdvantageConfig = GrpoConfig()
    loss: LossConfig = PpoConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig | None = None
    """Penalty on the divergence from a reference policy; unset: none, and no reference model is loaded."""
    critic: CriticConfig | None = None
    """Value model, for `advantage: gae`; unset: none."""
    throttle: ThrottleConfig | None = None
    """Less staleness when training can't bear it; unset: `buffer.max_staleness` holds throughout."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    attention: Literal["segments", "flash_attention_2"] = "segments"
    """Over packed sequences: `segments` is exact on any device, `flash_attention_2` needs the extra `flash`."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass to save memory."""
    wait_deadline_s: Seconds = 600.0
    """How long the learner waits for enough ready groups; then it ends and says what the buffer holds. Where steps are
    not saved yet it saves them first, which may make room in Redis, and waits as long once more. Its ranks wait
    as long for one that is silent, and end; and `slipstream up`, when it is stopped, for the learner to save its step.
    More than `rollout.group_deadline_s`."""
