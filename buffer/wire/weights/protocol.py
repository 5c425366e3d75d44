"""Control messages of the weight channel, between the learner (ROUTER) and the rollout servers (DEALER).

broadcast (gloo, nccl):       Form ─▶ Entered, then Announce ─▶ Ready, Sending and [buckets] ─▶ Loaded, Apply ─▶ Applied
fetched (ipc, shm, file, stream):                  Announce(source) ─▶ Ready, [bytes] ─▶ Loaded, Apply ─▶ Applied

`stream` admits few fetches at a time: the others get Queued first, and the deadlines of an Announce start with it.

The learner sends requests, the server answers. Each request carries the number of its transfer and each answer repeats
it, so that an answer to an earlier request, perhaps of an earlier learner, is recognised.
"""

import math

import msgspec

from slipstream.buffer.wire.messages import Count, Message, Name, Record

BY_CHECKSUM, BY_PROBE, NOT_VERIFIED = "checksum", "probe", "nothing"
"""Methods by which a server verifies the weights of its engine."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TensorInfo(Record, frozen=True):
    """One tensor of a version, under its Hugging Face name."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def size_bytes(self) -> int:
        """Size in bytes, without padding."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def item_bytes(self) -> int:
        """Size of one element in bytes."""
        return _ITEM_BYTES[self.dtype]


class Probe(Record, frozen=True):
    """Tokens and their log-probs under a version; an engine with these weights must agree."""

    token_ids: list[int]
    logprobs: list[float]
    """log-prob of each token but the first, given those before it, at temperature 1."""


AdapterConfig = dict[str, bool | int | float | str | list[str]]
"""Content of peft's adapter_config.json."""


class Manifest(Record, frozen=True):
    """Tensors and checksums of one version, in the order in which they are sent."""

    version: int
    tensors: list[TensorInfo]
    bucket_bytes: int
    evaluate: bool
    """Servers stay on this version until its evaluation tickets are worked off."""
    checksums: list[int] = msgspec.field(default_factory=list)
    """xxh3 (64 bits) of each tensor's bytes; empty where the bytes never lie in host memory (nccl, ipc)."""
    probe: Probe | None = None
    adapter: AdapterConfig | None = None
    """Set if `tensors` are an adapter's, under peft's names; None: they are all of the model."""


class DeviceMemory(Record, frozen=True):
    """Memory of a GPU that other processes may open."""

    gpu: str
    """Its identity, the same in all processes."""
    handle: bytes
    """CUDA's, of the whole memory (cuIpcGetMemHandle)."""


class Part(Record, frozen=True):
    """A piece of a source: a whole version (`base` is None), or what changed in it since version `base`."""

    name: str
    version: int
    size_bytes: int
    base: int | None = None
    sums: list[int] = msgspec.field(default_factory=list)
    """ipc: of each bucket, as `models.device_memory.sums_by_bucket` computes them."""
    memory: DeviceMemory | None = None
    """ipc: where the bytes lie; None: in the segment `name`, of a learner without a GPU."""


class Source(Record, frozen=True):
    """The source of a version: parts that are applied in their order."""

    place: str
    """shm, ipc: the folder of the segment; file: the shared folder; stream: the endpoint."""
    parts: list[Part]


class Join(Message, frozen=True):
    """Heartbeat of a server: it subscribes to versions."""

    run: str
    server: str
    incarnation: str
    """Another one after each start of the engine: whatever it held before is gone. Empty while there is none."""
    version: int
    """The version that generates."""
    staged: int
    """The version whose bytes it keeps, to which the next may be sent as a difference; -1 for none."""
    host: str
    """Servers and learners of the same name share memory."""
    transports: list[str]
    """Transports that it can receive through."""
    workers: int
    """Engine workers that take part in a transfer that goes straight into the engine (nccl)."""
    device: str = ""
    """Of the engine: identity of its GPU, or `host` again; servers and learners of the same one share its memory."""
    holding: bool = False
    """The server keeps its version for an evaluation; the next heartbeat without it follows at once when that ends."""


class Leave(Message, frozen=True):
    """The server ends as requested; no wait for it is needed."""


class Queued(Message, frozen=True):
    """The server will fetch a version once others have; no deadline runs meanwhile."""

    ahead: int
    """Servers before it in the queue."""


class Form(Message, frozen=True):
    """Enter transfer group `epoch` as ranks [rank, rank + workers) of `world`."""

    transfer: int
    epoch: int
    transport: str
    host: str
    port: int
    rank: int
    world: int
    deadline_s: float
    bucket_bytes: int = 0
    """nccl: bucket size that all ranks use; elsewhere the manifest has it."""


class Entered(Message, frozen=True):
    """The server is in the transfer group."""

    transfer: int


class Announce(Message, frozen=True):
    """A version is there: through transfer group `epoch`, or to be fetched from `source`."""

    transfer: int
    transport: str
    manifest: Manifest
    deadline_s: float
    epoch: int | None = None
    source: Source | None = None


class Ready(Message, frozen=True):
    """The server is receiving."""

    transfer: int
    version: int


class Sending(Message, frozen=True):
    """All of the group are ready: the first bucket leaves the learner."""

    transfer: int
    version: int


class Loaded(Message, frozen=True):
    """The server has all bytes of the version, and their checksums are right."""

    transfer: int
    version: int


class Apply(Message, frozen=True):
    """Put the version that was loaded into the engine."""

    transfer: int
    version: int


class Applied(Message, frozen=True):
    """The engine generates with `version`; generation stood still for `stall_s`."""

    transfer: int
    version: int
    stall_s: float
    verified: str
    """The method by which the server verified the weights of its engine."""
    deviation: float = 0.0
    """Sum of |Δ| of the probe's log-probs, as a share of the sum of |log-prob|."""


class Failed(Message, frozen=True):
    """The server could not fulfil a request."""

    transfer: int
    stage: str
    detail: str
    gone: bool = False
    """True if the source no longer exists or was overwritten."""


class Ping(Message, frozen=True):
    """Sent to a silent server, to detect a dead connection."""


class Evicted(Message, frozen=True):
    """The server is no member any more; it may join again after `retry_s`."""

    reason: str
    retry_s: float


FromServer = Join | Leave | Entered | Ready | Loaded | Applied | Failed
FromLearner = Queued | Form | Announce | Sending | Apply | Ping | Evicted


class Pull(Message, frozen=True):
    """A server wants bytes [offset, offset + size_bytes) of a part."""

    part: Name
    offset: int
    size_bytes: Count


class Piece(Message, frozen=True):
    """The bytes at `offset`, in the next frame."""

    part: Name
    offset: int


class Gone(Message, frozen=True):
    """The learner has no such part (any more)."""

    part: Name


FromStream = Piece | Gone
