"""Which transport brings a version to a member."""

import time

import pytest

from slipstream.buffer.wire import weights as w
from slipstream.learner.weights.members import Member, Record, choose_transport

ORDER = ("shm", "gloo", "stream", "file")


def member(*transports: str, host: str = "here", avoided: dict[str, float] | None = None) -> Member:
    join = w.Join(
        run="r", server="s", incarnation="i", version=0, staged=-1, host=host, transports=list(transports), workers=1
    )
    return Member(b"s", join, heard_at=0.0, version=0, staged=-1, record=Record(avoided=avoided or {}))


@pytest.mark.parametrize(
    ("host", "late", "chosen"),
    [("here", False, "shm"), ("there", False, "gloo"), ("there", True, "stream")],
    ids=["on the learner's host", "elsewhere", "when the others have it"],
)
def test_the_first_is_taken_that_reaches_it(host: str, late: bool, chosen: str) -> None:
    assert choose_transport(member(*ORDER, host=host), ORDER, host="here", late=late) == chosen


def test_one_that_failed_is_avoided_for_a_while() -> None:
    now = time.monotonic()
    assert choose_transport(member(*ORDER, avoided={"shm": now + 600}), ORDER, host="here", late=True) == "stream"
    assert choose_transport(member(*ORDER, avoided={"shm": now - 1}), ORDER, host="here", late=True) == "shm"
    assert choose_transport(member("shm", avoided={"shm": now + 600}), ORDER, host="here", late=True) is None
