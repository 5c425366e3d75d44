"""Publications reach real members through the real transports."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import structlog
import zmq

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.weights.broadcast import GlooTransport
from slipstream.learner.weights.fetch import FileTransport
from slipstream.learner.weights.publication import Publication
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.learner.weights.transports import Transports, build_transports
from tests.learner.weights.learner import PATIENCE_S, Gate, Join, Learner, every_transport, gathered, same, wait_until
from tests.learner.weights.member import Member, honest


@every_transport
def test_every_version_reaches_every_member_bit_for_bit(learner: Learner, join: Join, transport: str) -> None:
    members = [join("one"), join("two")]
    gathered(learner, "one", "two")
    for version in (1, 2, 3):
        learner.deliver(version, *members)
    learner.wait()
    figures = learner.publisher.metrics
    assert len(figures.published_s) == 3
    assert list(figures.stalls_s)[-2:] == [0.125, 0.125]
    assert figures.evictions == 0
    assert all(member.announced == [(version, transport) for version in (1, 2, 3)] for member in members)


def test_without_members_a_publication_is_done_at_once(learner: Learner) -> None:
    for version in (1, 2):
        learner.publish(version)
        assert learner.wait() < PATIENCE_S


@pytest.mark.parametrize("transport", ["shm", "stream", "file"])
def test_slow_member_skips_versions_and_fast_ones_get_all(learner: Learner, join: Join, transport: str) -> None:
    gate = Gate()
    fast, slow = join("fast"), join("slow", before_applying=gate)
    gathered(learner, "fast", "slow")
    for version in range(1, 5):
        learner.deliver(version, fast)
    assert gate.reached.is_set(), "it is still at the first one"
    gate.opened.set()
    assert same(slow.wait_for(4), learner.sent[4])
    learner.wait()
    assert sorted(slow.received) == [1, 4], "it has left out those that were overtaken"
    assert learner.publisher.metrics.evictions == 0


@pytest.mark.parametrize("transport", ["file"])
def test_skipped_versions_arrive_as_differences(learner: Learner, join: Join) -> None:
    gate = Gate()
    slow = join("slow", before_applying=gate)
    gathered(learner, "slow")
    learner.publish(1)
    assert gate.reached.wait(PATIENCE_S)
    for version in (2, 3, 4):  # nobody fetches the first two
        learner.publish(version)
    gate.opened.set()
    assert same(slow.wait_for(4), learner.sent[4])
    assert slow._announce.source is not None
    assert [part.base for part in slow._announce.source.parts] == [1, 2, 3]


def test_members_of_several_transports_are_fed_at_the_same_time(config: RunConfig, join: Join) -> None:
    auto = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": "auto"})})
    with closing(
        Learner(auto, WeightPublisher(auto.weights, auto.security, build_transports(auto), run=auto.run.name))
    ) as learner:
        members = {name: join(name, transports=(name,)) for name in ("shm", "gloo", "stream")}
        gathered(learner, *members)
        for version in (1, 2):
            learner.publish(version)
            for name, member in members.items():
                assert same(member.wait_for(version), learner.sent[version])
                assert member.announced[-1] == (version, name)


def test_member_without_common_transport_is_evicted(learner: Learner, join: Join) -> None:
    good, stranger = join("good"), join("stranger", transports=("pigeon",))
    gathered(learner, "good", "stranger")
    learner.deliver(1, good)
    wait_until(lambda: bool(stranger.evictions))
    assert all(name in stranger.evictions[0] for name in ("pigeon", "gloo", "stream"))


def test_leaving_member_is_not_an_eviction(learner: Learner, join: Join) -> None:
    stays, leaves = join("stays"), join("leaves", leaves=True)
    gathered(learner, "stays", "leaves")
    learner.deliver(1, stays, leaves)
    leaves.close()
    gathered(learner, "stays")
    learner.deliver(2, stays)
    assert learner.publisher.metrics.evictions == 0


@pytest.mark.parametrize("deadline_s", [2.0])
@pytest.mark.parametrize("transport", ["gloo", "stream"])
def test_deadline_rests_while_a_member_holds(learner: Learner, join: Join, deadline_s: float) -> None:
    """Its evaluation begins after the version was sent to it."""

    def begin() -> None:
        member.holding = True
        wait_until(lambda: all(each.holding for each in learner.publisher._roster))

    def finish() -> None:
        threading.Event().wait(1.5 * deadline_s)
        member.holding = False

    member = join("member")
    member.before_loading, member.before_applying = begin, finish
    gathered(learner, "member")
    learner.deliver(1, member)
    learner.wait()
    assert learner.publisher.metrics.evictions == 0


@pytest.mark.parametrize("deadline_s", [2.0])
def test_broadcast_waits_for_a_member_that_holds_but_not_long(learner: Learner, join: Join) -> None:
    free, held = join("free"), join("held")
    gathered(learner, "free", "held")
    learner.publish(1)
    learner.wait()
    held.holding = True
    wait_until(lambda: any(each.holding for each in learner.publisher._roster))
    learner.publish(2)
    assert 2 not in free.received
    assert same(free.wait_for(2), learner.sent[2])
    assert dict(free.announced) == {1: "gloo", 2: "gloo"}
    assert 2 not in dict(held.announced)
    held.holding = False
    assert same(held.wait_for(2), learner.sent[2])
    assert held.announced[-1] == (2, "stream")
    assert learner.publisher.metrics.evictions == 0


@pytest.mark.parametrize("transport", ["stream"])
def test_member_that_died_while_holding_is_evicted(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.weights.members.SILENT_S", 3.0)
    monkeypatch.setattr("slipstream.learner.weights.distribution.HOLDER_CHECK_S", 0.1)
    stays, dies = join("stays"), join("dies")
    gathered(learner, "stays", "dies")
    dies.holding = True
    wait_until(lambda: any(each.holding for each in learner.publisher._roster))
    dies.close()
    learner.deliver(1, stays)
    learner.wait()
    assert learner.publisher.metrics.evictions == 1
    gathered(learner, "stays")


@every_transport
def test_restarted_engine_gets_latest_version_again(learner: Learner, join: Join) -> None:
    member = join("member")
    gathered(learner, "member")
    learner.publish(1)
    member.wait_for(1)
    learner.wait()
    del member.received[1]
    member.restart()
    assert same(member.wait_for(1), learner.sent[1])
    learner.deliver(2, member)


@pytest.mark.parametrize("transport", ["shm"])
@pytest.mark.parametrize("deadline_s", [10 * PATIENCE_S])
def test_member_without_engine_is_not_an_eviction(learner: Learner, join: Join) -> None:
    member = join("member", says=lambda answer: None)
    gathered(learner, "member")
    learner.publish(1)
    member.wait_until_announced(1)
    member.incarnation = ""
    learner.wait()
    figures = learner.publisher.metrics
    assert (learner.members(), figures.members, learner.publisher.without_engine) == (set(), 0, 1)
    member.says = honest
    member.restart()
    assert same(member.wait_for(1), learner.sent[1])
    assert (figures.members, learner.publisher.without_engine, figures.evictions) == (1, 0, 0)


@pytest.mark.parametrize("deadline_s", [10 * PATIENCE_S])
def test_close_does_not_wait_for_group_forming(learner: Learner, join: Join) -> None:
    entering, stay = threading.Event(), threading.Event()

    def hesitate() -> None:
        entering.set()
        stay.wait(PATIENCE_S)
        raise RuntimeError("stays outside")

    join("first", before_entering=hesitate)
    gathered(learner, "first")
    learner.publish(1)
    assert entering.wait(PATIENCE_S)
    closing = threading.Thread(target=learner.publisher.close)
    closing.start()
    closing.join(PATIENCE_S / 2)
    assert not closing.is_alive()
    stay.set()


@pytest.mark.parametrize("transport", ["file"])
def test_late_old_version_keeps_newer_differences_valid(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    on_host = Publication.on_host
    calls = Counter[int]()

    async def on_host_later(publication: Publication) -> Snapshot:
        calls[publication.version] += 1
        if (publication.version, calls[2]) == (2, 2):  # the first call is for the difference, which reads version 1
            await asyncio.to_thread(go_on.wait, PATIENCE_S)
        return await on_host(publication)

    monkeypatch.setattr(Publication, "on_host", on_host_later)
    members = [join("one"), join("two")]
    gathered(learner, "one", "two")
    learner.publish(1)
    learner.wait()
    learner.publish(2)
    publishing = threading.Thread(target=learner.publish, args=(3,))
    publishing.start()
    wait_until(lambda: any(3 in member.received for member in members))
    go_on.set()
    publishing.join()
    learner.publish(4)
    for member in (*members, join("late")):
        assert same(member.wait_for(4), learner.sent[4])
        assert member.evictions == []


@pytest.mark.parametrize("transport", ["file"])
def test_base_of_a_difference_is_not_overwritten(learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    on_host = Publication.on_host

    async def on_host_later(publication: Publication) -> Snapshot:
        if publication.version == 2 and not reached.is_set():
            reached.set()
            await asyncio.to_thread(go_on.wait, PATIENCE_S)
        return await on_host(publication)

    member = join("one")
    gathered(learner, "one")
    learner.publish(1)
    learner.wait()
    monkeypatch.setattr(Publication, "on_host", on_host_later)
    learner.publish(2)
    assert reached.wait(PATIENCE_S)
    reclaiming = threading.Thread(target=learner.publisher.reclaim)  # before the next snapshot, in place of version 1
    reclaiming.start()
    reclaiming.join(0.3)
    assert reclaiming.is_alive()
    go_on.set()
    reclaiming.join(PATIENCE_S)
    learner.publish(3)
    assert same(member.wait_for(3), learner.sent[3])
    assert member.evictions == []


@pytest.mark.parametrize("rolling", [True])
def test_rolling_updates_stop_one_member_at_a_time(learner: Learner, join: Join) -> None:
    applying: list[str] = []
    overlaps: list[list[str]] = []
    lock, pause = threading.Lock(), threading.Event()

    def begin(name: str) -> Callable[[], None]:
        def apply() -> None:
            with lock:
                applying.append(name)
                overlaps.append(list(applying))
            pause.wait(0.1)

        return apply

    def end(name: str) -> Callable[[Any], Any]:
        def say(answer: Any) -> Any:
            if isinstance(answer, w.Applied):
                with lock:
                    applying.remove(name)
            return answer

        return say

    names = ("one", "two", "three")
    members = [join(name, before_applying=begin(name), says=end(name)) for name in names]
    gathered(learner, *names)
    learner.deliver(1, *members)
    assert sorted(overlaps) == [["one"], ["three"], ["two"]]


@pytest.mark.parametrize("rolling", [True])
def test_where_all_stand_still_already_they_apply_at_once(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = SnapshotTaker.take

    def sealed(*arguments: Any, **others: Any) -> Snapshot:
        snapshot = take(*arguments, **others)
        assert snapshot is not None
        return snapshot.sealed()

    monkeypatch.setattr(SnapshotTaker, "take", sealed)
    monkeypatch.setattr(GlooTransport, "on_device", True)
    all_of_them = threading.Barrier(3, timeout=PATIENCE_S)
    names = ("one", "two", "three")
    members = [join(name, before_applying=all_of_them.wait) for name in names]
    gathered(learner, *names)
    learner.deliver(1, *members)
    assert not all_of_them.broken


@pytest.mark.parametrize("transport", ["file"])
@pytest.mark.parametrize("deadline_s", [0.2])
def test_hanging_folder_is_logged_and_does_not_block_exit(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(FileTransport, "prepare", lambda *_: go_on.wait(PATIENCE_S))
    join("member")
    gathered(learner, "member")
    with structlog.testing.capture_logs() as said:
        learner.publish(1)
        wait_until(lambda: "a version is still not ready to be fetched" in str(said))
    closing = threading.Thread(target=learner.publisher.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S / 2)
    assert not closing.is_alive()
    go_on.set()


def test_garbage_and_servers_of_other_runs_are_ignored(config: RunConfig, learner: Learner, join: Join) -> None:
    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"name": "other"})})
    stranger = Member(elsewhere, "stranger").start()
    with closing(stranger), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{config.weights.control_port}")
        with structlog.testing.capture_logs() as logs:
            for frame in (b"", b"\xff\x00garbage", b"\x80") * 300:
                dealer.send(frame)
            member = join("member")
            learner.deliver(1, member)
            wait_until(lambda: any(line["event"] == "frame dropped" for line in logs))
    assert stranger.announced == []
    assert len([line for line in logs if line["event"] == "frame dropped"]) == 1


def test_publisher_thread_error_is_raised_by_publish(
    config: RunConfig, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.weights.distribution.Publication.read", lambda publication: 1 / 0)
    with closing(
        Learner(config, WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name))
    ) as learner:
        join("member")
        gathered(learner, "member")
        for version in (1, 2):
            with pytest.raises(ExceptionGroup) as death:
                learner.publish(version)
                learner.publisher.wait()
            assert death.group_contains(ZeroDivisionError, depth=2)


def test_a_busy_control_port_is_named_with_its_key(config: RunConfig) -> None:
    with (
        socket.create_server(("127.0.0.1", config.weights.control_port)),
        pytest.raises(ConfigError, match=rf"{config.weights.control_port}.*weights\.control_port"),
    ):
        WeightPublisher(config.weights, config.security, Transports((), {}, None), run=config.run.name)


def test_failed_transport_frees_ports_of_others(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", config.weights.stream_port)), pytest.raises(ConfigError) as failure:
        build_transports(config)
    build_transports(config).close()
    assert f"{config.weights.stream_port}" in str(failure.value)  # which holds whatever was built until here
