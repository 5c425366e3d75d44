"""Messages of the weight transport `stream`, between the learner (ROUTER) and a rollout server (DEALER).

server: Pull ─▶ learner: Piece, followed by a frame of bytes. A server has a bounded number of pulls under way, so that
nothing but what it has room for is on the way to it.
"""

from slipstream.buffer.wire.messages import Count, Message, Name


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
