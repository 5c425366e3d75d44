"""What the bench tells its processes, and what they answer."""

from slipstream.buffer.wire.messages import Message


class Here(Message, frozen=True):
    """The process is up, or has done what it was told."""


class Broadcast(Message, frozen=True):
    """Take part in a bare gloo broadcast of so many bytes."""

    config: str
    """As JSON; the first broadcast of a configuration connects."""
    size_bytes: int


class Received(Message, frozen=True):
    """A version has arrived."""

    receive_s: float
    """All of it."""
    check_s: float
    """Comparing checksums, once all bytes are there."""
    cpu_s: float
    """Of the process, meanwhile: unlike the others it hardly depends on what else the machine does."""


class Follow(Message, frozen=True):
    """Be a rollout server of this run."""

    config: str
    """As JSON."""


class Leave(Message, frozen=True):
    """Be none any more."""


class Generate(Message, frozen=True):
    """Count the tokens of the answers that are finished within the next seconds."""

    seconds: float


class Generated(Message, frozen=True):
    """What was generated."""

    tokens: int
    seconds: float
