"""A run without a model: service, rollout server over a scripted engine, and a learner that trains nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.buffer.client import BufferClient, GroupReader, new_incarnation
from slipstream.buffer.store.types import LeasedGroups
from slipstream.buffer.wire.messages import VersionSpan
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.rollout_servers.engines.base import Completion, Request
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.server import RolloutServer
from tests.buffer.peers import serving
from tests.faults.accounting import History
from tests.rollout_servers.scripted import ScriptedEngine, build_player

ANSWER = (3, 4, 5)
STEPS = 60
REWARD = "digit_match"
SETTINGS: dict[str, Any] = {
    "model": {"build": "digits"}, "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
    "rewards": [{"name": REWARD}], "scoring": {"workers": 0}, "eval": {"tasks": 0},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 3}, "groups_in_flight": 16,
                "group_deadline_s": 60.0},
    "learner": {"steps": STEPS, "groups_per_step": 4, "updates_per_step": 1, "wait_deadline_s": 90.0,
                "checkpoint": {"every_steps": 7}},
}  # fmt: skip


class FollowingEngine(ScriptedEngine):
    """Answers at once, with its current version."""

    answer: Sequence[int] = ANSWER

    async def generate(self, request: Request) -> list[Completion]:
        spans = [VersionSpan(version=self.version, start=0, end=len(self.answer))]
        return [Completion(self.answer, [-1.0] * len(self.answer), spans, "stop") for _ in range(request.samples)]


def rollout_server(config: RunConfig, model: Path, engine: FollowingEngine) -> RolloutServer:
    """A real rollout server with a scripted engine."""

    async def restart() -> FollowingEngine:
        return engine

    lasting = RestartingEngine(engine, restart, config.rollout)
    return RolloutServer(config, "r0", build_player(config, model, lasting), lasting)


@dataclass
class CountingLearner:
    """The training loop with prefetched leases, without training."""

    config: RunConfig
    engine: FollowingEngine
    """Gets each version when it is published."""
    step: int = 0
    version: int = 0
    checkpoint: tuple[int, int] = (0, 0)
    """Steps and version of the latest one."""
    trained: History = field(default_factory=dict)
    """Ids of the groups of each step, to compare with the ledger."""

    def run(self, *, killed_after: int | None = None) -> None:
        """Runs from the checkpoint to the last step, or for so many steps; blocks.

        Raises: DeadlineError without groups within the deadline.
        """
        incarnation = new_incarnation()
        self.step, self.version = self.checkpoint
        end = self.config.learner.steps if killed_after is None else self.step + killed_after
        main = BufferClient(self.config, "learner", incarnation)
        feed = BufferClient(self.config, "learner-feed", incarnation)
        with ThreadPoolExecutor(max_workers=1) as thread:
            try:
                latest = main.hello(self.step, version=self.version).version
                self.version = max(self.version, latest) + bool(latest)
                self._publish(main)
                prefetch = thread.submit(self._lease, feed, self.step, self.version)
                while self.step < end:
                    lease = prefetch.result()
                    if self.step + 1 < self.config.learner.steps:
                        prefetch = thread.submit(self._lease, feed, self.step + 1, self.version + 1)
                    self._train(main, lease)
                if killed_after is None:
                    main.finish()
            finally:
                feed.give_up()
                thread.shutdown(cancel_futures=True)
                main.close()
                feed.close()

    def _publish(self, main: BufferClient) -> None:
        main.published(self.version, evaluate=False)
        self.engine.version = self.version

    def _train(self, main: BufferClient, lease: LeasedGroups) -> None:
        assert max(lease.staleness) <= self.config.buffer.max_staleness
        groups = GroupReader(self.config.redis, run=self.config.run.name).read(lease.ids)
        self.trained[self.step] = sorted((group.id for group in groups), key=int)
        main.trained(self.step)
        self.step += 1
        self.version += 1
        self._publish(main)
        if self.step % self.config.learner.checkpoint.every_steps == 0:
            main.checkpointed(self.step)
            self.checkpoint = (self.step, self.version)

    def _lease(self, feed: BufferClient, step: int, consuming_version: int) -> LeasedGroups:
        count = self.config.learner.groups_per_step
        for _ in range(round(self.config.learner.wait_deadline_s)):
            lease = feed.lease(step, count=count, consuming_version=consuming_version, wait_s=1.0)
            if lease is not None:
                return lease
        raise DeadlineError(f"no groups for step {step}")


@asynccontextmanager
async def scripted_run(
    config: RunConfig, model: Path, engine: FollowingEngine | None = None
) -> AsyncIterator[CountingLearner]:
    """A running service and rollout server, and a learner to run."""
    engine = engine or FollowingEngine()
    async with serving(config):
        serves = asyncio.create_task(rollout_server(config, model, engine).run())
        try:
            yield CountingLearner(config, engine)
            assert not serves.done(), serves
        finally:
            serves.cancel()
            await asyncio.wait([serves])
