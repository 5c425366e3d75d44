"""Live events without a server: clients that are slow, files that are cut meanwhile."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from slipstream.configs.paths import RunPaths
from slipstream.tools.dashboard import stream
from slipstream.tools.dashboard.runs import Run
from slipstream.tools.dashboard.stream import Feed, Position
from tests.tools.dashboard.recorded import append, step

DEADLINE_S = 60.0


@pytest.fixture
def feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Feed:
    monkeypatch.setattr(stream, "POLL_S", 0.001)
    monkeypatch.setattr(stream, "QUEUE", 3)
    append(tmp_path / "metrics.jsonl", step(1))
    return Feed(Run("a", RunPaths(tmp_path)))


def steps(part: bytes) -> list[int]:
    return [json.loads(data)["step"] for data in re.findall(rb"event: step\ndata: (.*)", part)]


async def test_a_slow_client_is_cut_off_and_resumes_without_a_gap(feed: Feed, tmp_path: Path) -> None:
    slow, quick = feed.events(""), feed.events("")
    seen = await anext(slow) + b""
    await anext(quick)
    append(tmp_path / "metrics.jsonl", step(2))
    async with asyncio.timeout(DEADLINE_S):
        seen += await anext(slow)
        for number in range(3, 10):  # more parts than a queue holds, while the slow one takes none
            append(tmp_path / "metrics.jsonl", step(number))
            while number not in steps(await anext(quick)):
                pass
        seen += b"".join([part async for part in slow])
        assert steps(seen) == [2]
        (*_, last_id) = re.findall(rb"id: (.*)", seen)
        again = feed.events(last_id.decode())
        await anext(again)
        assert steps(await anext(again)) == list(range(3, 10))
    for client in (quick, again):
        await client.aclose()


async def test_a_file_that_was_cut_ends_the_catching_up(feed: Feed, tmp_path: Path) -> None:
    client = feed.events("0.0")
    await anext(client)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    async with asyncio.timeout(DEADLINE_S):
        append(tmp_path / "metrics.jsonl", step(7))
        while 7 not in steps(await anext(client)):
            pass
    await client.aclose()


@pytest.mark.parametrize(
    ("text", "position"),
    [("3.4", (3, 4)), ("3", (3, 9)), ("", (8, 9)), ("-1.2", (8, 9)), ("1.2.3", (8, 9)), ("9" * 30, (8, 9))],
)
def test_an_id_that_is_none_is_the_end(text: str, position: tuple[int, int]) -> None:
    assert Position.parse(text, Position(8, 9)) == Position(*position)
