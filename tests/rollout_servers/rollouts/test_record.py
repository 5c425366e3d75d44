"""Steps of episodes that the buffer keeps."""

import asyncio

import structlog

from slipstream.buffer.wire import messages as m
from slipstream.rollout_servers.rollouts.record import TicketRecord


async def test_too_large_step_is_named_and_not_sent() -> None:
    sent: list[m.KeepEvent] = []

    def keep(event: m.KeepEvent) -> asyncio.Future[str]:
        sent.append(event)
        kept: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        kept.set_result("kept")
        return kept

    episode = TicketRecord(id="ticket", keep=keep).episode(3)
    with structlog.testing.capture_logs() as logs:
        outcomes = [await episode.add(bytes(size), tokens=5) for size in (m.MOST_EVENT_BYTES + 1, m.MOST_EVENT_BYTES)]
    assert outcomes == ["full", "kept"]
    assert [(each.event.episode, each.event.place) for each in sent] == [(3, 1)]
    (line,) = logs
    assert (line["log_level"], line["ticket"], line["episode"], line["step"]) == ("warning", "ticket", 3, 0)
    assert line["bytes"] == m.MOST_EVENT_BYTES + 1
