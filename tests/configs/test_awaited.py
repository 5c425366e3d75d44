"""Who is waited for is named, but not at once and not all the time."""

import pytest
import structlog

from slipstream.configs.runtime.logging import SAY_AFTER_S, SAY_EVERY_S, Awaited, get_log


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def buffer(clock: list[float]) -> Awaited:
    return Awaited(get_log("test"), "the buffer", address="tcp://buffer:5555", clock=lambda: clock[0])


def test_a_long_wait_is_told_with_whom_what_and_how_long_and_so_is_its_end(buffer: Awaited, clock: list[float]) -> None:
    with structlog.testing.capture_logs() as said:
        for _ in range(int(SAY_AFTER_S + SAY_EVERY_S) + 1):
            buffer.still(question="Trained")
            clock[0] += 1.0
        buffer.there()
        buffer.there()
    waiting, still, there = said
    assert waiting == {
        "event": "waiting for the buffer", "address": "tcp://buffer:5555", "question": "Trained",
        "for_s": SAY_AFTER_S, "log_level": "warning",
    }  # fmt: skip
    assert still["for_s"] == SAY_AFTER_S + SAY_EVERY_S
    assert (there["event"], there["after_s"]) == ("the buffer is there", SAY_AFTER_S + SAY_EVERY_S + 1)


def test_short_waits_are_not_worth_a_word_however_many(buffer: Awaited, clock: list[float]) -> None:
    with structlog.testing.capture_logs() as said:
        for _ in range(5):
            buffer.still(question="Trained")
            clock[0] += SAY_AFTER_S - 1
            buffer.still(question="Trained")
            buffer.there()
    assert said == []
