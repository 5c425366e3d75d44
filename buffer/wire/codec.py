"""Encoding and decoding of msgpack frames: typed, named fields, a schema version, FrameError for invalid frames."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from slipstream.buffer.wire.messages import (
    LOGPROB_DTYPE,
    MASK_DTYPE,
    MOST_REWARD,
    SCHEMA_VERSION,
    TOKEN_DTYPE,
    Group,
    KeptTokens,
    Message,
    Trajectory,
)
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.models.images import MOST_IMAGE_BYTES

COMPRESSED_FROM_BYTES = 4096
"""Smaller groups are not compressed: it would not be worth the time."""
COMPRESSION_LEVEL = 1
"""Of zstd. Random mantissas of log-probabilities bound what higher levels gain: 1.4 to 1.9 times smaller at 350 MB/s,
at level 6 1.6 to 1.9 times at 100 MB/s."""
MOST_GROUP_BYTES = 1 << 30
"""Bound on a decompressed group, because a small frame may claim any size."""

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class FrameError(SlipstreamError):
    """A frame is not a message of the expected kind.

    Attributes:
        reason: the reason code under which such a group is counted.
    """

    reason = "malformed"


class InvalidRewardError(FrameError):
    """A group with a reward or a score that is not finite, or beyond MOST_REWARD."""

    reason = "invalid_reward"


class SchemaVersionError(FrameError):
    """A frame with another schema version.

    Attributes:
        version: the sender's schema version.
        request: number of the sender's request, 0 for messages without one.
    """

    def __init__(self, version: int, request: int) -> None:
        super().__init__(
            f"schema version {version} of the wire, expected {SCHEMA_VERSION}: run the same release on both sides"
        )
        self.version = version
        self.request = request


class _Envelope(msgspec.Struct):
    """The fields that messages of all releases share."""

    type: str
    v: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    request: int = 0


_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Message) -> bytes:
    """The message as one frame."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview, kind: Any) -> Any:
    """The message in `frame`, of the type (or union of types) `kind`.

    Raises: FrameError when the frame is no msgpack, lacks a field or has one of a wrong type; SchemaVersionError when
    it has another schema version.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message = decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _require_version(frame)
        raise FrameError(f"not a message: {error}") from None
    if message.v != SCHEMA_VERSION:
        raise SchemaVersionError(message.v, getattr(message, "request", 0))
    return message


def _require_version(frame: bytes | memoryview) -> None:
    """Raises: SchemaVersionError when a frame that can't be decoded is a message of another release."""
    try:
        envelope = _envelopes.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if envelope.v != SCHEMA_VERSION:
        raise SchemaVersionError(envelope.v, envelope.request)


def encode_group(group: Group) -> bytes:
    """The group as one frame, compressed unless it is small."""
    frame = encode(group)
    if len(frame) < COMPRESSED_FROM_BYTES:
        return frame
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True).compress(frame)


def _decompressed(frame: bytes | memoryview) -> bytes | memoryview:
    """Raises: FrameError when a compressed frame is damaged or holds more than MOST_GROUP_BYTES."""
    if bytes(frame[: len(zstandard.FRAME_HEADER)]) != zstandard.FRAME_HEADER:
        return frame
    try:
        size_bytes = zstandard.frame_content_size(frame)
        if not 0 < size_bytes <= MOST_GROUP_BYTES:  # -1: the frame does not give it
            raise FrameError(f"a compressed group of {size_bytes} bytes, the most are {MOST_GROUP_BYTES}")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise FrameError(f"not a compressed group: {error}") from None


def decode_group(frame: bytes | memoryview) -> Group:
    """The group in `frame`, compressed or not, with its arrays checked against each other.

    Raises: FrameError when it can't be decompressed or decoded, an array's length doesn't fit the others, a span lies
    outside the trajectory, trajectories of one episode differ in reward or scores, an image is missing or larger than
    MOST_IMAGE_BYTES, or more episodes are lost than missing; InvalidRewardError when a reward or a score is not finite
    or beyond MOST_REWARD.
    """
    group: Group = decode(_decompressed(frame), Group)
    episodes: dict[int, Trajectory] = {}
    for number, trajectory in enumerate(group.trajectories):
        unbounded = next((term for term in _rewards(trajectory) if not _is_bounded(term[1])), None)
        if unbounded is not None:
            raise _invalid_reward(f"{group.id}, trajectory {number}", *unbounded)
        problem = trajectory_problem(trajectory)
        first = episodes.setdefault(trajectory.episode, trajectory)
        if (first.reward, first.scores) != (trajectory.reward, trajectory.scores):
            problem = problem or f"reward or scores differ from those of its episode {trajectory.episode}"
        missing = [name for name in trajectory.images if name not in group.images]
        if missing:
            problem = problem or f"its group lacks the image {missing[0]}"
        if problem:
            raise FrameError(f"group {group.id}, trajectory {number}: {problem}")
    large = next((name for name, image in group.images.items() if len(image) > MOST_IMAGE_BYTES), None)
    if large is not None:
        raise FrameError(f"group {group.id}: image {large} has more than {MOST_IMAGE_BYTES} bytes")
    lost = sum(map(len, group.lost.values()))
    if lost > group.missing:
        raise FrameError(f"group {group.id}: {lost} episodes without a score of {group.missing} missing ones")
    if group.greedy_reward is not None and not _is_bounded(group.greedy_reward):
        raise _invalid_reward(group.id, "greedy_reward", group.greedy_reward)
    return group


def _rewards(trajectory: Trajectory) -> Iterator[tuple[str, float]]:
    yield "reward", trajectory.reward
    yield from trajectory.scores.items()
    for span in trajectory.rewards:
        yield "reward of a turn", span.value
    for agent in trajectory.agents:
        yield "reward of an agent", agent.reward


def _invalid_reward(where: str, name: str, value: float) -> InvalidRewardError:
    return InvalidRewardError(f"group {where}: {name} {value} is not within ±{MOST_REWARD:g}; scale it")


def trajectory_problem(trajectory: Trajectory) -> str | None:
    """The reason why a trajectory's arrays or spans don't fit each other; None if they do."""
    tokens = len(trajectory.action_mask)
    if len(trajectory.token_ids) != 4 * tokens or len(trajectory.behaviour_logprobs) != 4 * tokens:
        return "arrays of different lengths"
    if not all(0 <= span.start < span.end <= tokens for span in trajectory.spans):
        return f"a version span outside its {tokens} tokens"
    if not all(span.end <= tokens for span in trajectory.rewards):
        return f"a reward span outside its {tokens} tokens"
    ends = [span.end for span in trajectory.agents]
    if any(before >= end for before, end in pairwise([*ends, tokens + 1])):
        return f"agent spans out of order, or outside its {tokens} tokens"
    if trajectory.kept_tokens is not None and (problem := _kept_problem(trajectory, trajectory.kept_tokens)):
        return problem
    return _teacher_problem(trajectory)


def _teacher_problem(trajectory: Trajectory) -> str | None:
    actions = sum(span.end - span.start for span in trajectory.spans)
    logprobs, ids, top = trajectory.teacher_logprobs, trajectory.teacher_top_ids, trajectory.teacher_top_logprobs
    if len(logprobs) not in (0, 4 * actions):
        return f"{len(logprobs)} bytes of a teacher's log-probs, for {actions} actions"
    if len(ids) != len(top) or len(ids) % (4 * max(1, actions)) or len(trajectory.teacher_prompt) % 4:
        return "arrays of a teacher that don't fit its actions"
    return None


def _kept_problem(trajectory: Trajectory, kept: KeptTokens) -> str | None:
    """The reason why the tokens to choose from don't fit a trajectory: each action must be among its own."""
    tokens = len(trajectory.action_mask)
    if len(kept.counts) != 4 * tokens or len(kept.ids) % 4:
        return "tokens to choose from that don't fit its tokens"
    counts, ids = (np.frombuffer(each, dtype=TOKEN_DTYPE) for each in (kept.counts, kept.ids))
    if counts.min(initial=0) < 0 or int(counts.sum(dtype=np.int64)) != len(ids) or ids.min(initial=0) < 0:
        return "tokens to choose from that don't fit their numbers"
    place = np.repeat(np.arange(tokens), counts)
    chosen = np.bincount(place[ids == token_ids(trajectory)[place]], minlength=tokens)
    if ((counts > 0) & ((chosen == 0) | (action_mask(trajectory) == 0))).any():
        return "a token that is none of those to choose from"
    return None


def _is_bounded(reward: float) -> bool:
    return abs(reward) <= MOST_REWARD  # NaN is not


def version_range(group: Group) -> tuple[int, int]:
    """The oldest and the newest policy version among a group's action tokens. Raises: ValueError if it has none."""
    versions = [span.version for trajectory in group.trajectories for span in trajectory.spans]
    return min(versions), max(versions)


def token_ids(trajectory: Trajectory) -> NDArray[np.int32]:
    """Token ids, shape [T], read-only."""
    return np.frombuffer(trajectory.token_ids, dtype=TOKEN_DTYPE)


def action_mask(trajectory: Trajectory) -> NDArray[np.uint8]:
    """1 where the policy chose the token, shape [T], read-only."""
    return np.frombuffer(trajectory.action_mask, dtype=MASK_DTYPE)


def routed_experts(trajectory: Trajectory) -> NDArray[np.int16] | None:
    """Experts of the tokens that predict another one, shape [T - 1, layers, per_token], -1 where they are unknown.

    None if all are unknown.
    """
    routed = trajectory.routed_experts
    if routed is None:
        return None
    layout = routed.layout
    experts = np.full((len(trajectory.action_mask) - 1, layout.layers, layout.per_token), -1, dtype=np.int16)
    known = np.frombuffer(routed.ids, dtype=layout.dtype).reshape(-1, *experts.shape[1:])
    experts[len(experts) - len(known) :] = known
    return experts


def kept_tokens(trajectory: Trajectory) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Tokens left to choose from at each place: their number, shape [T], and the ids of all; None without top-k."""
    kept = trajectory.kept_tokens
    if kept is None:
        return None
    return np.frombuffer(kept.counts, dtype=TOKEN_DTYPE), np.frombuffer(kept.ids, dtype=TOKEN_DTYPE)


def behaviour_logprobs(trajectory: Trajectory) -> NDArray[np.float32]:
    """log μ of the chosen tokens, shape [T], read-only."""
    return np.frombuffer(trajectory.behaviour_logprobs, dtype=LOGPROB_DTYPE)
