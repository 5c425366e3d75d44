"""What becomes of a group that arrives: filters look at it, the sampler gives it its place. Pure functions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from slipstream.buffer.policies.filters import Answer, judge
from slipstream.buffer.policies.lengths import histogram
from slipstream.buffer.policies.sampling import order
from slipstream.buffer.store import DeliveredGroup, Facts
from slipstream.buffer.wire.codec import FrameError, decode_group, encode, oldest_version
from slipstream.buffer.wire.messages import EVAL, Group, Trajectory
from slipstream.configs.schema.buffer import BufferConfig

TRUNCATED = "length"
"""The finish reason of an answer that was cut off at its limit of tokens."""


def check_group(group_id: str, blob: bytes) -> Group:
    """The group in `blob`.

    Raises: FrameError when it is not the group that was announced, or not what its ticket asked for.
    """
    group = decode_group(blob)
    if group.id != group_id:
        raise FrameError(f"group {group_id}: another id inside, {group.id}")
    if not group.trajectories or not all(trajectory.spans for trajectory in group.trajectories):
        raise FrameError(f"group {group_id}: an answer without action tokens")
    if group.kind == EVAL and len(group.trajectories) != len(group.indices):
        raise FrameError(f"group {group_id}: {len(group.trajectories)} answers to {len(group.indices)} tasks")
    if not group.indices:
        raise FrameError(f"group {group_id}: no task")
    return group


def arrive(group: Group, blob: bytes, *, buffer: BufferConfig, seed: int) -> tuple[DeliveredGroup, str | None]:
    """The group as it is to be stored, and the reason for which it is dropped instead, None if it is not.

    The same group gets the same verdict every time that it is delivered.

    Args:
        group: a train group that `check_group` has passed.
        blob: its frame.
        seed: the run's seed.
    """
    number = int(group.id) if group.id.isdecimal() else 0
    rng = np.random.default_rng([seed, number])
    lengths = [sum(span.end - span.start for span in trajectory.spans) for trajectory in group.trajectories]
    answers = [
        Answer(tokens=tokens, reward=trajectory.reward, truncated=trajectory.finish_reason == TRUNCATED)
        for tokens, trajectory in zip(lengths, group.trajectories, strict=True)
    ]
    verdict = judge(answers, buffer.filters, rng)
    kept = _with(group, [group.trajectories[index] for index in verdict.keep])
    oldest = oldest_version(kept) or 0
    delivered = histogram(lengths)
    facts = Facts(
        tokens=sum(lengths),
        delivered=delivered,
        kept=delivered if kept is group else histogram(lengths[index] for index in verdict.keep),
        dropped=_by_reason(verdict.dropped, lengths),
        missing=group.missing,
        task=group.indices[0],
        outcome=verdict.outcome,
    )
    stored = DeliveredGroup(
        id=group.id,
        blob=blob if kept is group else encode(kept),
        oldest_version=oldest,
        order=order(
            buffer.sampler,
            number=number,
            oldest_version=oldest,
            rewards=[trajectory.reward for trajectory in kept.trajectories],
            rng=rng,
        ),
        facts=facts,
    )
    return stored, verdict.reason


def _with(group: Group, trajectories: Sequence[Trajectory]) -> Group:
    """The group with these trajectories; itself if nothing changes."""
    if len(trajectories) == len(group.trajectories) and all(
        mine is theirs for mine, theirs in zip(trajectories, group.trajectories, strict=True)
    ):
        return group
    return msgspec.structs.replace(group, trajectories=list(trajectories))


def _by_reason(dropped: Sequence[tuple[int, str]], lengths: Sequence[int]) -> Mapping[str, Mapping[int, int]]:
    of_reason: dict[str, list[int]] = defaultdict(list)
    for index, reason in dropped:
        of_reason[reason].append(lengths[index])
    return {reason: histogram(found) for reason, found in of_reason.items()}
