"""The critic: a value model with an optimizer of its own."""

from pydantic import Field

from slipstream.configs.schema.base import Section, UserPath
from slipstream.configs.schema.optimizer import OptimizerConfig


class CriticConfig(Section):
    """A value model, sharded like the policy; `learner.advantage: gae` needs one."""

    path: UserPath | None = None
    """Folder of the model that it starts from, with a value head of zeros and the policy's tokens; unset: the
    policy's."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of the returns that it learns to predict: 1 is Monte Carlo, unbiased (VAPO, arXiv 2504.05118)."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """A value may move by this much in a step before it stops getting a gradient; unset: no limit."""
    pretrain_steps: int = Field(default=0, ge=0)
    """Steps at the start that train the critic alone (VAPO's value pre-training); the policy's warm-up comes after."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
