"""Sessions that agents from outside open."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.env.base import AgentEndpoint
from slipstream.rollout_servers.rollouts.base import SILENT, EpisodeFailed
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.tally import Tally
from tests.rollout_servers.rollouts.gateway.harness import (
    DEADLINE_S,
    AgentTask,
    Http,
    Recorder,
    served,
)


@asynccontextmanager
async def outside(model: Path, recorder: Recorder, **rollout: Any) -> AsyncIterator[tuple[Player, Http]]:
    """A gateway for agents from outside, and a client with its key."""
    async with served(model, recorder, AgentTask(None), **rollout) as player:
        assert player.gateway is not None
        file = next((model.parent / "runs" / "run" / "gateways").glob("*.json"))
        assert file.stat().st_mode & 0o077 == 0
        found = json.loads(file.read_text())
        yield player, Http(found["url"], found["key"])


async def opened(http: Http, *, most_s: float = 1e6) -> AgentEndpoint:
    """A session, which may last so long, once a ticket waits for it."""
    async with asyncio.timeout(DEADLINE_S):
        while (response := await http.ask("/sessions", b"")).status_code == 429:
            assert float(response.headers["retry-after"]) > 0
            await asyncio.sleep(0.01)
    assert response.status_code == 201
    given = response.json()
    assert given["task"]["info"] == {"from": "a test"}
    assert 0 < given["deadline_s"] <= most_s
    assert given["base_url"] == given["session_url"] + "/v1"
    return AgentEndpoint(given["session_url"], given["api_key"], given["model"])


async def test_session_from_outside_waits_for_its_reward(model: Path, answers: Callable[..., Recorder]) -> None:
    async with outside(model, answers("One", "Two")) as (player, http):
        assert (await http.ask("/sessions", b"")).status_code == 429
        playing = asyncio.create_task(player.play("train", 0, samples=2))
        sessions = [Http.of(await opened(http)) for _ in range(2)]
        assert (await http.ask("/sessions", b"")).status_code == 429
        for session in sessions:
            (await session.chat()).raise_for_status()
            assert (await session.ask("/close", {"state": "done"})).json() == {"state": "done"}
            assert (await session.chat()).status_code == 410
        assert not playing.done()
        for session, reward in zip(sessions, (0.25, 0.75), strict=True):
            shown = (await session.ask("")).json()
            tokens = len(shown["nodes"][0]["token_ids"])
            assert shown["tokens"] == {"sampled": tokens, "trained": tokens, "unused": 0}
            (await session.ask("/reward", {"reward": reward})).raise_for_status()
        assert sorted(trajectory.reward for trajectory in await playing) == [0.25, 0.75]
        assert (await sessions[0].ask("/reward", {"reward": 1.0})).status_code == 410


@pytest.mark.parametrize(
    ("state", "reason"), [("failed", "agent_error"), ("void", "session_void"), ("done", "reward_missing")]
)
async def test_closed_session_without_a_reward_fails(
    model: Path, answers: Callable[..., Recorder], state: str, reason: str
) -> None:
    tally = Tally()
    async with outside(model, answers("One"), group_deadline_s=5.0, episode={"wall_s": 4.0}) as (player, http):
        playing = asyncio.create_task(player.generate("train", 0, samples=1, tally=tally))
        session = Http.of(await opened(http, most_s=4.0))
        (await session.chat()).raise_for_status()
        (await session.ask("/close", {"state": state})).raise_for_status()
        with pytest.raises(EpisodeFailed) as caught:
            await playing
    assert caught.value.reason == reason
    assert tally.unused == {reason: tally.sampled}


async def test_ended_episode_waits_for_announced_rewards(model: Path, answers: Callable[..., Recorder]) -> None:
    async with outside(model, answers("One", "Two")) as (player, http):
        playing = asyncio.create_task(player.play("train", 0, samples=1))
        session = Http.of(await opened(http))
        for label in ("writer", "critic"):
            (await session.chat(headers={"x-slipstream-agent": label})).raise_for_status()
        (await session.ask("/close", {"state": "done"})).raise_for_status()
        rewards = [{"reward": 0.25, "agent": "writer", "more": True}, {"reward": 0.5, "agent": "critic"}]
        for reward in rewards:
            assert not playing.done()
            (await session.ask("/reward", reward)).raise_for_status()
        trajectories = await playing
        assert {trajectory.reward for trajectory in trajectories} == {0.75}


async def test_session_that_nobody_took_is_silent(model: Path, answers: Callable[..., Recorder]) -> None:
    async with outside(model, answers("One"), group_deadline_s=1.0) as (player, http):
        with pytest.raises(EpisodeFailed) as caught:
            await player.generate("train", 0, samples=1)
        assert caught.value.reason == SILENT
        playing = asyncio.create_task(player.generate("train", 0, samples=1))
        await opened(http)
        with pytest.raises(EpisodeFailed) as caught:
            await playing
        assert caught.value.reason == SILENT
