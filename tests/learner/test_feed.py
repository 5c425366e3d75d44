"""The feed, on a real buffer service and a real Redis."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import zmq
from structlog.testing import capture_logs

from slipstream.buffer.client.learner import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, StoppedError
from slipstream.configs.runtime.logging import LogInterval
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.learner.data import buffer_feed as learner_feed
from slipstream.learner.data.buffer_feed import Feed, StarvedError, StepData
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import trajectory

DEADLINE_S = 20.0
LEARNER = "a1"
"""The incarnation of the one whose feed it is."""


@dataclass
class RolloutServer:
    """Delivers a random group for every ticket that it gets, over the real wire."""

    config: RunConfig
    socket: "zmq.Socket[bytes]"

    def hello(self) -> None:
        """Returns once the service knows it."""
        hello = m.ServerHello(
            run=self.config.run.name, env="digits", env_fingerprint="", train_tasks=100, eval_tasks=0,
            tokenizer_fingerprint="", incarnation="i1",
        )  # fmt: skip
        self.socket.send(encode(hello))
        self._await(m.Welcome)

    def deliver(self, count: int) -> list[m.Trajectory]:
        """Asks for that many tickets; returns the groups' trajectories, in the order of the tickets."""
        self._offer(count)
        tickets: list[m.Ticket] = []
        while len(tickets) < count:
            tickets += self._await(m.Tickets).tickets
        self._offer(0)
        groups = [
            m.Group(
                id=ticket.id,
                kind=ticket.kind,
                epoch=ticket.epoch,
                indices=ticket.indices,
                trajectories=[
                    trajectory(np.random.default_rng([int(ticket.id), number]), tokens=8, episode=number)
                    for number in range(ticket.samples)
                ],
            )
            for ticket in tickets
        ]
        frames = [encode(m.Deliver(ids=[group.id for group in groups])), *(encode(group) for group in groups)]
        self.socket.send_multipart(frames)
        assert set(self._await(m.Acknowledge).outcomes.values()) == {"ready"}
        return [each for group in groups for each in group.trajectories]

    def _offer(self, capacity: int) -> None:
        self.socket.send(encode(m.Credits(capacity=capacity, status=m.ServerStatus(server="rollout"), held=[])))

    def _await(self, kind: Any) -> Any:
        while self.socket.poll(round(DEADLINE_S * 1000)):
            message = decode(self.socket.recv(), m.ToServer)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came within {DEADLINE_S} s")


@pytest.fixture
def config(redis_url: str, run_name: str, free_address: str, tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": run_name, "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "redis": {"url": redis_url},
            "buffer": {"bind": free_address, "endpoint": free_address, "reply_deadline_s": DEADLINE_S},
            "rollout": {"group_size": 2, "group_deadline_s": DEADLINE_S / 2},
            "learner": {"groups_per_step": 4, "updates_per_step": 2, "wait_deadline_s": DEADLINE_S},
        }
    )


@pytest.fixture
def server(config: RunConfig, tmp_path: Path) -> Iterator[RolloutServer]:
    """A rollout server that the buffer service has welcomed, as it has a learner."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    service = subprocess.Popen([sys.executable, "-m", "slipstream.buffer.cli", str(path)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"rollout")
        socket.connect(config.buffer.endpoint)
        server = RolloutServer(config, socket)
        try:
            server.hello()
            with closing(BufferClient(config, "learner", LEARNER)) as client:
                client.hello(0)
            yield server
        finally:
            service.terminate()
            service.wait(DEADLINE_S)


def in_the_background(work: Callable[[], Any]) -> Any:
    """The future of a call in a thread of its own."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def test_the_leased_groups_come_in_the_order_of_their_tickets(
    config: RunConfig, server: RolloutServer, world: World
) -> None:
    delivered = server.deliver(8)
    with closing(Feed(config, world, LEARNER)) as feed:
        for step in (0, 1):
            feed.prefetch(step, consuming_version=step)
            data = feed.take(nothing)
            assert data.trajectories == delivered[8 * step : 8 * step + 8]
            assert (data.step, data.consuming_version, len(data.updates)) == (step, step, 2)


def test_the_feed_waits_until_enough_groups_are_ready(config: RunConfig, server: RolloutServer, world: World) -> None:
    delivered = server.deliver(3)
    with closing(Feed(config, world, LEARNER)) as feed:
        feed.prefetch(0, consuming_version=0)
        taking = in_the_background(lambda: feed.take(nothing))
        assert not taking.done()
        delivered += server.deliver(1)
        assert taking.result(DEADLINE_S).trajectories == delivered


def test_a_step_without_enough_groups_ends_at_the_deadline_and_says_what_the_buffer_has(
    config: RunConfig, server: RolloutServer, world: World
) -> None:
    server.deliver(3)
    impatient = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 0.1})})
    with closing(Feed(impatient, world, LEARNER)) as feed:
        feed.prefetch(7, consuming_version=0)
        with pytest.raises(
            DeadlineError,
            match=r"step 7 waited learner.wait_deadline_s=0.1 for 4 ready .* 3 ready, 0 in flight, 0 lea.* again$",
        ):
            feed.take(nothing)


def test_what_the_learner_does_before_it_takes_the_groups_is_no_waiting(
    config: RunConfig, server: RolloutServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Counted(BufferClient):
        def lease(self, step: int, **request: Any) -> Any:
            asked.append(step)
            return super().lease(step, **request)

    monkeypatch.setattr(learner_feed, "BufferClient", Counted)
    monkeypatch.setattr(learner_feed, "LEASE_WAIT_S", 0.1)
    impatient = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 1e-6})})
    with closing(Feed(impatient, world, LEARNER)) as feed, closing(BufferClient(config, "learner")) as client:
        feed.prefetch(0, consuming_version=0)
        await_true(lambda: len(asked) > 1)
        delivered = server.deliver(4)
        await_true(lambda: client.state().counts.leased == 4)
        assert feed.take(nothing).trajectories == delivered


def nothing() -> None:
    """Is done meanwhile."""


def await_true(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"it did not come true within {DEADLINE_S} s"


def test_while_it_waits_other_things_are_done_now_and_then(
    config: RunConfig, server: RolloutServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_feed, "MEANWHILE_S", 0.01)
    times: list[float] = []
    with closing(Feed(config, world, LEARNER)) as feed:
        feed.prefetch(0, consuming_version=0)
        taking = in_the_background(lambda: feed.take(lambda: times.append(time.monotonic())))
        await_true(lambda: len(times) > 2)
        delivered = server.deliver(4)
        assert taking.result(DEADLINE_S).trajectories == delivered


def test_a_wait_that_is_long_and_longer_than_the_last_is_told_with_what_the_buffer_has(
    config: RunConfig, server: RolloutServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, waiting, now = list[int](), list[float](), 0.0

    class Counted(BufferClient):
        def lease(self, step: int, **request: Any) -> Any:
            asked.append(step)
            return super().lease(step, **request)

    def passes(duration_s: float) -> None:
        """Returns once the feed has seen that so much time has passed."""
        nonlocal now
        now += duration_s
        seen = len(asked)
        await_true(lambda: len(asked) > seen + 2)

    monkeypatch.setattr(learner_feed, "BufferClient", Counted)
    monkeypatch.setattr(learner_feed, "LEASE_WAIT_S", 0.01)
    monkeypatch.setattr(learner_feed, "MEANWHILE_S", 0.01)
    monkeypatch.setattr(learner_feed, "LogInterval", lambda every_s: LogInterval(every_s, clock=lambda: now))
    monkeypatch.setattr(learner_feed, "time", SimpleNamespace(monotonic=lambda: now))
    patient = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 600.0})})
    server.deliver(3)
    with capture_logs() as logs, closing(Feed(patient, world, LEARNER)) as feed:
        for step, durations_s in enumerate(([29.0, 3.0, 20.0, 10.0, 3.0], [125.0, 10.0])):
            feed.prefetch(step, consuming_version=0)
            passes(1000.0)  # before it is waited for
            waiting.clear()
            taking = in_the_background(lambda: feed.take(lambda: waiting.append(now)))
            await_true(lambda: len(waiting) > 0)
            for duration_s in durations_s:
                passes(duration_s)
            server.deliver(4)
            taking.result(DEADLINE_S)
    assert [(each["event"], each["log_level"], each["step"], each["for_s"]) for each in logs] == [
        ("waiting for groups", "warning", *when) for when in ((0, 32), (0, 62), (1, 135))
    ]
    assert logs[0]["why"].startswith("the buffer has 3 ready, 0 in flight, 0 leased")


def test_servers_that_get_no_weights_are_named_with_the_port_that_they_may_not_reach(
    config: RunConfig, server: RolloutServer, world: World
) -> None:
    server.deliver(4)
    impatient = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 0.1})})
    version, port = config.buffer.max_staleness + 1, config.weights.control_port
    reached = rf"does it reach weights.host=127.0.0.1 at control_port {port}, .*\?$"
    named = rf"rollout holds version 0, the policy is at {version}: {reached}"
    with (
        closing(Feed(impatient, world, LEARNER)) as feed,
        closing(BufferClient(config, "learner", LEARNER)) as client,
    ):
        client.published(version, evaluate=False)
        feed.prefetch(0, consuming_version=version)
        with pytest.raises(DeadlineError, match=named):
            feed.take(nothing)


def test_each_of_two_ranks_gets_its_share_of_one_lease(config: RunConfig, server: RolloutServer, world: World) -> None:
    delivered = server.deliver(4)
    store = dist.HashStore()
    ranks = [replace(world, rank=rank, size=2, store=store) for rank in (0, 1)]
    with closing(Feed(config, ranks[1], LEARNER)) as other, closing(Feed(config, ranks[0], LEARNER)) as root:
        for feed in (other, root):
            feed.prefetch(0, consuming_version=0)
        # Groups 0 and 1 are of the first update, 2 and 3 of the second; a group has two trajectories.
        assert root.take(nothing).trajectories == [*delivered[0:2], *delivered[4:6]]
        assert other.take(nothing).trajectories == [*delivered[2:4], *delivered[6:8]]
    with closing(BufferClient(config, "learner")) as client:
        assert client.state().counts.leased == 4


def test_a_rank_whose_root_gives_up_for_want_of_groups_does_so_at_once_and_knows_why(
    config: RunConfig, server: RolloutServer, world: World
) -> None:
    server.deliver(3)
    store = dist.HashStore()
    short = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 0.1})})
    root, other = (Feed(short, replace(world, rank=rank, size=2, store=store), LEARNER) for rank in (0, 1))
    with closing(root), closing(other):
        for feed in (root, other):
            feed.prefetch(3, consuming_version=0)
        waiting = in_the_background(lambda: other.take(nothing))
        with pytest.raises(StarvedError) as starved:
            root.take(nothing)
        with pytest.raises(StarvedError) as told:
            waiting.result(DEADLINE_S)
    assert str(told.value) == str(starved.value)


def test_ranks_that_had_too_few_groups_for_a_step_may_ask_for_it_again(
    config: RunConfig, server: RolloutServer, world: World
) -> None:
    server.deliver(3)
    store = dist.HashStore()
    short = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 3.0})})
    root, other = (Feed(short, replace(world, rank=rank, size=2, store=store), LEARNER) for rank in (0, 1))

    def take_by_both() -> tuple[StepData, StepData]:
        for feed in (root, other):
            feed.prefetch(3, consuming_version=0)
        waiting = in_the_background(lambda: other.take(nothing))
        try:
            return root.take(nothing), waiting.result(DEADLINE_S)
        finally:
            wait([waiting], DEADLINE_S)

    with closing(root), closing(other):
        with pytest.raises(StarvedError):
            take_by_both()
        server.deliver(1)
        mine, theirs = take_by_both()
    assert len(mine.trajectories) == len(theirs.trajectories) > 0


def test_when_rank_0_is_told_to_end_while_groups_are_wanting_both_ranks_leave_off_at_the_same_step(
    config: RunConfig, server: RolloutServer, world: World
) -> None:
    signals, store = GracefulStop(), dist.HashStore()
    root, other = (Feed(config, replace(world, rank=rank, size=2, store=store), LEARNER, signals) for rank in (0, 1))
    with closing(root), closing(other):
        for feed in (root, other):
            feed.prefetch(0, consuming_version=0)
        waits = [in_the_background(partial(feed.take, nothing)) for feed in (root, other)]
        signals.number = signal.SIGTERM
        for waiting in waits:
            with pytest.raises(StopRequested) as end:
                waiting.result(DEADLINE_S)
            assert end.value.number == signal.SIGTERM


def test_who_is_told_to_end_leaves_off_though_the_buffer_is_away(
    config: RunConfig, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.client.learner.STOPPING_REPLY_S", 0.1)
    signals = GracefulStop()
    with closing(Feed(config, world, LEARNER, signals)) as feed:
        feed.prefetch(0, consuming_version=0)
        waiting = in_the_background(partial(feed.take, nothing))
        signals.number = signal.SIGTERM
        with pytest.raises(StopRequested):
            waiting.result(DEADLINE_S / 2)


def test_closing_ends_the_wait_of_a_rank_whose_root_never_leases(config: RunConfig, world: World) -> None:
    patient = config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": 600.0})})
    feed = Feed(patient, replace(world, rank=1, size=2, store=dist.HashStore()))
    feed.prefetch(0, consuming_version=0)
    taking = in_the_background(lambda: feed.take(nothing))
    started = time.monotonic()
    feed.close()
    assert time.monotonic() - started < DEADLINE_S
    with pytest.raises(StoppedError):
        taking.result(DEADLINE_S)


def test_a_rank_whose_root_never_leases_gives_up_after_the_root(config: RunConfig, world: World) -> None:
    short = config.model_copy(
        update={
            "learner": config.learner.model_copy(update={"wait_deadline_s": 0.1}),
            "redis": config.redis.model_copy(update={"outage_deadline_s": 0.1}),
        }
    )
    with closing(Feed(short, replace(world, rank=1, size=2, store=dist.HashStore()))) as feed:
        feed.prefetch(3, consuming_version=0)
        with pytest.raises(DeadlineError, match="step 3: rank 1 heard of no lease from rank 0"):
            feed.take(nothing)


def test_groups_that_do_not_divide_among_the_ranks_are_refused(config: RunConfig, world: World) -> None:
    with pytest.raises(ConfigError, match=r"groups_per_step / learner.updates_per_step = 2 must be .* 3 learner ranks"):
        Feed(config, replace(world, size=3))
