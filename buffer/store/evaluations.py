"""Evaluations of policy versions in Redis: slices of held-out tasks are granted, recorded and summed up."""

from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from slipstream.buffer.policies.statistics import estimates
from slipstream.buffer.store.redis import Scripts
from slipstream.buffer.store.types import UNKNOWN_ORIGIN, EvalSlice, Origin, of_kind
from slipstream.buffer.wire.messages import EvalReport
from slipstream.configs.schema.run import EvalConfig

MOST_EVAL_TASKS = 64
"""Held-out tasks per ticket: their answers travel in one frame."""
EVAL_RETRIES = 3


class Evaluations:
    """The evaluations of one run. Raises redis.RedisError as its ledger does."""

    def __init__(self, redis: Redis, scripts: Scripts, config: EvalConfig, *, deadline_s: float) -> None:
        """Slices that were not answered in `deadline_s` are granted again."""
        self._redis = redis
        self._scripts = scripts
        self._config = config
        self._deadline_s = deadline_s
        self._reports: dict[int, EvalReport] = {}

    async def grant(self, version: int, *, server: str, eval_tasks: int, share: int) -> tuple[int, list[EvalSlice]]:
        """Grants a server slices of at most MOST_EVAL_TASKS held-out tasks; returns the ranges left and the slices.

        Args:
            eval_tasks: held-out tasks of the server's env.
            share: tasks that the server may hold, those that it holds already included.
        """
        left, *flat = await self._scripts.call(
            "evaluate",
            version=version,
            tasks=min(eval_tasks, self._config.tasks),
            share=share,
            slice_size=MOST_EVAL_TASKS,
            deadline_s=self._deadline_s,
            server=server,
        )
        granted = [EvalSlice(flat[i].decode(), flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
        return int(left), granted

    async def record(
        self,
        work: EvalSlice,
        *,
        version: int,
        failures: Mapping[str, int],
        tallies: Mapping[str, tuple[float, float]],
        blob: bytes | memoryview,
        origin: Origin = UNKNOWN_ORIGIN,
        tokens: int = 0,
        lost: Mapping[str, int] | None = None,
    ) -> str:
        """Records a delivered slice of an evaluation.

        Args:
            failures: number of its tasks without an answer, by reason.
            tallies: sum and sum of squares of the other tasks' scores, by estimate; one is `score`.
            tokens: of its answers.
            lost: other tokens that were sampled for it, by reason.
        """
        outcome = await self._scripts.call(
            "evaluated",
            blob,
            id=work.id,
            version=version,
            first=work.first,
            tasks=work.tasks,
            failures=failures,
            answered=work.tasks - sum(failures.values()),
            tallies=tallies,
            origin=origin,
            tokens=tokens,
            lost=lost or {},
        )
        return str(outcome.decode())

    async def record_failure(
        self,
        ticket_id: str,
        *,
        reason: str,
        ignored_failures: int = 0,
        origin: Origin = UNKNOWN_ORIGIN,
        lost: Mapping[str, int] | None = None,
    ) -> str:
        """Records a failed slice; after `ignored_failures` of them it is granted again, at most EVAL_RETRIES times.

        Args:
            lost: its tokens, by reason.
        """
        outcome = await self._scripts.call(
            "evaluation_failed",
            id=ticket_id,
            reason=reason,
            ignored_failures=ignored_failures,
            retries=EVAL_RETRIES,
            origin=origin,
            lost=lost or {},
        )
        return str(outcome.decode())

    async def reports(self, versions: Sequence[int]) -> list[EvalReport]:
        """The finished evaluations of these versions."""
        # The cache has only these: a run may have many evaluations, and a ledger that was lost repeats their versions.
        self._reports = {version: self._reports.get(version) or await self._report(version) for version in versions}
        return list(self._reports.values())

    async def _report(self, version: int) -> EvalReport:
        name = f"{self._scripts.prefix}:eval:{version}"
        raw: dict[Any, Any] = await self._redis.hgetall(name)
        fields = {field.decode(): float(value) for field, value in raw.items()}
        ids: set[Any] = await self._redis.smembers(f"{name}:groups")
        names = [name.removeprefix("sum:") for name in fields if name.startswith("sum:")]
        tallies = {name: (fields[f"sum:{name}"], fields[f"squares:{name}"]) for name in names}
        by_name = estimates(tallies, int(fields["done"]))
        return EvalReport(
            version=version,
            score=by_name.pop("score", 0.0),
            estimates=by_name,
            tasks=int(fields["done"]),
            failures={reason: int(tasks) for reason, tasks in of_kind("failed", fields).items()},
            eval_s=fields["finished"] - fields["started"],
            group_ids=sorted(group_id.decode() for group_id in ids),
        )
