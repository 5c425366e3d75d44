"""A server at which nothing works takes few tickets."""

import structlog

from slipstream.rollout_servers.tickets import MOST_S, USUAL, Setbacks


def test_failures_in_a_row_are_held_back_longer_and_longer_and_a_success_ends_that() -> None:
    setbacks = Setbacks()
    with structlog.testing.capture_logs() as said:
        assert [setbacks.failure_s("env_error") for _ in range(USUAL)] == [0.0] * USUAL
        assert [setbacks.failure_s("env_error") for _ in range(3)] == [0.1, 0.2, 0.4]
        assert [setbacks.failure_s("env_error") for _ in range(2000)][-1] == MOST_S
        setbacks.success()
        assert setbacks.failure_s("env_error") == 0.0
    assert [line["event"] for line in said] == [
        "nothing but failures, so that few tickets are taken now", "tickets succeed again",
    ]  # fmt: skip


def test_a_task_that_fails_now_and_then_holds_nothing_back() -> None:
    setbacks = Setbacks()
    for _ in range(USUAL):
        assert setbacks.failure_s("prompt_too_long") == 0.0
        setbacks.success()
    assert setbacks.failure_s("prompt_too_long") == 0.0
