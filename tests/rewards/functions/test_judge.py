"""A judge behind a real HTTP server: ratings, retries, limits, the cache, and failures that are no scores."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Failure, RewardUnavailable, Score
from slipstream.rewards.functions.judge import Judge, Ratings
from slipstream.rewards.registry import find_reward
from slipstream.rewards.runners.pool import PoolRunner
from tests.rewards.episodes import episode
from tests.rewards.functions.http_server import serving

BACKOFF_S = 0.01
PATIENCE_S = 60.0


def completion(text: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


class Endpoint:
    """Answers from a list, then with the last one; keeps the requests and how many there were at once.

    Attributes:
        together: if set, an answer waits until so many requests are there.
    """

    def __init__(self, *answers: tuple[int, Any], together: int = 1) -> None:
        self.answers, self.requests = list(answers), list[tuple[Mapping[str, str], Any, float]]()
        self.together = threading.Barrier(together)
        self._running = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        assert path == "/v1/chat/completions"
        with self._lock:
            self.requests.append((headers, body, time.monotonic()))
            self._running += 1
            self.most = max(self.most, self._running)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.together.wait(PATIENCE_S)
        with self._lock:
            self._running -= 1
        return answer


@contextmanager
def judging(endpoint: Endpoint, **options: Any) -> Iterator[Judge]:
    with serving(endpoint) as url:
        judge = Judge(**{"url": f"{url}/v1", "model": "judge-7b", "timeout_s": PATIENCE_S, **options})
        judge.endpoint._backoff_s = BACKOFF_S
        yield judge


@pytest.mark.parametrize(
    ("reply", "value", "rating"),
    [
        ("Good.\nScore: 8", 0.8, 8),
        ("Score: 3, no.\n**Score: 7.5**", 0.75, 7.5),
        ("score 12", 1.0, 12),
        ("Score: -1", 0.0, -1),
    ],
)
async def test_the_last_rating_is_scaled(reply: str, value: float, rating: float) -> None:
    endpoint = Endpoint(completion(reply))
    with judging(endpoint) as judge:
        assert await judge(episode("an answer", reference="5")) == Score(value, {"rating": rating})
        await judge.endpoint.close()
    ((_, body, _),) = endpoint.requests
    assert (body["model"], body["temperature"]) == ("judge-7b", 0.0)
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert all(part in message["content"] for part in ("2+3=", "an answer", "5"))


async def test_prompt_of_parts_is_text() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    prompt: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    endpoint = Endpoint(completion("Score: 10"))
    with judging(endpoint, template="{prompt}|{answer}") as judge:
        await judge(replace(episode("red"), prompt=prompt))
        await judge.endpoint.close()
    ((_, body, _),) = endpoint.requests
    assert body["messages"][0]["content"] == "Be short.\n\n<image>Which colour?|red"


async def test_fields_in_an_answer_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint = Endpoint(completion("2"))
    options = {"template": '{answer} {"json": 1} {rubric}', "pattern": r"(\d)", "lowest": 1, "highest": 3}
    with judging(endpoint, rubric="short", api_key_variable="JUDGE_KEY", **options) as judge:
        assert (await judge(episode("{reference} {rubric}", reference="gold"))).value == 0.5
        await judge.endpoint.close()
    ((headers, body, _),) = endpoint.requests
    assert body["messages"][0]["content"] == '{reference} {rubric} {"json": 1} short'
    assert headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "failure", [(500, "down"), (429, {"error": "slow"}), (200, "no JSON"), completion("I like it.")]
)
async def test_failed_requests_are_repeated(failure: tuple[int, Any]) -> None:
    endpoint = Endpoint(failure, failure, completion("Score: 10"))
    with judging(endpoint) as judge:
        assert (await judge(episode("5"))).value == 1.0
        await judge.endpoint.close()
    times = [at for _, _, at in endpoint.requests]
    assert len(times) == 3
    if failure[0] != 200:
        assert times[1] - times[0] >= BACKOFF_S
        assert times[2] - times[1] >= 2 * BACKOFF_S


@pytest.mark.parametrize(
    ("failure", "requests"),
    [((503, "down"), 3), ((401, {"error": "no key"}), 1), (completion("I like it."), 3), ((200, {"choices": []}), 1)],
)
async def test_a_judge_without_a_rating_is_no_score(failure: tuple[int, Any], requests: int) -> None:
    endpoint = Endpoint(failure)
    with judging(endpoint, retries=2) as judge:
        with pytest.raises(RewardUnavailable, match=r"judge|HTTP"):
            await judge(episode("5"))
        await judge.endpoint.close()
    assert len(endpoint.requests) == requests


async def test_requests_at_once_are_limited() -> None:
    endpoint = Endpoint(completion("Score: 5"), together=3)
    with judging(endpoint, concurrency=3) as judge:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(judge(episode(str(number))) for number in range(12)))
        await judge.endpoint.close()
    assert (len(endpoint.requests), endpoint.most) == (12, 3)


async def test_requests_a_minute_are_limited() -> None:
    endpoint = Endpoint(completion("Score: 5"))
    with judging(endpoint, per_minute=600) as judge:
        began = time.monotonic()
        await asyncio.gather(*(judge(episode(str(number))) for number in range(5)))
        assert time.monotonic() - began >= 0.4
        await judge.endpoint.close()


@pytest.mark.parametrize("in_a_file", [False, True])
async def test_a_rating_is_asked_for_once(tmp_path: Path, in_a_file: bool) -> None:
    endpoint = Endpoint(completion("Score: 5"))
    cache = tmp_path / "ratings" if in_a_file else None
    with judging(endpoint, cache=cache) as judge:
        for answer in ("5", "5", "6", "5"):
            assert (await judge(episode(answer))).value == 0.5
        again = Judge(url=judge.url, model=judge.model, cache=cache)
        assert (await again(episode("5"))).value == 0.5
        for each in (judge, again):
            await each.endpoint.close()
            each._ratings.close()
    assert len(endpoint.requests) == (2 if in_a_file else 3)


async def test_ratings_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ratings, "_IN_MEMORY", 2)
    ratings = Ratings(None)
    for number in range(3):
        await ratings.put(str(number), number)
    assert [await ratings.get(str(number)) for number in range(3)] == [None, 1.0, 2.0]


async def test_locked_cache_is_a_miss_and_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ratings, "_BUSY_S", 0.5)
    with judging(Endpoint(completion("Score: 5")), cache=tmp_path / "ratings") as judge, closing(judge._ratings):
        with closing(sqlite3.connect(tmp_path / "ratings", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            scoring, ticks = asyncio.create_task(judge(episode("5"))), 0
            while not scoring.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert scoring.result().value == 0.5
            assert ticks > 10, "the event loop ran while the file was locked"
        await judge.endpoint.close()


async def test_damaged_cache_is_a_miss(tmp_path: Path) -> None:
    endpoint = Endpoint(completion("Score: 5"))
    with judging(endpoint, cache=tmp_path / "ratings") as judge, closing(judge._ratings):
        with closing(sqlite3.connect(tmp_path / "ratings")) as other:
            other.execute("DROP TABLE ratings")
        with structlog.testing.capture_logs() as logs:
            for answer in ("5", "6", "5"):
                assert (await judge(episode(answer))).value == 0.5
        await judge.endpoint.close()
    assert len(endpoint.requests) == 2
    assert [(each["log_level"], each["cache"]) for each in logs] == [("warning", str(tmp_path / "ratings"))]


@pytest.mark.parametrize(
    "options",
    [
        {"lowest": 10}, {"template": "no field"}, {"pattern": "("}, {"pattern": "score"},
        {"api_key_variable": "NO_SUCH_KEY"}, {"cache": "/nowhere/ratings"}, {"rubrik": "x"},
    ],
)  # fmt: skip
def test_unusable_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="judge"):
        find_reward(RewardConfig(name="judge", options={"url": "http://localhost/v1", "model": "m", **options}))


async def test_failing_judge_costs_its_group_in_a_worker() -> None:
    endpoint = Endpoint((401, {"error": "no key"}), completion("Score: 5"))
    with serving(endpoint) as url:
        term = RewardConfig(name="style", function="judge", options={"url": f"{url}/v1", "model": "m"})
        with closing(PoolRunner([term], workers=1, deadline_s=PATIENCE_S)) as runner:
            calls = runner.rewards["style"].calls(1)
            ((failed,),) = await runner.score(calls, [episode("5")])
            assert isinstance(failed, Failure)
            assert (failed.reason, "401" in failed.detail) == ("reward_unavailable", True)
            assert await runner.score(calls, [episode("5")]) == [[Score(0.5, {"rating": 5.0}, [])]]
