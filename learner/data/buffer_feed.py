"""Fetches the next step's groups while the present step trains.

Every rank has a thread that reads its own share of the groups from Redis; rank 0's thread also takes out the lease and
tells the others through the ranks' shared store, so that no collective runs outside the main thread.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.client.learner import BufferClient
from slipstream.buffer.store.types import Lease
from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import Group, ServerStatus, State, Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, StoppedError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.learner.data.packing import MicroBatch, TokenSequence, pack
from slipstream.learner.data.rows import Rows, build_rows
from slipstream.learner.parallel.mesh import World

log = get_log("learner.feed")

LEASE_WAIT_S = 1.0
MEANWHILE_S = 5.0
SAY_EVERY_S = 30.0


class StarvedError(DeadlineError):
    """Too few groups got ready for a step; all ranks find out alike."""


@dataclass(frozen=True)
class StepData:
    """This rank's part of one training step."""

    step: int
    consuming_version: int
    updates: list[list[MicroBatch]]
    """Of each optimizer update."""
    rows: Rows
    """Of all updates, one after the other."""
    trajectories: list[Trajectory]


def token_sequence(trajectory: Trajectory) -> TokenSequence:
    """The tokens of a trajectory, for packing."""
    return TokenSequence(token_ids(trajectory), action_mask(trajectory))


def deal(groups: int, *, updates: int, rank: int, world_size: int) -> list[list[int]]:
    """Which of a step's groups a rank trains on, for each update: in order to the updates, in turn to the ranks."""
    per_update = groups // updates
    return [list(range(update * per_update + rank, (update + 1) * per_update, world_size)) for update in range(updates)]


def build_step(
    dealt: Sequence[Sequence[tuple[Group, float]]], config: RunConfig, *, step: int, consuming_version: int
) -> StepData:
    """A rank's part of a step, from its groups of each update and how much each of them counts."""
    updates, all_trajectories = [], list[Trajectory]()
    for groups in dealt:
        trajectories = [trajectory for group, _ in groups for trajectory in group.trajectories]
        sequences = [token_sequence(trajectory) for trajectory in trajectories]
        updates.append(pack(sequences, token_budget=config.learner.token_budget, first_row=len(all_trajectories)))
        all_trajectories += trajectories
    rows = build_rows(
        [each for groups in dealt for each in groups], terms=[term.name for term in config.rewards if term.weight]
    )
    return StepData(step, consuming_version, updates, rows, all_trajectories)


class Feed:
    """The queue of depth one between buffer and training loop; on every rank."""

    def __init__(
        self, config: RunConfig, world: World, incarnation: str | None = None, signals: GracefulStop | None = None
    ) -> None:
        """`incarnation` is that of the learner that it belongs to; None: of a learner of its own. `signals` may tell it
        to end.

        Raises: ConfigError when the groups of an update do not divide among the ranks.
        """
        per_update = config.learner.groups_per_step // config.learner.updates_per_step
        if per_update % world.size:
            raise ConfigError(
                f"learner.groups_per_step / learner.updates_per_step = {per_update} must be a multiple of the "
                f"{world.size} learner ranks"
            )
        self._config = config
        self._world = world
        self._signals = signals or GracefulStop()
        self._reader = GroupReader(config.redis, run=config.run.name)
        self._buffer = (
            BufferClient(config, "learner-feed", incarnation, is_stopping=self._signals.is_requested)
            if world.is_root
            else None
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._next: Future[StepData] | None = None
        self._fetches = 0
        """The same on all ranks."""
        self._waits_since = math.inf
        """When the training loop began to wait in `take`."""
        self._last_wait_s = 0.0
        self._news = LogInterval(SAY_EVERY_S)
        self._stopping = False

    def prefetch(self, step: int, *, consuming_version: int) -> None:
        """Starts to fetch the groups of `step`, which will be consumed at `consuming_version`."""
        self._fetches += 1
        self._next = self._thread.submit(self._fetch, self._fetches, step, consuming_version)

    def take(self, meanwhile: Callable[[], None]) -> StepData:
        """What was prefetched; every MEANWHILE_S that it takes `meanwhile` is called.

        Raises: StarvedError when too few groups got ready in `learner.wait_deadline_s`, StopRequested when rank 0 was
        told before there were enough, DeadlineError when whoever has them is away.
        """
        assert self._next is not None, "take() without prefetch()"
        # Not before: what the learner trains and publishes meanwhile may be what the groups wait for.
        self._waits_since = time.monotonic()
        try:
            while not wait([self._next], MEANWHILE_S).done:
                meanwhile()
            return self._next.result()
        finally:
            self._last_wait_s = self._waited_s
            self._waits_since = math.inf

    @property
    def _waited_s(self) -> float:
        """For how long the training loop has waited; less than 0 if it doesn't."""
        return time.monotonic() - self._waits_since

    def close(self) -> None:
        """Stops waiting for groups."""
        self._stopping = True
        self._reader.give_up()
        if self._buffer is not None:
            self._buffer.give_up()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._buffer is not None:
            self._buffer.close()

    def _fetch(self, number: int, step: int, consuming_version: int) -> StepData:
        lease = self._lease(number, step, consuming_version)
        mine = deal(
            len(lease.ids),
            updates=self._config.learner.updates_per_step,
            rank=self._world.rank,
            world_size=self._world.size,
        )
        groups = iter(self._reader.read([lease.ids[index] for indices in mine for index in indices]))
        dealt = [[(next(groups), lease.importance_weights[index]) for index in indices] for indices in mine]
        return build_step(dealt, self._config, step=step, consuming_version=consuming_version)

    def _lease(self, number: int, step: int, consuming_version: int) -> Lease:
        key = f"lease/{number}"  # not the step: it is asked for again when there were too few groups for it
        if self._buffer is None:
            return self._lease_from_root(key, step)
        try:
            lease = self._lease_from_buffer(self._buffer, step, consuming_version)
        except StarvedError as error:
            self._tell(key, {"starved": str(error)})
            raise
        except StopRequested as end:
            self._tell(key, {"told": end.number})
            raise
        self._tell(key, asdict(lease))
        if self._world.size > 1:
            self._world.store.delete_key(f"lease/{number - 2}")
        return lease

    def _tell(self, key: str, what: Mapping[str, Any]) -> None:
        if self._world.size > 1:
            self._world.store.set(key, json.dumps(what))

    def _lease_from_root(self, key: str, step: int) -> Lease:
        """What rank 0 has leased; rank 0 gives up first, because it can say why.

        Raises: StarvedError and StopRequested as it does.
        """
        deadline_s = self._config.learner.wait_deadline_s + self._config.redis.outage_deadline_s
        while not self._stopping:
            said = self._world.read_store(key)
            if said is not None:
                told = json.loads(said)
                if "starved" in told:
                    raise StarvedError(told["starved"])
                if "told" in told:
                    raise StopRequested(told["told"])
                return Lease(**told)
            if self._waited_s > deadline_s:
                raise DeadlineError(
                    f"step {step}: rank {self._world.rank} heard of no lease from rank 0 within {deadline_s:.0f} s; "
                    "see rank 0's log"
                )
        raise StoppedError("the learner stops")

    def _lease_from_buffer(self, buffer: BufferClient, step: int, consuming_version: int) -> Lease:
        count, deadline_s = self._config.learner.groups_per_step, self._config.learner.wait_deadline_s
        while not self._stopping:
            if self._signals.number:
                raise StopRequested(self._signals.number)
            try:
                lease = buffer.lease(step, count=count, consuming_version=consuming_version, wait_s=LEASE_WAIT_S)
            except DeadlineError:
                if not self._signals.is_requested():
                    raise
                continue
            if lease is not None:
                return lease
            waited_s = self._waited_s
            if waited_s > deadline_s:
                raise StarvedError(
                    f"step {step} waited learner.wait_deadline_s={deadline_s:g} for {count} ready groups; "
                    + _explain(buffer.state(), self._config, consuming_version)
                )
            # Where generation is the slower side, every step waits its time.
            if waited_s > max(SAY_EVERY_S, 2 * self._last_wait_s) and self._news.due():
                why = _explain(buffer.state(), self._config, consuming_version)
                log.warning("waiting for groups", step=step, wanted=count, for_s=round(waited_s), why=why)
        raise StoppedError("the learner stops")


def _explain(state: State, config: RunConfig, consuming_version: int) -> str:
    """Where the groups are that did not get ready."""
    counts = state.counts
    held = f"the buffer has {counts.ready} ready, {counts.in_flight} in flight, {counts.leased} leased"
    if not state.servers:
        return f"{held}; no rollout server is connected"
    gone = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.reasons.items()))
    told = f"{held}; of {counts.issued} issued it dropped {gone or 'none'}, {counts.reissued} were issued again"
    if state.tasks.get("solved", 0) > sum(state.tasks.values()) / 2:
        told += (
            f"; {state.tasks['solved']} tasks are solved, and dynamic_sampling drops them: to end with the last "
            "checkpoint, start again with learner.steps no larger than its step"
        )
    behind = [server for server in state.servers if server.version < consuming_version - config.buffer.max_staleness]
    if not behind:
        return told
    versions = ", ".join(_holding(server) for server in behind)
    weights = config.weights
    ports = ", ".join(f"{name} {getattr(weights, name)}" for name in ("control_port", "store_port", "stream_port"))
    return (
        f"{told}; {versions}, the policy is at {state.version}: does it reach weights.host={weights.host} at {ports}?"
    )


def _holding(server: ServerStatus) -> str:
    """An engine that is started again holds version 0 for as long as that takes."""
    deaths = f" (deaths of its engine: {server.engine_deaths}, see its log)" if server.engine_deaths else ""
    return f"{server.server} holds version {server.version}{deaths}"
