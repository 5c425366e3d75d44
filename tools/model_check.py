"""Checks of a run's models: files, targets of adapters, plug-ins of the algorithm, and the engine's settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.algorithms.registry import build_advantage, build_loss
from slipstream.learner.models.load import ModelOptions, check_model
from slipstream.models.folder import model_folder
from slipstream.rollout_servers.engines.registry import engine_problems


def model_problems(config: RunConfig, model: Path) -> list[str]:
    """Reasons why the learner can't train `model`, or the engine can't serve it; no weight is read."""
    learner, options = config.learner, ModelOptions.of(config.model, config.learner)
    steps: list[Callable[[], object]] = [
        lambda: check_model(model, options),
        lambda: build_advantage(learner.advantage),
        lambda: build_loss(learner.loss),
    ]
    if learner.kl is not None and learner.kl.reference is not None:
        reference = model_folder("learner.kl.reference", learner.kl.reference)
        steps.append(lambda: check_model(reference, replace(options, lora=None)))
    problems = engine_problems(config.rollout.engine, config.weights, model)
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems += error.problems
    return problems
