"""The replay buffer and the Redis that it stands on."""

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from slipstream.configs.schema.base import Section


class RedisConfig(Section):
    """The durable store."""

    url: str | None = None
    """`redis://host:port/db` or `unix:///path` of a running server; unset: `slipstream up` starts an embedded one."""
    port: int = Field(default=6399, ge=1, le=65535)
    """Loopback port of the embedded server."""
    fsync: Literal["everysec", "always"] = "everysec"
    """The embedded server's AOF: `everysec` may lose about a second on power loss, `always` nothing (and is slow)."""
    deadline_s: float = Field(default=10.0, gt=0)
    """How long a command may take before the caller gives up."""

    @model_validator(mode="after")
    def _known_scheme(self) -> Self:
        if self.url is not None and urlsplit(self.url).scheme not in {"redis", "rediss", "unix"}:
            raise ValueError(f"redis.url={self.url!r} must start with redis://, rediss:// or unix://")
        return self

    @property
    def address(self) -> str:
        """The URL that clients connect to."""
        return self.url or f"redis://127.0.0.1:{self.port}/0"


class BufferConfig(Section):
    """The service that issues tickets, stores groups and leases them."""

    bind: str = "tcp://127.0.0.1:5555"
    """Where the service listens (loopback unless told otherwise)."""
    endpoint: str = "tcp://127.0.0.1:5555"
    """Where rollout servers and learners find it."""
    max_staleness: int = Field(default=4, ge=0)
    """Most versions that may lie between the oldest action token of a trajectory and the version that consumes it."""
    ticket_deadline_s: float = Field(default=600.0, gt=0)
    """A ticket that is not delivered by then is void and its task is issued again."""
    lease_deadline_s: float = Field(default=600.0, gt=0)
    """Leased groups that are not trained by then return to `ready`."""
    max_message_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """A larger ZeroMQ message is refused before it is read."""
    reply_deadline_s: float = Field(default=30.0, gt=0)
    """How long a client waits for the service before it says so and exits."""
