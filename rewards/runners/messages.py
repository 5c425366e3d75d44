"""Messages between the rollout server and its reward workers."""

from collections.abc import Sequence
from typing import Final

import msgspec

from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.rewards.base import Episode, FailureReason, RewardFailed
from slipstream.rewards.compose import Scores

START_S: Final = 90.0  # a worker's interpreter and the plug-ins' imports
LENGTH_BYTES: Final = 8  # before each message


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A group to score under these rewards."""

    names: tuple[str, ...]
    episodes: tuple[Episode, ...]


class Scored(msgspec.Struct, frozen=True, tag=True):
    """Reply: the group's scores."""

    scores: Scores


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Reply: the group can't be scored."""

    reason: FailureReason
    detail: str


class WorkerEnded(SlipstreamError):
    """The process has ended, or can't be used further."""


# Not pickle: reading one runs code that its writer chose, and a reward can write into its process's socket.
_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Scored | Failure)
_ENCODE_ERRORS: Final = (TypeError, ValueError, OverflowError, RecursionError)
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def framed(message: bytes) -> bytes:
    """The message behind its length."""
    return len(message).to_bytes(LENGTH_BYTES) + message


def encode_request(names: Sequence[str], episodes: Sequence[Episode]) -> bytes:
    """A group for a worker. Raises: RewardFailed for a task's info beyond JSON values."""
    try:
        return _encoder.encode(Request(tuple(names), tuple(episodes)))
    except _ENCODE_ERRORS as error:
        raise _unreadable(error) from error


def decode_request(message: bytes) -> Request:
    """The group of a message. Raises: RewardFailed."""
    try:
        return _requests.decode(message)
    except _DECODE_ERRORS as error:  # such as a key that is no text
        raise _unreadable(error) from error


def encode_scores(scores: Scores) -> bytes:
    """The reply with a group's scores."""
    return _encoder.encode(Scored(scores))


def encode_failure(failed: RewardFailed) -> bytes:
    """The reply with a failure."""
    # Errors of user code may contain lone surrogates.
    return _encoder.encode(Failure(failed.reason, failed.detail.encode(errors="replace").decode()))


def decode_reply(message: bytes, names: Sequence[str], size: int) -> Scores:
    """The scores of a group of `size` episodes. Raises: RewardFailed; WorkerEnded for an invalid reply."""
    try:
        reply: Scored | Failure = _replies.decode(message)
    except _DECODE_ERRORS as error:  # rewards run in that process, and may write into its socket
        raise WorkerEnded(f"the worker process sent an invalid reply: {error}") from None
    if isinstance(reply, Failure):
        raise RewardFailed(reply.reason, reply.detail)
    if {name: len(column) for name, column in reply.scores.items()} != dict.fromkeys(names, size):
        raise WorkerEnded("the worker process sent an invalid reply: not a score of each reward for each episode")
    return reply.scores


def _unreadable(error: Exception) -> RewardFailed:
    return RewardFailed("reward_error", f"the task's info must be plain JSON values: {format_error(error)}")
