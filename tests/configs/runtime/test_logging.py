"""Rate-limited messages, wait logs, and log files on full disks."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from slipstream.configs.runtime.logging import (
    WAIT_LOG_AFTER_S,
    WAIT_LOG_EVERY_S,
    LogFile,
    LogInterval,
    WaitLog,
    get_log,
)
from tests.full_disk import files_of_at_most


def test_interval_is_due_again_after_its_time() -> None:
    times = iter((0.0, 4.9, 5.0, 9.0, 20.0, 20.1))
    interval = LogInterval(5.0, clock=lambda: next(times))
    assert [interval.due() for _ in range(6)] == [True, False, True, False, True, False]


# --- WaitLog ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def wait_log(clock: list[float]) -> WaitLog:
    return WaitLog(get_log("test"), "the buffer", address="tcp://buffer:5555", clock=lambda: clock[0])


def test_long_wait_and_its_end_are_logged(wait_log: WaitLog, clock: list[float]) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(int(WAIT_LOG_AFTER_S + WAIT_LOG_EVERY_S) + 1):
            wait_log.waiting(request="Trained")
            clock[0] += 1.0
        wait_log.arrived()
        wait_log.arrived()
    first, second, end = logs
    assert first == {
        "event": "waiting for the buffer", "address": "tcp://buffer:5555", "request": "Trained",
        "for_s": WAIT_LOG_AFTER_S, "log_level": "warning",
    }  # fmt: skip
    assert second["for_s"] == WAIT_LOG_AFTER_S + WAIT_LOG_EVERY_S
    assert end["after_s"] == WAIT_LOG_AFTER_S + WAIT_LOG_EVERY_S + 1


def test_short_waits_are_not_logged(wait_log: WaitLog, clock: list[float]) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            wait_log.waiting(request="Trained")
            clock[0] += WAIT_LOG_AFTER_S - 1
            wait_log.waiting(request="Trained")
            wait_log.arrived()
    assert logs == []


# --- LogFile ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "buffer.jsonl"


@pytest.fixture
def log(file: Path) -> Iterator[logging.Logger]:
    """Writes to `file` alone."""
    file.parent.mkdir()
    handler = LogFile(file)
    log = logging.Logger("alone")
    log.addHandler(handler)
    yield log
    handler.close()


def test_log_continues_when_a_full_disk_has_room_again(
    file: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("before")
    with files_of_at_most(file.stat().st_size):
        for _ in range(100):
            log.warning("line")
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"can't write {file}: ")
    log.warning("after")
    lines = file.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert set(lines) <= {"before", "line", "after"}


def test_renamed_log_is_created_again(file: Path, log: logging.Logger) -> None:
    log.warning("first")
    rotated = file.rename(file.with_suffix(".1"))
    log.warning("second")
    assert (rotated.read_text(), file.read_text()) == ("first\n", "second\n")


def test_log_without_a_folder_loses_only_its_lines(
    file: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(file.parent)
    for _ in range(3):
        log.warning("lost")
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"can't write {file}: ")
    file.parent.mkdir()
    log.warning("found")
    assert file.read_text() == "found\n"


def test_malformed_record_is_reported_with_a_traceback(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err
