"""Weight updates of the rollout servers, their transports, and the encryption of connections."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.schema.base import Seconds, Section, UserPath

TransportName = Literal["gloo", "nccl", "ipc", "shm", "file", "stream"]
"""Values of `weights.transport` beside `auto`."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A transport of versions. To add one: an entry of `TRANSPORTS` and the two classes that it names.

    Attributes:
        name: its name in messages between learner and rollout servers.
        key: the value of `weights.transport` that chooses it.
        sender: `module:class` of the learner's half, a `Fetched` or `Broadcast` (learner/weights/transport.py).
        receiver: `module:class` of the rollout server's half, a `Receiver` (rollout_servers/weights/receivers.py); none
            where the engine itself receives.
        engine: that engine, as `name` or `name/core`.
        auto: learners that offer it with `weights.transport: auto`.
        broadcast: a version goes to a process group of servers at once; otherwise each fetches it from a source.
        in_place: servers read the learner's own copy of a version, in memory that both share.
        on_device: that copy lies on the learner's GPU, which the servers use too; nothing passes through the host.
        queued: few servers at a time fetch, the others wait for their turn.
        late: name of the transport by which servers fetch that this one does not reach.
        ports: keys of `weights` with the ports on which the learner listens.
    """

    name: str
    key: TransportName
    sender: str
    receiver: str | None = None
    engine: str | None = None
    auto: Literal["any learner", "learner with a GPU", "learner without a GPU"] | None = None
    broadcast: bool = False
    in_place: bool = False
    on_device: bool = False
    queued: bool = False
    late: str | None = None
    ports: tuple[str, ...] = ()

    @property
    def direct(self) -> bool:
        """True if a version goes straight into the engine, between memories of GPUs."""
        return self.receiver is None


_SENDERS, _RECEIVERS = "slipstream.learner.weights.", "slipstream.rollout_servers.weights.receivers:"
TRANSPORTS = {
    transport.name: transport
    for transport in (
        Transport(
            name="nccl",
            key="nccl",
            sender=_SENDERS + "broadcast:NcclTransport",
            engine="vllm/process",
            auto="learner with a GPU",
            broadcast=True,
            late="stream",
            ports=("store_port",),
        ),
        Transport(
            name="nccl_sglang",
            key="nccl",
            sender=_SENDERS + "broadcast:SglangTransport",
            engine="sglang",
            broadcast=True,
            late="stream",
            ports=("store_port",),
        ),
        Transport(
            name="ipc",
            key="ipc",
            sender=_SENDERS + "fetch:IpcTransport",
            receiver=_RECEIVERS + "IpcReceiver",
            in_place=True,
            on_device=True,
            late="shm",
        ),
        Transport(
            name="shm",
            key="shm",
            sender=_SENDERS + "fetch:ShmTransport",
            receiver=_RECEIVERS + "ShmReceiver",
            auto="any learner",
            in_place=True,
        ),
        Transport(
            name="gloo",
            key="gloo",
            sender=_SENDERS + "broadcast:GlooTransport",
            receiver=_RECEIVERS + "GlooReceiver",
            auto="learner without a GPU",
            broadcast=True,
            late="stream",
            ports=("store_port",),
        ),
        Transport(
            name="stream",
            key="stream",
            sender=_SENDERS + "fetch:StreamTransport",
            receiver=_RECEIVERS + "StreamReceiver",
            auto="any learner",
            queued=True,
            ports=("stream_port",),
        ),
        Transport(
            name="file",
            key="file",
            sender=_SENDERS + "fetch:FileTransport",
            receiver=_RECEIVERS + "FileReceiver",
        ),
    )
}
"""All transports by name; `auto` prefers the first."""


def direct_transport(engine: str) -> str | None:
    """Name of the transport straight into an engine (`name` or `name/core`), if it has one."""
    return next((transport.name for transport in TRANSPORTS.values() if transport.engine == engine), None)


class WeightsConfig(Section):
    """The weight channel between learner and rollout servers."""

    transport: Literal["auto", TransportName] = "auto"
    """`auto` picks for each server: `nccl` where learner and vLLM have GPUs, `shm` on the learner's host, else
    `gloo`, or `stream` from a learner with a GPU. `ipc` is for engines on the learner's own GPU, where `slipstream up`
    chooses it. `file` needs a folder that all hosts see; `stream` sends only what changed, for hosts without a
    fabric."""
    host: str = "127.0.0.1"
    """Address at which rollout servers reach the learner (control and transfer)."""
    bind: str = "127.0.0.1"
    """Address on which the learner listens; default: loopback only."""
    control_port: int = Field(default=5556, ge=1, le=65535)
    """Port of the control plane (ZeroMQ)."""
    store_port: int = Field(default=5557, ge=1, le=65535)
    """Port of the transfer groups' rendezvous store."""
    stream_port: int = Field(default=5558, ge=1, le=65535)
    """Port from which `stream` is fetched (ZeroMQ); late joiners of a transfer group use it too."""
    folder: UserPath | None = None
    """Folder of the transport `file`, at the same path on all hosts; unset: `weights` in the run folder."""
    publish_every_steps: int = Field(default=1, ge=1)
    """Steps between two published versions."""
    bucket_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Size of the contiguous pieces in which weights travel."""
    full_every: int = Field(default=20, ge=1)
    """`file` writes every so many versions whole, and between them only what changed; `stream` keeps the
    differences of so many versions, and sends a whole version to servers with an older one; 1: always whole."""
    deadline_s: Seconds = 60.0
    """Deadline of each step of a transfer; a server that misses it is evicted and training goes on."""
    rolling: bool = False
    """Servers apply a version one after another, so that generation pauses on one of them at a time; not with `nccl`,
    where it pauses on all from the first byte on."""
    keep_stale_kv: bool = False
    """Running requests keep the KV cache of the old weights: no pause for its recomputation, but the log-probs of
    their later tokens belong to neither version, and vLLM computes a prompt anew for each answer of its group."""
    verify: bool = True
    """Verify after each update that the engine holds the version: by checksums of its tensors or, where they are not
    accessible, by log-probs of a probe, compared with the learner's. A server that fails is evicted and restarts its
    engine."""

    @property
    def possible(self) -> list[Transport]:
        """Transports that `transport` allows, the preferred one first, without those of late joiners."""
        if self.transport == "auto":
            return [transport for transport in TRANSPORTS.values() if transport.auto is not None]
        return [transport for transport in TRANSPORTS.values() if transport.key == self.transport]

    @property
    def direct(self) -> bool:
        """True if versions may only go straight into engines."""
        return all(transport.direct for transport in self.possible)

    @model_validator(mode="after")
    def _bare_hosts(self) -> Self:
        for host in (self.host, self.bind):
            if not _is_host(host):
                raise ValueError(
                    f"the host {host!r} must be a name or an address without brackets and port, such as ::1"
                )
        return self


def _is_host(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return re.fullmatch(r"[\w.-]+", text) is not None


class SecurityConfig(Section):
    """Encryption and authentication of the ZeroMQ sockets. Redis has its own: `redis.url`, `redis.ca_file`."""

    keys: UserPath | None = None
    """Folder with this host's CURVE keys, made by `slipstream keys new`; unset: plain text, for loopback only."""
