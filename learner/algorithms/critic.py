"""The critic: a transformer with a value head, sharded like the policy, with an optimizer of its own.

# A actions
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.configs.schema.learner import CriticConfig
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.flops import ModelFlops
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.load import ModelOptions, vocabulary_of
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.models.scalar_head import load_scalar_model, scalar_values
from slipstream.learner.parallel.mesh import World
from slipstream.models.folder import model_folder


@dataclass(frozen=True)
class Critic:
    """The value model and its optimizer, on every rank."""

    config: CriticConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def flops(self) -> ModelFlops:
        """Operations of a forward and backward pass."""
        return ModelFlops.of_model(self.model)

    def values(self, batch: MicroBatch) -> Tensor:
        """Value of the state before each action, fp32, shape [A]."""
        return scalar_values(self.model, batch)


def load_critic(critic: CriticConfig | None, policy: Path, options: ModelOptions, world: World) -> Critic | None:
    """The configured critic; it starts from `learner.critic.path`, or from the policy's weights. None: no critic.

    A trained head in that folder, of a value model or a reward model, is used too.

    Raises: ConfigError when it can't be trained, or has other tokens than the policy.
    """
    if critic is None:
        return None
    folder = policy if critic.path is None else model_folder("learner.critic.path", critic.path)
    model = load_scalar_model(folder, replace(options, lora=None), world, bias=True)
    if critic.path is not None:
        known = vocabulary_of(model)
        require_same_tokens("learner.critic.path", folder, policy, vocabulary=known, world=world)
    return Critic(critic, model, build_optimizer(model, critic.optimizer))
