"""Trainers by `learner.trainer`; the parts of one are imported only where it is chosen."""

from inspect import isabstract
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import TRAINERS, TrainerConfig
from slipstream.learner.trainers.base import Trainer


def find_trainer(config: TrainerConfig) -> type[Trainer[Any]]:
    """The configured class of trainers.

    Raises: ConfigError when there is none of that name, it can't be imported, or it is no complete trainer.
    """
    trainer = TRAINERS.load(config.name)
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise ConfigError(f"trainer {config.name!r} must be a subclass of slipstream.learner.trainers.base.Trainer")
    if isabstract(trainer):
        missing = ", ".join(sorted(trainer.__abstractmethods__))
        raise ConfigError(f"trainer {config.name!r} lacks {missing}, which every trainer defines")
    return trainer
