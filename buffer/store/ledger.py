"""The ledger of a run in Redis: every transition of a group is one atomic Lua script, written once in `lua/`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from slipstream.buffer.policies.admission import bounds
from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.sampling import importance_weights
from slipstream.buffer.policies.statistics import ks_distance
from slipstream.buffer.store.account import account
from slipstream.buffer.store.evaluations import Evaluations
from slipstream.buffer.store.redis import Scripts, portions, set_all
from slipstream.buffer.store.server_checks import ServerMemory, require_durable
from slipstream.buffer.store.types import (
    SPILL_BYTES,
    UNKNOWN_ORIGIN,
    DeliveredGroup,
    Facts,
    IssuedTask,
    LeasedGroups,
    LedgerSnapshot,
    Origin,
    Room,
    SpilledGroupsError,
    StepCheck,
    StepTally,
    SupersededError,
    SweepResult,
    TicketRequest,
    UnknownLearnerError,
    check_steps,
    of_kind,
)
from slipstream.buffer.wire.messages import EpisodeEvent, KeepEvent, LedgerCounts, Sampled
from slipstream.configs import RunConfig

FORGET_AT_ONCE = 100
"""Groups per `trim` script, because a script blocks Redis."""
FORGET_TIMES = 100
"""Scripts per trim: more groups a second than arrive, or Redis would fill up."""
STORED_AT_ONCE = 128
STORED_AT_ONCE_BYTES = 8 << 20
"""Storing blocks Redis; a single group may be larger."""
EXPORTED_AT_ONCE = 1000
MOST_EVENT_BYTES = 32 << 20
"""Of the events that are kept for a ticket; a server takes messages of twice as much."""
LATEST_REPORTS = 4
LEARNER_ERRORS = {b"superseded": SupersededError, b"unknown": UnknownLearnerError}
"""Results of `check_learner` in `lua/prelude.lua` for a learner that is not the run's current one."""


class Ledger:
    """The ledger of one run.

    Raises redis.RedisError when Redis can't be reached in time or refuses to write. Methods with a `learner` raise
    NotCurrentLearnerError for any incarnation but the run's current one; an empty name skips the check.

    Attributes:
        config: of the run.
        evaluations: of the run's policy versions.
        spill_bytes: the bytes of larger groups are moved into spill files once they are trained.
    """

    def __init__(self, redis: Redis, config: RunConfig, *, spill_bytes: int = SPILL_BYTES) -> None:
        self.run = config.run.name
        self.config = config
        self.spill_bytes = spill_bytes
        self._redis = redis
        self._published = 0
        self.scripts = Scripts(redis, self.run)
        self.evaluations = Evaluations(redis, self.scripts, config.eval, deadline_s=config.buffer.ticket_deadline_s)
        self._prefix = self.scripts.prefix

    async def _call_as(self, learner: str, name: str, **arguments: Any) -> Any:
        """Runs a script that only the run's current learner may run. Raises: NotCurrentLearnerError."""
        answer = await self.scripts.call(name, learner=learner, **arguments)
        if isinstance(answer, bytes):
            raise LEARNER_ERRORS[answer](self.run)
        return answer

    # --- rollout servers ----------------------------------------------------------------------------------------------

    async def join(self, server: str, incarnation: str) -> int:
        """Registers a server; returns the number of reissued tickets of an earlier process of that name."""
        return int(await self.scripts.call("join", server=server, incarnation=incarnation))

    async def leave(self, server: str, incarnation: str, *, sampled: Sampled | None = None) -> int:
        """Removes a server; returns the number of tickets and evaluation slices that it held.

        Args:
            sampled: its tokens so far of tickets that it has not settled.
        """
        return int(await self.scripts.call("leave", server=server, incarnation=incarnation, sampled=sampled or {}))

    async def heartbeat(
        self, held: Mapping[str, Sequence[str]], *, grace_s: float, sampled: Mapping[str, Sampled] | None = None
    ) -> dict[str, int]:
        """Records that servers are alive; returns how many tickets, older than the grace, each of them does not hold.

        Args:
            held: the tickets of each server.
            sampled: its tokens so far of these.
        """
        flat = await self.scripts.call("heartbeat", held=held, sampled=sampled or {}, grace_s=grace_s)
        return {server.decode(): int(lost) for server, lost in zip(flat[::2], flat[1::2], strict=True)}

    async def room(self, servers: Sequence[str], versions: Sequence[int]) -> Room:
        """Room that admission leaves servers of these versions, and the tickets that the servers hold."""
        answer = await self.scripts.call("room", servers=servers, versions=versions, **self._admission)
        latest, allowed, held, epoch, position = answer
        by_version, by_server = zip(versions, allowed, strict=True), zip(servers, held, strict=False)
        return Room(latest, dict(by_version), dict(by_server), cursor=(epoch, position))

    async def streaks(self, tasks: Sequence[int]) -> list[int]:
        """Each task's latest groups in a row that were all solved (positive) or unsolved (negative), otherwise 0."""
        answer: list[Any] = await self._redis.hmget(f"{self._prefix}:streaks", [str(task) for task in tasks])
        return [int(streak or 0) for streak in answer]

    async def issue(
        self, requests: Sequence[TicketRequest], *, train_tasks: int, skip: Sequence[Place] = (), resumed: bool = False
    ) -> list[list[IssuedTask]]:
        """Grants the requested tickets in this order, as credits, capacity and rate limit allow; none for `skip`.

        Args:
            resumed: only tickets whose episodes a lost server has begun, whatever the limits are.
        """
        limits = {"deadline_s": self.config.buffer.ticket_deadline_s, **self._admission}
        flat = await self.scripts.call(
            "issue", requests=requests, tasks=train_tasks, skip=skip, resumed=resumed, **limits
        )
        granted: list[list[IssuedTask]] = [[] for _ in requests]
        for index, group_id, *place in zip(*(flat[first::5] for first in range(5)), strict=True):
            granted[index - 1].append(IssuedTask(group_id.decode(), *place))
        return granted

    async def keep_events(self, events: Sequence[tuple[str, KeepEvent]]) -> list[str]:
        """Keeps events of episodes in flight, each with the name of its server; the outcomes in the same order."""
        outcomes: list[str] = []
        for some in portions(
            events, lambda each: len(each[1].event.content), most=STORED_AT_ONCE, most_bytes=STORED_AT_ONCE_BYTES
        ):
            described = [
                {
                    "id": kept.id,
                    "server": server,
                    "env": kept.env,
                    "place": f"{kept.event.episode}:{kept.event.place}",
                    "tokens": kept.event.tokens,
                }
                for server, kept in some
            ]
            contents = [msgspec.msgpack.encode(kept.event) for _, kept in some]
            answer = await self.scripts.call("keep_events", *contents, events=described, most_bytes=MOST_EVENT_BYTES)
            outcomes += [outcome.decode() for outcome in answer]
        return outcomes

    async def events(self, group_id: str) -> list[EpisodeEvent]:
        """The events that are kept for a ticket, in the order of episodes and places."""
        raw: list[Any] = await self._redis.hvals(f"{self._prefix}:events:{group_id}")
        events = [msgspec.msgpack.decode(content, type=EpisodeEvent) for content in raw]
        return sorted(events, key=lambda event: (event.episode, event.place))

    async def resumable(self) -> int:
        """Tasks whose episodes a lost server has begun."""
        return int(await self._redis.llen(f"{self._prefix}:resume"))

    async def give_back(self, group_id: str, *, origin: Origin, lost: Mapping[str, int]) -> str:
        """issued → reissued, of a ticket that came to nothing; returns the outcome."""
        return str((await self.scripts.call("give_back", id=group_id, origin=origin, lost=lost)).decode())

    async def places(self, ids: Sequence[str]) -> dict[str, Place]:
        """Epoch and position of the tickets in flight among these."""
        if not ids:
            return {}
        flat = await self.scripts.call("places", ids=ids)
        places = zip(ids, flat[::2], flat[1::2], strict=True)
        return {group_id: (epoch, position) for group_id, epoch, position in places if position >= 0}

    async def deliver(self, groups: Sequence[DeliveredGroup]) -> list[str]:
        """issued → ready for each; the outcomes in the same order."""
        outcomes: list[str] = []
        for some in portions(
            groups, lambda group: len(group.blob), most=STORED_AT_ONCE, most_bytes=STORED_AT_ONCE_BYTES
        ):
            # The bytes are set outside the script: Lua would copy and hash them, which takes longer than the rest of
            # the script. Reversed, so that the first of two groups with the same id counts, as in the script.
            await set_all(self._redis, {f"{self._prefix}:arriving:{group.id}": group.blob for group in reversed(some)})
            arguments = [group.script_arguments() for group in some]
            answer = await self.scripts.call("deliver", groups=arguments, published=self._published)
            outcomes += [outcome.decode() for outcome in answer]
        return outcomes

    async def filter(
        self, group_id: str, *, reason: str, facts: Facts, origin: Origin = UNKNOWN_ORIGIN, ignored_failures: int = 0
    ) -> str:
        """issued → filtered(reason), at the failure after the first `ignored_failures`; returns the outcome."""
        outcome = await self.scripts.call(
            "filter",
            id=group_id,
            reason=reason,
            facts=facts.script_arguments(),
            origin=origin,
            ignored_failures=ignored_failures,
        )
        return str(outcome.decode())

    # --- learner ------------------------------------------------------------------------------------------------------

    async def restart(self, steps: int, *, learner: str, version: int = 0) -> tuple[int, int]:
        """Starts a learner after `steps` steps: leased groups, and those of later steps, return to ready.

        The next published version continues `version`, the last one that was published in these steps. Returns the
        number of these groups, and the number of undone steps of which groups were forgotten. Repeating it has no
        effect. Raises: SupersededError when another learner has taken over since the first call.
        """
        training = self._training(steps)
        back, forgotten = await self._call_as(learner, "restart", steps=steps, version=version, **training)
        return int(back), int(forgotten)

    async def lease(self, step: int, *, consuming_version: int, count: int, learner: str = "") -> LeasedGroups | None:
        """ready → leased, all `count` groups or none (None); groups that are too stale expire.

        Raises: SpilledGroupsError when bytes must be read back from spill files first.
        """
        limits = bounds(self.config.buffer.limiter)
        leased: list[Any] = await self._call_as(
            learner,
            "lease",
            step=step,
            consuming_version=consuming_version,
            count=count,
            deadline_s=self.config.buffer.lease_deadline_s,
            min_diff=_json_number(limits.min_diff),
            min_ready=limits.min_ready,
            spill_bytes=self.spill_bytes,
            **self._admission,
        )
        if not leased:
            return None
        if leased[0] == b"spilled":
            raise SpilledGroupsError([group_id.decode() for group_id in leased[1]])
        (oldest_version, *staleness), *groups = leased
        weights, exposures = (list(map(float, groups[first::3])) for first in (1, 2))
        importance = importance_weights(weights, exposures, exponent=self.config.buffer.sampler.importance_exponent)
        return LeasedGroups(
            [group_id.decode() for group_id in groups[::3]], importance.tolist(), oldest_version, staleness
        )

    async def train(self, step: int, *, learner: str = "") -> int:
        """leased → trained, or → ready with uses left, for the groups leased for `step`; returns their number."""
        return int(await self._call_as(learner, "train", step=step, **self._training(step)))

    async def publish(self, version: int, *, evaluate: bool, learner: str = "") -> None:
        """Sets the latest policy version; `evaluate` requests its evaluation."""
        await self._call_as(learner, "publish", version=version, evaluate=evaluate)
        self._published = max(self._published, version)  # Redis may lose it, until the learner repeats its report

    async def throttle(self, max_staleness: int, *, learner: str = "") -> None:
        """Lowers the staleness that tickets are issued for below `buffer.max_staleness`, until the next call."""
        await self._call_as(learner, "throttle", max_staleness=max_staleness)

    async def durable(self, steps: int, *, learner: str = "") -> int:
        """trained → durable for the groups of the first `steps` steps; returns their number."""
        return int(await self._call_as(learner, "durable", steps=steps))

    async def finish(self, *, learner: str = "") -> int:
        """Ends the run: groups in flight expire; returns their number."""
        return int(await self._call_as(learner, "finish"))

    @property
    def _admission(self) -> dict[str, float]:
        """Arguments of `capacity` and `issuable` in `lua/prelude.lua`."""
        buffer, limits = self.config.buffer, bounds(self.config.buffer.limiter)
        return {
            "max_staleness": buffer.max_staleness,
            "groups_per_version": self.config.groups_per_version,
            "groups_per_step": self.config.learner.groups_per_step,
            "max_uses": buffer.limiter.max_uses,
            "samples_per_insert": limits.samples_per_insert,
            "max_diff": _json_number(limits.max_diff),
        }

    def _training(self, step: int) -> dict[str, int]:
        """Arguments of `finish_steps` in `lua/prelude.lua`."""
        return {
            "max_uses": self.config.buffer.limiter.max_uses,
            "seed": self.config.run.seed * 1_000_003 + step,
            "spill_bytes": self.spill_bytes,
        }

    # --- upkeep -------------------------------------------------------------------------------------------------------

    async def require_durable(self, address: str) -> ServerMemory:
        """The memory of the Redis at `address`. Raises: ConfigError when it may evict keys."""
        return await require_durable(self._redis, address)

    async def sweep(self, *, silent_s: float | None, silences_s: Mapping[str, float] | None = None) -> SweepResult:
        """Applies the deadlines; tickets of servers that were silent for `silent_s` are reissued.

        Args:
            silences_s: seconds since each server's last message to the service, of any kind.
        """
        tickets, leases, slices, *silent = await self.scripts.call(
            "sweep", silent_s=-1 if silent_s is None else silent_s, silences_s=silences_s or {}
        )
        return SweepResult(int(tickets), int(leases), int(slices), [server.decode() for server in silent])

    async def trim(self) -> int:
        """Forgets final groups beyond the retention; returns their number."""
        retention, forgotten = self.config.buffer.retention, 0
        for _ in range(FORGET_TIMES):
            some = await self.scripts.call(
                "trim",
                keep=retention.max_groups,
                max_age_s=retention.max_age_s or 0,
                until_exported=retention.keep_until_exported,
                count=FORGET_AT_ONCE,
            )
            forgotten += int(some)
            if some < FORGET_AT_ONCE:
                break
        return forgotten

    async def exported(self, ids: Sequence[str], *, forget: bool) -> int:
        """Marks or forgets durable groups that were written to a file; returns how many were still durable."""
        portions = [ids[first : first + EXPORTED_AT_ONCE] for first in range(0, len(ids), EXPORTED_AT_ONCE)]
        return sum([int(await self.scripts.call("exported", ids=some, forget=forget)) for some in portions])

    async def identify(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Fixes fields of the run's identity that are not set yet; returns the fixed values of these fields."""
        fixed = await self.scripts.call("identify", names=list(facts), values=list(facts.values()))
        return dict(zip(facts, (value.decode() for value in fixed), strict=True))

    async def identity(self) -> dict[str, str]:
        """All fixed fields of the run's identity; empty without a ledger."""
        raw: dict[Any, Any] = await self._redis.hgetall(f"{self._prefix}:identity")
        return {name.decode(): value.decode() for name, value in raw.items()}

    async def verify(self, *, most: int = -1) -> list[str]:
        """The violations of the ledger's invariants, one sentence each; none for a sound ledger.

        Args:
            most: a ledger of more groups is not checked, because the check blocks Redis; -1: no limit.
        """
        tasks = (await self.identity()).get("train_tasks")
        problems = await self.scripts.call("verify", tasks=-1 if tasks is None else int(tasks), most=most)
        return [problem.decode() for problem in problems] + (await account(self.scripts)).problems()

    async def check_steps(self) -> StepCheck:
        """Compares the groups of every trained step with `learner.groups_per_step`."""
        return check_steps(await self.step_tally(), groups_per_step=self.config.learner.groups_per_step)

    async def step_tally(self) -> StepTally:
        """Number of groups that each step used."""
        forgotten, *flat = await self.scripts.call("steps")
        return StepTally(forgotten, dict(zip(flat[::2], flat[1::2], strict=True)))

    # --- state --------------------------------------------------------------------------------------------------------

    async def learner(self) -> str:
        """The incarnation of the run's current learner; empty if there was none."""
        name: Any = await self._redis.hget(f"{self._prefix}:meta", "learner")
        return "" if name is None else str(name.decode())

    async def durable_steps(self) -> int:
        """Steps that the latest checkpoint of the run's learner contains; 0 without one."""
        return int(await self._redis.hget(f"{self._prefix}:meta", "durable_steps") or 0)

    async def incarnation(self, server: str) -> str:
        """The incarnation of the last process of this name; empty if there was none."""
        name: Any = await self._redis.hget(f"{self._prefix}:incarnations", server)
        return "" if name is None else str(name.decode())

    async def version(self) -> int:
        """The latest published policy version."""
        return int(await self._redis.hget(f"{self._prefix}:meta", "version") or 0)

    async def snapshot(self) -> LedgerSnapshot:
        """Counts and latest versions, read atomically."""
        answer = await self.scripts.call("snapshot", reports=LATEST_REPORTS)
        raw, in_flight, ready, leased, trained, version, evaluated, evaluating, slices_left, spilled = answer
        counters = {name.decode(): int(value) for name, value in zip(raw[::2], raw[1::2], strict=True)}
        counts = LedgerCounts(
            issued=counters.get("issued", 0),
            in_flight=in_flight,
            ready=ready,
            leased=leased,
            trained=trained + counters.get("durable", 0),
            durable=counters.get("durable", 0),
            filtered=counters.get("filtered", 0),
            expired=counters.get("expired", 0),
            reissued=counters.get("reissued", 0),
            skipped_tasks=counters.get("skipped_tasks", 0),
            uses=counters.get("uses", 0),
            tokens=counters.get("tokens", 0),
            reasons={name: n for name, n in counters.items() if name.startswith(("filtered:", "expired:"))},
            answers_dropped=of_kind("answers_dropped", counters),
            spilled=spilled,
            spilled_bytes=counters.get("spilled_bytes", 0),
        )
        return LedgerSnapshot(
            counts=counts,
            version=int(version),
            tasks=of_kind("tasks", counters),
            evaluated=[int(number) for number in evaluated],
            evaluating=None if evaluating is None else int(evaluating),
            slices_left=int(slices_left),
        )

    async def counts(self) -> LedgerCounts:
        """Groups by state."""
        return (await self.snapshot()).counts

    async def lengths(self, reasons: Sequence[str]) -> dict[str, dict[int, int]]:
        """Answers by the bucket of their length: `delivered`, `trained`, and dropped ones by reason."""
        histograms: dict[str, dict[int, int]] = {}
        for name in ("delivered", "trained", *reasons):
            raw: dict[Any, Any] = await self._redis.hgetall(f"{self._prefix}:lengths:{name}")
            histograms[name] = {int(bucket): int(answers) for bucket, answers in raw.items()}
        return histograms

    async def length_bias(self, reasons: Sequence[str]) -> dict[str, float]:
        """Kolmogorov-Smirnov distance from all delivered lengths: of trained answers, and of dropped ones by reason.

        Classes without a length are left out, such as answers that were never finished.
        """
        lengths = await self.lengths(reasons)
        delivered = lengths.pop("delivered")
        return {name: ks_distance(delivered, dropped) for name, dropped in lengths.items() if sum(dropped.values())}


def _json_number(value: float) -> float:
    """Replaces infinity, which JSON does not have, by a number beyond any count."""
    return max(-1e300, min(1e300, value))
