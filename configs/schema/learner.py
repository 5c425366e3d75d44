"""The learner: batch, loss, optimizer, checkpoints."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up and decay."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's running-average coefficients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up from 0."""
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the linear decay has reached after the last step, as a share of the peak; 1: no decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled to at most this global norm."""


class LossConfig(Section):
    """Decoupled PPO: the ratio to the proximal policy is clipped, the behaviour weight truncated."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio's upper bound is 1 + clip_high."""
    behaviour_weight_cap: float = Field(default=2.0, gt=0)
    """Cap of the behaviour weight π_prox/μ (truncated importance sampling)."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the policy's mean entropy, which is added to the objective; 0 saves its computation."""


class CheckpointConfig(Section):
    """Checkpoints of model, optimizer and step (torch.distributed.checkpoint)."""

    every_steps: int = Field(default=100, ge=1)
    """Save each time this many steps are done, and after the last."""
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
    advantage: Literal["grpo"] = "grpo"
    """Group-relative advantages: (r - mean) / (std + eps) within the group (arXiv 2402.03300)."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    attention: Literal["segments", "flash_attention_2"] = "segments"
    """Over packed sequences: `segments` is exact on any device, `flash_attention_2` needs the extra `flash`."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass to save memory."""
    wait_deadline_s: float = Field(default=600.0, gt=0)
    """How long the learner waits for enough ready groups; then it ends and says what the buffer holds."""
