"""The client of OpenEnv against the real server, which has an environment of its own: `make openenv-check`."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.env.adapters.openenv import OpenEnv, OpenEnvError, OpenEnvSession
from slipstream.env.base import Action
from tests.conftest import free_port

PYTHON = os.environ.get("SLIPSTREAM_OPENENV_PYTHON")
SERVER = Path(__file__).parent / "openenv_server" / "server.py"
START_S = 60.0
PLACES = 3

pytestmark = pytest.mark.skipif(PYTHON is None, reason="make openenv-check runs it")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a server with `PLACES` sessions."""
    port = free_port()
    with subprocess.Popen([str(PYTHON), SERVER, str(port), str(PLACES)]) as server:
        try:
            give_up = time.monotonic() + START_S
            while True:
                assert server.poll() is None
                assert time.monotonic() < give_up
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.05)
            yield f"ws://127.0.0.1:{port}"
        finally:
            server.terminate()


def _env(url: str, **options: Any) -> OpenEnv:
    return OpenEnv(url, **{"observation_field": "text", "chat": False, "instructions": "Play.", **options})


async def _guess(session: OpenEnvSession) -> tuple[str, list[float]]:
    """Plays to the end by bisection over the ten numbers that the first hint leaves."""
    prompt = str(await session.reset())
    last, rewards = int(prompt.partition("it is ")[2][0]), []
    for number in range(last, 100, 10):
        turn = await session.step(Action(f'I say {{"number": {number}}}.' if number != 13 else "{}", ()))
        rewards.append(turn.reward)
        if turn.done:
            return prompt, rewards
    raise AssertionError("no guess was right")


async def _played(env: OpenEnv, index: int) -> tuple[str, list[float]]:
    session = env.session(env.task("train", index))
    try:
        return await _guess(session)
    finally:
        await session.close()


def _index_without_13(env: OpenEnv) -> int:
    async def find() -> int:
        for index in range(50):
            session = env.session(env.task("train", index))
            try:
                if "is 3 modulo" not in str(await session.reset()):
                    return index
            finally:
                await session.close()
        raise AssertionError

    return asyncio.run(find())


def test_episode_is_played_to_its_end_and_repeats(url: str) -> None:
    env = _env(url)
    index = _index_without_13(env)
    prompt, rewards = asyncio.run(_played(env, index))
    assert prompt.startswith("Play.\n\nGuess")
    assert rewards[-1] == 1.0
    assert asyncio.run(_played(env, index)) == (prompt, rewards)
    assert env.fingerprint() == _env(url).fingerprint() != _env(url, seed=1).fingerprint()


@pytest.mark.parametrize(("text", "part"), [("none", "JSON"), ('{"number": "x"}', "number"), ('{"n": 1}', "n:")])
def test_invalid_action_is_an_observation(url: str, text: str, part: str) -> None:
    async def act() -> Any:
        env = _env(url)
        session = env.session(env.task("train", 0))
        try:
            await session.reset()
            return await session.step(Action(text, ()))
        finally:
            await session.close()

    turn = asyncio.run(act())
    assert part in turn.observation
    assert (turn.reward, turn.done, turn.metrics) == (0.0, False, {"invalid_actions": 1.0})


def test_error_of_the_env_is_no_reward(url: str) -> None:
    async def act() -> None:
        env = _env(url)
        session = env.session(env.task("train", 0))
        try:
            await session.reset()
            await session.step(Action('{"number": 13}', ()))
        finally:
            await session.close()

    with pytest.raises(OpenEnvError, match="unlucky"):
        asyncio.run(act())


def test_full_server_is_waited_for(url: str) -> None:
    async def play_all() -> list[tuple[str, list[float]]]:
        env = _env(url, sessions=20)
        index = await asyncio.to_thread(_index_without_13, env)
        return await asyncio.gather(*(_played(env, index) for _ in range(5 * PLACES)))

    played = asyncio.run(asyncio.wait_for(play_all(), 60))
    assert len(played) == 5 * PLACES
    assert all(each == played[0] for each in played)


def test_sessions_are_bounded_and_given_back(url: str) -> None:
    async def overtake() -> bool:
        env = _env(url, sessions=1)
        first, second = (env.session(env.task("train", 0)) for _ in range(2))
        await first.reset()
        waiting = asyncio.create_task(second.reset())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        await first.close()
        await asyncio.wait_for(waiting, 10)
        await second.close()
        third = env.session(env.task("train", 0))
        waits = asyncio.create_task(third.reset())
        waits.cancel()
        await asyncio.wait([waits])
        await third.close()
        fourth = env.session(env.task("train", 0))
        await asyncio.wait_for(fourth.reset(), 10)
        await fourth.close()
        return bool(done)

    assert not asyncio.run(overtake())
