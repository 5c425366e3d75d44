"""Members that join late, while a group forms, or together."""

import threading

import pytest
import structlog

from tests.learner.weights.learner import PATIENCE_S, Join, Learner, every_transport, gathered, same, wait_until
from tests.learner.weights.member import Member


@every_transport
def test_late_joiner_gets_latest_version_alone(learner: Learner, join: Join, transport: str) -> None:
    early = join("early")
    gathered(learner, "early")
    for version in (1, 2):
        learner.publish(version)
        early.wait_for(version)
    late = join("late")
    assert same(late.wait_for(2), learner.sent[2])
    assert late.announced == [(2, "stream" if transport == "gloo" else transport)]
    wait_until(lambda: all(member.version == 2 for member in learner.publisher._roster))
    learner.publish(3)
    for member in (early, late):
        assert same(member.wait_for(3), learner.sent[3])
        assert member.announced[-1] == (3, transport)
    assert early.announced == [(version, transport) for version in (1, 2, 3)]


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_a_late_joiner_never_gets_weights_of_two_versions(learner: Learner, join: Join) -> None:
    """Its transfer may still be under way when the learner has published and trained on."""
    learner.publish(1)
    learner.wait()
    loading, go_on = threading.Event(), threading.Event()

    def hesitate() -> None:
        loading.set()
        assert go_on.wait(PATIENCE_S)

    late = join("late", before_loading=hesitate)
    assert loading.wait(PATIENCE_S)

    def publish_three() -> None:
        for version in (2, 3, 4):
            learner.publish(version)

    training = threading.Thread(target=publish_three)
    training.start()
    training.join(0.5)  # either it has overwritten version 1 by then, or it waits for the late joiner
    go_on.set()
    late.wait_for(4)
    training.join(PATIENCE_S)
    for version, data in late.received.items():
        assert same(data, learner.sent[version]), f"what came as version {version} is something else"


def test_join_during_forming_fetches_without_evictions(learner: Learner, join: Join) -> None:
    entering, go_on = threading.Event(), threading.Event()

    def hesitate() -> None:
        entering.set()
        assert go_on.wait(PATIENCE_S)

    first = join("first", before_entering=hesitate)
    gathered(learner, "first")
    learner.publish(1)
    assert entering.wait(PATIENCE_S)
    second = join("second")
    assert same(second.wait_for(1), learner.sent[1])
    go_on.set()
    assert same(first.wait_for(1), learner.sent[1])
    learner.wait()
    assert learner.publisher.figures.evictions == 0


def test_newcomers_enter_a_group_together(learner: Learner, join: Join) -> None:
    held, go_on = threading.Event(), threading.Event()

    def dawdle() -> None:
        held.set()
        assert go_on.wait(PATIENCE_S)

    def publish(version: int, *members: Member) -> None:
        learner.publish(version)
        for member in members:
            assert same(member.wait_for(version), learner.sent[version])
        wait_until(lambda: sum(each.version == version for each in learner.publisher._roster) >= len(members))

    with structlog.testing.capture_logs() as logs:
        early, leaves = join("early"), join("leaves", leaves=True)
        gathered(learner, "early", "leaves")
        publish(1, early, leaves)
        quick, slow = join("quick"), join("slow", before_loading=dawdle)
        gathered(learner, "early", "leaves", "quick", "slow")
        assert held.wait(PATIENCE_S)
        for version in (2, 3):
            publish(version, early, leaves, quick)
        go_on.set()
        slow.wait_for(3)
        wait_until(lambda: all(each.version == 3 for each in learner.publisher._roster))
        leaves.close()
        gathered(learner, "early", "quick", "slow")
        publish(4, early, quick, slow)
    formed = [set(line["members"]) for line in logs if line["event"] == "transfer group formed"]
    assert formed == [{"early", "leaves"}, {"early", "quick", "slow"}]
    assert quick.announced == [(1, "stream"), (2, "stream"), (3, "stream"), (4, "gloo")]
    assert early.announced == [(version, "gloo") for version in range(1, 5)]
    assert learner.publisher.figures.evictions == 0
