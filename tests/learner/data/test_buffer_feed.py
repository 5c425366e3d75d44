"""The feed of training steps, with a real buffer service and Redis."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from structlog.testing import capture_logs

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, StoppedError
from slipstream.configs.runtime.logging import LogInterval
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.learner.data import buffer_feed
from slipstream.learner.data.buffer_feed import Feed, StarvedError, StepData, explain_shortage
from slipstream.learner.parallel.mesh import MeshSizes, World
from slipstream.learner.trainers.rl import parts
from slipstream.learner.trainers.rl.parts import build_feed
from slipstream.models.folder import initial_model
from tests.learner.served import DEADLINE_S, LEARNER, RolloutServer, served_sections, serving


@pytest.fixture
def config(redis_url: str, run_name: str, free_address: str, tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            **served_sections(redis_url, run_name, free_address, tmp_path),
            "model": {"build": "digits"},
            "learner": {"groups_per_step": 4, "updates_per_step": 2, "wait_deadline_s": DEADLINE_S},
        }
    )


@pytest.fixture
def server(config: RunConfig, tmp_path: Path) -> Iterator[RolloutServer]:
    """A rollout server and a learner are registered with a buffer service."""
    with serving(config, tmp_path) as server:
        yield server


MakeFeed = Callable[..., Feed]


@pytest.fixture
def make_feed(config: RunConfig, world: World) -> Iterator[MakeFeed]:
    """Builds feeds, which are closed at the end; those of several ranks share a store."""
    store = dist.HashStore()
    with ExitStack() as feeds:

        def make(rank: int = 0, size: int = 1, wait_deadline_s: float = DEADLINE_S, **options: Any) -> Feed:
            learner = config.learner.model_copy(update={"wait_deadline_s": wait_deadline_s})
            ranks = replace(world, rank=rank, size=size, store=store, sizes=MeshSizes(dp_shard=size))
            own = config.model_copy(update={"learner": learner})
            feed = build_feed(own, initial_model(config), ranks, LEARNER, **options)
            return feeds.enter_context(closing(feed))

        yield make


@pytest.fixture
def lease_requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of the lease requests so far."""
    steps: list[int] = []

    class Recording(BufferClient):
        def lease(self, step: int, **request: Any) -> Any:
            steps.append(step)
            return super().lease(step, **request)

    monkeypatch.setattr(parts, "BufferClient", Recording)
    return steps


def no_callback() -> None:
    """While a feed waits."""


def take(feed: Feed) -> StepData:
    return feed.take(no_callback)


def in_thread(work: Callable[[], Any]) -> "Future[Any]":
    """The future of a call in a thread of its own."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def await_true(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"not true within {DEADLINE_S} s"


def test_groups_are_leased_in_ticket_order(server: RolloutServer, make_feed: MakeFeed) -> None:
    delivered, feed = server.deliver(8), make_feed()
    for step in (0, 1):
        feed.prefetch(step, consuming_version=step)
        data = take(feed)
        assert data.trajectories == delivered[8 * step : 8 * step + 8]
        assert (data.step, data.consuming_version, len(data.updates)) == (step, step, 2)


def test_feed_waits_for_enough_groups(
    server: RolloutServer, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_feed, "CALLBACK_S", 0.01)
    delivered, feed, callbacks = server.deliver(3), make_feed(), list[float]()
    feed.prefetch(0, consuming_version=0)
    taking = in_thread(lambda: feed.take(lambda: callbacks.append(time.monotonic())))
    await_true(lambda: len(callbacks) > 2)
    assert not taking.done()
    delivered += server.deliver(1)
    assert taking.result(DEADLINE_S).trajectories == delivered


def test_starvation_error_explains_shortage(server: RolloutServer, make_feed: MakeFeed) -> None:
    server.deliver(3)
    feed = make_feed(wait_deadline_s=0.1)
    feed.prefetch(7, consuming_version=0)
    with pytest.raises(StarvedError, match=r"step 7 .*learner\.wait_deadline_s=0\.1 .* 3 ready, 0 in flight"):
        take(feed)


def test_time_before_take_does_not_count_as_waiting(
    config: RunConfig,
    server: RolloutServer,
    make_feed: MakeFeed,
    lease_requests: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer_feed, "LEASE_WAIT_S", 0.1)
    feed = make_feed(wait_deadline_s=1e-6)
    with closing(BufferClient(config, "learner")) as client:
        feed.prefetch(0, consuming_version=0)
        await_true(lambda: len(lease_requests) > 1)
        delivered = server.deliver(4)
        await_true(lambda: client.state().counts.leased == 4)
        assert take(feed).trajectories == delivered


def test_wait_longer_than_last_is_logged(
    server: RolloutServer, make_feed: MakeFeed, lease_requests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, now = list[float](), 0.0

    def advance(duration_s: float) -> None:
        """Advances the clock and waits until the feed has read it."""
        nonlocal now
        now += duration_s
        before = len(lease_requests)
        await_true(lambda: len(lease_requests) > before + 2)

    for name in ("LEASE_WAIT_S", "CALLBACK_S"):
        monkeypatch.setattr(buffer_feed, name, 0.01)
    monkeypatch.setattr(buffer_feed, "LogInterval", lambda every_s: LogInterval(every_s, clock=lambda: now))
    monkeypatch.setattr(buffer_feed, "time", SimpleNamespace(monotonic=lambda: now))
    server.deliver(3)
    feed = make_feed(wait_deadline_s=600.0)
    with capture_logs() as logs:
        for step, durations_s in enumerate(([29.0, 3.0, 20.0, 10.0, 3.0], [125.0, 10.0])):
            feed.prefetch(step, consuming_version=0)
            advance(1000.0)  # before it is waited for
            waiting.clear()
            taking = in_thread(lambda: feed.take(lambda: waiting.append(now)))
            await_true(lambda: len(waiting) > 0)
            for duration_s in durations_s:
                advance(duration_s)
            server.deliver(4)
            taking.result(DEADLINE_S)
    assert [(line["event"], line["log_level"], line["step"], line["for_s"]) for line in logs] == [
        ("waiting for groups", "warning", *when) for when in ((0, 32), (0, 62), (1, 135))
    ]
    assert "3 ready, 0 in flight, 0 leased" in logs[0]["why"]


def test_servers_without_weights_are_named_with_port(
    config: RunConfig, server: RolloutServer, make_feed: MakeFeed
) -> None:
    server.deliver(4)
    feed, version = make_feed(wait_deadline_s=0.1), config.buffer.max_staleness + 1
    with closing(BufferClient(config, "learner", LEARNER)) as client:
        for published in (0, version):
            client.published(published, evaluate=False)
        feed.prefetch(0, consuming_version=version)
        port = config.weights.control_port
        with pytest.raises(StarvedError, match=rf"rollout .*version 0, .* {version}.*127\.0\.0\.1 .*{port}"):
            take(feed)


def test_ranks_share_one_lease_by_cost(config: RunConfig, server: RolloutServer, make_feed: MakeFeed) -> None:
    delivered = server.deliver(4, lengths=(8, 30, 9, 8))
    feeds = [make_feed(rank, 2) for rank in (0, 1)]
    for feed in feeds:
        feed.prefetch(0, consuming_version=0)
    # In each update the first rank has the group that costs more, wherever it stands.
    root, other = map(take, feeds)
    assert root.trajectories == [*delivered[2:4], *delivered[4:6]]
    assert other.trajectories == [*delivered[0:2], *delivered[6:8]]
    assert [len(batches) for batches in root.updates] == [len(batches) for batches in other.updates] == [1, 1]
    with closing(BufferClient(config, "learner")) as client:
        assert client.state().counts.leased == 4


def test_starved_step_can_be_leased_again(server: RolloutServer, make_feed: MakeFeed) -> None:
    server.deliver(3)
    root, other = (make_feed(rank, 2, wait_deadline_s=3.0) for rank in (0, 1))

    def take_both() -> list["Future[StepData]"]:
        for feed in (root, other):
            feed.prefetch(3, consuming_version=0)
        taking = [in_thread(partial(take, feed)) for feed in (root, other)]
        wait(taking, DEADLINE_S)
        return taking

    errors = [taken.exception(0) for taken in take_both()]
    assert [type(error) for error in errors] == [StarvedError] * 2
    assert str(errors[0]) == str(errors[1])
    server.deliver(1)
    assert [len(taken.result(0).trajectories) for taken in take_both()] == [4, 4]


def test_stop_signal_of_rank_0_stops_both_ranks(server: RolloutServer, make_feed: MakeFeed) -> None:
    signals = GracefulStop()
    feeds = [make_feed(rank, 2, signals=signals) for rank in (0, 1)]
    for feed in feeds:
        feed.prefetch(0, consuming_version=0)
    taking = [in_thread(partial(take, feed)) for feed in feeds]
    signals.number = signal.SIGTERM
    for future in taking:
        with pytest.raises(StopRequested) as stop:
            future.result(DEADLINE_S)
        assert stop.value.number == signal.SIGTERM


def test_stop_signal_ends_wait_for_absent_buffer(make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.client.STOPPING_REPLY_S", 0.1)
    signals = GracefulStop()
    feed = make_feed(signals=signals)
    feed.prefetch(0, consuming_version=0)
    taking = in_thread(partial(take, feed))
    signals.number = signal.SIGTERM
    with pytest.raises(StopRequested):
        taking.result(DEADLINE_S / 2)


def test_closing_ends_wait_for_rank_0(make_feed: MakeFeed) -> None:
    feed = make_feed(1, 2, wait_deadline_s=600.0)
    feed.prefetch(0, consuming_version=0)
    taking = in_thread(partial(take, feed))
    started = time.monotonic()
    feed.close()
    assert time.monotonic() - started < DEADLINE_S
    with pytest.raises(StoppedError):
        taking.result(DEADLINE_S)


def test_rank_without_lease_from_rank_0_gives_up(
    config: RunConfig, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = make_feed(1, 2, wait_deadline_s=0.1)
    redis = config.redis.model_copy(update={"outage_deadline_s": 0.1})
    monkeypatch.setattr(feed, "_config", feed._config.model_copy(update={"redis": redis}))
    feed.prefetch(3, consuming_version=0)
    with pytest.raises(DeadlineError, match=r"step 3.*rank 1"):
        take(feed)


def test_groups_must_divide_among_ranks(make_feed: MakeFeed) -> None:
    with pytest.raises(ConfigError, match=r"learner\.groups_per_step / learner\.updates_per_step = 2 .* 3 "):
        make_feed(size=3)


def explain(config: RunConfig, *servers: m.ServerStatus, tasks: dict[str, int] | None = None, **counts: Any) -> str:
    """The explanation where groups may be consumed from version 2 on."""
    state = m.State(
        request=0, version=3, counts=m.LedgerCounts(**counts), servers=list(servers), evals=[], tasks=tasks or {}
    )
    return explain_shortage(state, config.weights, oldest_version=2)


@pytest.mark.parametrize(
    ("solved", "reason", "explains"),
    [(3, "dynamic_sampling", True), (2, "dynamic_sampling", False), (3, "length", False)],
)
def test_solved_tasks_explain_shortage(config: RunConfig, solved: int, reason: str, explains: bool) -> None:
    counts: dict[str, Any] = {"issued": 40, "reissued": 4, "reasons": {f"filtered:{reason}": 30}}
    server = m.ServerStatus(server="r0", version=3)
    text = explain(config, server, tasks={"solved": solved, "mixed": 2}, **counts)
    assert re.search(rf"\b40\b.*\b30 filtered:{reason}\b.*\b4\b", text)
    assert ("learner.steps" in text) == explains


def test_missing_server_explains_shortage(config: RunConfig) -> None:
    text = explain(config, in_flight=1)
    assert "0 ready, 1 in flight, 0 leased" in text
    assert "no rollout server" in text


def test_stale_servers_explain_shortage(config: RunConfig) -> None:
    servers = [m.ServerStatus(server=f"r{number}", version=version) for number, version in enumerate((3, 1, 2, 0))]
    text = explain(config, *servers)
    assert [f"r{number} " in text for number in range(4)] == [False, True, False, True]
    assert "crashes" not in text
    assert "crashes: 2" in explain(config, m.ServerStatus(server="r0", version=0, engine_deaths=2))
