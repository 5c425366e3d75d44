"""Messages between the rollout server and its reward workers."""

from collections.abc import Sequence
from typing import Final

import msgspec

from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.rewards.base import Episode, Result
from slipstream.rewards.compose import Call

START_S: Final = 90.0  # a worker's interpreter and the plug-ins' imports
LENGTH_BYTES: Final = 8  # before each message


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Calls of rewards with the episodes of a group; each call has a reply, in this order."""

    calls: tuple[Call, ...]
    episodes: tuple[Episode, ...]


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The results of one call; or an error instead, that of the request."""

    results: list[Result]
    error: str = ""


class WorkerEnded(SlipstreamError):
    """The process has ended, or can't be used further."""


class UnreadableInfo(SlipstreamError):
    """A task's info is beyond JSON values."""


# Not pickle: reading one runs code that its writer chose, and a reward can write into its process's socket.
_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)
_ENCODE_ERRORS: Final = (TypeError, ValueError, OverflowError, RecursionError)
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def framed(message: bytes) -> bytes:
    """The message behind its length."""
    return len(message).to_bytes(LENGTH_BYTES) + message


def encode_request(calls: Sequence[Call], episodes: Sequence[Episode]) -> bytes:
    """Calls for a worker. Raises: UnreadableInfo."""
    try:
        return _encoder.encode(Request(tuple(calls), tuple(episodes)))
    except _ENCODE_ERRORS as error:
        raise _unreadable(error) from error


def decode_request(message: bytes) -> Request:
    """The calls of a message. Raises: UnreadableInfo."""
    try:
        return _requests.decode(message)
    except _DECODE_ERRORS as error:  # such as a key that is no text
        raise _unreadable(error) from error


def encode_reply(results: list[Result]) -> bytes:
    """The reply with the results of a call."""
    return _encoder.encode(Reply(results))


def encode_error(error: UnreadableInfo) -> bytes:
    """The reply to a request that can't be read."""
    return _encoder.encode(Reply([], str(error)))


def decode_reply(message: bytes, size: int) -> list[Result]:
    """The results of a call with `size` episodes. Raises: UnreadableInfo; WorkerEnded for an invalid reply."""
    try:
        reply = _replies.decode(message)
    except _DECODE_ERRORS as error:  # rewards run in that process, and may write into its socket
        raise WorkerEnded(f"the worker process sent an invalid reply: {error}") from None
    if reply.error:
        raise UnreadableInfo(reply.error)
    if len(reply.results) != size:
        raise WorkerEnded("the worker process sent an invalid reply: not a result for each episode")
    return reply.results


def _unreadable(error: Exception) -> UnreadableInfo:
    return UnreadableInfo(f"the task's info must be plain JSON values: {format_error(error)}")
