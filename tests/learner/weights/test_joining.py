"""Members that join late, while a group forms, or together."""

import threading

import pytest
import structlog

from tests.learner.weights.learner import PATIENCE_S, Gate, Join, Learner, every_transport, gathered, same, wait_until
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
    learner.deliver(3, early, late)
    assert (early.announced[-1], late.announced[-1]) == ((3, transport), (3, transport))
    assert early.announced == [(version, transport) for version in (1, 2, 3)]


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_a_late_joiner_never_gets_weights_of_two_versions(learner: Learner, join: Join) -> None:
    """Its transfer may still be under way when the learner has published and trained on."""
    learner.publish(1)
    learner.wait()
    gate = Gate()
    late = join("late", before_loading=gate)
    assert gate.reached.wait(PATIENCE_S)

    def publish_three() -> None:
        for version in (2, 3, 4):
            learner.publish(version)

    training = threading.Thread(target=publish_three)
    training.start()
    training.join(0.5)  # either it has overwritten version 1 by then, or it waits for the late joiner
    gate.opened.set()
    late.wait_for(4)
    training.join(PATIENCE_S)
    for version, data in late.received.items():
        assert same(data, learner.sent[version]), f"what came as version {version} is something else"


def test_join_during_forming_fetches_without_evictions(learner: Learner, join: Join) -> None:
    gate = Gate()
    first = join("first", before_entering=gate)
    gathered(learner, "first")
    learner.publish(1)
    assert gate.reached.wait(PATIENCE_S)
    second = join("second")
    assert same(second.wait_for(1), learner.sent[1])
    gate.opened.set()
    assert same(first.wait_for(1), learner.sent[1])
    learner.wait()
    assert learner.publisher.metrics.evictions == 0


def test_newcomers_enter_a_group_together(learner: Learner, join: Join) -> None:
    gate = Gate()

    def publish(version: int, *members: Member) -> None:
        learner.deliver(version, *members)
        wait_until(lambda: sum(each.version == version for each in learner.publisher._roster) >= len(members))

    with structlog.testing.capture_logs() as logs:
        early, leaves = join("early"), join("leaves", leaves=True)
        gathered(learner, "early", "leaves")
        publish(1, early, leaves)
        quick, slow = join("quick"), join("slow", before_loading=gate)
        gathered(learner, "early", "leaves", "quick", "slow")
        assert gate.reached.wait(PATIENCE_S)
        for version in (2, 3):
            publish(version, early, leaves, quick)
        gate.opened.set()
        slow.wait_for(3)
        wait_until(lambda: all(each.version == 3 for each in learner.publisher._roster))
        leaves.close()
        gathered(learner, "early", "quick", "slow")
        publish(4, early, quick, slow)
    formed = [set(line["members"]) for line in logs if line["event"] == "transfer group formed"]
    assert formed == [{"early", "leaves"}, {"early", "quick", "slow"}]
    assert quick.announced == [(1, "stream"), (2, "stream"), (3, "stream"), (4, "gloo")]
    assert early.announced == [(version, "gloo") for version in range(1, 5)]
