"""One training run at a forced lag, through the real learner."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from slipstream.configs.models import initial_model
from slipstream.learner.data.buffer_feed import StepData, build_step, deal
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.throttle import Throttle
from slipstream.learner.trainers.step import Trainer, build_trainer
from slipstream.tools.bench.staleness.curves import Curves
from slipstream.tools.bench.staleness.held_back import HeldBack
from slipstream.tools.bench.staleness.sampler import Sampler

KEPT_FIGURES = ("ess", "kl_k3", "clip_fraction", "truncated_fraction", "grad_norm", "lr")
"""Of the learner's figures of a step, those that explain a curve."""


def train(config: RunConfig) -> Curves:
    """Trains; what the weights after step s generated is trained on at step s + `buffer.max_staleness`."""
    started = time.monotonic()
    torch.manual_seed(config.run.seed)
    path = initial_model(config)
    world = join_world()
    try:
        trainer = build_trainer(config, path, world)
        curves = follow(trainer, Sampler(config, trainer.model, path).groups)
    finally:
        leave_world()
    curves.seconds = time.monotonic() - started
    return curves


def follow(trainer: Trainer, generate: Callable[[int], Sequence[Group]]) -> Curves:
    """All steps of a run.

    Args:
        generate: a step's groups, by the trainer's present weights, which are of the given version.
    """
    config, curves = trainer.config, Curves()
    lag = config.buffer.max_staleness
    throttle = None if config.learner.throttle is None else Throttle(config.learner.throttle, lag)
    held_back = HeldBack(generate)
    for step in range(config.learner.steps):
        data = _step_data(held_back.take(step, lag=lag), config, step)
        figures = trainer.step(data, own_version=None)
        curves.rewards.append(_reward(held_back.newest))
        curves.lags.append(lag)
        for name in KEPT_FIGURES:
            curves.figures.setdefault(name, []).append(figures[name])
        action = None if throttle is None else throttle.observe(figures)
        if action is not None:
            lag, trainer.lr_scale = action.max_staleness, action.lr_scale
    curves.rewards.append(_reward(generate(config.learner.steps)))
    curves.dropped = held_back.dropped
    return curves


def _step_data(groups: Sequence[Group], config: RunConfig, step: int) -> StepData:
    dealt = deal(len(groups), updates=config.learner.updates_per_step, rank=0, world_size=1)
    weighted = [[(groups[index], 1.0) for index in indices] for indices in dealt]
    return build_step(weighted, config, step=step, consuming_version=step)


def _reward(groups: Sequence[Group]) -> float:
    return float(np.mean([trajectory.reward for group in groups for trajectory in group.trajectories]))
