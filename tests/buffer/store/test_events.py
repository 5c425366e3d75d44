"""Events of episodes in flight: they go to the next ticket of a task whose server was lost, and to nobody else."""

import pytest

from slipstream.buffer.store import ledger as ledger_module
from slipstream.buffer.store.account import Tokens, account
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.types import DeliveredGroup, IssuedTask, Origin, TicketRequest
from slipstream.buffer.wire import messages as m
from tests.buffer.ledger import AT_ONCE_S, ENV, TRAIN_TASKS, deliver, fail, group, heartbeat, issue, sweep


async def keep(store: Ledger, id: str, *, place: int = 0, episode: int = 0, tokens: int = 4, server: str = "r0") -> str:
    event = m.EpisodeEvent(episode=episode, place=place, tokens=tokens, content=b"turn")
    (outcome,) = await store.keep_events([(server, m.KeepEvent(id=id, env=ENV, event=event))])
    return outcome


async def resume(store: Ledger, server: str) -> list[IssuedTask]:
    """Grants a server the tickets that go on with episodes."""
    assert not await issue(store, 0, server=server)
    (issued,) = await store.issue(
        [TicketRequest(server, 0, credits=0, tickets=2)], train_tasks=TRAIN_TASKS, resumed=True
    )
    return issued


async def total(store: Ledger) -> Tokens:
    """The account, which closes, of a sound ledger."""
    assert await store.verify() == []
    return (await account(store.scripts)).total


async def test_events_are_kept_once_and_for_the_holder_of_a_ticket(
    store: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = await issue(store, 1)
    assert await keep(store, task.id, episode=1) == await keep(store, task.id) == await keep(store, task.id) == "kept"
    assert [event.episode for event in await store.events(task.id)] == [0, 1]
    assert await keep(store, task.id, place=1, server="r1") == await keep(store, "99") == "void"
    monkeypatch.setattr(ledger_module, "MOST_EVENT_BYTES", 100)
    assert await keep(store, task.id, place=1) == "full"


@pytest.mark.parametrize("reported", [0, 6, 11])
@pytest.mark.parametrize("how", ["silent", "stopped", "restarted", "forgotten"])
async def test_lost_servers_events_go_to_the_next_ticket(store: Ledger, how: str, reported: int) -> None:
    (task,) = await issue(store, 1)
    await keep(store, task.id)
    await keep(store, task.id, place=1)
    await heartbeat(store, "r0", [task.id], sampled={task.id: reported})
    if how == "silent":
        assert (await store.sweep(silent_s=0)).tickets == 1
    elif how == "stopped":
        await store.leave("r0", "first")
    elif how == "restarted":
        await store.join("r0", "second")
    else:
        assert await heartbeat(store, "r0", [], grace_s=0) == 1
    moved = await total(store)
    sampled = max(reported, 8)
    assert (moved.generated, moved.lost["resumed"], sum(moved.lost.values())) == (sampled, 8, sampled)

    (again,) = await resume(store, "r1")
    assert (again.epoch, again.position, again.events) == (task.epoch, task.position, 2)
    assert [event.place for event in await store.events(again.id)] == [0, 1]
    assert not await store.events(task.id)
    assert await keep(store, task.id, place=2) == "void", "of the lost server, which returns"
    await heartbeat(store, "r0", [task.id], sampled={task.id: 20})
    assert await deliver(store, [task.id]) == ["void"]
    assert (await total(store)).generated == sampled
    await heartbeat(store, "r1", [again.id], sampled={again.id: 10})
    assert (await total(store)).in_flight == 10

    delivered = group(again.id, length=15, server="r1")
    assert await store.deliver([delivered]) == ["ready"]
    assert not await store.events(again.id)
    found = await total(store)
    assert (found.generated, found.taken_over, found.ready) == (sampled + 7, 8, 15)


async def test_events_move_on_with_each_server(store: Ledger) -> None:
    (task,) = await issue(store, 1)
    await keep(store, task.id)
    await store.leave("r0", "first")
    (second,) = await resume(store, "r1")
    await keep(store, second.id, place=1, tokens=3, server="r1")
    await store.leave("r1", "first")
    (third,) = await resume(store, "r2")
    assert third.events == 2
    delivered = DeliveredGroup(**{**vars(group(third.id, length=9)), "origin": Origin("r2", ENV, 9)})
    assert await store.deliver([delivered]) == ["ready"]
    found = await total(store)
    assert (found.generated, found.taken_over, found.lost, found.ready) == (9, 11, {"resumed": 11}, 9)


async def test_events_end_with_their_ticket(store: Ledger) -> None:
    tasks = await issue(store, 4)
    for task in tasks:
        await keep(store, task.id)
    assert await deliver(store, [tasks[0].id]) == ["ready"]
    assert await fail(store, tasks[1].id) == "filtered"
    assert await store.give_back(tasks[2].id, origin=Origin("r0", ENV, 4), lost={"session_silent": 4}) == "reissued"
    await store.finish()
    assert not [event for task in tasks for event in await store.events(task.id)]
    assert (await total(store)).lost["session_silent"] == 4


async def test_expired_tickets_events_are_forgotten(store: Ledger) -> None:
    (task,) = await issue(store, 1, deadline_s=AT_ONCE_S)
    await keep(store, task.id)
    assert await sweep(store) == (1, 0)
    (again,) = await issue(store, 1, server="r1")
    assert (again.position, again.events) == (task.position, 0)
    assert not await store.events(task.id)
