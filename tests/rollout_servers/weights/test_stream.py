"""What a rollout server pulls from the learner's stream."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.protocol import Announce, Manifest, Part, Piece, Pull, Source, TensorInfo
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights import receivers as module
from slipstream.rollout_servers.weights.receivers import WINDOW, StreamReceiver
from tests.conftest import free_port

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
