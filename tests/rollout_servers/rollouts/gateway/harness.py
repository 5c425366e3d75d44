"""Agents and gateways of the tests: real clients, against a real engine or one whose answers are scripted."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from slipstream.configs import RunConfig
from slipstream.env.base import AgentEndpoint, Env, Split, Task
from slipstream.rollout_servers.engines.base import Completion, Engine, Request
from slipstream.rollout_servers.rollouts.gateway.listener import serving
from slipstream.rollout_servers.rollouts.player import Player
from tests.rollout_servers.scripted import build_player

DEADLINE_S = 30.0
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
Agent = Callable[[Task, AgentEndpoint], Awaitable[float | None]]


@dataclass
class AgentTask:
    """An env of one task, played by a function; without one by agents from outside."""

    agent: Agent | None
    needs_reward: bool = True
    from_outside: bool = field(init=False)

    def __post_init__(self) -> None:
        self.from_outside = self.agent is None

    def size(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt=[{"role": "user", "content": "What is 40 and 2?"}], reference="42", info={"from": "a test"})

    def fingerprint(self) -> str:
        return "agents"

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> float | None:
        assert self.agent is not None
        return await self.agent(task, endpoint)


@dataclass
class Recorder:
    """An engine whose calls are recorded; with `answers` it is not asked, and gives these in order.

    Attributes:
        calls: contexts with their answers.
        gate: awaited before each answer, if there is one.
    """

    engine: Engine | None
    answers: Sequence[Completion] = ()
    calls: list[tuple[list[int], Completion]] = field(default_factory=list)
    gate: Callable[[int], Awaitable[None]] | None = None
    version: int = 0

    async def generate(self, request: Request) -> list[Completion]:
        number = len(self.calls)
        if self.answers:
            answer = self.answers[number]
        self.calls.append((list(request.prompt_ids), self.answers[number] if self.answers else None))  # type: ignore[arg-type]
        if self.gate is not None:
            await self.gate(number)
        if not self.answers:
            assert self.engine is not None
            (answer,) = await self.engine.generate(request)
        else:
            request.tally.add(len(answer.token_ids))
        self.calls[number] = (list(request.prompt_ids), answer)
        return [answer]


def run_config(model: Path, **rollout: Any) -> RunConfig:
    """The configuration of a run whose rewards are those of the agents."""
    return RunConfig.model_validate(
        {
            "run": {"dir": model.parent / "runs"},
            "model": {"path": model, "dtype": "float32"},
            "rewards": [{"name": "none"}],
            "scoring": {"workers": 0},
            "rollout": {
                "engine": {"name": "hf", "max_model_len": 2048},
                "sampling": {"max_tokens": 24},
                "episode": {"tokens": 1000},
            }
            | rollout,
        }
    )


@asynccontextmanager
async def served(model: Path, engine: Any, env: Env, **rollout: Any) -> AsyncIterator[Player]:
    """A player whose gateway serves."""
    config = run_config(model, **rollout)
    player = build_player(config, model, engine, env=env)
    async with serving(player.gateway, config, "server-1"):
        yield player


def client(endpoint: AgentEndpoint, **options: Any) -> AsyncOpenAI:
    """OpenAI's client of a session."""
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


class Http:
    """Requests with a key, each on a connection of its own."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}".encode()} if key else {}

    @classmethod
    def of(cls, endpoint: AgentEndpoint) -> "Http":
        return cls(endpoint.session_url, endpoint.api_key)

    async def ask(self, path: str, body: Any = None, **headers: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(headers=self._headers | headers, timeout=DEADLINE_S, verify=False) as http:
            if body is None:
                return await http.get(self._url + path)
            return await http.post(self._url + path, content=content)

    async def chat(self, messages: Any = HELLO, *, headers: Any = None, **options: Any) -> httpx.Response:
        return await self.ask("/v1/chat/completions", {"messages": messages, **options}, **(headers or {}))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


def is_true(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def found() -> bool:
        return condition()

    return found


def is_set(event: threading.Event) -> Callable[[], Awaitable[bool]]:
    """Of another thread: agents run beside the gateway."""
    return is_true(event.is_set)
