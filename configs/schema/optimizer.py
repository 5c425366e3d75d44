"""Optimizer and learning rate, of policy and critic."""

from typing import Annotated

from pydantic import Field

from slipstream.configs.schema.base import Section

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW with linear warm-up and decay."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    """AdamW's running-average coefficients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up from 0."""
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the linear decay has reached after the last step, as a share of the peak; 1: no decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled to at most this global norm."""
