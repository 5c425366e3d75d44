"""What all receivers have in common."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zmq

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import SHARED_MEMORY, layout
from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest, Part, Piece, Pull, Source, TensorInfo
from slipstream.configs import RunConfig
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.rollout_servers.engines.staging import SourceGone, Staging
from slipstream.rollout_servers.weights import receivers as module
from slipstream.rollout_servers.weights.receivers import WINDOW, StreamReceiver, build_receivers
from slipstream.rollout_servers.weights.verify import WrongWeights, verify
from tests.conftest import free_port
from tests.rollout_servers.scripted import ScriptedEngine


def test_deleted_file_raises_source_gone(run_name: str, tmp_path: Path) -> None:
    receiver = build_receivers(SecurityConfig())["file"]
    manifest = Manifest(version=1, tensors=[], bucket_bytes=1 << 16, evaluate=False)
    source = Source(place=str(tmp_path), parts=[Part(name="1", version=1, size_bytes=0)])
    announce = Announce(transfer=1, transport="file", manifest=manifest, deadline_s=1.0, source=source)
    with pytest.raises(SourceGone, match=f"there is no {tmp_path}/1"):
        receiver.receive(announce, Staging(run_name, shared=False))


@pytest.mark.parametrize("transport", ["shm", "file", "stream"])
def test_fetched_transport_refuses_transfer_group(transport: str) -> None:
    receiver = build_receivers(SecurityConfig())[transport]
    form = Form(transfer=1, epoch=1, transport=transport, host="127.0.0.1", port=1, rank=1, world=2, deadline_s=1.0)
    with pytest.raises(TransferError, match=f"transport {transport} has no transfer groups"):
        receiver.enter(form)
    receiver.close()


# --- what a rollout server pulls from the learner's stream ------------------------------------------------------------


PIECE_BYTES = 16
SIZE_BYTES = 3 * WINDOW * PIECE_BYTES


@pytest.fixture
def receiver(run_name: str) -> StreamReceiver:
    return StreamReceiver(SecurityConfig())


def version(*, place: str, parts: list[Part]) -> tuple[Snapshot, Announce]:
    """One of SIZE_BYTES, and its announcement."""
    tensors = [TensorInfo(name="weight", dtype="float32", shape=[SIZE_BYTES // 4])]
    manifest = Manifest(version=1, tensors=tensors, bucket_bytes=PIECE_BYTES, evaluate=False)
    snapshot = Snapshot(manifest, torch.arange(SIZE_BYTES, dtype=torch.int64).to(torch.uint8)).sealed()
    source = Source(place=place, parts=parts)
    return snapshot, Announce(
        transfer=1, transport="stream", manifest=snapshot.manifest, deadline_s=60.0, source=source
    )


@contextmanager
def learner(place: str, answers: Callable[[Pull], list[Pull]]) -> Iterator[list[Pull]]:
    """A stream of the version's bytes that answers a pull with whatever `answers` says; gives what it was asked."""
    asked: list[Pull] = []
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(place)
    content = version(place=place, parts=[])[0].data.numpy().data

    def serve() -> None:
        with router, suppress(zmq.ContextTerminated):
            while True:
                peer, frame = router.recv_multipart()
                asked.append(decode(frame, Pull))
                for pull in answers(asked[-1]):
                    piece = content[pull.offset : pull.offset + pull.size_bytes]
                    router.send_multipart([peer, encode(Piece(part=pull.part, offset=pull.offset)), piece])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        context.term()
        thread.join()


def test_for_a_version_that_is_held_no_connection_is_made(
    receiver: StreamReceiver, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "connect_dealer", pytest.fail)
    snapshot, announce = version(place="tcp://127.0.0.1:1", parts=[])
    staging = Staging(run_name, shared=False)
    staging.begin(announce.manifest).copy_(snapshot.data)
    staging.finish(announce.manifest)
    receiver.receive(announce, staging)
    assert staging.version == 1


def test_trickle_of_pieces_does_not_extend_the_deadline(receiver: StreamReceiver, run_name: str) -> None:
    pause = threading.Event()

    def trickle(pull: Pull) -> list[Pull]:
        pause.wait(0.05)
        return [pull]

    place = f"tcp://127.0.0.1:{free_port()}"
    _, announce = version(place=place, parts=[Part(name="1", version=1, size_bytes=SIZE_BYTES)])
    began = time.monotonic()
    with learner(place, trickle), pytest.raises(TransferError):  # all pieces would take 1.2 s
        receiver.receive(msgspec.structs.replace(announce, deadline_s=0.3), Staging(run_name, shared=False))
    assert time.monotonic() - began < 1.2 + 0.3


def test_lost_pulls_are_repeated_and_duplicates_ignored(
    receiver: StreamReceiver, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.05)
    late: list[Pull] = []

    def answers(pull: Pull) -> list[Pull]:
        if len(asked) <= WINDOW:  # lost, or so it seems
            late.append(pull)
            return []
        return [pull, late.pop()] if late else [pull]

    place = f"tcp://127.0.0.1:{free_port()}"
    snapshot, announce = version(place=place, parts=[Part(name="1", version=1, size_bytes=SIZE_BYTES)])
    staging = Staging(run_name, shared=False)
    with learner(place, answers) as asked:
        receiver.receive(announce, staging)
    assert staging.version == 1
    assert torch.equal(staging.data, snapshot.data)


def test_transfers_use_the_same_threads(receiver: StreamReceiver, run_name: str) -> None:
    threads: list[set[str]] = []

    def answers(pull: Pull) -> list[Pull]:
        running = set()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
                if (task / "comm").read_text().startswith("ZMQ"):
                    running.add(task.name)
        threads.append(running)
        return [pull]

    place = f"tcp://127.0.0.1:{free_port()}"
    _, announce = version(place=place, parts=[Part(name="1", version=1, size_bytes=SIZE_BYTES)])
    with learner(place, answers):
        for _ in range(2):
            receiver.receive(announce, Staging(run_name, shared=False))
    assert threads[0] >= threads[-1]  # some of another test's may have ended


# --- staging keeps one version's bytes, and calls nothing a version that is not what was sent -------------------------


TENSORS = [TensorInfo(name="a", dtype="bfloat16", shape=[3, 5]), TensorInfo(name="b", dtype="float32", shape=[4])]


def manifest(version: int, data: torch.Tensor, tensors: list[TensorInfo] = TENSORS) -> Manifest:
    sums = [
        xxhash.xxh3_64_intdigest(data[offset : offset + info.size_bytes].numpy().data)
        for info, offset in zip(tensors, layout(tensors)[0], strict=True)
    ]
    return Manifest(version=version, tensors=tensors, bucket_bytes=1 << 16, evaluate=False, checksums=sums)


@pytest.fixture
def sent() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, layout(TENSORS)[1], dtype=np.uint8))


@pytest.mark.parametrize("shared", [False, True])
def test_a_version_is_held_once_its_bytes_are_verified(run_name: str, shared: bool, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=shared)
    staging.begin(manifest(4, sent)).copy_(sent)
    assert staging.version == -1
    staging.finish(manifest(4, sent))
    assert staging.version == 4
    found = dict(staging.named_tensors(manifest(4, sent)))
    assert torch.equal(found["a"].view(torch.int16), sent[:30].view(torch.int16).view(3, 5))
    assert torch.equal(found["b"].view(torch.int32), sent[32:].view(torch.int32))
    files = list(SHARED_MEMORY.glob(f"*{run_name}*"))
    assert [file.read_bytes() for file in files] == ([sent.numpy().tobytes()] if shared else [])
    assert not shared or files == [staging.path]
    staging.abandon()


def test_size_change_frees_previous_memory(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=True)
    staging.begin(manifest(1, sent))
    path = staging.path
    assert staging.begin(manifest(2, sent[:32], TENSORS[:1])).numel() == layout(TENSORS[:1])[1]
    assert staging.path != path
    assert list(SHARED_MEMORY.glob(f"*{run_name}*")) == [staging.path]
    staging.abandon()


def test_the_next_version_lies_over_the_last_in_the_same_memory(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=True)
    staging.begin(manifest(1, sent)).copy_(sent)
    staging.finish(manifest(1, sent))
    path = staging.path
    data = staging.begin(manifest(2, sent))
    assert torch.equal(data, sent)
    assert (staging.version, staging.path) == (-1, path)
    staging.abandon()
    assert not path.exists()


def test_damage_is_named_and_leaves_no_version(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=False)
    data = staging.begin(manifest(1, sent)).copy_(sent)
    data[40] ^= 1
    with pytest.raises(TransferError, match=r"version 1\b.*\bb\b"):
        staging.finish(manifest(1, sent))
    assert staging.version == -1


@pytest.mark.parametrize(("byte", "name"), [(0, "a"), (100, "a"), (1999, "a"), (2000, "b"), (2027, "b")])
def test_difference_to_other_bytes_of_same_version_is_refused(run_name: str, byte: int, name: str) -> None:
    """Neither in a tensor that they change, nor in one that they leave as it is."""
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[1000]), TensorInfo(name="b", dtype="float32", shape=[7])]
    versions = [torch.arange(layout(tensors)[1]).to(torch.uint8)]
    for step in (100, 77):
        versions.append(versions[-1].clone())
        versions[-1][:2000:step] += 1
    staging = Staging(run_name, shared=False)
    staging.begin(manifest(1, versions[0], tensors)).copy_(versions[0])
    staging.finish(manifest(1, versions[0], tensors))
    staging.data[byte] ^= 1
    last = manifest(3, versions[-1], tensors)
    staging.begin(last)
    for base, (old, new) in enumerate(itertools.pairwise(versions), start=1):
        frame = delta.encode(old.numpy(), new.numpy(), tensors, base=base, version=base + 1)
        staging.change(memoryview(frame), last, held=base)
    with pytest.raises(TransferError, match=f"or version 1 here is another one: checksum of {name} differs"):
        staging.finish(last)
    assert staging.version == -1
    staging.begin(last).copy_(versions[0])
    with pytest.raises(TransferError, match=r"version 3\b.*\ba\b"):  # it came whole
        staging.finish(last)


def test_abandoned_memory_stays_writable_and_unused(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=True)
    given_up = staging.begin(manifest(1, sent))
    staging.abandon()
    staging.begin(manifest(1, sent)).copy_(sent)
    given_up.fill_(7)
    staging.finish(manifest(1, sent))
    staging.abandon()


# --- which log-probs of a probe show that an engine holds a version ---------------------------------------------------


OF_SMOLLM2 = [-15.0] * 31
"""What SmolLM2-135M thinks of random tokens, on average."""


async def probed(dtype: str, *, off: float, expected: list[float]) -> None:
    """Verifies a version whose probe's log-probs an engine finds larger and smaller by `off`, in turn."""
    config = RunConfig.model_validate({"model": {"build": "digits", "dtype": dtype}})
    engine = ScriptedEngine(logprobs=[each + off * (-1) ** place for place, each in enumerate(expected)])
    probe = w.Probe(token_ids=list(range(len(expected) + 1)), logprobs=expected)
    manifest = w.Manifest(version=1, tensors=[], bucket_bytes=1, evaluate=False, probe=probe)
    assert (await verify(engine, manifest, config.weights, dtype=config.model.dtype_here)).how == w.BY_PROBE


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.087), ("float32", 3e-5)])
async def test_rounding_of_unlikely_tokens_passes_verification(dtype: str, rounding: float) -> None:
    await probed(dtype, off=rounding, expected=OF_SMOLLM2)


@pytest.mark.parametrize(
    ("dtype", "off"),
    # One layer without its queries; the version before, at a learning rate of 1e-5.
    [("bfloat16", 0.38), ("float32", 0.013)],
)
async def test_wrong_weights_of_a_large_model_are_found_out(dtype: str, off: float) -> None:
    with pytest.raises(WrongWeights, match=rf"off by {off / 15:.2g} of their size"):
        await probed(dtype, off=off, expected=OF_SMOLLM2)


@pytest.mark.parametrize("expected", [[], [0.0], [float("nan")]])
async def test_a_probe_that_says_nothing_verifies_nothing(expected: list[float]) -> None:
    with pytest.raises(WrongWeights):
        await probed("bfloat16", off=0.0, expected=expected)
