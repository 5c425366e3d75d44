"""Versions pass from the learner to few members, and from these to the others."""

import os
import threading
import time
from typing import Any

import pytest

from slipstream.learner.weights import fanout
from slipstream.rollout_servers.weights import receivers
from tests.learner.weights.learner import Join, Learner, gathered, same
from tests.learner.weights.member import Member

NAMES = [f"s{number}" for number in range(10)]


@pytest.fixture
def transport() -> str:
    return "stream"


def publish(learner: Learner, members: list[Member], version: int) -> None:
    learner.publish(version)
    for member in members:
        assert same(member.wait_for(version), learner.sent[version])
    learner.wait()
    assert learner.publisher.figures.evictions == 0


def test_versions_and_differences_are_relayed(learner: Learner, join: Join) -> None:
    members = [join(name) for name in NAMES]
    gathered(learner, *NAMES)
    for version in (1, 2, 3):
        publish(learner, members, version)
        assert sum(member.sources[-1] == "" for member in members) == fanout.FANOUT
    assert any(member.queued for member in members)
    assert learner.publisher.figures.relayed == 3 * (len(NAMES) - fanout.FANOUT)


def test_members_without_relays_wait_for_the_learner(learner: Learner, join: Join) -> None:
    fetching, most, lock = [0], [0], threading.Lock()

    def begin() -> None:
        with lock:
            fetching[0] += 1
            most[0] = max(most[0], fetching[0])

    def ended(answer: Any) -> Any:
        with lock:
            fetching[0] -= type(answer).__name__ == "Loaded"
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.learner.weights.member.start_relay", lambda *_: None)
        members = [join(name, before_loading=begin, says=ended) for name in NAMES]
    gathered(learner, *NAMES)
    publish(learner, members, 1)
    assert most[0] <= fanout.FANOUT
    assert all(member.sources == [""] for member in members)


@pytest.mark.parametrize("deadline_s", [3.0])
def test_queued_member_outlasts_its_deadline(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch, deadline_s: float
) -> None:
    monkeypatch.setattr(fanout, "FANOUT", 1)
    monkeypatch.setattr("tests.learner.weights.member.start_relay", lambda *_: None)
    began: list[float] = []

    def dawdle() -> None:
        began.append(time.monotonic())
        threading.Event().wait(deadline_s / 2)

    names = NAMES[:4]
    members = [join(name, before_loading=dawdle) for name in names]
    gathered(learner, *names)
    publish(learner, members, 1)
    assert began[-1] - began[0] > deadline_s
    assert sorted(member.queued for member in members) == [[], [0], [1], [2]]


@pytest.mark.parametrize("fault", ["dead", "damaged", "withdrawn"])
def test_learner_replaces_a_faulty_relay(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(receivers, "RELAY_SILENT_S", 0.5)
    relay = join("relay")
    gathered(learner, "relay")
    publish(learner, [relay], 1)
    assert relay.relay is not None
    if fault == "dead":
        relay.relay._server.close()
    else:
        damaged = memoryview(os.urandom(len(relay.relay._server.parts["1"])))
        relay.relay._server.parts = {"1": damaged} if fault == "damaged" else {}
    late = join("late")
    assert same(late.wait_for(1), learner.sent[1])
    assert late.sources == ["relay", ""]
    last = join("last")
    assert same(last.wait_for(1), learner.sent[1])
    assert last.sources in ([""], ["late"])
    assert learner.publisher.figures.evictions == 0
