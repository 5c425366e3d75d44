"""The gateway over HTTP: keys, bounds, retries, rewards and sessions from outside."""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.env.base import AgentEndpoint, Task
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.gateway import app
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.tally import Tally
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import AgentTask, Recorder, client, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer

DEADLINE_S = 30.0
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("gateway") / "model", "chatml")


@pytest.fixture(scope="module")
def answers(model: Path) -> Callable[..., Recorder]:
    tokenizer = Tokenizer(model)

    def make(*texts: str, **options: Any) -> Recorder:
        return Recorder(None, [chat_answer(tokenizer, f"{text}<|im_end|>") for text in texts], **options)

    return make


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
        await http.chat(then("One", "More"), headers={"x-slipstream-agent": "worker"})
        for reward, target in ((0.25, {"agent": "worker"}), ({"style": 0.5, "speed": 0.25}, {})):
            assert (await http.ask("/reward", {"reward": reward, **target})).status_code == 200
        assert (await http.ask("/reward", {"reward": 1.0, "agent": "nobody"})).status_code == 404

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
    (trajectory,), tally = await played(model, recorder, agent)
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
                    await openai.chat.completions.create(model="any", messages=HELLO, **refused)  # type: ignore[call-overload]
            answer = await openai.chat.completions.create(
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


async def infinite(task: Task, endpoint: AgentEndpoint) -> float:
    await Http.of(endpoint).chat()
    return float("inf")


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (crashes, "agent_error"), (forgets, "reward_missing"), (lingers, "agent_timeout"), (silent, "agent_error"),
        (infinite, "agent_error"),
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
            for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/reward", {"reward": 1}), ("", None)):
                headers = {"authorization": f"Bearer {key}".encode()} if key else {}
                response = await http.ask(path, body, **headers)  # type: ignore[arg-type]
                assert response.status_code == 401
        assert (await Http(endpoint.session_url[:-1] + "x", endpoint.api_key).chat()).status_code == 404
        assert (await Http.of(endpoint).chat()).status_code == 200
        return 1.0

    async with served(model, answers("One", "Two"), AgentTask(agent)) as player:
        await player.play("train", 0, samples=2)
        for endpoint in endpoints:
            assert (await Http.of(endpoint).chat()).status_code == 410
        assert player.gateway is not None
        assert player.gateway.refused["invalid_key"] == 24


def malformed(count: int) -> list[bytes]:
    """Bodies that are no request in any dialect."""
    chosen = random.Random(0)
    good = json.dumps({"messages": HELLO, "input": HELLO, "reward": 1.0}).encode()
    bodies = [b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b"null", b"\xff\xfe", b'{"reward": NaN, "input": 1}']
    while len(bodies) < count:
        cut, noise = good[: chosen.randrange(1, len(good) - 1)], chosen.randbytes(40)
        bodies += [cut, noise]
    return bodies[:count]


async def begun(url: str, key: str, body: bytes) -> asyncio.StreamWriter:
    """A connection with a request that lacks its end."""
    parts = httpx.URL(url)
    _, writer = await asyncio.open_connection(parts.host, parts.port)
    head = f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {len(body) + 1}\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


async def test_bad_requests_are_refused_and_delay_nobody(
    model: Path, answers: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 malformed ones, long and endless bodies of one session, while another is answered."""
    monkeypatch.setattr(app, "MOST_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(app, "BODY_S", 1.0)
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
        paths = itertools.cycle(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/reward"))
        for path, body in zip(paths, malformed(1000), strict=False):
            assert (await http.ask(path, body)).status_code == 400
        assert (await http.ask("/v1/chat/completions", b" " * (2 << 20))).status_code == 413
        await until(is_true(lambda: player.gateway is not None and player.gateway.refused["body_too_slow"] == 2))
        (await http.chat()).raise_for_status()
        is_over.set()
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


# --- sessions from outside --------------------------------------------------------------------------------------------


@asynccontextmanager
async def outside(model: Path, recorder: Recorder, **rollout: Any) -> AsyncIterator[tuple[Player, Http]]:
    """A gateway for agents from outside, and a client with its key."""
    async with served(model, recorder, AgentTask(None), **rollout) as player:
        assert player.gateway is not None
        file = next((model.parent / "runs" / "run" / "gateways").glob("*.json"))
        assert file.stat().st_mode & 0o077 == 0
        found = json.loads(file.read_text())
        yield player, Http(found["url"], found["key"])


async def opened(http: Http) -> AgentEndpoint:
    """A session, once a ticket waits for it."""
    async with asyncio.timeout(DEADLINE_S):
        while (response := await http.ask("/sessions", b"")).status_code == 429:
            assert float(response.headers["retry-after"]) > 0
            await asyncio.sleep(0.01)
    assert response.status_code == 201
    given = response.json()
    assert given["task"]["info"] == {"from": "a test"}
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
    async with outside(model, answers("One"), group_deadline_s=5.0) as (player, http):
        playing = asyncio.create_task(player.generate("train", 0, samples=1, tally=tally))
        session = Http.of(await opened(http))
        (await session.chat()).raise_for_status()
        (await session.ask("/close", {"state": state})).raise_for_status()
        with pytest.raises(EpisodeFailed) as caught:
            await playing
    assert caught.value.reason == reason
    assert tally.unused == {reason: tally.sampled}
