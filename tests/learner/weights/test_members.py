"""How long a member stays out that was evicted, and which transport brings it a version."""

import time
from types import SimpleNamespace

import msgspec
import pytest

from slipstream.buffer.wire.weights import protocol as w
from slipstream.learner.weights import members
from slipstream.learner.weights.members import Member, Roster, ServerRecord, choose_transport
from slipstream.learner.weights.process_group import next_group

ORDER = ("shm", "gloo", "stream", "file")
DEADLINE_S = 10.0


def heartbeat(*transports: str, host: str = "here", incarnation: str = "i") -> w.Join:
    return w.Join(
        run="r", server="s", incarnation=incarnation, version=0, staged=-1, host=host, transports=list(transports),
        workers=1,
    )  # fmt: skip


def joined(roster: Roster) -> Member:
    """By its first heartbeat since it was evicted."""
    assert roster.receive_join(b"s", heartbeat()), "it has to stay out"
    (member,) = roster
    return member


def member(*transports: str, host: str = "here", avoided: dict[str, float] | None = None) -> Member:
    join = heartbeat(*transports, host=host)
    return Member(b"s", join, heard_at=0.0, version=0, staged=-1, record=ServerRecord(avoided=avoided or {}))


def test_a_server_that_was_evicted_twice_in_a_row_stays_out() -> None:
    roster = Roster("r", deadline_s=DEADLINE_S)
    assert [roster.evict(joined(roster), "slow") for _ in range(2)] == [0.0, DEADLINE_S]


def test_successful_update_resets_eviction_count() -> None:
    roster = Roster("r", deadline_s=DEADLINE_S)
    assert roster.evict(joined(roster), "slow") == 0.0
    back = joined(roster)
    roster.applied(back, 1)
    assert roster.evict(back, "slow") == 0.0


def test_dead_server_without_engine_is_counted_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(members, "time", SimpleNamespace(monotonic=lambda: now))
    roster = Roster("r", deadline_s=DEADLINE_S)
    assert roster.receive_join(b"s", heartbeat(incarnation=""))
    now = members.SILENT_S
    assert roster.without_engine == 1
    assert not roster.receive_join(b"s", heartbeat(incarnation=""))
    now = 2 * members.SILENT_S
    assert roster.without_engine == 1
    now += 1.0
    assert roster.without_engine == 0


@pytest.mark.parametrize(
    ("host", "late", "chosen"),
    [("here", False, "shm"), ("there", False, "gloo"), ("there", True, "stream")],
    ids=["on the learner's host", "elsewhere", "when the others have it"],
)
def test_the_first_is_taken_that_reaches_it(host: str, late: bool, chosen: str) -> None:
    assert choose_transport(member(*ORDER, host=host), ORDER, host="here", late=late) == chosen


@pytest.mark.parametrize(("device", "chosen"), [("GPU-1", "ipc"), ("GPU-2", "shm"), ("here", "shm")])
def test_memory_of_a_gpu_is_for_engines_on_it(device: str, chosen: str) -> None:
    server = member("ipc", "shm")
    server.join = msgspec.structs.replace(server.join, device="GPU-1")
    assert choose_transport(server, ("ipc", "shm"), host="here", device=device, late=False) == chosen


def test_one_that_failed_is_avoided_for_a_while() -> None:
    now = time.monotonic()
    assert choose_transport(member(*ORDER, avoided={"shm": now + 600}), ORDER, host="here", late=True) == "stream"
    assert choose_transport(member(*ORDER, avoided={"shm": now - 1}), ORDER, host="here", late=True) == "shm"
    assert choose_transport(member("shm", avoided={"shm": now + 600}), ORDER, host="here", late=True) is None


@pytest.mark.parametrize(
    ("left", "others_fetch", "waited_s", "enters"),
    [(False, False, 0.0, True), (False, True, 0.0, False), (False, True, DEADLINE_S, True), (True, True, 0.0, True)],
    ids=["alone", "others fetch", "for long enough", "a member has left"],
)
def test_newcomers_wait_for_those_that_fetch(left: bool, others_fetch: bool, waited_s: float, enters: bool) -> None:
    stays, leaves, newcomer = (member("gloo") for _ in range(3))
    newcomer.joined_at -= waited_s
    if left:
        leaves.gone.set()
    willing = [newcomer, stays] if left else [newcomer, stays, leaves]
    group = next_group(willing, [stays, leaves], others_fetch=others_fetch, max_wait_s=DEADLINE_S)
    assert group == [each for each in willing if each is not newcomer or enters]
