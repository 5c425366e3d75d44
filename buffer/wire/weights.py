"""Control messages of the weight channel, between the learner (ROUTER) and the rollout servers (DEALER).

server: Join ─▶  learner: Form(epoch) ─▶  both enter the transfer group
learner: Announce(manifest) ─▶  server: Ready ─▶  learner: [buckets] Sent ─▶  server: Applied ─▶
"""

import math
from collections.abc import Sequence

from slipstream.buffer.wire.messages import Message, Record

ALIGNMENT_BYTES = 16
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TensorInfo(Record, frozen=True):
    """One tensor of a version, under its Hugging Face name."""

    name: str
    dtype: str
    shape: list[int]


def layout(tensors: Sequence[TensorInfo]) -> tuple[list[int], int]:
    """Where each tensor starts in the byte buffer that all of them are sent in, and the buffer's size in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        size = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


class Manifest(Record, frozen=True):
    """What one version consists of, in the order in which it travels."""

    version: int
    tensors: list[TensorInfo]
    bucket_bytes: int
    evaluate: bool
    """Servers stay on this version until its evaluation tickets are worked off."""


class Join(Message, frozen=True):
    """Heartbeat of a server: it wants (to keep) being fed. `epoch` is the transfer group that it is in, -1 for none."""

    run: str
    server: str
    epoch: int
    version: int
    workers: int
    """Engine workers that take part in a transfer (tensor-parallel ranks)."""


class Form(Message, frozen=True):
    """Enter transfer group `epoch` as ranks [rank, rank + workers) of `world`."""

    epoch: int
    transport: str
    host: str
    port: int
    rank: int
    world: int
    deadline_s: float


class Announce(Message, frozen=True):
    """A version is about to be sent through group `epoch`."""

    epoch: int
    manifest: Manifest


class Ready(Message, frozen=True):
    """The server is receiving."""

    version: int


class Sent(Message, frozen=True):
    """All buckets have left the learner: apply them."""

    version: int


class Applied(Message, frozen=True):
    """The engine generates with `version`; generation stood still for `stall_s`."""

    version: int
    stall_s: float


class Failed(Message, frozen=True):
    """The server could not do what was asked of it."""

    stage: str
    detail: str


FromServer = Join | Ready | Applied | Failed
FromLearner = Form | Announce | Sent
