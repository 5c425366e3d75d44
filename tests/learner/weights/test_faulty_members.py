"""No member can make a publication hang, and whoever is at fault is named."""

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import pytest
import structlog

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs import RunConfig
from slipstream.learner.weights.distribution import OVERTAKEN_OFTEN
from tests.learner.weights.learner import PATIENCE_S, Join, Learner, every_transport, gathered, same, wait_until
from tests.learner.weights.member import honest
from tests.learner.weights.member import main as member_main

SHORT_S = 2.0
"""The deadline where it is to pass; a sound member that misses it too comes back."""

short_deadline = pytest.mark.parametrize("deadline_s", [SHORT_S])


@every_transport
@short_deadline
def test_unresponsive_member_is_evicted_by_deadline(learner: Learner, join: Join) -> None:
    mute = join("mute", says=lambda answer: None)
    good = join("good")
    gathered(learner, "good", "mute")
    learner.deliver(1, good)
    mute.close()
    learner.wait()
    assert learner.publisher.metrics.evictions >= 1
    assert mute.received == {}


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("kind", [w.Ready, w.Loaded, w.Applied])
def test_answer_for_wrong_version_evicts_member(
    learner: Learner, join: Join, kind: type[w.Ready | w.Loaded | w.Applied]
) -> None:
    def lie(answer: Any) -> Any:
        return msgspec.structs.replace(answer, version=answer.version + 7) if isinstance(answer, kind) else answer

    liar, good = join("liar", says=lie), join("good")
    gathered(learner, "liar", "good")
    learner.deliver(1, good)
    wait_until(lambda: bool(liar.evictions))
    assert liar.evictions[0] == f"answered {kind.__name__} for version 8, not for 1"
    assert good.evictions == []


@short_deadline
def test_member_that_never_enters_group_is_evicted(learner: Learner, join: Join) -> None:
    stay_out = threading.Event()

    def never() -> None:
        stay_out.wait(PATIENCE_S)
        raise RuntimeError("stays outside")

    good, outside = join("good"), join("outside", before_entering=never)
    gathered(learner, "good", "outside")
    learner.deliver(1, good)
    wait_until(lambda: bool(outside.evictions))
    assert "did not enter the transfer group in time" in outside.evictions[0]
    assert good.evictions == []
    stay_out.set()


@short_deadline
def test_repeated_failures_lengthen_eviction(learner: Learner, join: Join) -> None:
    def fail(answer: Any) -> Any:
        return (
            w.Failed(transfer=answer.transfer, stage="receive", detail="no") if isinstance(answer, w.Ready) else answer
        )

    good, bad = join("good"), join("bad", says=fail)
    gathered(learner, "good", "bad")
    for version in range(1, 6):
        learner.deliver(version, good)
    assert good.evictions == []
    wait_until(lambda: len(bad.evictions) >= 2)
    evictions = len(bad.evictions)
    for version in range(6, 9):  # it stays out for two seconds and more
        learner.publish(version)
        good.wait_for(version)
    assert len(bad.evictions) <= evictions + 1


@pytest.mark.parametrize("transport", ["stream"])
@pytest.mark.parametrize(("superseded", "evictions"), [(True, 0), (False, 1)])
def test_superseded_version_is_not_members_fault(
    learner: Learner, join: Join, superseded: bool, evictions: int
) -> None:
    fetched, go_on = threading.Event(), threading.Event()

    def too_late(answer: Any) -> Any:
        if not isinstance(answer, w.Loaded) or fetched.is_set():
            return answer
        fetched.set()
        assert go_on.wait(PATIENCE_S)
        return w.Failed(transfer=answer.transfer, stage="announce", detail="not there any more", gone=True)

    member = join("slow", says=too_late)
    gathered(learner, "slow")
    learner.publish(1)
    assert fetched.wait(PATIENCE_S)
    if superseded:
        learner.publish(2)
    go_on.set()
    if not superseded:
        wait_until(lambda: bool(member.evictions))
        learner.publish(2)
    assert same(member.wait_for(2), learner.sent[2])
    assert learner.publisher.metrics.evictions == evictions


@pytest.mark.parametrize("transport", ["stream"])
def test_a_member_that_is_overtaken_again_and_again_is_named(learner: Learner, join: Join) -> None:
    fetched, go_on = queue.SimpleQueue[int](), queue.SimpleQueue[None]()

    def too_late(answer: Any) -> Any:
        if not isinstance(answer, w.Loaded) or answer.version > OVERTAKEN_OFTEN:
            return answer
        fetched.put(answer.version)
        go_on.get(timeout=PATIENCE_S)
        return w.Failed(transfer=answer.transfer, stage="announce", detail="not there any more", gone=True)

    member = join("slow", says=too_late)
    gathered(learner, "slow")
    with structlog.testing.capture_logs() as said:
        learner.publish(1)
        for version in range(1, OVERTAKEN_OFTEN + 1):
            assert fetched.get(timeout=PATIENCE_S) == version
            learner.publish(version + 1)
            go_on.put(None)
        member.wait_for(OVERTAKEN_OFTEN + 1)
    named = [(line["server"], line["versions"]) for line in said if "fetches so slowly" in line["event"]]
    assert named == [("slow", OVERTAKEN_OFTEN)]


@pytest.mark.parametrize("deadline_s", [100 * PATIENCE_S])
def test_restarted_engine_ends_eviction(learner: Learner, join: Join) -> None:
    def fail(answer: Any) -> Any:
        return (
            w.Failed(transfer=answer.transfer, stage="apply", detail="died") if isinstance(answer, w.Ready) else answer
        )

    member = join("member", says=fail)
    gathered(learner, "member")
    learner.publish(1)
    wait_until(lambda: len(member.evictions) == 2)
    member.says = honest
    member.restart()
    assert same(member.wait_for(1), learner.sent[1])


@contextmanager
def victim(forks: ForkServerContext, config: RunConfig, transports: str, dies_at: str) -> Iterator[BaseProcess]:
    """A member in a process of its own, which kills or freezes itself."""
    process = forks.Process(target=member_main, args=(config.model_dump_json(), "victim", transports, dies_at))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("deadline_s", [4 * SHORT_S])
@pytest.mark.parametrize(
    ("transport", "dies_at"),
    [
        *(("gloo", moment) for moment in ("rest", "rest-frozen", "ready", "loading", "loading-frozen", "applying")),
        ("ipc", "loading-frozen"),
        ("shm", "loading"),
        ("stream", "loading-frozen"),
    ],
)
def test_dead_or_frozen_member_delays_only_to_deadline(
    config: RunConfig, learner: Learner, join: Join, forks: ForkServerContext, dies_at: str, transport: str
) -> None:
    survivor = join("survivor")
    with victim(forks, config, f"{transport},stream", dies_at) as dying:
        gathered(learner, "survivor", "victim")
        learner.publish(1)
        wait_until(lambda: len(learner.publisher.metrics.stalls_s) >= 2)  # the victim has applied version 1
        if dies_at.startswith("rest"):
            assert dying.pid is not None, "it was started"
            os.kill(dying.pid, signal.SIGSTOP if dies_at == "rest-frozen" else signal.SIGKILL)
        for version in (2, 3):
            learner.deliver(version, survivor)
        wait_until(lambda: learner.publisher.metrics.evictions >= 1)
        learner.wait()
    assert survivor.evictions == []


@pytest.mark.parametrize("deadline_s", [10 * PATIENCE_S])
def test_member_killed_while_applying_is_evicted_early(
    config: RunConfig, learner: Learner, join: Join, forks: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.weights.members.SILENT_S", 3.0)
    survivor = join("survivor")
    with victim(forks, config, "gloo", "applying"):
        gathered(learner, "survivor", "victim")
        for version in (1, 2):
            learner.deliver(version, survivor)
        learner.wait()
    assert learner.publisher.metrics.evictions == 1
