"""Stop signals during RL training."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.configs.runtime.signals import StopRequested
from slipstream.learner.data.buffer_feed import StepData
from slipstream.learner.parallel.mesh import World
from tests.learner.trainers.rl.loops import Learner, learner_that_continues, third_step

AWAY = DeadlineError("the buffer is away")


@pytest.fixture
def resume(world: World, make_config: Callable[..., RunConfig], groups: Path) -> Callable[[int], Learner]:
    """Makes a learner that has done two of so many steps, and gets the groups of the third."""

    def make(steps: int) -> Learner:
        learner = learner_that_continues(2, make_config(steps=steps, checkpoint={"every_steps": 10}), world)
        learner.feed.take.side_effect = [third_step(groups, learner.config)]
        return learner

    return make


def exit_code(learner: Learner) -> Any:
    with pytest.raises(SystemExit) as stopped:
        learner.loop.run()
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]
    return stopped.value.code


@pytest.mark.parametrize("case", ["groups ready", "no groups", "step not reported", "buffer away"])
def test_stop_signal_saves_trained_steps(case: str, resume: Callable[[int], Learner]) -> None:
    learner = resume(9)
    third: StepData = next(learner.feed.take.side_effect)

    def receive_signal() -> None:
        learner.loop.signals.number = signal.SIGTERM

    def take(while_waiting: Callable[[], None]) -> StepData:
        if learner.loop.state.step == 2:
            return third
        receive_signal()
        if case == "groups ready":
            return replace(third, step=3)
        while_waiting()
        raise StopRequested(signal.SIGTERM)

    def lose_report(_: int) -> None:
        receive_signal()
        raise AWAY

    learner.feed.take.side_effect = take
    if case == "step not reported":
        learner.buffer.trained.side_effect = lose_report
    if case in {"step not reported", "buffer away"}:
        learner.buffer.repeat_reports.side_effect = learner.buffer.checkpointed.side_effect = AWAY
    assert exit_code(learner) == 128 + signal.SIGTERM
    learner.buffer.checkpointed.assert_called_once_with(3)


def test_stop_signal_in_last_step_skips_finish(resume: Callable[[int], Learner]) -> None:
    learner = resume(3)

    def publish(_: object) -> None:
        if learner.loop.state.step == 3:
            learner.loop.signals.number = signal.SIGINT

    learner.publisher.publish.side_effect = publish
    assert exit_code(learner) == 128 + signal.SIGINT
    learner.buffer.finish.assert_not_called()


def test_second_stop_signal_logs_unsaved_steps(resume: Callable[[int], Learner]) -> None:
    learner = resume(9)
    third: StepData = next(learner.feed.take.side_effect)
    learner.feed.take.side_effect = [third, SystemExit(130)]
    with structlog.testing.capture_logs() as logs, pytest.raises(SystemExit):
        learner.loop.run()
    assert [line["steps"] for line in logs if "steps" in line] == [1]
