"""msgpack frames: typed, named fields, a schema version, and one error for whatever is wrong with a frame."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire.messages import (
    LOGPROB_DTYPE,
    MASK_DTYPE,
    MOST_REWARD,
    SCHEMA_VERSION,
    TOKEN_DTYPE,
    Group,
    Message,
    Trajectory,
)
from slipstream.configs.runtime.errors import SlipstreamError

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class FrameError(SlipstreamError):
    """A frame is not a message of the expected kind."""


def encode(message: Message) -> bytes:
    """The message as one frame."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview, kind: Any) -> Any:
    """The message in `frame`, of the type (or union of types) `kind`.

    Raises: FrameError when the frame is no msgpack, lacks a field, has one of a wrong type, or another schema version.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message = decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None
    if message.v != SCHEMA_VERSION:
        raise FrameError(f"schema version {message.v}, expected {SCHEMA_VERSION}: both sides must run the same release")
    return message


def decode_group(frame: bytes | memoryview) -> Group:
    """The group in `frame`, with its arrays checked against each other.

    Raises: FrameError when an array's length doesn't fit the others, a span lies outside the trajectory, or a reward is
    not finite or beyond MOST_REWARD.
    """
    group: Group = decode(frame, Group)
    for number, trajectory in enumerate(group.trajectories):
        tokens = len(trajectory.action_mask)
        if len(trajectory.token_ids) != 4 * tokens or len(trajectory.behaviour_logprobs) != 4 * tokens:
            raise FrameError(f"group {group.id}, trajectory {number}: arrays of different lengths")
        for span in trajectory.spans:
            if not 0 <= span.start < span.end <= tokens:
                raise FrameError(f"group {group.id}, trajectory {number}: a version span outside its {tokens} tokens")
        if not _is_bounded(trajectory.reward):
            raise FrameError(
                f"group {group.id}, trajectory {number}: reward {trajectory.reward} is not within ±{MOST_REWARD:g}"
            )
    if group.greedy_reward is not None and not _is_bounded(group.greedy_reward):
        raise FrameError(f"group {group.id}: greedy_reward {group.greedy_reward} is not within ±{MOST_REWARD:g}")
    return group


def _is_bounded(reward: float) -> bool:
    return abs(reward) <= MOST_REWARD  # NaN is not


def oldest_version(group: Group) -> int:
    """The oldest policy version among the action tokens of a group. Raises: ValueError if it has none."""
    return min(span.version for trajectory in group.trajectories for span in trajectory.spans)


def token_ids(trajectory: Trajectory) -> NDArray[np.int32]:
    """Token ids, shape [T], read-only."""
    return np.frombuffer(trajectory.token_ids, dtype=TOKEN_DTYPE)


def action_mask(trajectory: Trajectory) -> NDArray[np.uint8]:
    """1 where the policy chose the token, shape [T], read-only."""
    return np.frombuffer(trajectory.action_mask, dtype=MASK_DTYPE)


def behaviour_logprobs(trajectory: Trajectory) -> NDArray[np.float32]:
    """log μ of the chosen tokens, shape [T], read-only."""
    return np.frombuffer(trajectory.behaviour_logprobs, dtype=LOGPROB_DTYPE)
