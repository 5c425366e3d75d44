"""A group over NCCL is formed when all are there, or given up; neither costs the learner its port, or an engine."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.buffer.wire.weights import Form
from slipstream.configs import RunConfig
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.nccl import NcclTransport
from slipstream.rollout_servers.weights.transports.meeting import LEARNER, meet
from tests.learner.weights.learner import PATIENCE_S, wait_until

NCCL = "slipstream.learner.weights.transports.nccl"
ID = bytes(range(128))
SHORT_S = 0.3


class Communicator:
    """Where NCCL's would be."""

    def __init__(self) -> None:
        self.destroyed = False

    def destroy(self) -> None:
        self.destroyed = True


class Nccl:
    """Makes communicators, once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()
        self.asked: list[tuple[bytes, int]] = []
        self.made: list[Communicator] = []

    def communicator(self, unique_id: bytes, world: int, device: int) -> Communicator:
        self.asked.append((unique_id, world))
        assert self.may.wait(PATIENCE_S)
        self.made.append(Communicator())
        return self.made[-1]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    nccl = Nccl()
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(f"{NCCL}.new_id", lambda: ID)
    monkeypatch.setattr(f"{NCCL}.communicator", nccl.communicator)
    return nccl


@pytest.fixture
def transport() -> str:
    return "nccl"


@pytest.fixture
def sender(config: RunConfig, nccl: Nccl) -> Iterator[NcclTransport]:
    sender = NcclTransport(config.weights)
    yield sender
    sender.close()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """What goes on in other processes otherwise."""
    with ThreadPoolExecutor() as beside:
        yield beside


def comes(config: RunConfig, epoch: int, *, ranks: int = 1) -> bytes:
    """A server enters; returns what it is told to know the others by."""
    weights = config.weights
    form = Form(
        transfer=1, epoch=epoch, transport="nccl", host=weights.host, port=weights.store_port, rank=1, world=ranks + 1,
        deadline_s=PATIENCE_S,
    )  # fmt: skip
    return base64.b64decode(meet(form, ranks=ranks, wanted=lambda: True).get(LEARNER))


def test_all_ranks_of_a_group_are_waited_for_and_told_the_same_id(
    config: RunConfig, sender: NcclTransport, nccl: Nccl, beside: ThreadPoolExecutor
) -> None:
    server = beside.submit(comes, config, 1, ranks=2)
    sender.form(1, 3)
    assert server.result() == ID
    assert nccl.asked == [(ID, 3)]


@pytest.mark.parametrize("deadline_s", [SHORT_S])
def test_after_a_group_that_nobody_entered_the_next_one_is_formed(
    config: RunConfig, sender: NcclTransport, nccl: Nccl, beside: ThreadPoolExecutor
) -> None:
    with pytest.raises(TransferError, match="rank 1, 2 of 3 did not enter") as given_up:
        sender.form(1, 3)
    assert given_up.value.absent == (1, 2)
    server = beside.submit(comes, config, 2)
    wait_until(lambda: sender._meeting._store is not None and sender._meeting._store.check(["epoch2/here/1"]))
    sender.form(2, 2)
    assert server.result() == ID
    assert [made.destroyed for made in nccl.made] == [False]


@pytest.mark.parametrize("moment", ["meeting", "connecting"])
def test_forming_a_group_is_broken_off_at_once(
    config: RunConfig, sender: NcclTransport, nccl: Nccl, beside: ThreadPoolExecutor, moment: str
) -> None:
    nccl.may.clear()
    forming = beside.submit(sender.form, 1, 2)
    if moment == "connecting":
        comes(config, 1)
        wait_until(lambda: bool(nccl.asked))

    def ended() -> bool:
        sender.abort()  # it may not have begun yet
        return forming.done()

    wait_until(ended)
    with pytest.raises(TransferError, match="broken off"):
        forming.result()
    nccl.may.set()
    wait_until(lambda: [made.destroyed for made in nccl.made] == [True] * len(nccl.asked))


def test_what_nccl_fails_with_breaks_the_group_off(
    config: RunConfig, sender: NcclTransport, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(f"{NCCL}.communicator", fail)
    server = beside.submit(comes, config, 1)
    with pytest.raises(TransferError, match=r"could not connect to each other: libnccl\.so\.2"):
        sender.form(1, 2)
    server.result()
