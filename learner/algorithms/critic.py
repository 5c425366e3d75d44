"""The critic: a transformer with a value head, sharded like the policy, with an optimizer of its own.

# N packed input tokens, A actions, D hidden size
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.configs.schema.learner import CriticConfig
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.flops import ModelFlops
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.layers import backbone_of, decoder_of
from slipstream.learner.models.load import (
    ModelOptions,
    build_model,
    load_and_check,
    vocabulary_of,
)
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.parallel.context import context_of
from slipstream.learner.parallel.mesh import World
from slipstream.models.folder import model_folder


class ValueModel(nn.Module):
    """A transformer that predicts the return from the state before each action."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        # The first values are 0: those of a random head would only add noise to the first advantages.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Value of the state before each action, shape [A, 1]."""
        states_1ND = self.backbone(**batch.model_inputs()).last_hidden_state
        values_A1: Tensor = self.head(states_1ND[0].index_select(0, batch.action_positions_S))
        return values_A1


@dataclass(frozen=True)
class Critic:
    """The value model and its optimizer, on every rank."""

    config: CriticConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def flops(self) -> ModelFlops:
        """Operations of a forward and backward pass."""
        model: Any = self.model
        return ModelFlops.of_parts(model.backbone, decoder_of(model.backbone).layers, model.head.weight)

    def values(self, batch: MicroBatch) -> Tensor:
        """Value of the state before each action, fp32, shape [A]."""
        share = batch.split(context_of(self.model))
        values_A1: Tensor = self.model(share)
        return share.of_whole(values_A1.float().squeeze(-1))


def load_critic(critic: CriticConfig | None, policy: Path, options: ModelOptions, world: World) -> Critic | None:
    """The configured critic; it starts from `learner.critic.path`, or from the policy's weights. None: no critic.

    Raises: ConfigError when it can't be trained, or has other tokens than the policy.
    """
    if critic is None:
        return None
    folder = policy if critic.path is None else model_folder("learner.critic.path", critic.path)
    loader = build_model(folder, options, world)
    whole = loader.model
    if critic.path is not None:
        known = vocabulary_of(whole)
        require_same_tokens("learner.critic.path", folder, policy, vocabulary=known, world=world)
    model = ValueModel(backbone_of(whole), whole.config.get_text_config(decoder=True).hidden_size)
    load_and_check(loader, model, model, options, world)
    return Critic(critic, model, build_optimizer(model, critic.optimizer))
