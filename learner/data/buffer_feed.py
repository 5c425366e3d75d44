"""Groups from the buffer for each training step; those of the next step are fetched while the present one trains.

Every rank has a thread that reads its share of the groups from Redis. Rank 0's thread also takes out the lease and
shares it through the ranks' store, so that no collective runs outside the main thread.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.client import BufferClient, GroupReader
from slipstream.buffer.store.types import LeasedGroups
from slipstream.buffer.wire.codec import action_mask, kept_tokens, routed_experts, token_ids
from slipstream.buffer.wire.messages import MIXTURE, Group, ServerStatus, State, Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, StoppedError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.run import RewardConfig
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.data.balance import MicroBatchPlan, SequenceCost, Work, balance_groups
from slipstream.learner.data.images import ImageReader
from slipstream.learner.data.packing import MicroBatch, TokenSequence, pack, share_prefixes
from slipstream.learner.data.prefix_tree import PrefixSharing
from slipstream.learner.data.rows import ActionBatch, build_rows
from slipstream.learner.metrics.samples import Source, sources_of
from slipstream.learner.parallel.mesh import World

log = get_log("learner.feed")

LEASE_WAIT_S = 1.0
CALLBACK_S = 5.0
"""Between two calls of the callback of `take`."""
WARNING_S = 30.0


class StarvedError(DeadlineError):
    """Too few groups became ready for a step; raised on all ranks."""


@dataclass(frozen=True)
class StepData:
    """This rank's part of one training step."""

    step: int
    consuming_version: int
    updates: list[list[MicroBatch]]
    """Micro-batches of each optimizer update."""
    rows: ActionBatch
    """Actions of all updates, one update after the other."""
    trajectories: list[Trajectory]
    sources: list[Source]
    """Of the trajectories."""
    staleness: Mapping[int, int]
    """Staleness of action tokens, by their policy version."""
    lease: LeasedGroups | None = None
    """The step's groups, of all ranks; None where they were not leased."""


def token_sequence(
    trajectory: Trajectory,
    images: Mapping[str, bytes],
    reader: ImageReader | None = None,
    targets: NDArray[np.bool_] | None = None,
) -> TokenSequence:
    """The tokens of a trajectory with its images, for packing.

    Args:
        images: of its group.
        reader: of the model; None: it takes no images.
        targets: of the cross-entropy.
    """
    ids = token_ids(trajectory)
    read = None if reader is None else reader.read(ids, [images[name] for name in trajectory.images])
    return TokenSequence(
        ids, action_mask(trajectory), read, routed_experts(trajectory), targets, kept_tokens(trajectory)
    )


def observed_tokens(trajectory: Trajectory, reader: ImageReader | None = None) -> NDArray[np.bool_]:
    """True at what the env and the chat template have added after an action, shape [T]; not at images.

    The tokens before the first action are the task, or in an episode's later trajectories its rewritten history.
    """
    mask = action_mask(trajectory)
    observed: NDArray[np.bool_] = (mask == 0) & (np.maximum.accumulate(mask) > 0)
    if reader is not None:
        observed &= token_ids(trajectory) != reader.placeholder
    return observed


def algorithm_of(group: Group, algorithms: Sequence[str]) -> int:
    """Index of a group's algorithm.

    Args:
        algorithms: labels of the envs with one of their own; the first is the learner's, of all other groups.
    """
    scores = group.trajectories[0].scores if group.trajectories else {}
    return next((index for index, label in enumerate(algorithms) if label and f"{MIXTURE}{label}" in scores), 0)


def partition_groups(groups: int, *, updates: int, rank: int, world_size: int) -> list[list[int]]:
    """Indices of a step's groups that a rank trains on, per update: blocks to the updates, round-robin to the ranks."""
    per_update = groups // updates
    return [list(range(update * per_update + rank, (update + 1) * per_update, world_size)) for update in range(updates)]


def group_works(group: Group, sharing: PrefixSharing | None, *, token_budget: int) -> list[Work]:
    """Work of a group's sequences, or trees of them, as `pack` finds them."""
    trajectories = group.trajectories
    if sharing is None or any(each.images or each.routed_experts for each in trajectories):
        return [Work.of_length(len(each.action_mask) - 1) for each in trajectories]
    sequences = [token_sequence(trajectory, group.images) for trajectory in trajectories]
    return [item.work for item in share_prefixes(sequences, sharing, token_budget=token_budget)]


def balance_step(
    works: Sequence[Sequence[Work]], learner: LearnerConfig, world: World, cost: SequenceCost
) -> tuple[list[list[int]], list[MicroBatchPlan]]:
    """Indices of the groups that this rank trains on and its micro-batches, by update.

    Args:
        works: work of each group's sequences, or trees of them.
        cost: of sequences under the policy.
    """
    per_update = len(works) // learner.updates_per_step
    assigned, plans = [], []
    for start in range(0, len(works), per_update):
        shares, plan = balance_groups(
            works[start : start + per_update], world.data_size, budget=learner.token_budget, cost=cost
        )
        assigned.append([start + index for index in shares[world.data_rank]])
        plans.append(plan)
    return assigned, plans


def build_step(  # noqa: PLR0913  (all that a step depends on)
    assigned: Sequence[Sequence[tuple[Group, float]]],
    *,
    algorithms: Mapping[str, LearnerConfig],
    rewards: Sequence[RewardConfig],
    step: int,
    consuming_version: int,
    staleness: Mapping[int, int] | None = None,
    images: ImageReader | None = None,
    plans: Sequence[MicroBatchPlan] | None = None,
    sharing: PrefixSharing | None = None,
) -> StepData:
    """A rank's part of a step.

    Args:
        assigned: groups of each update with their importance weights.
        algorithms: `RunConfig.algorithms`.
        staleness: of action tokens, by their policy version; None: that of a training without restarts.
        images: reads the images of a vision-language model.
        plans: of each update's micro-batches, where several ranks train in step.
        sharing: of common prefixes; None: each sequence is computed alone.
    """
    updates, all_trajectories, sources = [], list[Trajectory](), list[Source]()
    labels, chosen = list(algorithms), list(algorithms.values())
    indices = [algorithm_of(group, labels) for groups in assigned for group, _ in groups]
    targets: list[NDArray[np.bool_]] | None = None
    if any(each.streams.ce for each in chosen):
        targets = [
            observed_tokens(trajectory, images) & bool(chosen[index].streams.ce)
            for index, (group, _) in zip(indices, chain.from_iterable(assigned), strict=True)
            for trajectory in group.trajectories
        ]
    unset: list[MicroBatchPlan | None] = [None] * len(assigned)
    for groups, plan in zip(assigned, plans or unset, strict=True):
        trajectories = [trajectory for group, _ in groups for trajectory in group.trajectories]
        own = repeat(None) if targets is None else iter(targets[len(all_trajectories) :])
        sequences = [
            token_sequence(trajectory, group.images, images, next(own))
            for group, _ in groups
            for trajectory in group.trajectories
        ]
        batches = pack(
            sequences,
            token_budget=chosen[0].token_budget,
            first_row=len(all_trajectories),
            plan=plan,
            sharing=sharing,
            groups=[len(group.trajectories) for group, _ in groups],
        )
        updates.append(batches)
        all_trajectories += trajectories
        sources += [source for group, _ in groups for source in sources_of(group, samples=1)]
    rows = build_rows(
        [group for groups in assigned for group in groups],
        terms=[reward.name for reward in rewards if reward.weight],
        turns=any(each.advantage.needs_turns for each in chosen),
        agents=any(each.advantage.needs_agents for each in chosen),
        algorithms=indices if len(chosen) > 1 else None,
        targets=targets,
    )
    if staleness is None:
        versions = {span.version for trajectory in all_trajectories for span in trajectory.spans}
        staleness = {version: consuming_version - version for version in versions}
    return StepData(step, consuming_version, updates, rows, all_trajectories, sources, staleness)


class Feed:
    """A queue of depth one between buffer and training loop; on every rank."""

    def __init__(
        self,
        config: RunConfig,
        cost: SequenceCost,
        world: World,
        reader: GroupReader,
        buffer: BufferClient | None,
        signals: GracefulStop | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Args:
        cost: of sequences under the policy.
        buffer: rank 0's connection for leases, which the feed closes; None on other ranks.
        signals: stop signals of this process.
        images: reads the images of a vision-language model.
        """
        self.images = images
        self.sharing: PrefixSharing | None = None
        """Of common prefixes, by the models' abilities; they are loaded later."""
        self._config = config
        self._algorithms = config.algorithms
        self._cost = cost
        self._world = world
        self._signals = signals or GracefulStop()
        self._reader = reader
        self._buffer = buffer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._next: Future[StepData] | None = None
        self._fetches = 0
        """The same on all ranks."""
        self._waits_since = math.inf
        """Time of the present call of `take`."""
        self._last_wait_s = 0.0
        self._warning = LogInterval(WARNING_S)
        self._stopping = False

    def prefetch(self, step: int, *, consuming_version: int) -> None:
        """Starts to fetch the groups of `step`, which will be consumed at `consuming_version`."""
        self._fetches += 1
        self._next = self._thread.submit(self._fetch, self._fetches, step, consuming_version)

    def take(self, while_waiting: Callable[[], None]) -> StepData:
        """The prefetched step; calls `while_waiting` every CALLBACK_S until it is complete.

        Raises: StarvedError when too few groups become ready in `learner.wait_deadline_s`, StopRequested when rank 0
        received a stop signal before, DeadlineError when buffer or Redis are away.
        """
        assert self._next is not None, "take() without prefetch()"
        # Not before: the groups may depend on what the learner trains and publishes meanwhile.
        self._waits_since = time.monotonic()
        try:
            while not wait([self._next], CALLBACK_S).done:
                while_waiting()
            return self._next.result()
        finally:
            self._last_wait_s = self._waited_s
            self._waits_since = math.inf

    def close(self) -> None:
        """Stops the fetch in progress and closes the connection to the buffer."""
        self._stopping = True
        self._reader.give_up()
        if self._buffer is not None:
            self._buffer.give_up()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._buffer is not None:
            self._buffer.close()

    @property
    def _waited_s(self) -> float:
        """Time since the training loop called `take`; negative outside of it."""
        return time.monotonic() - self._waits_since

    def _fetch(self, number: int, step: int, consuming_version: int) -> StepData:
        learner, world = self._config.learner, self._world
        with span("lease", of=("step", step + 1)) as leasing:
            lease = self._lease(number, step, consuming_version)
            leasing.note(groups=lease.ids)
        assigned = partition_groups(
            len(lease.ids), updates=learner.updates_per_step, rank=world.data_rank, world_size=world.data_size
        )
        groups, plans = self._read(step, lease, chain.from_iterable(assigned)), None
        if world.data_size > 1:
            assigned, plans = self._balance(number, step, groups)
            groups |= self._read(step, lease, [index for index in chain.from_iterable(assigned) if index not in groups])
        data = build_step(
            [[(groups[index], lease.importance_weights[index]) for index in indices] for indices in assigned],
            algorithms=self._algorithms,
            rewards=self._config.rewards,
            step=step,
            consuming_version=consuming_version,
            staleness=lease.staleness_of,
            images=self.images,
            plans=plans,
            sharing=self.sharing,
        )
        return replace(data, lease=lease)

    def _read(self, step: int, lease: LeasedGroups, indices: Iterable[int]) -> dict[int, Group]:
        """The leased groups of these indices."""
        wanted = list(indices)
        with span("read groups", of=("step", step + 1), groups=len(wanted)):
            groups = self._reader.read([lease.ids[index] for index in wanted])
        return dict(zip(wanted, groups, strict=True))

    def _balance(
        self, number: int, step: int, groups: Mapping[int, Group]
    ) -> tuple[list[list[int]], list[MicroBatchPlan]]:
        """Indices of the groups that this rank trains on and its micro-batches, by update.

        Args:
            groups: those whose work this rank shares with the others, by index.
        """
        learner, world = self._config.learner, self._world
        own = [
            (index, group_works(group, self.sharing, token_budget=learner.token_budget))
            for index, group in groups.items()
        ]
        world.store.set(f"works/{number}/{world.data_rank}", json.dumps(own))
        if number > 2:
            world.store.delete_key(f"works/{number - 2}/{world.data_rank}")
        works: dict[int, list[Work]] = {}
        for rank in range(world.data_size):
            shared = self._await_key(f"works/{number}/{rank}", f"step {step}: the lengths of rank {rank}'s groups")
            works |= {index: [Work(*work) for work in of_group] for index, of_group in json.loads(shared)}
        return balance_step([works[index] for index in range(len(works))], learner, world, self._cost)

    def _lease(self, number: int, step: int, consuming_version: int) -> LeasedGroups:
        key = f"lease/{number}"  # not the step: it is leased again after a StarvedError
        if self._buffer is None:
            return self._lease_from_root(key, step)
        try:
            lease = self._lease_from_buffer(self._buffer, step, consuming_version)
        except StarvedError as error:
            self._share(key, {"starved": str(error)})
            raise
        except StopRequested as stop:
            self._share(key, {"stopped": stop.number})
            raise
        self._share(key, asdict(lease))
        if self._world.size > 1:
            self._world.store.delete_key(f"lease/{number - 2}")
        return lease

    def _share(self, key: str, outcome: Mapping[str, Any]) -> None:
        if self._world.size > 1:
            self._world.store.set(key, json.dumps(outcome))

    def _lease_from_root(self, key: str, step: int) -> LeasedGroups:
        """Rank 0's lease. Raises: StarvedError and StopRequested as on rank 0."""
        outcome = json.loads(self._await_key(key, f"step {step}: the lease of rank 0"))
        if "starved" in outcome:
            raise StarvedError(outcome["starved"])
        if "stopped" in outcome:
            raise StopRequested(outcome["stopped"])
        return LeasedGroups(**outcome)

    def _await_key(self, key: str, what: str) -> str:
        """The store's value of `key`; the deadline is later than rank 0's for the lease, whose error has the reason.

        Args:
            what: the value, for the error.

        Raises: DeadlineError, StoppedError.
        """
        deadline_s = self._config.learner.wait_deadline_s + self._config.redis.outage_deadline_s
        while not self._stopping:
            shared = self._world.read_store(key)
            if shared is not None:
                return shared
            if self._waited_s > deadline_s:
                raise DeadlineError(
                    f"{what} did not reach rank {self._world.rank} within {deadline_s:.0f} s; see that rank's log"
                )
        raise StoppedError("the learner stops")

    def _lease_from_buffer(self, buffer: BufferClient, step: int, consuming_version: int) -> LeasedGroups:
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
                    + self._explain_shortage(buffer.state(), consuming_version)
                )
            # Where generation is the slower side, every step waits about as long.
            if waited_s > max(WARNING_S, 2 * self._last_wait_s) and self._warning.due():
                why = self._explain_shortage(buffer.state(), consuming_version)
                log.warning("waiting for groups", step=step, wanted=count, for_s=round(waited_s), why=why)
        raise StoppedError("the learner stops")

    def _explain_shortage(self, state: State, consuming_version: int) -> str:
        oldest_version = consuming_version - self._config.buffer.max_staleness
        return explain_shortage(state, self._config.weights, oldest_version=oldest_version)


def explain_shortage(state: State, weights: WeightsConfig, *, oldest_version: int) -> str:
    """Description of where the missing groups are, and what to do, for messages.

    Args:
        oldest_version: of groups that may be consumed now.
    """
    counts = state.counts
    held = f"the buffer has {counts.ready} ready, {counts.in_flight} in flight, {counts.leased} leased"
    if not state.servers:
        return f"{held}; no rollout server is connected"
    dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.reasons.items()))
    text = f"{held}; of {counts.issued} issued it dropped {dropped or 'none'}, {counts.reissued} were issued again"
    if "filtered:dynamic_sampling" in counts.reasons and state.tasks.get("solved", 0) > sum(state.tasks.values()) / 2:
        text += (
            f"; {state.tasks['solved']} tasks are solved, and dynamic_sampling drops them: to end with the last "
            "checkpoint, start again with learner.steps no larger than its step"
        )
    behind = [server for server in state.servers if server.version < oldest_version]
    if not behind:
        return text
    versions = ", ".join(_held_version(server) for server in behind)
    ports = ", ".join(f"{name} {getattr(weights, name)}" for name in ("control_port", "store_port", "stream_port"))
    return (
        f"{text}; {versions}, the policy is at {state.version}: does it reach weights.host={weights.host} at {ports}?"
    )


def _held_version(server: ServerStatus) -> str:
    # A restarted engine holds version 0 until it has the weights.
    crashes = f" (engine crashes: {server.engine_deaths}, see its log)" if server.engine_deaths else ""
    return f"{server.server} holds version {server.version}{crashes}"
