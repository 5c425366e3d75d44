"""Whom a version is broadcast to when broadcasts have broken off before."""

import pytest
from structlog.testing import capture_logs

from slipstream.buffer.wire.weights import protocol as w
from slipstream.learner.weights.members import Member, Roster
from slipstream.learner.weights.process_group import admitted, attribute_fault, record_fault, record_success


def fleet(size: int) -> list[Member]:
    """Members that have just joined."""
    roster = Roster("run", deadline_s=1.0)
    return [member for rank in range(size) if (member := joined(roster, f"server-{rank}")) is not None]


def joined(roster: Roster, server: str) -> Member | None:
    join = w.Join(
        run="run", server=server, incarnation="1", version=0, staged=-1, host="here", transports=["gloo"], workers=1
    )
    roster.receive_join(server.encode(), join)
    return roster.of(server.encode())


def broadcasts(members: list[Member], broken: set[int], versions: range) -> list[list[Member]]:
    """Publishes; whom each version was sent to. A broken member lets a broadcast break off before anybody has it."""
    sent = []
    for version in versions:
        group = admitted(members, version)
        sent.append(group)
        if any(members.index(member) in broken for member in group):
            attribute_fault(group, (), version + 1, "broke off")
        elif group:
            record_success(group)
    return sent


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("where", ["first", "last"])
def test_fault_is_attributed_and_others_get_most_broadcasts(size: int, where: str) -> None:
    members = fleet(size)
    broken = 0 if where == "first" else size - 1
    sent = broadcasts(members, {broken}, range(1, 257))
    breaks = sum(members[broken] in group for group in sent)
    # Those that halve the fleet, and the tries after 1, 2, 4, ... versions.
    assert breaks <= size.bit_length() + 9
    assert all(set(group) >= set(members) - {members[broken]} for group in sent[128:])
    assert [member.record.breaks > 0 for member in members] == [rank == broken for rank in range(size)]


def test_several_broken_ones_are_found_too() -> None:
    members = fleet(16)
    broken = {0, 7, 15}
    sent = broadcasts(members, broken, range(1, 257))
    assert {rank for rank, member in enumerate(members) if member.record.breaks} == broken
    assert sum(any(members.index(member) in broken for member in group) for group in sent) < 50


def test_who_has_the_version_is_not_at_fault() -> None:
    one, two, other = members = fleet(3)
    attribute_fault(members, {one, two}, 2, "not received")
    assert admitted(members, 2) == [one, two]
    assert other.record.breaks == 1


def test_unproven_member_is_suspected_before_proven_ones() -> None:
    one, two, newcomer = members = fleet(3)
    record_success([one, two])
    attribute_fault(members, (), 3, "broke off")
    assert admitted(members, 3) == [one, two]
    assert newcomer.record.breaks == 1


def test_one_that_broadcasts_have_reached_may_stop_being_reached() -> None:
    one, other = members = fleet(2)
    record_success(members)
    attribute_fault(members, {one}, 3, "broke off")
    assert admitted(members, 3) == [one]
    assert other.record.breaks == 1


def test_unreached_server_and_recovery_are_logged_once() -> None:
    one, other = members = fleet(2)
    with capture_logs() as logs:
        for _ in range(2):
            record_fault(other, 2, "broke off")
        for _ in range(2):
            record_success(members)
    assert [(line["log_level"], line["server"]) for line in logs] == [("warning", other.name), ("info", other.name)]
    assert (one.proven, other.proven) == (True, True)


def test_ambiguous_fault_readmits_half_of_suspects_first() -> None:
    members = fleet(4)
    attribute_fault(members, (), 2, "broke off")
    assert admitted(members, 2) == members[:2]
    record_success(members[:2])
    assert admitted(members, 3) == members
    record_success(members)
    assert admitted(members, 4) == members
    assert not any(member.record.breaks for member in members)


def test_retries_of_member_at_fault_double_until_success() -> None:
    (member,) = members = fleet(1)
    assert [version for version, group in enumerate(broadcasts(members, {0}, range(1, 40)), start=1) if group] == [
        1, 3, 6, 11, 20, 37,
    ]  # fmt: skip
    record_success(members)
    record_fault(member, 101, "broke off")
    assert [bool(admitted(members, version)) for version in (101, 102)] == [False, True]


def test_fault_record_survives_eviction_but_not_leaving() -> None:
    roster = Roster("run", deadline_s=1.0)
    member = joined(roster, "server")
    assert member is not None
    record_fault(member, 2, "broke off")
    roster.evict(member, "late")
    again = joined(roster, "server")
    assert again is not None
    assert admitted([again], 2) == []
    roster.receive_leave(again.peer)
    restarted = joined(roster, "server")
    assert restarted is not None
    assert admitted([restarted], 2) == [restarted]
