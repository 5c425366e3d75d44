"""How new weights reach the rollout servers."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class WeightsConfig(Section):
    """The weight channel between learner and rollout servers."""

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl where learner and engine have GPUs, gloo otherwise."""
    host: str = "127.0.0.1"
    """Address at which rollout servers reach the learner (control and transfer)."""
    bind: str = "127.0.0.1"
    """Address on which the learner listens (loopback unless told otherwise)."""
    control_port: int = Field(default=5556, ge=1, le=65535)
    """Port of the control plane (ZeroMQ)."""
    store_port: int = Field(default=5557, ge=1, le=65535)
    """Port of the transfer groups' rendezvous store."""
    publish_every_steps: int = Field(default=1, ge=1)
    """Steps between two published versions."""
    bucket_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Size of the contiguous pieces in which weights travel."""
    deadline_s: float = Field(default=60.0, gt=0)
    """How long any step of a transfer may take; a server that misses it is evicted and training goes on."""
