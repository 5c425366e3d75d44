"""The ledger in Redis: every state change of a group is one Lua script, atomic, written once in `lua/`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis

from slipstream.buffer.keys import run_prefix
from slipstream.buffer.wire.messages import EvalReport, LedgerCounts

EVAL_SLICE = 64


@dataclass(frozen=True)
class IssuedTask:
    """A granted ticket: its id, and the task as a position in the epoch's order."""

    id: str
    epoch: int
    position: int


@dataclass(frozen=True)
class DeliveredGroup:
    """A group as it is stored."""

    id: str
    oldest_version: int
    """Among its action tokens."""
    action_tokens: int
    blob: bytes


@dataclass(frozen=True)
class EvalSlice:
    """Held-out tasks [first, first + tasks) to be answered under ticket `id`."""

    id: str
    first: int
    tasks: int


class RedisStore:
    """The ledger of one run. Raises redis.RedisError when Redis can't be reached in time."""

    def __init__(self, redis: Redis, run: str) -> None:
        self._redis = redis
        self._run = run
        self._prefix = run_prefix(run)
        lua = files(__package__) / "lua"
        prelude = (lua / "prelude.lua").read_text(encoding="utf-8")
        self._scripts = {
            name: redis.register_script(prelude + (lua / f"{name}.lua").read_text(encoding="utf-8"))
            for name in (
                "issue",
                "deliver",
                "fail",
                "lease",
                "train",
                "publish",
                "durable",
                "restart",
                "sweep",
                "finish",
                "evaluate",
                "evaluated",
            )
        }

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._scripts[name](keys=[self._prefix], args=arguments)

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
    ) -> list[IssuedTask]:
        """Grants as many tickets as the server's credits and the staleness capacity allow."""
        flat = await self._call(
            "issue",
            server,
            server_version,
            credits,
            max_staleness,
            groups_per_version,
            deadline_s,
            train_tasks,
        )
        return [IssuedTask(flat[i].decode(), flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]

    async def deliver(self, groups: Sequence[DeliveredGroup]) -> list[str]:
        """issued → ready for each; the outcomes in the same order."""
        pipeline = self._redis.pipeline(transaction=False)
        script = self._scripts["deliver"]
        for group in groups:
            arguments: list[str | int | bytes] = [group.id, group.oldest_version, group.blob, group.action_tokens]
            await script(keys=[self._prefix], args=arguments, client=pipeline)
        return [outcome.decode() for outcome in await pipeline.execute()]

    async def fail(self, group_id: str, *, reason: str, tokens: int) -> str:
        """issued → filtered(reason)."""
        return str((await self._call("fail", group_id, reason, tokens)).decode())

    async def lease(
        self, step: int, *, consuming_version: int, count: int, max_staleness: int, deadline_s: float
    ) -> list[str]:
        """ready → leased, all `count` groups or none; what is too stale expires."""
        ids = await self._call("lease", step, consuming_version, count, max_staleness, deadline_s)
        return [group_id.decode() for group_id in ids]

    async def train(self, step: int) -> int:
        """leased → trained for the groups leased for `step`; how many."""
        return int(await self._call("train", step))

    async def publish(self, version: int, *, eval_tasks: int) -> None:
        """Sets the latest policy version and, with `eval_tasks` > 0, asks for its evaluation."""
        await self._call("publish", version, eval_tasks, EVAL_SLICE)

    async def evaluate(self, version: int, *, slices: int, deadline_s: float) -> tuple[int, list[EvalSlice]]:
        """Hands out slices of the held-out tasks; returns how many are left, and the granted ones."""
        left, *flat = await self._call("evaluate", version, slices, deadline_s)
        granted = [EvalSlice(flat[i].decode(), flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
        return int(left), granted

    async def evaluated(self, work: EvalSlice, *, version: int, score_sum: float, blob: bytes) -> str:
        """Records a delivered slice of an evaluation."""
        outcome = await self._call("evaluated", work.id, version, work.first, work.tasks, score_sum, blob)
        return str(outcome.decode())

    async def durable(self, steps: int) -> int:
        """trained → durable for the groups of the first `steps` steps; how many."""
        return int(await self._call("durable", steps))

    async def restart(self, steps: int) -> int:
        """Gives back what a learner held, and what it had trained after the first `steps` steps; how many."""
        return int(await self._call("restart", steps))

    async def sweep(self) -> tuple[int, int]:
        """Applies the deadlines; how many tickets and how many leased groups ran out."""
        tickets, leases = await self._call("sweep")
        return int(tickets), int(leases)

    async def finish(self) -> int:
        """Ends the run: what is in flight expires; how many groups that were."""
        return int(await self._call("finish"))

    async def version(self) -> int:
        """The latest published policy version."""
        return int(await self._redis.hget(f"{self._prefix}:meta", "version") or 0)

    async def evaluating(self) -> int | None:
        """The version whose evaluation was asked for last."""
        version = await self._redis.hget(f"{self._prefix}:meta", "evaluated")
        return None if version is None else int(version)

    async def counts(self) -> LedgerCounts:
        """Groups by state."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(f"{self._prefix}:counters")
        for state in ("issued", "ready", "leased", "trained"):
            pipeline.zcard(f"{self._prefix}:{state}")
        raw, in_flight, ready, leased, trained = await pipeline.execute()
        counters = {name.decode(): int(value) for name, value in raw.items()}
        return LedgerCounts(
            issued=counters.get("issued", 0),
            in_flight=in_flight,
            ready=ready,
            leased=leased,
            trained=trained + counters.get("durable", 0),
            durable=counters.get("durable", 0),
            filtered=counters.get("filtered", 0),
            expired=counters.get("expired", 0),
            reissued=counters.get("reissued", 0),
            tokens=counters.get("tokens", 0),
            reasons={name: n for name, n in counters.items() if name.startswith(("filtered:", "expired:"))},
        )

    async def take_eval_reports(self) -> list[EvalReport]:
        """Evaluations finished since the last call."""
        versions = await self._redis.lpop(f"{self._prefix}:eval_reports", 1000) or []
        return [await self._eval_report(int(version)) for version in versions]

    async def _eval_report(self, version: int) -> EvalReport:
        name = f"{self._prefix}:eval:{version}"
        raw: dict[Any, Any] = await self._redis.hgetall(name)
        fields = {field.decode(): float(value) for field, value in raw.items()}
        ids: set[Any] = await self._redis.smembers(f"{name}:groups")
        return EvalReport(
            version=version,
            score=fields["sum"] / fields["done"],
            tasks=int(fields["done"]),
            eval_s=fields["finished"] - fields["started"],
            group_ids=sorted(group_id.decode() for group_id in ids),
        )
