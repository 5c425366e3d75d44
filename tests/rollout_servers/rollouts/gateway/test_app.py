"""The gateway over HTTP: keys, bounds, retries and rewards."""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.env.base import AgentEndpoint, Task
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.gateway import app, listener
from slipstream.rollout_servers.tally import Tally
from tests.rollout_servers.rollouts.gateway.harness import (
    DEADLINE_S,
    HELLO,
    AgentTask,
    Http,
    Recorder,
    client,
    is_set,
    is_true,
    served,
    until,
)


def then(text: str, more: str) -> list[Any]:
    return [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": more}]


async def played(model: Path, recorder: Recorder, agent: Any, **options: Any) -> tuple[list[m.Trajectory], Tally]:
    tally = Tally()
    async with served(model, recorder, AgentTask(agent, **options.pop("env", {})), **options) as player:
        unscored = await player.generate("train", 0, samples=1, tally=tally)
        return (await player.score(unscored)).trajectories, tally


# --- retries ----------------------------------------------------------------------------------------------------------


async def test_marked_retry_gets_the_first_answer(model: Path, answers: Callable[..., Recorder]) -> None:
    """The SDK times out and retries: its second request gets the answer that the first one is still waiting for."""
    retried = threading.Event()

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        async with client(endpoint, timeout=0.3, max_retries=50) as openai:
            asking = asyncio.create_task(openai.chat.completions.create(model="any", messages=HELLO))
            await until(lambda: shown_retries(endpoint))
            retried.set()
            assert (await asking).choices[0].message.content == "One"
        return 1.0

    async def shown_retries(endpoint: AgentEndpoint) -> bool:
        return bool((await Http.of(endpoint).ask("")).json()["retries"])

    recorder = answers("One", gate=lambda _: until(is_set(retried)))
    (trajectory,), tally = await played(model, recorder, agent)
    assert len(recorder.calls) == 1
    assert (trajectory.scores["env/retries"] >= 1, tally.unused) == (True, {})


async def test_unmarked_duplicate_replaces_undelivered_answer(model: Path, answers: Callable[..., Recorder]) -> None:
    first_may_end = threading.Event()

    async def gate(number: int) -> None:
        if number == 0:
            await until(is_set(first_may_end))

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        http = Http.of(endpoint)
        lost = asyncio.create_task(http.chat())
        await until(is_true(lambda: len(recorder.calls) == 1))
        lost.cancel()
        answer = await http.chat()
        first_may_end.set()
        shown = (await http.ask("")).json()
        async with asyncio.timeout(DEADLINE_S):
            while len(shown["nodes"]) < 2:
                shown = (await http.ask("")).json()
        assert answer.json()["choices"][0]["message"]["content"] == "Two"
        return 1.0

    recorder = answers("Lost one", "Two", gate=gate)
    (trajectory,), tally = await played(model, recorder, agent)
    assert codec.action_mask(trajectory).sum() == len(recorder.calls[1][1].token_ids)
    assert tally.unused == {"undelivered": len(recorder.calls[0][1].token_ids)}
    assert tally.sampled == sum(len(answer.token_ids) for _, answer in recorder.calls)


# --- labels, flags, stop texts ----------------------------------------------------------------------------------------


async def test_calls_that_are_not_trainable_are_context(model: Path, answers: Callable[..., Recorder]) -> None:
    async def agent(task: Task, endpoint: AgentEndpoint) -> None:
        http = Http.of(endpoint)
        await http.chat()
        await http.chat(then("One", "Compact"), headers={"x-slipstream-trainable": "false"})
        last = await http.chat(then("One", "More"), headers={"x-slipstream-agent": "worker"})
        an_answer = {"completion_id": last.json()["id"]}
        for reward, target in ((0.25, {"agent": "worker"}), ({"style": 0.5, "speed": 0.25}, {})):
            assert (await http.ask("/reward", {"reward": reward, **target})).status_code == 200
        assert (await http.ask("/reward", {"reward": 1.0, "agent": "nobody"})).status_code == 404
        many = {str(number): 1.0 for number in range(100)}
        for refused in ({"reward": {"roots": 1.0}}, {"reward": many}, {"reward": 1, "agent": "worker", **an_answer}):
            assert (await http.ask("/reward", refused)).status_code == 400

    recorder = answers("One", "Dropped", "Two")
    (trajectory,), tally = await played(model, recorder, agent)
    one, dropped, two = (len(answer.token_ids) for _, answer in recorder.calls)
    assert codec.action_mask(trajectory).sum() == one + two
    assert tally.unused == {"not_trainable": dropped}
    assert (trajectory.reward, trajectory.scores["env/style"]) == (1.0, 0.5)


async def test_stop_text_ends_the_answer_at_its_token(model: Path, answers: Callable[..., Recorder]) -> None:
    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        http = Http.of(endpoint)
        choice = (await http.chat(stop=["Observation:", "!"])).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Look ", "stop")
        await http.chat(then("Look ", "Here"))
        return 1.0

    recorder = answers("Look Observation: forty", "Done")
    recorder.answers = [
        replace(answer, kept=[np.array([token, 0], dtype=np.int32) for token in answer.token_ids])
        for answer in recorder.answers
    ]
    (trajectory,), tally = await played(model, recorder, agent)
    kept = codec.kept_tokens(trajectory)
    assert kept is not None
    assert kept[0].tolist() == (2 * codec.action_mask(trajectory)).tolist()
    ids, mask = codec.token_ids(trajectory), codec.action_mask(trajectory)
    text = Tokenizer(model).decode_whole(ids[mask == 1].tolist())
    assert text.startswith("Look Observation:")
    assert "forty" not in text
    assert text.endswith("Done<|im_end|>")
    assert tally.unused["behind_stop"] == tally.sampled - mask.sum() > 0


async def test_parameters_that_change_the_policy_are_counted_or_refused(
    model: Path, answers: Callable[..., Recorder]
) -> None:
    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        async with client(endpoint) as openai:
            for refused in ({"n": 2}, {"logit_bias": {"1": 2}}, {"max_tokens": 0}):
                with pytest.raises(BadRequestError):
                    await openai.chat.completions.create(model="any", messages=HELLO, **refused)
            answer: Any = await openai.chat.completions.create(
                model="any", messages=HELLO, temperature=0.2, top_p=0.9, seed=3, logprobs=True
            )
            assert [each.id async for each in openai.models.list()] == [endpoint.model]
        content = answer.choices[0].logprobs.content
        assert [each.logprob for each in content] == [-1.0, -2.0, -3.0, -4.0][: len(content)]
        assert "".join(each.token for each in content) == "One<|im_end|>"
        return 1.0

    (trajectory,), _ = await played(model, answers("One"), agent)
    names = ("temperature", "top_p", "seed")
    assert [trajectory.scores[f"env/ignored/{name}"] for name in names] == [1, 1, 1]


async def test_text_far_beyond_the_context_is_not_encoded(
    model: Path, answers: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = list[int]()
    encode = Tokenizer.encode_observation

    def recorded(self: Tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode_observation", recorded)

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        http = Http.of(endpoint)
        await http.chat()
        for messages in ([{"role": "user", "content": "word " * 400_000}], then("One", "word " * 400_000)):
            encoded.clear()
            response = await http.chat(messages)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert sum(encoded) <= 100_000
        (await http.chat(then("One", "More"))).raise_for_status()
        return 1.0

    await played(model, answers("One", "Two"), agent)


# --- failures are no rewards ------------------------------------------------------------------------------------------


async def crashes(task: Task, endpoint: AgentEndpoint) -> float:
    await Http.of(endpoint).chat()
    raise RuntimeError("broken harness")


async def forgets(task: Task, endpoint: AgentEndpoint) -> None:
    await Http.of(endpoint).chat()


async def lingers(task: Task, endpoint: AgentEndpoint) -> float:
    await Http.of(endpoint).chat()
    await asyncio.Future()
    return 1.0


async def silent(task: Task, endpoint: AgentEndpoint) -> float:
    return 1.0


async def gives_up(task: Task, endpoint: AgentEndpoint) -> float:
    http = Http.of(endpoint)
    await http.chat()
    await http.ask("/close", {"state": "void"})
    return 0.0


async def test_cancelled_agent_ends_before_its_session(model: Path, answers: Callable[..., Recorder]) -> None:
    shown = list[int]()

    async def tidies(task: Task, endpoint: AgentEndpoint) -> float:
        try:
            return await lingers(task, endpoint)
        finally:
            shown.append((await Http.of(endpoint).ask("")).status_code)

    async with served(model, answers("One"), AgentTask(tidies), group_deadline_s=3.0) as player:
        with pytest.raises(EpisodeFailed, match="agent_timeout"):
            await player.generate("train", 0, samples=1)
    assert shown == [200]


async def infinite(task: Task, endpoint: AgentEndpoint) -> float:
    await Http.of(endpoint).chat()
    return float("inf")


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (crashes, "agent_error"), (forgets, "reward_missing"), (lingers, "agent_timeout"), (silent, "agent_error"),
        (infinite, "agent_error"), (gives_up, "session_void"),
    ],
)  # fmt: skip
async def test_failure_is_counted_with_its_tokens(
    model: Path, answers: Callable[..., Recorder], agent: Any, reason: str
) -> None:
    recorder, tally = answers("One"), Tally()
    async with served(model, recorder, AgentTask(agent), group_deadline_s=3.0) as player:
        with pytest.raises(EpisodeFailed) as caught:
            await player.generate("train", 0, samples=1, tally=tally)
    assert caught.value.reason == reason
    assert tally.unused == ({reason: len(recorder.calls[0][1].token_ids)} if recorder.calls else {})


async def greedy_caller(task: Task, endpoint: AgentEndpoint) -> None:
    http = Http.of(endpoint)
    (await http.chat()).raise_for_status()
    response = await http.chat(then("One", "More"))
    assert response.json()["error"]["code"] == "session_budget_exhausted"
    response.raise_for_status()


@pytest.mark.parametrize(
    ("agent", "episode", "ended"),
    [
        (greedy_caller, {"turns": 1}, "turns"),
        (greedy_caller, {"tokens": 24}, "tokens"),
        (lingers, {"wall_s": 1.0}, "wall"),
    ],
)
@pytest.mark.parametrize("needs_reward", [False, True])
async def test_exhausted_budget_leaves_the_episode_to_the_rewards(
    model: Path, answers: Callable[..., Recorder], agent: Any, episode: Any, ended: str, needs_reward: bool
) -> None:
    recorder = answers("One" + " more" * 12)
    playing = played(model, recorder, agent, env={"needs_reward": needs_reward}, episode=episode)
    if needs_reward:
        with pytest.raises(EpisodeFailed, match="reward_missing"):
            await playing
    else:
        (trajectory,), _ = await playing
        assert trajectory.finish_reason == ended


async def test_dead_engine_ends_the_group(model: Path) -> None:
    async def dead(number: int) -> None:
        raise EngineError("dead")

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        response = await Http.of(endpoint).chat()
        assert response.status_code == 503
        return 1.0

    with pytest.raises(ExceptionGroup) as caught:
        await played(model, Recorder(None, gate=dead), agent)
    assert caught.group_contains(EngineError, match="dead")


# --- keys and bodies --------------------------------------------------------------------------------------------------


async def test_calls_need_the_key_of_an_open_session(model: Path, answers: Callable[..., Recorder]) -> None:
    endpoints: list[AgentEndpoint] = []

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        endpoints.append(endpoint)
        await until(is_true(lambda: len(endpoints) == 2))
        (other,) = (each for each in endpoints if each is not endpoint)
        for key in ("", other.api_key, endpoint.api_key[:-1], "ä"):
            http = Http(endpoint.session_url, "")
            for path, body in (
                ("/v1/chat/completions", {"messages": HELLO}),
                ("/v1/messages/count_tokens", {"messages": HELLO}),
                ("/reward", {"reward": 1}),
                ("", None),
            ):
                headers = {"authorization": f"Bearer {key}".encode()} if key else {}
                response = await http.ask(path, body, **headers)
                assert response.status_code == 401
        assert (await Http(endpoint.session_url[:-1] + "x", endpoint.api_key).chat()).status_code == 404
        assert (await Http.of(endpoint).chat()).status_code == 200
        return 1.0

    async with served(model, answers("One", "Two"), AgentTask(agent)) as player:
        await player.play("train", 0, samples=2)
        for endpoint in endpoints:
            assert (await Http.of(endpoint).chat()).status_code == 410
        assert player.gateway is not None
        assert player.gateway.refused["invalid_key"] == 32


def malformed(count: int) -> list[bytes]:
    """Bodies that are no request in any dialect."""
    chosen = random.Random(0)
    good = json.dumps({"messages": HELLO, "input": HELLO, "reward": 1.0}).encode()
    bodies = [b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b"null", b"\xff\xfe", b'{"reward": NaN, "input": 1}']
    while len(bodies) < count:
        cut, noise = good[: chosen.randrange(1, len(good) - 1)], chosen.randbytes(40)
        bodies += [cut, noise]
    return bodies[:count]


async def connected(url: str, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a text was sent."""
    parts = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    writer.write(text)
    await writer.drain()
    return reader, writer


async def begun(url: str, key: str, body: bytes) -> asyncio.StreamWriter:
    """A connection with a request that lacks its end."""
    path = f"{httpx.URL(url).path}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    _, writer = await connected(url, f"{head}Content-Length: {len(body) + 1}\r\n\r\n".encode() + body)
    return writer


async def test_bad_requests_are_refused_and_delay_nobody(
    model: Path, answers: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 malformed ones, long and endless bodies of one session, while another is answered."""
    monkeypatch.setattr(app, "MOST_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(app, "BODY_S", 1.0)
    monkeypatch.setattr(listener, "HEAD_S", 1.0)
    is_over, waits_s = asyncio.Event(), list[float]()
    roles = iter(("bad", "good"))

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        http = Http.of(endpoint)
        if next(roles) == "good":
            for number in range(20):
                began = asyncio.get_running_loop().time()
                (await http.chat([{"role": "user", "content": str(number)}])).raise_for_status()
                waits_s.append(asyncio.get_running_loop().time() - began)
            await is_over.wait()  # in the same event loop
            return 1.0
        slow = [await begun(endpoint.session_url, endpoint.api_key, b"{" * size) for size in (1, 1000)]
        headless = [await connected(endpoint.session_url, text) for text in (b"", b"GET / HTTP/1.1\r\nHost: ")]
        endless, writer = await connected(endpoint.session_url, b"GET / HTTP/1.1\r\nHost: " + b"x" * 20_000)
        assert (await endless.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        pieces, writer = await connected(endpoint.session_url, b"GET / HTTP/1.1\r\n")
        with suppress(ConnectionError):
            for number in range(2000):
                writer.write(f"X-{number}: {number}\r\n".encode())
                await writer.drain()
        with suppress(ConnectionError):
            assert (await pieces.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        calls = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
        paths = itertools.cycle((*calls, "/reward"))
        for path, body in zip(paths, malformed(1000), strict=False):
            assert (await http.ask(path, body)).status_code == 400
        assert (await http.ask("/v1/chat/completions", b" " * (2 << 20))).status_code == 413
        await until(is_true(lambda: player.gateway is not None and player.gateway.refused["body_too_slow"] == 2))
        (await http.chat()).raise_for_status()
        is_over.set()
        for reader, writer in headless:
            assert await reader.read() == b""
            writer.close()
        for writer in slow:
            writer.close()
            await writer.wait_closed()
        return 1.0

    async with asyncio.timeout(200), served(model, answers(*["One"] * 21), AgentTask(agent)) as player:
        trajectories = await player.play("train", 0, samples=2)
    assert player.gateway is not None
    refused = player.gateway.refused
    assert (refused["malformed"] + refused["invalid_request"], refused["body_too_large"]) == (1000, 1)
    assert sorted(trajectory.scores["env/calls"] for trajectory in trajectories)[-1] == 20
    assert max(waits_s) < 5.0
