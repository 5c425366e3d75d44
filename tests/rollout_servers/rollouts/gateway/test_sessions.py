"""Sessions that agents from outside open."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.env.base import AgentEndpoint
from slipstream.rollout_servers.rollouts.base import SILENT, EpisodeFailed
from slipstream.rollout_servers.rollouts.gateway import session as session_module
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.rollouts.record import TicketRecord
from slipstream.rollout_servers.tally import Tally
from tests.rollout_servers.rollouts.gateway.harness import (
    DEADLINE_S,
    HELLO,
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


class Kept:
    """Keeps events as the buffer does, with this outcome."""

    def __init__(self) -> None:
        self.outcome = "kept"
        self.events = list[m.EpisodeEvent]()
        self.waiting: list[asyncio.Future[str]] | None = None
        """Of events that are not acknowledged, if these shall wait."""

    def __call__(self, event: m.KeepEvent) -> asyncio.Future[str]:
        kept: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if self.waiting is not None:
            self.waiting.append(kept)
            return kept
        if self.outcome == "kept":
            self.events.append(event.event)
        kept.set_result(self.outcome)
        return kept


async def test_server_that_was_silent_goes_on_with_its_own_session(
    model: Path, answers: Callable[..., Recorder]
) -> None:
    async with outside(model, answers("One", "Two")) as (player, http):
        kept, later = Kept(), Kept()
        first = asyncio.create_task(player.generate("train", 0, samples=1, record=TicketRecord("1", keep=kept)))
        session = Http.of(await opened(http))
        (await session.chat()).raise_for_status()
        tally = Tally(taken_over=sum(event.tokens for event in kept.events))
        record = TicketRecord("2", tally, later, kept.events)
        second = asyncio.create_task(player.generate("train", 0, samples=1, tally=tally, record=record))
        with pytest.raises(EpisodeFailed) as caught:
            await first
        assert caught.value.reason == "session_void"
        shown = (await session.ask("")).json()
        assert (shown["state"], len(shown["nodes"])) == ("open", 1)
        (await session.ask("/reward", {"reward": 0.5})).raise_for_status()
        (await session.ask("/close", {"state": "done"})).raise_for_status()
        (episode,) = (await second).played.episodes
        assert episode.action_tokens == tally.sampled
        assert (await session.chat()).status_code == 410


async def test_moved_session_may_come_back(model: Path, answers: Callable[..., Recorder]) -> None:
    asked = asyncio.Event()

    async def gate(number: int) -> None:
        if number == 1:
            asked.set()
            await asyncio.Event().wait()

    recorder = answers("One", "Two")
    recorder.gate = gate
    async with outside(model, recorder) as (player, http):
        kept = Kept()
        playing = asyncio.create_task(player.generate("train", 0, samples=1, record=TicketRecord("1", keep=kept)))
        session = Http.of(await opened(http))
        (await session.chat()).raise_for_status()
        calling = asyncio.create_task(session.chat())
        await asyncio.wait_for(asked.wait(), DEADLINE_S)
        kept.outcome = "void"
        for response in (await session.ask("/reward", {"reward": 1.0}), await calling):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "session_moved")
        with pytest.raises(EpisodeFailed):
            await playing
        response = await session.chat()
        assert (response.status_code, response.headers["x-should-retry"]) == (404, "true")


async def test_session_that_could_not_be_kept_is_offered_again(
    model: Path, answers: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "KEEP_S", 0.1)
    async with outside(model, answers("One")) as (player, http):
        kept = Kept()
        kept.waiting = []
        playing = asyncio.create_task(player.generate("train", 0, samples=1, record=TicketRecord("1", keep=kept)))
        async with asyncio.timeout(DEADLINE_S):
            while (response := await http.ask("/sessions", b"")).status_code == 429:
                await asyncio.sleep(0.01)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_kept")
        kept.waiting = None
        session = Http.of(await opened(http))
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/reward", {"reward": 0.5}), ("/close", {})):
            (await session.ask(path, body)).raise_for_status()
        assert len((await playing).played.episodes) == 1


async def test_reward_that_comes_too_late_is_refused(model: Path, answers: Callable[..., Recorder]) -> None:
    async with outside(model, answers("One")) as (player, http):
        kept = Kept()
        playing = asyncio.create_task(player.generate("train", 0, samples=1, record=TicketRecord("1", keep=kept)))
        session = Http.of(await opened(http))
        (await session.chat()).raise_for_status()
        (await session.ask("/close", {"state": "done"})).raise_for_status()
        waiting = kept.waiting = list[asyncio.Future[str]]()
        late = asyncio.create_task(session.ask("/reward", {"reward": 5.0, "agent": ""}))
        async with asyncio.timeout(DEADLINE_S):
            while not waiting:
                await asyncio.sleep(0.01)
        kept.waiting = None
        (await session.ask("/reward", {"reward": 0.5})).raise_for_status()
        (episode,) = (await playing).played.episodes
        waiting[0].set_result("kept")
        assert (await late).status_code == 410
        assert [value for _, value in episode.env_rewards or ()] == [0.5]


async def test_steps_have_places_of_their_own_behind_those_of_another_release() -> None:
    event = m.EpisodeEvent(episode=0, place=3, tokens=4, content=b"", v=m.SCHEMA_VERSION - 1)
    kept = Kept()
    record = TicketRecord("1", keep=kept, events=[event]).episode(0)
    assert (record.kept, record.kept_tokens) == ([], 0)
    await record.add(b"turn")
    assert [each.place for each in kept.events] == [4]
