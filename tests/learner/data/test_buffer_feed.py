"""The feed, on a real buffer service and a real Redis."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from slipstream.learner.data.buffer_feed import StarvedError, StepData, explain_shortage
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers import assemble
from slipstream.learner.trainers.assemble import build_feed
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
            tokenizer_fingerprint="", vocab_size=32, incarnation="i1",
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


def with_deadline(config: RunConfig, wait_deadline_s: float) -> RunConfig:
    return config.model_copy(update={"learner": config.learner.model_copy(update={"wait_deadline_s": wait_deadline_s})})


def in_the_background(work: Callable[[], Any]) -> Any:
    """The future of a call in a thread of its own."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def test_groups_are_leased_in_ticket_order(config: RunConfig, server: RolloutServer, world: World) -> None:
    delivered = server.deliver(8)
    with closing(build_feed(config, world, LEARNER)) as feed:
        for step in (0, 1):
            feed.prefetch(step, consuming_version=step)
            data = feed.take(nothing)
            assert data.trajectories == delivered[8 * step : 8 * step + 8]
            assert (data.step, data.consuming_version, len(data.updates)) == (step, step, 2)


def test_feed_waits_for_enough_groups(config: RunConfig, server: RolloutServer, world: World) -> None:
    delivered = server.deliver(3)
    with closing(build_feed(config, world, LEARNER)) as feed:
        feed.prefetch(0, consuming_version=0)
        taking = in_the_background(lambda: feed.take(nothing))
        assert not taking.done()
        delivered += server.deliver(1)
        assert taking.result(DEADLINE_S).trajectories == delivered


def test_starvation_error_explains_shortage(config: RunConfig, server: RolloutServer, world: World) -> None:
    server.deliver(3)
    impatient = with_deadline(config, 0.1)
    with closing(build_feed(impatient, world, LEARNER)) as feed:
        feed.prefetch(7, consuming_version=0)
        with pytest.raises(StarvedError, match=r"step 7 .*learner.wait_deadline_s=0.1 .* 3 ready, 0 in flight, 0 lea"):
            feed.take(nothing)


def test_time_before_take_does_not_count_as_waiting(
    config: RunConfig, server: RolloutServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Counted(BufferClient):
        def lease(self, step: int, **request: Any) -> Any:
            asked.append(step)
            return super().lease(step, **request)

    monkeypatch.setattr(assemble, "BufferClient", Counted)
    monkeypatch.setattr(learner_feed, "LEASE_WAIT_S", 0.1)
    impatient = with_deadline(config, 1e-6)
    with closing(build_feed(impatient, world, LEARNER)) as feed, closing(BufferClient(config, "learner")) as client:
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


def test_callback_is_called_while_take_waits(
    config: RunConfig, server: RolloutServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_feed, "CALLBACK_S", 0.01)
    times: list[float] = []
    with closing(build_feed(config, world, LEARNER)) as feed:
        feed.prefetch(0, consuming_version=0)
        taking = in_the_background(lambda: feed.take(lambda: times.append(time.monotonic())))
        await_true(lambda: len(times) > 2)
        delivered = server.deliver(4)
        assert taking.result(DEADLINE_S).trajectories == delivered


def test_wait_longer_than_last_is_logged(
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

    monkeypatch.setattr(assemble, "BufferClient", Counted)
    monkeypatch.setattr(learner_feed, "LEASE_WAIT_S", 0.01)
    monkeypatch.setattr(learner_feed, "CALLBACK_S", 0.01)
    monkeypatch.setattr(learner_feed, "LogInterval", lambda every_s: LogInterval(every_s, clock=lambda: now))
    monkeypatch.setattr(learner_feed, "time", SimpleNamespace(monotonic=lambda: now))
    patient = with_deadline(config, 600.0)
    server.deliver(3)
    with capture_logs() as logs, closing(build_feed(patient, world, LEARNER)) as feed:
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


def test_servers_without_weights_are_named_with_port(config: RunConfig, server: RolloutServer, world: World) -> None:
    server.deliver(4)
    impatient = with_deadline(config, 0.1)
    version, port = config.buffer.max_staleness + 1, config.weights.control_port
    named = rf"rollout .*version 0, .* {version}: .*weights.host=127.0.0.1 .*control_port {port}, "
    with (
        closing(build_feed(impatient, world, LEARNER)) as feed,
        closing(BufferClient(config, "learner", LEARNER)) as client,
    ):
        client.published(version, evaluate=False)
        feed.prefetch(0, consuming_version=version)
        with pytest.raises(DeadlineError, match=named):
            feed.take(nothing)


def test_two_ranks_share_one_lease(config: RunConfig, server: RolloutServer, world: World) -> None:
    delivered = server.deliver(4)
    store = dist.HashStore()
    ranks = [replace(world, rank=rank, size=2, store=store) for rank in (0, 1)]
    with (
        closing(build_feed(config, ranks[1], LEARNER)) as other,
        closing(build_feed(config, ranks[0], LEARNER)) as root,
    ):
        for feed in (other, root):
            feed.prefetch(0, consuming_version=0)
        # Groups 0 and 1 are of the first update, 2 and 3 of the second; a group has two trajectories.
        assert root.take(nothing).trajectories == [*delivered[0:2], *delivered[4:6]]
        assert other.take(nothing).trajectories == [*delivered[2:4], *delivered[6:8]]
    with closing(BufferClient(config, "learner")) as client:
        assert client.state().counts.leased == 4


def test_starvation_reaches_other_ranks_with_its_reason(config: RunConfig, server: RolloutServer, world: World) -> None:
    server.deliver(3)
    store = dist.HashStore()
    short = with_deadline(config, 0.1)
    root, other = (build_feed(short, replace(world, rank=rank, size=2, store=store), LEARNER) for rank in (0, 1))
    with closing(root), closing(other):
        for feed in (root, other):
            feed.prefetch(3, consuming_version=0)
        waiting = in_the_background(lambda: other.take(nothing))
        with pytest.raises(StarvedError) as starved:
            root.take(nothing)
        with pytest.raises(StarvedError) as told:
            waiting.result(DEADLINE_S)
    assert str(told.value) == str(starved.value)


def test_starved_step_can_be_leased_again(config: RunConfig, server: RolloutServer, world: World) -> None:
    server.deliver(3)
    store = dist.HashStore()
    short = with_deadline(config, 3.0)
    root, other = (build_feed(short, replace(world, rank=rank, size=2, store=store), LEARNER) for rank in (0, 1))

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


def test_stop_signal_of_rank_0_stops_both_ranks(config: RunConfig, server: RolloutServer, world: World) -> None:
    signals, store = GracefulStop(), dist.HashStore()
    root, other = (
        build_feed(config, replace(world, rank=rank, size=2, store=store), LEARNER, signals) for rank in (0, 1)
    )
    with closing(root), closing(other):
        for feed in (root, other):
            feed.prefetch(0, consuming_version=0)
        waits = [in_the_background(partial(feed.take, nothing)) for feed in (root, other)]
        signals.number = signal.SIGTERM
        for waiting in waits:
            with pytest.raises(StopRequested) as end:
                waiting.result(DEADLINE_S)
            assert end.value.number == signal.SIGTERM


def test_stop_signal_ends_wait_for_absent_buffer(
    config: RunConfig, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.client.learner.STOPPING_REPLY_S", 0.1)
    signals = GracefulStop()
    with closing(build_feed(config, world, LEARNER, signals)) as feed:
        feed.prefetch(0, consuming_version=0)
        waiting = in_the_background(partial(feed.take, nothing))
        signals.number = signal.SIGTERM
        with pytest.raises(StopRequested):
            waiting.result(DEADLINE_S / 2)


def test_closing_ends_wait_for_rank_0(config: RunConfig, world: World) -> None:
    patient = with_deadline(config, 600.0)
    feed = build_feed(patient, replace(world, rank=1, size=2, store=dist.HashStore()), LEARNER)
    feed.prefetch(0, consuming_version=0)
    taking = in_the_background(lambda: feed.take(nothing))
    started = time.monotonic()
    feed.close()
    assert time.monotonic() - started < DEADLINE_S
    with pytest.raises(StoppedError):
        taking.result(DEADLINE_S)


def test_rank_without_lease_from_rank_0_gives_up(config: RunConfig, world: World) -> None:
    redis = config.redis.model_copy(update={"outage_deadline_s": 0.1})
    short = with_deadline(config.model_copy(update={"redis": redis}), 0.1)
    with closing(build_feed(short, replace(world, rank=1, size=2, store=dist.HashStore()), LEARNER)) as feed:
        feed.prefetch(3, consuming_version=0)
        with pytest.raises(DeadlineError, match="step 3: rank 1"):
            feed.take(nothing)


def test_groups_must_divide_among_ranks(config: RunConfig, world: World) -> None:
    with pytest.raises(ConfigError, match=r"learner.groups_per_step / learner.updates_per_step = 2 .* 3 "):
        build_feed(config, replace(world, size=3), LEARNER)


def explained(
    config: RunConfig,
    *,
    versions: Sequence[int],
    deaths: int = 0,
    tasks: Mapping[str, int] | None = None,
    **counts: Any,
) -> str:
    """Explanation at version 3 and a staleness bound of 1, with servers `r0`, `r1`, … that hold `versions`."""
    servers = [
        m.ServerStatus(server=f"r{number}", version=version, engine_deaths=deaths)
        for number, version in enumerate(versions)
    ]
    ledger = m.LedgerCounts(**counts)
    state = m.State(request=0, version=3, counts=ledger, servers=servers, evals=[], tasks=dict(tasks or {}))
    return explain_shortage(state, config.weights, oldest_version=2)


@pytest.mark.parametrize(("solved", "explains"), [(3, True), (2, False)])
def test_solved_tasks_explain_shortage(config: RunConfig, solved: int, explains: bool) -> None:
    counts: dict[str, Any] = {"issued": 40, "reissued": 4, "reasons": {"filtered:dynamic_sampling": 30}}
    text = explained(config, versions=[3], tasks={"solved": solved, "mixed": 2}, **counts)
    assert "of 40 issued it dropped 30 filtered:dynamic_sampling, 4 were" in text
    assert (f"{solved} tasks are solved" in text and "learner.steps" in text) == explains


def test_missing_server_explains_shortage(config: RunConfig) -> None:
    text = explained(config, versions=[], in_flight=1)
    assert "0 ready, 1 in flight, 0 leased" in text
    assert text.endswith("no rollout server is connected")


def test_stale_servers_explain_shortage(config: RunConfig) -> None:
    text = explained(config, versions=[3, 1, 2, 0])
    assert "dropped none" in text
    assert [f"r{number} holds" in text for number in range(4)] == [False, True, False, True]
    assert "engine crashes" not in text
    assert "r0 holds version 0 (engine crashes: 2" in explained(config, versions=[0], deaths=2)
