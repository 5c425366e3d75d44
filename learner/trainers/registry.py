"""Trainers by `learner.trainer`; the parts of one are imported only where it is chosen."""

from inspect import isabstract
from typing import Any, Final

from slipstream.configs.plugins import find_plugin
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import TrainerConfig
from slipstream.learner.trainers.base import Trainer

TRAINERS: Final = {"rl": "slipstream.learner.trainers.rl.trainer:RLTrainer"}
"""`module:attribute` by name."""


def find_trainer(config: TrainerConfig) -> type[Trainer[Any]]:
    """The configured class of trainers.

    Raises: ConfigError when there is none of that name, it can't be imported, or it is no complete trainer.
    """
    found = find_plugin("trainer", TRAINERS.get(config.name, config.name), TRAINERS)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise ConfigError(f"trainer {config.name!r} must be a subclass of slipstream.learner.trainers.base.Trainer")
    if isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"trainer {config.name!r} lacks {missing}, which every trainer defines")
    return found
