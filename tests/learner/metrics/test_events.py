"""Events of a run: warnings of the process's log, and those that parts of the learner add."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.logging import configure_logging, get_log
from slipstream.learner.metrics import events as events_module
from slipstream.learner.metrics.events import EventLog
from tests.full_disk import files_of_at_most


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    configure_logging("learner", level="info", folder=None)
    log = EventLog(tmp_path / "events.jsonl", started=0.0)
    logging.getLogger().addHandler(log)
    yield log
    logging.getLogger().removeHandler(log)
    log.close()


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def test_warnings_of_the_log_are_events(events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events.step = 7
    log = get_log("learner.test")
    log.info("nothing to see")
    log.warning("updates skipped", step=3, updates=2, where=Path("x"), kind="nan", text="y")
    log.warning("throttle moves", event_kind="throttle", cause="ess 0.1 < 0.5")
    logging.getLogger("other.package").warning("deprecated %s", "thing")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("other.package").warning("%d texts, one argument", "x")
    skipped, moved, foreign = read(tmp_path)
    assert (skipped["kind"], skipped["text"], skipped["step"]) == ("warning", "updates skipped", 3)
    assert (skipped["updates"], skipped["where"]) == (2, "x")
    assert (moved["kind"], moved["step"], moved["cause"]) == ("throttle", 7, "ess 0.1 < 0.5")
    assert "event_kind" not in moved
    assert (foreign["kind"], foreign["text"]) == ("warning", "deprecated thing")
    assert all(event["at"] > 1e9 and event["time_s"] > 0 for event in (skipped, moved, foreign))


def test_repeated_events_are_bounded(events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MOST_ALIKE", 3)
    threads = [threading.Thread(target=events.add, args=("warning", text)) for text in "ab" * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(5):
        logging.getLogger("other.package").warning(f"object {number}")
    found = read(tmp_path)
    for text in ("a", "b", "object"):
        alike = [event for event in found if event["text"].startswith(text)]
        assert ["further_ones" in event for event in alike] == [False, False, True]
    assert [event["text"] for event in found[6:]] == ["object 0", "object 1", "object 2"]


def test_restart_appends_and_a_full_disk_ends_the_events(events: EventLog, tmp_path: Path) -> None:
    events.add("restart", "the learner continues", step=4, policy_version=2)
    again = EventLog(tmp_path / "events.jsonl", started=0.0)
    again.add("server_joined", "rollout server joined", server="r0")
    with files_of_at_most(1):
        again.add("server_lost", "rollout server left", server="r0")
    again.add("server_joined", "rollout server joined", server="r1")
    again.close()
    kinds = [event["kind"] for event in read(tmp_path)]
    assert kinds[:2] == ["restart", "server_joined"]
    assert "r1" not in (tmp_path / "events.jsonl").read_text(encoding="utf-8")
