"""A learner that is told to end while it trains."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.configs.runtime.signals import StopRequested
from slipstream.learner.data.buffer_feed import StepData
from slipstream.learner.parallel.mesh import World
from tests.learner.loops import learner_that_continues, third_step


@pytest.mark.parametrize("when", ["groups are there", "groups are wanting"])
def test_a_learner_that_is_told_to_end_has_saved_what_it_has_trained(
    when: str, world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    learner = learner_that_continues(2, make_config(steps=9, checkpoint={"every_steps": 10}), world)
    third, told = third_step(groups, learner.config), signal.SIGTERM

    def take(meanwhile: object) -> StepData:
        if learner.loop.state.step == 2:
            return third
        learner.loop.signals.number = told
        if when == "groups are wanting":
            raise StopRequested(told)
        return replace(third, step=3)

    learner.feed.take.side_effect = take
    with pytest.raises(SystemExit) as ended:
        learner.loop.run()
    assert ended.value.code == 128 + told
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]
    learner.buffer.checkpointed.assert_called_once_with(3)


def test_a_learner_that_is_told_to_end_saves_a_step_of_which_the_buffer_does_not_hear(
    world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    learner = learner_that_continues(2, make_config(steps=9, checkpoint={"every_steps": 10}), world)

    def told_in_vain(step: int) -> None:
        learner.loop.signals.number = signal.SIGTERM
        raise DeadlineError("the buffer is away")

    learner.feed.take.side_effect = [third_step(groups, learner.config)]
    learner.buffer.trained.side_effect = told_in_vain
    learner.buffer.checkpointed.side_effect = DeadlineError("the buffer is away")
    with pytest.raises(SystemExit) as ended:
        learner.loop.run()
    assert ended.value.code == 128 + signal.SIGTERM
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]


def test_a_learner_that_waits_and_is_told_to_end_while_the_buffer_is_away_saves_all_the_same(
    world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    learner = learner_that_continues(2, make_config(steps=9, checkpoint={"every_steps": 10}), world)

    def take(meanwhile: Callable[[], None]) -> None:
        learner.loop.signals.number = signal.SIGTERM
        meanwhile()
        raise StopRequested(signal.SIGTERM)

    learner.feed.take.side_effect = lambda meanwhile: (
        third_step(groups, learner.config) if learner.loop.state.step == 2 else take(meanwhile)
    )
    for call in (learner.buffer.repeat_reports, learner.buffer.checkpointed):
        call.side_effect = DeadlineError("the buffer is away")
    with pytest.raises(SystemExit):
        learner.loop.run()
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]


def test_a_learner_that_is_told_to_end_in_its_last_step_leaves_the_rest_to_a_later_start(
    world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    learner = learner_that_continues(2, make_config(steps=3, checkpoint={"every_steps": 10}), world)
    learner.feed.take.side_effect = [third_step(groups, learner.config)]
    learner.publisher.publish.side_effect = lambda _: setattr(
        learner.loop.signals, "number", signal.SIGINT * (learner.loop.state.step == 3)
    )
    with pytest.raises(SystemExit) as ended:
        learner.loop.run()
    assert ended.value.code == 128 + signal.SIGINT
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]
    learner.buffer.finish.assert_not_called()


def test_a_learner_that_is_told_to_end_twice_says_how_many_steps_will_be_done_again(
    world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    learner = learner_that_continues(2, make_config(steps=9, checkpoint={"every_steps": 10}), world)
    learner.feed.take.side_effect = [third_step(groups, learner.config), SystemExit(130)]
    with structlog.testing.capture_logs() as said, pytest.raises(SystemExit):
        learner.loop.run()
    assert [line["steps"] for line in said if line["event"].startswith("steps since the last checkpoint")] == [1]
