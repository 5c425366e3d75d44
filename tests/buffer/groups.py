"""Groups to deliver: small, real and valid."""

from collections.abc import Sequence

import numpy as np

from slipstream.buffer.store.types import SPILL_BYTES
from slipstream.buffer.wire import messages as m

LONG = 1000
"""Characters of a long name."""


def trajectory(*, versions: Sequence[int] = (0,), reward: float = 1.0, episode: int = 0) -> m.Trajectory:
    """Two prompt tokens, then two action tokens of each version."""
    tokens = 2 + 2 * len(versions)
    mask = np.ones(tokens, dtype=m.MASK_DTYPE)
    mask[:2] = 0
    return m.Trajectory(
        token_ids=np.arange(tokens, dtype=m.TOKEN_DTYPE).tobytes(), action_mask=mask.tobytes(),
        behaviour_logprobs=(-0.5 * mask).astype(m.LOGPROB_DTYPE).tobytes(),
        spans=[
            m.VersionSpan(version=version, start=2 + 2 * number, end=4 + 2 * number)
            for number, version in enumerate(versions)
        ],
        reward=reward, scores={"exact_match": reward}, finish_reason="stop", episode=episode,
    )  # fmt: skip


def train_group(group_id: str, *, versions: Sequence[int] = (0,), epoch: int = 0, index: int = 0) -> m.Group:
    """A group of two trajectories."""
    answers = [trajectory(versions=versions, reward=1.0), trajectory(versions=versions, reward=0.0, episode=1)]
    return m.Group(id=group_id, kind=m.TRAIN, epoch=epoch, indices=[index], trajectories=answers)


def answered(ticket: m.Ticket, *, reward: float = 1.0) -> m.Group:
    """The group of a rollout server that runs the ticket's version."""
    answers = [
        trajectory(versions=(ticket.version,), reward=reward, episode=number)
        for number in range(len(ticket.indices) * ticket.samples)
    ]
    return m.Group(id=ticket.id, kind=ticket.kind, epoch=ticket.epoch, indices=ticket.indices, trajectories=answers)


def large(group: m.Group, *, reward: str = "exact_match") -> m.Group:
    """The group with more bytes than stay in Redis once it is trained."""
    for trajectory in group.trajectories:
        trajectory.scores.update({f"{number:0{LONG}}": 1.0 for number in range(SPILL_BYTES // 2 // LONG + 1)})
        trajectory.scores[reward] = 1.0
    return group
