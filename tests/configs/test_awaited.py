"""Who is waited for is named, but not at once and not all the time."""

import pytest
import structlog

from slipstream.configs.runtime.logging import WAIT_LOG_AFTER_S, WAIT_LOG_EVERY_S, WaitLog, get_log


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def buffer(clock: list[float]) -> WaitLog:
    return WaitLog(get_log("test"), "the buffer", address="tcp://buffer:5555", clock=lambda: clock[0])


def test_a_long_wait_is_told_with_whom_what_and_how_long_and_so_is_its_end(buffer: WaitLog, clock: list[float]) -> None:
    with structlog.testing.capture_logs() as said:
        for _ in range(int(WAIT_LOG_AFTER_S + WAIT_LOG_EVERY_S) + 1):
            buffer.waiting(request="Trained")
            clock[0] += 1.0
        buffer.arrived()
        buffer.arrived()
    waiting, still, there = said
    assert waiting == {
        "event": "waiting for the buffer", "address": "tcp://buffer:5555", "request": "Trained",
        "for_s": WAIT_LOG_AFTER_S, "log_level": "warning",
    }  # fmt: skip
    assert still["for_s"] == WAIT_LOG_AFTER_S + WAIT_LOG_EVERY_S
    assert (there["event"], there["after_s"]) == ("the buffer is there", WAIT_LOG_AFTER_S + WAIT_LOG_EVERY_S + 1)


def test_short_waits_are_not_worth_a_word_however_many(buffer: WaitLog, clock: list[float]) -> None:
    with structlog.testing.capture_logs() as said:
        for _ in range(5):
            buffer.waiting(request="Trained")
            clock[0] += WAIT_LOG_AFTER_S - 1
            buffer.waiting(request="Trained")
            buffer.arrived()
    assert said == []
