"""Limits of open calls and tries of rewards that ask a real HTTP server."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.rewards.base import Failure
from slipstream.rewards.compose import EpisodeReward, Reward
from slipstream.rewards.scorer import Scorer
from tests.rewards.episodes import episode
from tests.rewards.functions.http_server import serving

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


class Service:
    """Refuses the first `failures` requests, and answers the others when `together` of them are open."""

    def __init__(self, *, together: int = 1, failures: int = 0) -> None:
        self.failures, self.requests = failures, 0
        self._together = threading.Barrier(together)
        self._lock = threading.Lock()

    def __call__(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        with self._lock:
            self.requests += 1
            if self.requests <= self.failures:
                return 503, {}
        self._together.wait(PATIENCE_S)
        return 200, {"score": float(body["answer"])}


async def scored(service: Service, *, workers: int, groups: int, **keys: Any) -> list[EpisodeReward | Failure]:
    """The results of groups of 8 answers that are scored at once."""
    with serving(service) as url:
        term = RewardConfig(name="served", function="served_plugins:Served", options={"url": url}, **keys)
        with closing(Scorer([term], ScoringConfig(workers=workers), backoff_s=0.01)) as scorer:
            async with asyncio.timeout(PATIENCE_S):
                found = await asyncio.gather(*(scorer.score([episode("3")] * 8) for _ in range(groups)))
            await scorer.runner.rewards["served"].function.client.aclose()  # type: ignore[attr-defined]
    return [each for group in found for each in group]


def outcomes(results: Sequence[EpisodeReward | Failure]) -> list[float | str]:
    return [each.reward if isinstance(each, EpisodeReward) else each.reason for each in results]


@pytest.mark.parametrize(("workers", "keys", "most"), [(0, {}, 32), (1, {}, 32), (0, {"concurrency": 4}, 4)])
async def test_open_calls_of_async_reward_are_limited(workers: int, keys: dict[str, Any], most: int) -> None:
    found = await scored(Service(together=most), workers=workers, groups=8, retries=0, **keys)
    assert outcomes(found) == [3.0] * 64
    assert max(each.scores["served/most"] for each in found if isinstance(each, EpisodeReward)) == most


@pytest.mark.parametrize(
    ("keys", "requests", "results"),
    [({}, 24, ["reward_error"] * 8), ({"retries": 0}, 8, ["reward_error"] * 8), ({"retries": 3}, 32, [3.0] * 8)],
)
async def test_failed_calls_are_tried_again(keys: dict[str, Any], requests: int, results: list[Any]) -> None:
    service = Service(failures=24)
    assert outcomes(await scored(service, workers=0, groups=1, concurrency=1, **keys)) == results
    assert service.requests == requests


async def test_call_is_not_begun_without_time_left() -> None:
    async def answers(answer: str, reference: str, info: object) -> float:
        return 1.0

    reward = Reward("slow", answers, "answer", is_async=True, deadline_s=600.0, open_calls=asyncio.Semaphore(1))
    now = asyncio.get_running_loop().time
    async with reward.slot(1):
        until = now() + 2.0
        with pytest.raises(TimeoutError):
            async with reward.slot(1, until=until):
                pytest.fail("another call is open")
        assert now() < until
    async with asyncio.timeout(PATIENCE_S), reward.slot(1, until=now() + PATIENCE_S):
        pass
