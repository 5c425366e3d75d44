"""Shares of servers in the groups that admission allows, and the limits set by their throughput."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.policies.admission import Candidate, Throughput, share_room, ticket_limit

candidates = st.builds(Candidate, held=st.integers(0, 9), limit=st.integers(0, 9), room=st.integers(0, 30))


def server(held: int = 0, *, limit: int = 100, room: int = 8) -> Candidate:
    return Candidate(held, limit, room)


@pytest.mark.parametrize(
    ("servers", "shares"),
    [
        ([server()] * 4, [2, 2, 2, 2]), ([server()] * 3, [3, 3, 2]), ([server()] * 16, [1] * 8 + [0] * 8),
        ([server(5), server(0), server(9)], [2, 6, 0]), ([server(0, limit=1), server()], [1, 7]),
        ([server(0, limit=2), server(0, limit=3)], [2, 3]), ([server(room=0), server(room=3), server()], [0, 2, 6]),
        ([server(7, limit=3)], [0]), ([], []),
    ],
)  # fmt: skip
def test_room_is_shared_by_water_filling(servers: list[Candidate], shares: list[int]) -> None:
    assert share_room(servers) == shares


@given(st.lists(candidates, max_size=9))
def test_shares_are_within_limits_and_level(servers: list[Candidate]) -> None:
    shares = share_room(servers)
    total = sum(shares)
    assert total <= max((each.room for each in servers), default=0)
    for each, share in zip(servers, shares, strict=True):
        assert 0 <= share <= max(0, each.limit - each.held)
    for gets, share in zip(servers, shares, strict=True):
        for other, others in zip(servers, shares, strict=True):
            may_take_more = other.held + others < other.limit and other.room > total
            assert not share or not may_take_more or gets.held + share <= other.held + others + 1


def test_unlimited_room_fills_all_credits() -> None:
    assert share_room([server(1, limit=4, room=10**9), server(limit=2, room=10**9)]) == [3, 2]


@pytest.mark.parametrize(("throughput", "limit"), [(1.0, 12), (0.5, 6), (0.01, 1), (0.0, 1), (10.0, 125)])
def test_limit_is_share_of_capacity(throughput: float, limit: int) -> None:
    assert ticket_limit(throughput=throughput, total_throughput=10.0, capacity=100) == limit


def test_throughput_is_share_of_deliveries() -> None:
    rng, delivered = random.Random(0), 0
    speeds = [1, 1, 1, 5]
    servers = [Throughput(0) for _ in speeds]
    for _ in range(1000):
        (index,) = rng.choices(range(4), speeds)
        delivered += 1
        servers[index].add(1, delivered_by_fleet=delivered, servers=4)
    values = [each.value(delivered_by_fleet=delivered, servers=4) for each in servers]
    assert [value / sum(values) for value in values] == pytest.approx([1 / 8, 1 / 8, 1 / 8, 5 / 8], abs=0.06)
    new = Throughput(delivered).value(delivered_by_fleet=delivered, servers=4)
    assert new == pytest.approx(sum(values) / 4, rel=0.05)
