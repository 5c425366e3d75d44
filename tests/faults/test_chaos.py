"""Agents from outside, with late rewards, while their servers, Redis, the buffer and they themselves are killed."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.account import Tokens, account
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.spill import SpillFolder
from slipstream.buffer.wire.codec import decode_group, token_ids
from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.configs import RunConfig
from tests.faults.processes import DEADLINE_S, Run, running
from tests.rollout_servers.rollouts.chat import build_chat_model

SESSIONS = 200
AT_ONCE = 16
TURNS = 3
LATEST_REWARD_S = 5.0
FAULTS = ("rollout", "rollout-2", "both", "redis", "buffer", "agents")
SETTINGS = (
    "env={name: agent, options: {tasks: {name: lookup}}}", "rewards=[{name: none}]",
    "rollout={group_size: 1, groups_in_flight: 24, group_deadline_s: 60, episode: {tokens: 1000}, "
    "sampling: {max_tokens: 24, ignore_eos: false}, engine: {name: hf, max_model_len: 1024}}",
    "learner.advantage={name: reinforce_plus_plus}", "learner.groups_per_step=4", "buffer.max_staleness=8",
    "eval.tasks=0",
)  # fmt: skip


@dataclass
class Dialogue:
    """An agent's part of its session, from which a new start of it goes on."""

    number: int
    path: str = ""
    key: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)


class Gone(Exception):
    """No gateway has a session any more."""


@dataclass
class Agents:
    """Agents in a thread of their own.

    Attributes:
        finished: all tokens of each session whose reward was accepted.
        lost: ids of answers that a session did not have at its end.
    """

    gateways: Path
    rng: random.Random
    finished: list[list[int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    abandoned: int = 0
    restarted: int = 0
    gone: int = 0
    retries: int = 0
    _tasks: "dict[asyncio.Task[None], Dialogue]" = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _stopped: bool = False
    _next: int = 0

    @contextmanager
    def playing(self) -> Iterator["Agents"]:
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        thread.start()
        try:
            yield self
        finally:
            self._stopped = True
            thread.join(DEADLINE_S)
            self._loop.close()

    def kill(self) -> None:
        """Kills a third of the agents; every other one of them starts again."""
        self._loop.call_soon_threadsafe(self._kill)

    def _kill(self) -> None:
        for task in self.rng.sample(sorted(self._tasks, key=id), k=len(self._tasks) // 3):
            dialogue = self._tasks.pop(task)
            task.cancel()
            if dialogue.path and self.rng.random() < 0.5:
                self.restarted += 1
                self._start(dialogue)
            else:
                self.abandoned += bool(dialogue.path)

    def _start(self, dialogue: Dialogue) -> None:
        task = asyncio.create_task(self._play(dialogue))
        self._tasks[task] = dialogue
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=httpx.Timeout(90.0, connect=2.0), limits=limits) as self._http:
            while not self._stopped:
                while len(self._tasks) < AT_ONCE:
                    self._start(Dialogue(self._next))
                    self._next += 1
                await asyncio.sleep(0.1)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _play(self, dialogue: Dialogue) -> None:
        with suppress(Gone):
            if not dialogue.path:
                opened = await self._ask("/sessions", None, {})
                dialogue.path, dialogue.key = f"/s/{opened['id']}", opened["api_key"]
                dialogue.messages = [{"role": "user", "content": f"Number {dialogue.number}"}]
            while len(dialogue.answered) < TURNS:
                body = {"messages": dialogue.messages}
                answer = await self._ask(dialogue.path + "/v1/chat/completions", dialogue.key, body)
                dialogue.answered.append(answer["id"])
                dialogue.messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on"}]
                await asyncio.sleep(self.rng.uniform(0, 1))
            shown = await self._ask(dialogue.path, dialogue.key, None)
            nodes = {node["id"]: node for node in shown["nodes"]}
            self.lost += [each for each in dialogue.answered if each not in nodes]
            await self._ask(dialogue.path + "/close", dialogue.key, {"state": "done"})
            await asyncio.sleep(self.rng.uniform(0, LATEST_REWARD_S))
            await self._ask(dialogue.path + "/reward", dialogue.key, {"reward": self.rng.random()})
            path = [nodes[each] for each in dialogue.answered]
            self.finished.append([token for node in path for token in (*node["context_ids"], *node["token_ids"])])

    async def _ask(self, path: str, key: str | None, body: Any) -> Any:
        """The answer of the gateway that has the session. Raises: Gone."""
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            for file in sorted(self.gateways.glob("*.json"), key=lambda file: -file.stat().st_mtime):
                with suppress(httpx.HTTPError, OSError, json.JSONDecodeError):
                    given = json.loads(file.read_text())
                    headers = {"authorization": f"Bearer {key or given['key']}"}
                    method = "GET" if body is None else "POST"
                    response = await self._http.request(method, given["url"] + path, json=body, headers=headers)
                    if response.is_success:
                        return response.json()
                    assert response.status_code in (404, 410, 429, 503), response.text
                self.retries += 1
            await asyncio.sleep(0.5)
        self.gone += 1
        raise Gone(path)


def inject(run: Run, agents: Agents, name: str, away_s: float) -> None:
    """Kills something for a while; returns once it is back and further sessions have finished."""
    names = {"both": ["rollout", "rollout-2"], "agents": []}.get(name, [name])
    if name == "agents":
        agents.kill()
    for each in names:
        run.end(each, signal.SIGKILL)
    time.sleep(away_s)
    for each in names:
        run.start(each)
    for each in names:
        run.until(lambda each=each: run._up(each), f"{each} is up again")  # type: ignore[misc]
    before = len(agents.finished)
    run.until(lambda: len(agents.finished) >= before + SESSIONS // 20, f"sessions finish after {name}")


async def found(config: RunConfig) -> tuple[list[list[int]], Tokens, LedgerCounts]:
    """The tokens of each episode that may be trained on or was, the account, and the counts of groups."""
    async with Redis.from_url(config.redis.address) as redis:
        reader = LedgerReader(redis, config.run.name, SpillFolder(config.paths.spill))
        ids = [each for state in ("trained", "durable", "ready", "leased") for each in await reader.ids(state)]
        blobs = [record.blob for record in await reader.groups(ids) if record is not None]
        groups = [decode_group(blob) for blob in blobs if blob is not None]
        ledger = Ledger(redis, config)
        episodes = [[int(token) for token in token_ids(each)] for group in groups for each in group.trajectories]
        return episodes, (await account(ledger.scripts)).total, await ledger.counts()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_finished_call_of_an_agent_is_lost(tmp_path: Path, forks: ForkServerContext) -> None:
    rng = random.Random(5)
    model = build_chat_model(tmp_path / "model", "chatml")
    rounds = int(os.environ.get("SOAK_ROUNDS", "20"))
    agents = Agents(tmp_path / "test" / "gateways", random.Random(6))
    settings = f"model={{path: {model}, dtype: float32}}"
    with agents.playing(), running(tmp_path, forks, settings, *SETTINGS) as run:
        run.start("rollout-2")
        run.until(lambda: run._up("rollout-2"), "the second server is up")
        for number in range(rounds):
            name, away_s = rng.choice(FAULTS), rng.uniform(0, 3)
            since = time.monotonic()
            inject(run, agents, name, away_s)
            line = f"{number + 1}: {name}, {away_s:.1f} s away; {len(agents.finished)} sessions after"
            print(f"{line} {time.monotonic() - since:.1f} s", flush=True)  # noqa: T201  (pytest -s shows it)
        run.until(lambda: len(agents.finished) >= SESSIONS, "all sessions")
        run.finish_soon(6)
        sessions = list(agents.finished)
        episodes, total, counts = asyncio.run(found(run.config))
    # A session may finish in the last moment of the run, when its group expires.
    expired = counts.expired + counts.filtered
    missing = Counter(map(tuple, sessions)) - Counter(map(tuple, episodes))
    print(  # noqa: T201
        f"{len(sessions)} sessions with {TURNS * len(sessions)} calls finished, {len(agents.lost)} calls lost, "
        f"{missing.total()} sessions in groups that expired; agents killed: {agents.restarted} went on, "
        f"{agents.abandoned} did not; {agents.gone} sessions gone, {agents.retries} requests to other gateways\n"
        f"{counts}\n{total}"
    )
    assert not agents.lost and not agents.errors
    assert max(Counter(map(tuple, episodes)).values()) == 1, "an episode is in two groups"
    assert missing.total() <= expired, counts.reasons
    assert total.closes
