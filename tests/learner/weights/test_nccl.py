"""A group over NCCL is formed when all are there, or given up; neither costs the learner its port, or an engine."""

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.buffer.wire.weights.fabric import LEARNER, TransferError
from slipstream.buffer.wire.weights.protocol import Form
from slipstream.configs import RunConfig
from slipstream.learner.weights.broadcast import NcclTransport
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.rollout_servers.engines.staging import join_rendezvous
from tests.learner.weights.learner import PATIENCE_S, wait_until

NCCL = "slipstream.learner.weights.broadcast"
ID = bytes(range(128))
SHORT_S = 0.3


class Communicator:
    """Where NCCL's would be."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.destroyed = False
        self.buckets = 0
        self.in_broadcast: Callable[[], None] = lambda: None

    def broadcast(self, bucket: Tensor, src: int) -> None:
        assert not self.destroyed, "NCCL frees it at this moment"
        self.buckets += 1
        self.in_broadcast()

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
        self.made.append(Communicator(device))
        return self.made[-1]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    nccl = Nccl()
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


def comes(config: RunConfig, epoch: int, *, ranks: int = 1) -> bytes:
    """A server enters; returns what it is told to know the others by."""
    weights = config.weights
    form = Form(
        transfer=1, epoch=epoch, transport="nccl", host=weights.host, port=weights.store_port, rank=1, world=ranks + 1,
        deadline_s=PATIENCE_S,
    )  # fmt: skip
    return base64.b64decode(join_rendezvous(form, ranks=ranks, left=threading.Event()).get(LEARNER))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sender runs without a GPU."""
    sender = "vllm.distributed.weight_transfer.packed_tensor"
    monkeypatch.setattr(f"{sender}._get_streams", lambda *_: [SimpleNamespace(synchronize=lambda: None)] * 2)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())


def snapshot(tensors: int) -> Snapshot:
    """A version of so many tensors, each of which fills a bucket."""
    model = nn.Sequential(*(nn.Linear(200, 100, bias=False) for _ in range(tensors)))
    taker = SnapshotTaker(model, dtype=torch.float32, bucket_bytes=1 << 16, device=torch.device("cpu"))
    taken = taker.take(3, evaluate=False, keep=True)
    assert taken is not None
    return taken


def test_all_ranks_are_gathered_and_get_same_id(
    config: RunConfig, sender: NcclTransport, nccl: Nccl, beside: ThreadPoolExecutor
) -> None:
    server = beside.submit(comes, config, 1, ranks=2)
    sender.form(1, 3)
    assert server.result() == ID
    assert nccl.asked == [(ID, 3)]


@pytest.mark.parametrize("deadline_s", [SHORT_S])
def test_next_group_forms_after_absent_ranks(
    config: RunConfig, sender: NcclTransport, nccl: Nccl, beside: ThreadPoolExecutor
) -> None:
    with pytest.raises(TransferError) as given_up:
        sender.form(1, 3)
    assert given_up.value.absent == (1, 2)
    server = beside.submit(comes, config, 2)
    wait_until(lambda: sender._rendezvous._store is not None and sender._rendezvous._store.check(["epoch2/here/1"]))
    sender.form(2, 2)
    assert server.result() == ID
    assert [made.destroyed for made in nccl.made] == [False]


@pytest.mark.parametrize("moment", ["gathering", "connecting"])
def test_abort_ends_forming_at_once(
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
    with pytest.raises(TransferError, match="aborted"):
        forming.result()
    nccl.may.set()
    wait_until(lambda: [made.destroyed for made in nccl.made] == [True] * len(nccl.asked))


def test_nccl_error_fails_forming(
    config: RunConfig, sender: NcclTransport, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(f"{NCCL}.communicator", fail)
    server = beside.submit(comes, config, 1)
    with pytest.raises(TransferError, match=r"libnccl\.so\.2"):
        sender.form(1, 2)
    server.result()


VLLM_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@VLLM_WARNS
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("moment", [0, 2, 6], ids=["before", "in-the-middle", "in-the-last-bucket"])
def test_aborted_communicator_sends_no_more_buckets(
    config: RunConfig, sender: NcclTransport, nccl: Nccl, beside: ThreadPoolExecutor, moment: int
) -> None:
    server = beside.submit(comes, config, 1)
    sender.form(1, 2)
    server.result()
    (group,) = nccl.made

    def broken_off() -> None:
        if group.buckets == moment:
            sender.abort()

    group.in_broadcast = broken_off
    broken_off()
    with pytest.raises(TransferError, match="version 3"):
        sender.send(snapshot(tensors=6))
    assert (group.buckets, group.destroyed) == (moment, True)


@VLLM_WARNS
@pytest.mark.usefixtures("streams")
def test_nccl_uses_learner_device_in_any_thread(
    config: RunConfig, nccl: Nccl, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_thread = threading.local()  # as in CUDA

    @contextmanager
    def device(number: int) -> Iterator[None]:
        before, of_thread.device = getattr(of_thread, "device", 0), number
        yield
        of_thread.device = before

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: getattr(of_thread, "device", 0))
    monkeypatch.setattr("torch.cuda.device", device)
    with device(1):
        sender = NcclTransport(config.weights)
    server = beside.submit(comes, config, 1)
    beside.submit(sender.form, 1, 2).result()
    server.result()
    (group,) = nccl.made
    used: list[int] = []
    group.in_broadcast = lambda: used.append(torch.cuda.current_device())
    beside.submit(sender.send, snapshot(tensors=2)).result()
    assert (group.device, used) == (1, [1, 1])
    sender.close()
