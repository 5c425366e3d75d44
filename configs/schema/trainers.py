"""The kinds of training, which `learner.trainer` chooses from."""

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import Field

from slipstream.configs.registry import Registry
from slipstream.configs.schema.base import NamedSection, PluginSection, one_of, registry_of


class RlConfig(NamedSection):
    """Reinforcement learning on groups that rollout servers generate."""

    target: ClassVar[str] = "slipstream.learner.trainers.rl.trainer:RLTrainer"
    name: Literal["rl"] = "rl"


TRAINERS: Final = registry_of("trainer", RlConfig)


class TrainerPlugin(PluginSection):
    """A trainer of the user's own: a subclass of `Trainer`, see learner/trainers/base.py."""

    registry: ClassVar[Registry] = TRAINERS

    options: dict[str, Any] = Field(default_factory=dict)
    """Its options; the trainer validates them."""


if TYPE_CHECKING:
    TrainerConfig = NamedSection
else:
    TrainerConfig = one_of(RlConfig, TrainerPlugin)
