"""What happens a lot is said now and then, and a log goes on whatever becomes of its file."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.configs.runtime.logging import LogFile, LogInterval
from tests.full_disk import files_of_at_most


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "buffer.jsonl"


@pytest.fixture
def log(file: Path) -> Iterator[logging.Logger]:
    """Writes to `file`, and to nothing else."""
    file.parent.mkdir()
    handler = LogFile(file)
    log = logging.Logger("alone")
    log.addHandler(handler)
    yield log
    handler.close()


def test_what_was_said_is_due_again_when_its_time_has_passed() -> None:
    times = iter((0.0, 4.9, 5.0, 9.0, 20.0, 20.1))
    news = LogInterval(5.0, clock=lambda: next(times))
    assert [news.due() for _ in range(6)] == [True, False, True, False, True, False]


def test_a_log_without_room_is_told_once_and_goes_on_when_there_is_room_again(
    file: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("before")
    with files_of_at_most(file.stat().st_size):
        for _ in range(100):
            log.warning("line")
    assert capsys.readouterr().err == f"can't write {file}: File too large; lines of this log are missing\n"
    log.warning("after")
    lines = file.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert set(lines) <= {"before", "line", "after"}


def test_a_log_that_is_renamed_is_begun_anew(file: Path, log: logging.Logger) -> None:
    log.warning("first")
    rotated = file.rename(file.with_suffix(".1"))
    log.warning("second")
    assert (rotated.read_text(), file.read_text()) == ("first\n", "second\n")


def test_a_log_that_can_t_be_begun_anew_costs_its_lines_and_nothing_else(
    file: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(file.parent)
    for _ in range(3):
        log.warning("lost")
    assert capsys.readouterr().err == (
        f"can't write {file}: No such file or directory; lines of this log are missing\n"
    )
    file.parent.mkdir()
    log.warning("found")
    assert file.read_text() == "found\n"


def test_a_line_that_makes_no_text_is_told_with_its_traceback(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err
