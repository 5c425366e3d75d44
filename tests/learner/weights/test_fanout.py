"""Admission of fetches: the order of the queue, limits of each source, relays and their failures."""

import asyncio

import pytest

from slipstream.buffer.wire.weights.protocol import Join, Relay
from slipstream.learner.weights import fanout as module
from slipstream.learner.weights.fanout import DEADLINE_SHARE, FANOUT, MEASURED_BYTES, RELAY_FANOUT, Fanout
from slipstream.learner.weights.members import Absent, Member, Record

DEADLINE_S = 10.0
SIZE_BYTES = 1000


def member(name: str, *, staged: int = -1, relays: bool = True) -> Member:
    join = Join(
        run="r", server=name, incarnation=name, version=0, staged=staged, host="", transports=["stream"], workers=1,
        relay=Relay(place=f"tcp://{name}", key="") if relays else None,
    )  # fmt: skip
    return Member(name.encode(), join, heard_at=0.0, version=0, staged=staged, record=Record())


def fleet(size: int, *, relays: bool = True) -> tuple[Fanout, list[Member]]:
    members = [member(f"s{number}", relays=relays) for number in range(size)]
    fanout = Fanout(members, deadline_s=DEADLINE_S)
    fanout.offer(1, SIZE_BYTES)
    return fanout, members


Fetches = dict[Member, "asyncio.Future[Member | None]"]


def admitted(fetches: Fetches) -> dict[str, str | None]:
    """Admitted members and their relays, by name."""
    sources = {each.name: granted.result() for each, granted in fetches.items() if granted.done()}
    return {name: None if relay is None else relay.name for name, relay in sources.items()}


def finish(fanout: Fanout, fetches: Fetches, done: Member) -> None:
    done.staged, done.queued_at = 1, None
    del fetches[done]
    fanout.leave(done)


async def test_learner_serves_few_and_relays_serve_the_rest() -> None:
    fanout, members = fleet(64)
    fetches: Fetches = {each: fanout.enter(each) for each in members}
    assert admitted(fetches) == dict.fromkeys([f"s{number}" for number in range(FANOUT)])
    from_learner, rounds = 0, 0
    while fetches:
        now = admitted(fetches)
        from_learner += sum(relay is None for relay in now.values())
        assert all(list(now.values()).count(relay) <= RELAY_FANOUT for relay in now.values() if relay is not None)
        for name in now:
            finish(fanout, fetches, members[int(name[1:])])
        rounds += 1
    assert (from_learner, rounds) == (FANOUT, 4)


async def test_queue_is_served_in_order_and_keeps_places() -> None:
    fanout, members = fleet(FANOUT + 3, relays=False)
    fetches: Fetches = {each: fanout.enter(each) for each in members}
    *_, superseded, late, last = members
    fanout.leave(superseded)
    fetches[superseded] = fanout.enter(superseded)  # as after a newer version
    for done, expected in zip(members, (superseded, late, last), strict=False):
        finish(fanout, fetches, done)
        assert expected.name in admitted(fetches)
        assert fanout.waiting == sum(not granted.done() for granted in fetches.values())


@pytest.mark.parametrize("fit", [0, 1, 3, 50])
@pytest.mark.parametrize("relays", [False, True])
async def test_learner_slots_follow_rate_and_deadline(fit: int, relays: bool) -> None:
    fanout, _ = fleet(100, relays=relays)
    size_bytes = MEASURED_BYTES
    fanout.offer(1, size_bytes)
    fanout.measure(1, seconds=0.001)  # too few bytes to count
    assert fanout.learner_slots == FANOUT
    fanout.measure(size_bytes, seconds=DEADLINE_S * DEADLINE_SHARE / (fit + 0.5))
    assert fanout.learner_slots == max(1, min(fit, FANOUT) if relays else fit)


async def test_failed_relay_and_its_client_use_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    relay, client, other = member("relay", staged=1), member("client"), member("other")
    fanout = Fanout([relay, client, other], deadline_s=DEADLINE_S)
    fanout.offer(1, SIZE_BYTES)
    assert fanout.enter(client).result() is relay
    fanout.relay_failed(relay, client, "no answer")
    fanout.leave(client)
    for each in (client, other):
        assert fanout.enter(each).result() is None
        fanout.leave(each)
    now[0] += module.AVOIDED_S
    assert fanout.enter(client).result() is relay


async def test_relay_is_not_overwritten_while_read() -> None:
    relay, client = member("relay", staged=1), member("client")
    fanout = Fanout([relay, client], deadline_s=DEADLINE_S)
    fanout.offer(1, SIZE_BYTES)
    assert fanout.enter(client).result() is relay
    fanout.offer(2, SIZE_BYTES)
    next_version = fanout.enter(relay)
    assert not next_version.done()
    fanout.leave(client)
    assert next_version.result() is None


async def test_absent_member_leaves_the_queue() -> None:
    fanout, members = fleet(FANOUT + 2)
    fetches: Fetches = {each: fanout.enter(each) for each in members}
    members[FANOUT].gone.set()
    fanout.leave(members[0])
    with pytest.raises(Absent):
        fetches[members[FANOUT]].result()
    assert fetches[members[FANOUT + 1]].done()
