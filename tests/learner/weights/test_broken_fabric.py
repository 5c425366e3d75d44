"""A server that broadcasts don't reach is fed otherwise, and the others don't pay for it with every version."""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import structlog

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.protocol import Form
from slipstream.learner.weights.broadcast import GlooTransport
from slipstream.rollout_servers.engines.staging import join_rendezvous
from tests.learner.weights.learner import Join, Learner, gathered, wait_until
from tests.learner.weights.member import Member

SHORT_S = 3.0
"""The deadline where it is to pass."""

short_deadline = pytest.mark.parametrize("deadline_s", [SHORT_S])

Said = list[MutableMapping[str, Any]]


@pytest.fixture
def said() -> Iterator[Said]:
    """What is logged."""
    with structlog.testing.capture_logs() as said:
        yield said


def blamed(said: Said) -> list[str]:
    """The servers that were named."""
    return [each["server"] for each in said if each["event"].startswith("broadcasts don't reach")]


def broken_off(said: Said) -> list[int]:
    """The versions whose broadcast broke off."""
    return [each["version"] for each in said if each["event"] == "transfer group broke off"]


def fleet(learner: Learner, join: Join, *names: str) -> dict[str, Member]:
    """Members that join one after another, for they are suspected in this order."""
    members: dict[str, Member] = {}
    for name in names:
        members[name] = join(name)
        gathered(learner, *members)
    return members


def publish(learner: Learner, members: dict[str, Member], versions: range) -> None:
    """Publishes; all members get every version, whichever way."""
    for version in versions:
        gathered(learner, *members)
        learner.deliver(version, *members.values())
        learner.wait()


def through(member: Member, transport: str) -> list[int]:
    """The versions that were announced to a member through a transport."""
    return [version for version, name in member.announced if name == transport]


def without_data_connection(member: Member) -> Callable[[], None]:
    """What comes by broadcast fails at once; what is fetched does not."""

    def lose() -> None:
        if member.announced[-1][1] == "gloo":
            member._receivers["gloo"].close()

    return lose


def test_always_failing_member_aborts_ever_fewer_broadcasts(learner: Learner, join: Join, said: Said) -> None:
    members = fleet(learner, join, "one", "broken", "two")
    members["broken"].before_loading = without_data_connection(members["broken"])
    publish(learner, members, range(1, 17))
    assert broken_off(said) == through(members["broken"], "gloo")
    assert len(broken_off(said)) <= 6
    assert blamed(said) == ["broken"]
    assert learner.publisher.metrics.unreached == 1
    assert learner.publisher.metrics.evictions == 0
    for name in ("one", "two"):
        assert len(set(through(members[name], "gloo")) - set(broken_off(said))) >= 8


@short_deadline
def test_hung_member_fetches_next_version_and_is_retried(learner: Learner, join: Join, said: Said) -> None:
    hangs = threading.Event()

    def hang() -> None:
        if not hangs.is_set():
            hangs.set()
            wait_until(lambda: members["hung"].announced[-1][1] == "stream")

    members = fleet(learner, join, "good", "hung")
    members["hung"].before_loading = hang
    publish(learner, members, range(1, 3))
    assert broken_off(said) == [1]
    assert members["good"].announced == [(1, "gloo"), (1, "stream"), (2, "gloo")]
    assert members["hung"].announced == [(1, "gloo"), (1, "stream"), (2, "stream")]
    publish(learner, members, range(3, 4))
    assert [member.announced[-1] for member in members.values()] == [(3, "gloo")] * 2
    assert learner.publisher.metrics.unreached == 0


@short_deadline
def test_unreachable_member_is_found_among_victims(
    learner: Learner, join: Join, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.weights.process_group.GRACE_S", 0.5)
    members = fleet(learner, join, "one", "two", "walled")

    def meet_in_vain(group: Form) -> None:
        join_rendezvous(group, ranks=1, left=threading.Event())
        raise TransferError("no connection to the others")

    monkeypatch.setattr(members["walled"]._receivers["gloo"], "enter", meet_in_vain)
    publish(learner, members, range(1, 6))
    assert len(broken_off(said)) <= 3, "1, 4, and one for a slow machine"
    assert "walled" in blamed(said)
    assert len(through(members["one"], "gloo")) >= 2
    assert through(members["walled"], "gloo") == []


@short_deadline
def test_absent_member_is_not_awaited_at_every_version(learner: Learner, join: Join, said: Said) -> None:
    def stay_out() -> None:
        raise RuntimeError("stays outside")

    members = fleet(learner, join, "good", "outside")
    members["outside"].before_entering = stay_out
    publish(learner, members, range(1, 6))
    assert len(broken_off(said)) <= 3, "1, 3, and one for a slow machine"
    assert "outside" in blamed(said)
    assert len(through(members["good"], "gloo")) >= 2


def test_learner_send_errors_back_off_until_recovery(
    learner: Learner, join: Join, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no route to anybody")

    members = fleet(learner, join, "one", "two", "three")
    with monkeypatch.context() as patch:
        broadcast = learner.publisher._transports.broadcast
        assert isinstance(broadcast, GlooTransport)
        patch.setattr(broadcast._fabric, "_buckets", fail)
        publish(learner, members, range(1, 16))
    assert broken_off(said) == [1, 2, 4, 8]
    assert learner.publisher.metrics.unreached == 3
    publish(learner, members, range(16, 21))
    assert broken_off(said) == [1, 2, 4, 8]
    assert [member.announced[-1] for member in members.values()] == [(20, "gloo")] * 3
    assert learner.publisher.metrics.unreached == 0
