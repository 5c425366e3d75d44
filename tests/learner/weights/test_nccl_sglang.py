"""Versions leave for SGLang's process group in its packed format, or the broadcast ends in time."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import tensor_buckets
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs import RunConfig
from slipstream.learner.weights.broadcast import NEVER, ON_ERRORS, SglangTransport, process_group
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.rollout_servers.engines.staging import join_rendezvous
from tests.learner.weights.learner import PATIENCE_S, wait_until

TRANSPORT = "slipstream.learner.weights.broadcast"
PATIENCE = timedelta(seconds=PATIENCE_S)
SHORT_S = 0.3


@pytest.fixture
def transport() -> str:
    return "nccl"


@pytest.fixture
def sender(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangTransport]:
    """With gloo in NCCL's place."""
    monkeypatch.setattr(
        f"{TRANSPORT}.process_group",
        lambda store, world: ProcessGroupGloo(PrefixStore("cpu/", store), 0, world, PATIENCE),
    )
    sender = SglangTransport(config.weights)
    yield sender
    sender.close()


def enter(config: RunConfig, epoch: int) -> Any:
    """A worker of SGLang's enters by torch's own helper, which puts the group's name before its keys twice."""
    weights = config.weights
    form = Form(
        transfer=1, epoch=epoch, transport="nccl_sglang", host=weights.host, port=weights.store_port, rank=1, world=2,
        deadline_s=PATIENCE_S,
    )  # fmt: skip
    join_rendezvous(form, ranks=1, left=threading.Event())
    store: Any = TCPStore(weights.host, weights.store_port, 2, False, PATIENCE)
    for prefix in (f"epoch{epoch}", f"epoch{epoch}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, 1, 2, PATIENCE)


def receive(group: Any, manifest: Manifest) -> dict[str, Tensor]:
    """Takes a version in, as SGLang does: a bucket is one broadcast, whose bytes are the tensors' one by one."""
    received: dict[str, Tensor] = {}
    for bucket in tensor_buckets(manifest.tensors, manifest.bucket_bytes):
        flat, end = torch.empty(sum(tensor.size_bytes for tensor in bucket), dtype=torch.uint8), 0
        group.broadcast(flat, 0).wait()
        for tensor in bucket:
            part, end = flat[end : end + tensor.size_bytes], end + tensor.size_bytes
            received[tensor.name] = part.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
    return received


def snapshot() -> Snapshot:
    """A version of some small and some large tensors, which make several buckets."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(200, 100), nn.Linear(7, 3), nn.Linear(150, 130))
    taker = SnapshotTaker(model, dtype=torch.float32, bucket_bytes=1 << 16, device=torch.device("cpu"))
    taken = taker.take(3, evaluate=False, keep=True)
    assert taken is not None
    return taken


def test_sglang_tensors_arrive_exactly_through_successive_groups(
    config: RunConfig, sender: SglangTransport, beside: ThreadPoolExecutor
) -> None:
    sent = snapshot()
    assert len(tensor_buckets(sent.manifest.tensors, sent.manifest.bucket_bytes)) > 2
    for epoch in (1, 2):
        entering = beside.submit(enter, config, epoch)
        sender.form(epoch, 2)
        group = entering.result()
        for _ in range(2):
            receiving = beside.submit(receive, group, sent.manifest)
            sender.send(sent)
            received = receiving.result()
            assert received.keys() == {name for name, _ in sent.named_tensors()}
            assert all(torch.equal(received[name], tensor) for name, tensor in sent.named_tensors())


class Stuck:
    """A group in which nothing moves until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def broadcast(self, packed: Tensor, root: int) -> Any:
        assert self.aborted.wait(PATIENCE_S)
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def stuck(config: RunConfig, monkeypatch: pytest.MonkeyPatch, sender: SglangTransport) -> Stuck:
    """What `sender` has formed."""
    stuck = Stuck()
    monkeypatch.setattr(f"{TRANSPORT}.process_group", lambda store, world: stuck)
    sender.form(1, 1)
    return stuck


@pytest.mark.parametrize("deadline_s", [SHORT_S])
def test_unreceived_sglang_broadcast_ends_at_deadline(sender: SglangTransport, stuck: Stuck) -> None:
    with pytest.raises(TransferError, match=r"weights\.deadline_s"):
        sender.send(snapshot())
    assert stuck.aborted.wait(PATIENCE_S)
    with pytest.raises(TransferError, match="version 3"):
        sender.send(snapshot())


def test_abort_ends_broadcast_at_once(sender: SglangTransport, stuck: Stuck, beside: ThreadPoolExecutor) -> None:
    sending = beside.submit(sender.send, snapshot())

    def ended() -> bool:
        sender.abort()  # it may not have begun yet
        return sending.done()

    wait_until(ended)
    with pytest.raises(TransferError, match="version 3"):
        sending.result()
    assert stuck.aborted.is_set() or stuck.aborted.wait(PATIENCE_S)


def test_nccl_error_fails_the_broadcast(sender: SglangTransport, stuck: Stuck) -> None:
    stuck.abort()
    with pytest.raises(TransferError, match="NCCL"):
        sender.send(snapshot())


@pytest.mark.parametrize("before", [None, "1"])
def test_dead_peer_does_not_kill_learner(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """By torch's default it would: the group's own thread ends the process, when NCCL tells it of the death."""
    monkeypatch.delenv(ON_ERRORS, raising=False)
    if before is not None:
        monkeypatch.setenv(ON_ERRORS, before)
    made: list[tuple[Any, ...]] = []

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, store: PrefixStore, rank: int, world: int, options: Any) -> None:
            store.set("0", "here")
            made.append((rank, world, options._timeout, os.environ[ON_ERRORS]))

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    keys = HashStore()
    process_group(PrefixStore("epoch7/", keys), 3)
    assert made == [(0, 3, NEVER, "0")]
    assert os.environ.get(ON_ERRORS) == before
    assert keys.check(["epoch7//cuda//0"])
