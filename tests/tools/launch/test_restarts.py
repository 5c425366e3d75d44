"""Restarts: delays of the services, and the learner's second attempts."""

import pytest

from slipstream.tools.launch.restarts import MOST_ALIKE, Failure, learner_may_restart, restart_delay_s


def rows(*errors: str, lived_s: float = 1.0) -> list[Failure]:
    """Failures with these errors."""
    return [Failure(error, lived_s) for error in errors]


def test_delays_double_up_to_a_minute() -> None:
    failures = rows(*"abababab")
    delays = [restart_delay_s(failures[: count + 1], sound_s=60) for count in range(len(failures))]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_same_failure_again_and_again_keeps_a_process_down() -> None:
    alike = rows(*"a" * MOST_ALIKE)
    assert restart_delay_s(alike[1:], sound_s=60) == 2 ** (MOST_ALIKE - 2)
    assert restart_delay_s(alike, sound_s=60) is None
    assert restart_delay_s([*alike[1:], *rows("b", "a")], sound_s=60) is not None


def test_process_that_worked_begins_a_new_row() -> None:
    failures = [*rows(*"a" * (MOST_ALIKE - 1)), *rows("a", lived_s=61.0)]
    assert restart_delay_s(failures, sound_s=60) == 1
    assert restart_delay_s([*failures, *rows("a")], sound_s=60) == 2


@pytest.mark.parametrize(
    ("failures", "restarts"),
    [
        ([("a", 15, 10)], True),
        ([("a", 15, 10), ("a", 15, 10)], False),
        ([("a", 15, 10), ("b", 17, 10)], False),
        ([("a", 15, 10), ("a", 25, 20)], True),
        ([("a", 15, 0), ("a", 15, 10)], False),
        ([("a", 15, 10), ("a", 25, 20), ("b", 26, 20)], False),
    ],
    ids=["first", "same", "no checkpoint since", "further on", "same step", "third"],
)
def test_learner_restarts_once_for_each_checkpoint(failures: list[tuple[str, int, int]], restarts: bool) -> None:
    ended = [Failure(error, 60.0, step, checkpoint) for error, step, checkpoint in failures]
    assert learner_may_restart(ended) == restarts
