"""One shard of the ledger in Redis: every state change of a group is one Lua script, atomic, written once in `lua/`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slipstream.buffer.policies.limiter import UNBOUNDED, Bounds
from slipstream.buffer.store.keys import shard_prefix
from slipstream.buffer.store.redis import AsyncRedis, set_all
from slipstream.buffer.store.scripts import scripts
from slipstream.buffer.store.types import (
    DeliveredGroup,
    EvalSlice,
    Facts,
    Issued,
    IssuedTask,
    Leased,
    Standing,
    StepTally,
    SupersededError,
    Swept,
    UnknownLearnerError,
)
from slipstream.buffer.wire.messages import EvalReport, LedgerCounts

EVAL_SLICE = 64
FORGET_AT_ONCE = 100
"""Redis serves nobody meanwhile."""
FORGET_TIMES = 100
"""Per look: more groups a second than come in, or they would fill Redis in the end."""
STORED_AT_ONCE = 128
STORED_AT_ONCE_BYTES = 8 << 20
"""Redis serves nobody while it stores them; one group may be larger."""
LATEST_REPORTS = 4
EVAL_RETRIES = 3
STRANGERS = {b"superseded": SupersededError, b"unknown": UnknownLearnerError}
"""What scripts answer whom they don't serve (`stranger` in `lua/prelude.lua`)."""


class RedisStore:
    """One shard of a run's ledger: all of it, unless `shards` says otherwise.

    Raises redis.RedisError when Redis can't be reached in time or refuses to write; from what only the run's present
    learner may do, StrangerError for any other `learner`. Without one it is whoever is the present one.
    """

    def __init__(self, redis: AsyncRedis, run: str, *, shard: int = 0, shards: int = 1) -> None:
        self._redis = redis
        self._run = run
        self._shard = shard
        self._shards = shards
        self._reports: dict[int, EvalReport] = {}
        self._prefix = shard_prefix(run, shard)
        self._scripts = {name: redis.register_script(text) for name, text in scripts().items()}

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._scripts[name](keys=[self._prefix], args=arguments)

    async def _call_as(self, learner: str, name: str, *arguments: Any) -> Any:
        """What a learner asks for. Raises: StrangerError."""
        answer = await self._call(name, *arguments, learner)
        if isinstance(answer, bytes):
            raise STRANGERS[answer](self._run)
        return answer

    async def issue(
        self,
        server: str,
        *,
        server_version: int,
        credits: int,
        max_staleness: int,
        groups_per_version: int,
        deadline_s: float,
        train_tasks: int,
        bounds: Bounds = UNBOUNDED,
    ) -> Issued:
        """Grants what the server's credits in this shard, the staleness capacity and the rate limit allow."""
        free, *flat = await self._call(
            "issue",
            server,
            server_version,
            credits,
            max_staleness,
            groups_per_version,
            deadline_s,
            len(range(self._shard, train_tasks, self._shards)),
            self._shard,
            self._shards,
            bounds.samples_per_insert,
            bounds.max_diff,
        )
        tasks = [IssuedTask(flat[i].decode(), flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
        return Issued(tasks, int(free))

    async def deliver(self, groups: Sequence[DeliveredGroup]) -> list[str]:
        """issued → ready for each; the outcomes in the same order."""
        outcomes: list[str] = []
        for some in _portions(groups):
            # Their bytes by themselves: Lua would copy and hash them, which takes longer than all else that the script
            # does. Of a group that is there twice the first one counts, as it does for the script.
            await set_all(self._redis, {f"{self._prefix}:arriving:{group.id}": group.blob for group in reversed(some)})
            found = await self._call("deliver", msgspec.json.encode([_delivered_facts(group) for group in some]))
            outcomes += [outcome.decode() for outcome in found]
        return outcomes

    async def filter(self, group_id: str, *, reason: str, facts: Facts, patience: int = 0) -> str:
        """issued → filtered(reason), once it has happened more than `patience` times."""
        outcome = await self._call("filter", group_id, reason, msgspec.json.encode(_facts(facts)), patience)
        return str(outcome.decode())

    async def lease(
        self,
        step: int,
        *,
        consuming_version: int,
        count: int,
        max_staleness: int,
        deadline_s: float,
        groups_per_version: int,
        bounds: Bounds = UNBOUNDED,
        learner: str = "",
    ) -> Leased | None:
        """ready → leased, all `count` groups or none; what is too stale expires."""
        found: list[bytes] = await self._call_as(
            learner,
            "lease",
            step,
            consuming_version,
            count,
            max_staleness,
            deadline_s,
            bounds.samples_per_insert,
            bounds.min_diff,
            bounds.min_ready,
            groups_per_version,
        )
        if not found:
            return None
        return Leased([each.decode() for each in found[::2]], [float(each) for each in found[1::2]])

    async def train(self, step: int, *, max_uses: int = 1, seed: int = 0, learner: str = "") -> int:
        """leased → trained, or → ready with uses left, for the groups leased for `step`; how many."""
        return int(await self._call_as(learner, "train", step, max_uses, seed))

    async def publish(self, version: int, *, evaluate: bool, learner: str = "") -> None:
        """Sets the latest policy version, and asks for its evaluation or not."""
        await self._call_as(learner, "publish", version, int(evaluate))

    async def throttle(self, max_staleness: int, *, learner: str = "") -> None:
        """Issues only what this staleness allows, if it is less than the configured one; until told otherwise."""
        await self._call_as(learner, "throttle", max_staleness)

    async def evaluate(
        self, version: int, *, server: str, tasks: int, deadline_s: float
    ) -> tuple[int, list[EvalSlice]]:
        """Hands out a server's part of the held-out tasks, less what it holds; returns how many slices are left too."""
        left, *flat = await self._call("evaluate", version, tasks, EVAL_SLICE, deadline_s, server)
        granted = [EvalSlice(flat[i].decode(), flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
        return int(left), granted

    async def evaluated(
        self, work: EvalSlice, *, version: int, answered: int, score_sum: float, blob: bytes | memoryview
    ) -> str:
        """Records a delivered slice of an evaluation; of its tasks, those that were not answered have failed."""
        outcome = await self._call("evaluated", work.id, version, work.first, work.tasks, answered, score_sum, blob)
        return str(outcome.decode())

    async def evaluation_failed(self, ticket_id: str, *, patience: int = 0) -> str:
        """A slice could not be answered more than `patience` times: it is handed out again, at last given up."""
        return str((await self._call("evaluation_failed", ticket_id, patience, EVAL_RETRIES)).decode())

    async def durable(self, steps: int, *, learner: str = "") -> int:
        """trained → durable for the groups of the first `steps` steps; how many."""
        return int(await self._call_as(learner, "durable", steps))

    async def restart(self, steps: int, *, learner: str, max_uses: int = 1, seed: int = 0) -> tuple[int, int]:
        """Gives back what a learner held, and what was trained after the first `steps` steps; once for each `learner`.

        Returns how many groups those are, and of how many undone steps groups have been forgotten since.
        Raises: SupersededError when another one has said hello since this one did.
        """
        back, forgotten = await self._call_as(learner, "restart", steps, max_uses, seed)
        return int(back), int(forgotten)

    async def sweep(self, *, silent_s: float | None, heard: Mapping[str, float] | None = None) -> Swept:
        """Applies the deadlines; servers that were silent for `silent_s` lose their tickets.

        Args:
            heard: for how long servers have said nothing to their service, in s: they may say more than heartbeats.
        """
        words = [word for server in (heard or {}).items() for word in server]
        tickets, leases, slices, *silent = await self._call("sweep", -1 if silent_s is None else silent_s, *words)
        return Swept(int(tickets), int(leases), int(slices), [server.decode() for server in silent])

    async def join(self, server: str, incarnation: str) -> int:
        """A server said hello; how many tickets an earlier process of that name had held."""
        return int(await self._call("join", server, incarnation))

    async def leave(self, server: str, incarnation: str) -> int:
        """A server said goodbye; how many tickets and slices of an evaluation it had held."""
        return int(await self._call("leave", server, incarnation))

    async def hear(self, server: str, *, held: Sequence[str], grace_s: float) -> int:
        """A server is alive; how many of its tickets, older than the grace, it does not hold: they were lost."""
        return int(await self._call("hear", server, grace_s, *held))

    async def finish(self, *, learner: str = "") -> int:
        """Ends the run: what is in flight expires; how many groups that were."""
        return int(await self._call_as(learner, "finish"))

    async def trim(self, *, keep: int, max_age_s: float | None, until_exported: bool) -> int:
        """Forgets groups that are over; how many."""
        forgotten = 0
        for _ in range(FORGET_TIMES):
            some = int(await self._call("trim", keep, max_age_s or 0, int(until_exported), FORGET_AT_ONCE))
            forgotten += some
            if some < FORGET_AT_ONCE:
                break
        return forgotten

    async def verify(self, train_tasks: int | None) -> list[str]:
        """What is wrong with the ledger, one sentence each."""
        tasks = -1 if train_tasks is None else len(range(self._shard, train_tasks, self._shards))
        return [problem.decode() for problem in await self._call("verify", tasks, self._shard, self._shards)]

    async def step_tally(self) -> StepTally:
        """How many groups each step used."""
        forgotten, *flat = await self._call("steps")
        return StepTally(forgotten, dict(zip(flat[::2], flat[1::2], strict=True)))

    async def exported(self, ids: Sequence[str], *, forget: bool) -> int:
        """These durable groups are in a file: marks or forgets them; how many there still were."""
        return int(await self._call("exported", int(forget), *ids))

    async def tickets_of(self, server: str) -> int:
        """Tickets that a server holds, those that were issued again included."""
        held: int = await self._redis.scard(f"{self._prefix}:tickets_of:{server}")
        return held

    async def learner(self) -> str:
        """The incarnation of the run's present learner; empty if there was none."""
        found: Any = await self._redis.hget(f"{self._prefix}:meta", "learner")
        return "" if found is None else str(found.decode())

    async def incarnation(self, server: str) -> str:
        """Of the last process that said hello under this name; empty if none has."""
        found: Any = await self._redis.hget(f"{self._prefix}:incarnations", server)
        return "" if found is None else str(found.decode())

    async def version(self) -> int:
        """The latest published policy version."""
        return int(await self._redis.hget(f"{self._prefix}:meta", "version") or 0)

    async def identify(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Fixes what the run is, the first time; returns what it has been since then, of the same fields."""
        fixed = await self._call("identify", *(word for fact in facts.items() for word in fact))
        return dict(zip(facts, (value.decode() for value in fixed), strict=True))

    async def identity(self) -> dict[str, str]:
        """What the run is: all that was ever fixed."""
        raw: dict[Any, Any] = await self._redis.hgetall(f"{self._prefix}:identity")
        return {name.decode(): value.decode() for name, value in raw.items()}

    async def standing(self) -> Standing:
        """How the run stands, in one look."""
        found = await self._call("standing", LATEST_REPORTS)
        raw, in_flight, ready, leased, trained, version, evaluated, evaluating, slices_left = found
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
            uses=counters.get("uses", 0),
            tokens=counters.get("tokens", 0),
            reasons={name: n for name, n in counters.items() if name.startswith(("filtered:", "expired:"))},
            answers_dropped=_of_kind("answers_dropped", counters),
        )
        return Standing(
            counts=counts,
            version=int(version),
            tasks=_of_kind("tasks", counters),
            evaluated=[int(each) for each in evaluated],
            evaluating=None if evaluating is None else int(evaluating),
            slices_left=int(slices_left),
        )

    async def lengths(self, reasons: Sequence[str]) -> dict[str, dict[int, int]]:
        """Answers by the bucket of their length: `delivered`, `trained`, and dropped ones by reason."""
        found: dict[str, dict[int, int]] = {}
        for name in ("delivered", "trained", *reasons):
            raw: dict[Any, Any] = await self._redis.hgetall(f"{self._prefix}:lengths:{name}")
            found[name] = {int(bucket): int(answers) for bucket, answers in raw.items()}
        return found

    async def eval_reports(self, versions: Sequence[int]) -> list[EvalReport]:
        """The finished evaluations of these versions."""
        # Only these: a run has any number of evaluations, and a ledger that was lost has the same again.
        self._reports = {
            version: self._reports.get(version) or await self._eval_report(version) for version in versions
        }
        return list(self._reports.values())

    async def _eval_report(self, version: int) -> EvalReport:
        name = f"{self._prefix}:eval:{version}"
        raw: dict[Any, Any] = await self._redis.hgetall(name)
        fields = {field.decode(): float(value) for field, value in raw.items()}
        ids: set[Any] = await self._redis.smembers(f"{name}:groups")
        return EvalReport(
            version=version,
            score=fields["sum"] / fields["done"] if fields["done"] else 0.0,
            tasks=int(fields["done"]),
            failed=int(fields["failed"]),
            eval_s=fields["finished"] - fields["started"],
            group_ids=sorted(group_id.decode() for group_id in ids),
        )


def _of_kind(kind: str, counters: Mapping[str, int]) -> dict[str, int]:
    """What the counters `<kind>:<name>` have counted, by name."""
    return {name.removeprefix(f"{kind}:"): n for name, n in counters.items() if n and name.startswith(f"{kind}:")}


def _portions(groups: Sequence[DeliveredGroup]) -> Iterator[list[DeliveredGroup]]:
    """The groups in their order, as many in each portion as are stored at once."""
    portion: list[DeliveredGroup] = []
    size_bytes = 0
    for group in groups:
        if portion and (len(portion) == STORED_AT_ONCE or size_bytes + len(group.blob) > STORED_AT_ONCE_BYTES):
            yield portion
            portion, size_bytes = [], 0
        portion.append(group)
        size_bytes += len(group.blob)
    if portion:
        yield portion


def _delivered_facts(group: DeliveredGroup) -> dict[str, Any]:
    return _facts(group.facts) | {
        "id": group.id,
        "oldest": group.oldest_version,
        "order": group.order.key,
        "raced": group.order.raced,
        "weight": group.order.weight,
    }


def _facts(facts: Facts) -> dict[str, Any]:
    return {name: value for name, value in vars(facts).items() if value is not None}
