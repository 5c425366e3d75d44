"""A run's ledger: the shards as one. Each shard is a ledger of its own, sound by itself; this adds them up."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import msgspec

from slipstream.buffer.policies.lengths import ks_distance
from slipstream.buffer.policies.limiter import Bounds, bounds
from slipstream.buffer.policies.sampling import importance_weights
from slipstream.buffer.store.keys import shard_of
from slipstream.buffer.store.redis import TROUBLE, AsyncRedis, require_durable
from slipstream.buffer.store.shard import RedisStore
from slipstream.buffer.store.types import (
    DeliveredGroup,
    EvalSlice,
    Facts,
    Issued,
    IssuedTask,
    Lease,
    Standing,
    StepCheck,
    SupersededError,
    Swept,
    check_steps,
)
from slipstream.buffer.wire.messages import EvalReport, LedgerCounts
from slipstream.configs import RunConfig

Result = TypeVar("Result")

EXPORTED_AT_ONCE = 1000
"""Redis serves nobody while it marks them."""


class Ledger:
    """All shards of one run. Raises what RedisStore raises; an operation that failed half-way is simply done again."""

    def __init__(self, redis: AsyncRedis, config: RunConfig) -> None:
        shards = config.buffer.shards
        self._redis = redis
        self._config = config
        self._buffer = config.buffer
        self._shards = [RedisStore(redis, config.run.name, shard=shard, shards=shards) for shard in range(shards)]
        self._first = self._shards[0]
        self._groups_per_version = config.groups_per_version // shards
        self._bounds = _share(bounds(config.buffer.limiter), shards)
        self._turn = 0

    # --- servers --------------------------------------------------------------------------------------------------

    async def join(self, server: str, incarnation: str) -> int:
        """A server said hello; how many tickets an earlier process of that name had held."""
        return sum(await self._each(lambda shard: shard.join(server, incarnation)))

    async def leave(self, server: str, incarnation: str) -> int:
        """A server said goodbye; how many tickets and slices of an evaluation it had held."""
        return sum(await self._each(lambda shard: shard.leave(server, incarnation)))

    async def hear(self, server: str, *, held: Sequence[str], grace_s: float) -> int:
        """A server is alive and holds these; how many others it was given and has lost."""
        return sum(await self._each(lambda shard: shard.hear(server, held=held, grace_s=grace_s)))

    async def issue(self, server: str, *, server_version: int, credits: int, train_tasks: int) -> Issued:
        """Grants as many tickets as the server's credits, the staleness capacity and the rate limit allow."""
        held = await self._each(lambda shard: shard.tickets_of(server)) if len(self._shards) > 1 else [0]
        tasks: list[IssuedTask] = []
        free = 0
        # Another shard is first each time, or the last ones would get what the first ones leave.
        self._turn += 1
        for number in range(len(self._shards)):
            chosen = (self._turn + number) % len(self._shards)
            try:
                granted = await self._shards[chosen].issue(
                    server,
                    server_version=server_version,
                    credits=credits - (sum(held) - held[chosen]),
                    max_staleness=self._buffer.max_staleness,
                    groups_per_version=self._groups_per_version,
                    deadline_s=self._buffer.ticket_deadline_s,
                    train_tasks=train_tasks,
                    bounds=self._bounds,
                )
            except TROUBLE:
                if not tasks:
                    raise
                return Issued(tasks, free=1)  # what others have granted must get to the server; it may have more
            held[chosen] += len(granted.tasks)
            tasks += granted.tasks
            free = granted.free
        return Issued(tasks, free)

    async def deliver(self, groups: Sequence[DeliveredGroup]) -> dict[str, str]:
        """issued → ready for each; the outcomes by id."""
        parts: dict[RedisStore, list[DeliveredGroup]] = {shard: [] for shard in self._shards}
        for group in groups:
            parts[self._shards[shard_of(group.id, len(self._shards))]].append(group)
        stored = await self._each(lambda shard: shard.deliver(parts[shard]))
        ids = [group.id for part in parts.values() for group in part]
        return dict(zip(ids, chain.from_iterable(stored), strict=True))

    async def filter(self, group_id: str, *, reason: str, facts: Facts, patience: int = 0) -> str:
        """issued → filtered(reason), once it has happened more than `patience` times."""
        shard = self._shards[shard_of(group_id, len(self._shards))]
        return await shard.filter(group_id, reason=reason, facts=facts, patience=patience)

    # --- learner: `learner` says which one asks; any but the run's present one gets StrangerError -----------------

    async def restart(self, steps: int, *, learner: str) -> tuple[int, int]:
        """A learner starts after `steps` steps: how many groups came back, how many undone steps can't.

        Args:
            learner: differs for each; said again by the same one, it changes nothing.
        """
        max_uses, seed = self._buffer.limiter.max_uses, self._seed(steps)
        returned = await self._each(lambda shard: shard.restart(steps, learner=learner, max_uses=max_uses, seed=seed))
        return sum(back for back, _ in returned), max(forgotten for _, forgotten in returned)

    async def lease(self, step: int, *, consuming_version: int, count: int, learner: str = "") -> Lease | None:
        """ready → leased, all `count` groups or none as yet: a shard that was ready keeps its part for the step."""
        parts = await self._each(
            lambda shard: shard.lease(
                step,
                consuming_version=consuming_version,
                count=count // len(self._shards),
                max_staleness=self._buffer.max_staleness,
                deadline_s=self._buffer.lease_deadline_s,
                groups_per_version=self._groups_per_version,
                bounds=self._bounds,
                learner=learner,
            )
        )
        leased = [part for part in parts if part is not None]
        if len(leased) < len(parts):
            return None
        weights = importance_weights(
            [weight for part in leased for weight in part.weights],
            exponent=self._buffer.sampler.importance_exponent,
        )
        return Lease([group_id for part in leased for group_id in part.ids], weights.tolist())

    async def train(self, step: int, *, learner: str = "") -> int:
        """The groups leased for `step` went into an optimizer step; how many."""
        max_uses, seed = self._buffer.limiter.max_uses, self._seed(step)
        return sum(await self._each(lambda shard: shard.train(step, max_uses=max_uses, seed=seed, learner=learner)))

    async def publish(self, version: int, *, evaluate: bool, learner: str = "") -> None:
        """Sets the latest policy version, and asks for its evaluation or not."""
        await self._each(
            lambda shard: shard.publish(version, evaluate=evaluate and shard is self._first, learner=learner)
        )

    async def throttle(self, max_staleness: int, *, learner: str = "") -> None:
        """Issues only what this staleness allows, if it is less than `buffer.max_staleness`; until told otherwise."""
        await self._each(lambda shard: shard.throttle(max_staleness, learner=learner))

    async def durable(self, steps: int, *, learner: str = "") -> int:
        """A checkpoint contains the first `steps` steps; how many groups that made durable."""
        return sum(await self._each(lambda shard: shard.durable(steps, learner=learner)))

    async def finish(self, *, learner: str = "") -> int:
        """Ends the run: what is in flight expires; how many groups that were."""
        return sum(await self._each(lambda shard: shard.finish(learner=learner)))

    def _seed(self, step: int) -> int:
        """Of the race that a step's groups enter anew."""
        return self._config.run.seed * 1_000_003 + step

    # --- evaluation, which the first shard keeps --------------------------------------------------------------------

    async def evaluate(self, version: int, *, server: str, eval_tasks: int) -> tuple[int, list[EvalSlice]]:
        """Hands out a server's part of the held-out tasks, less what it holds; also returns how many slices are left.

        Args:
            eval_tasks: how many its env has.
        """
        tasks, deadline_s = min(eval_tasks, self._config.eval.tasks), self._buffer.ticket_deadline_s
        return await self._first.evaluate(version, server=server, tasks=tasks, deadline_s=deadline_s)

    async def evaluated(
        self, work: EvalSlice, *, version: int, answered: int, score_sum: float, blob: bytes | memoryview
    ) -> str:
        """Records a delivered slice of an evaluation; of its tasks, those that were not answered have failed."""
        return await self._first.evaluated(work, version=version, answered=answered, score_sum=score_sum, blob=blob)

    async def evaluation_failed(self, ticket_id: str, *, patience: int = 0) -> str:
        """A slice could not be answered more than `patience` times: it is handed out again, at last given up."""
        return await self._first.evaluation_failed(ticket_id, patience=patience)

    async def eval_reports(self, versions: Sequence[int]) -> list[EvalReport]:
        """The finished evaluations of these versions."""
        return await self._first.eval_reports(versions)

    # --- upkeep ---------------------------------------------------------------------------------------------------

    async def require_durable(self) -> None:
        """Raises: ConfigError when Redis may drop keys of the ledger."""
        await require_durable(self._redis, self._config.redis.address)

    async def identity(self) -> dict[str, str]:
        """What the run is: all that was ever fixed; nothing if there is no ledger of it."""
        return await self._first.identity()

    async def identify(self, facts: dict[str, str]) -> dict[str, str]:
        """Fixes what the run is, the first time; returns what it has been since then, of the same fields."""
        return await self._first.identify(facts)

    async def sweep(self, *, silent_s: float | None, heard: Mapping[str, float] | None = None) -> Swept:
        """Applies the deadlines, and forgets what retention no longer covers."""
        swept = await self._each(lambda shard: shard.sweep(silent_s=silent_s, heard=heard))
        retention = self._buffer.retention
        await self._each(
            lambda shard: shard.trim(
                keep=retention.max_groups,
                max_age_s=retention.max_age_s,
                until_exported=retention.keep_until_exported,
            )
        )
        return Swept(
            tickets=sum(each.tickets for each in swept),
            leases=sum(each.leases for each in swept),
            slices=sum(each.slices for each in swept),
            silent=sorted({server for each in swept for server in each.silent}),
        )

    async def verify(self) -> list[str]:
        """What is wrong with the ledger, one sentence each; nothing for a sound one."""
        tasks = (await self.identity()).get("train_tasks")
        found = await self._each(lambda shard: shard.verify(None if tasks is None else int(tasks)))
        return [problem for problems in found for problem in problems]

    async def check_steps(self) -> StepCheck:
        """Whether every step that was trained had as many groups as it should."""
        tallies = await self._each(lambda shard: shard.step_tally())
        return check_steps(tallies, groups_per_step=self._config.learner.groups_per_step)

    async def exported(self, ids: Sequence[str], *, forget: bool) -> int:
        """These durable groups are in a file: marks or forgets them; how many there still were."""
        count = 0
        for first in range(0, len(ids), EXPORTED_AT_ONCE):
            some = ids[first : first + EXPORTED_AT_ONCE]
            for number, shard in enumerate(self._shards):
                mine = [group_id for group_id in some if shard_of(group_id, len(self._shards)) == number]
                count += await shard.exported(mine, forget=forget) if mine else 0
        return count

    # --- figures ----------------------------------------------------------------------------------------------------

    async def learner(self) -> str:
        """The incarnation of the run's present learner; empty if there was none."""
        return await self._first.learner()

    async def incarnation(self, server: str) -> str:
        """Of the last process that said hello under this name; empty if none has."""
        return await self._first.incarnation(server)

    async def version(self) -> int:
        """The latest published policy version."""
        return await self._first.version()

    async def counts(self) -> LedgerCounts:
        """Groups by state."""
        return (await self.standing()).counts

    async def standing(self) -> Standing:
        """How the run stands, in one look at each shard."""
        parts = await self._each(lambda shard: shard.standing())
        tasks: Counter[str] = Counter()
        for part in parts:
            tasks.update(part.tasks)
        return replace(parts[0], counts=add_counts([part.counts for part in parts]), tasks=dict(tasks))

    async def length_bias(self, reasons: Sequence[str]) -> dict[str, float]:
        """Kolmogorov-Smirnov distance of the lengths of trained, and of dropped answers by reason, from all.

        Left out is what has no lengths: answers that were never finished, and all as long as there are none.
        """
        total: dict[str, Counter[int]] = {name: Counter() for name in ("delivered", "trained", *reasons)}
        for found in await self._each(lambda shard: shard.lengths(reasons)):
            for name, lengths in found.items():
                total[name].update(lengths)
        delivered = total.pop("delivered")
        return {name: ks_distance(delivered, lengths) for name, lengths in total.items() if lengths.total()}

    async def _each(self, operation: Callable[[RedisStore], Awaitable[Result]]) -> list[Result]:
        """The operation's result on every shard. When it fails on one, it is over on all of them."""
        if len(self._shards) == 1:
            return [await operation(self._first)]
        results: list[Result] = []
        errors: list[BaseException] = []
        for found in await asyncio.gather(*(operation(shard) for shard in self._shards), return_exceptions=True):
            if isinstance(found, BaseException):
                errors.append(found)
            else:
                results.append(found)
        if errors:
            # Whom one shard knows to be replaced must not introduce itself to one that has forgotten it.
            raise next((error for error in errors if isinstance(error, SupersededError)), errors[0])
        return results


def add_counts(parts: Sequence[LedgerCounts]) -> LedgerCounts:
    """The sum of the shards' counts."""
    total: dict[str, int | dict[str, int]] = {}
    for name in LedgerCounts.__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            merged: Counter[str] = Counter()
            for value in values:
                merged.update(value)
            total[name] = dict(merged)
        else:
            total[name] = sum(values)
    return msgspec.convert(total, LedgerCounts)


def _share(limits: Bounds, shards: int) -> Bounds:
    """One shard's part of the rate limit."""
    return replace(
        limits,
        min_diff=limits.min_diff / shards,
        max_diff=limits.max_diff / shards,
        min_ready=math.ceil(limits.min_ready / shards),
    )
