"""Checks of a delivered group: against itself, and against what any ticket of the run asks for."""

import re
from collections import Counter
from itertools import pairwise
from typing import Final

import numpy as np

from slipstream.buffer.wire.codec import FrameError, decode_group
from slipstream.buffer.wire.messages import EVAL, LOGPROB_DTYPE, TOKEN_DTYPE, TRAIN, Group, Trajectory
from slipstream.configs.schema.rollout import RolloutConfig

MOST_LOGPROB = 1e-3
"""A log-probability may exceed 0 by so much, for the rounding of an engine's log-softmax."""
LEAST_LOGPROB = -104.0
"""Logarithm of float32's smallest number: a less likely token is never sampled."""

INVALID_LOGPROB = "invalid_logprob"
UNCOVERED_ACTION = "uncovered_action"
OUT_OF_VOCABULARY = "token_out_of_vocabulary"
FUTURE_VERSION = "future_version"
INVALID_EXPERTS = "invalid_experts"
OTHER_TICKET = "other_ticket"
WRONG_EPISODES = "wrong_episodes"
ANSWER_TOO_LONG = "answer_too_long"
CONTEXT_TOO_LONG = "context_too_long"

_EVAL_ID: Final = re.compile(r"e([0-9]+)-([0-9]+)(-[0-9]+)?")


class InvalidGroupError(FrameError):
    """A group that can't be trained on, or contradicts its ticket.

    Attributes:
        reason: the reason code under which it is counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def largest_token(group: Group) -> int:
    """The group's largest token id; a negative one counts as beyond any vocabulary."""
    token_ids = b"".join([trajectory.token_ids for trajectory in group.trajectories])
    return int(np.frombuffer(token_ids, dtype=TOKEN_DTYPE).view(np.uint32).max())


def check_group(group_id: str, blob: bytes | memoryview, rollout: RolloutConfig, *, eval_samples: int) -> Group:
    """The group in `blob`.

    Args:
        eval_samples: answers to each held-out task.

    Raises: FrameError when it is not the announced group; InvalidGroupError when it can't be trained on, or is not
    what any ticket with this id asks for.
    """
    group = decode_group(blob)
    if group.id != group_id:
        raise FrameError(f"group {group_id}: another id inside, {group.id}")
    if not group.trajectories or not all(_has_actions(trajectory) for trajectory in group.trajectories):
        raise FrameError(f"group {group_id}: an answer without action tokens")
    if not all(_covers_actions(trajectory) for trajectory in group.trajectories):
        raise InvalidGroupError(UNCOVERED_ACTION, f"group {group_id}: the version spans are not those of its actions")
    _check_logprobs(group)
    _check_experts(group)
    if not group.indices:
        raise FrameError(f"group {group_id}: no task")
    _check_lengths(group, rollout)
    slice_id = _EVAL_ID.fullmatch(group_id)
    if group.kind != (TRAIN if slice_id is None else EVAL):
        raise InvalidGroupError(OTHER_TICKET, f"group {group_id}: kind {group.kind!r} is not its ticket's")
    if slice_id is None:
        _check_training(group, rollout)
    else:
        _check_evaluation(group, version=int(slice_id[1]), first=int(slice_id[2]), samples=eval_samples)
    return group


def _check_logprobs(group: Group) -> None:
    # One call for all trajectories is faster.
    joined = b"".join([trajectory.behaviour_logprobs for trajectory in group.trajectories])
    logprobs = np.frombuffer(joined, dtype=LOGPROB_DTYPE)
    least, most = float(logprobs.min()), float(logprobs.max())
    if not (least >= LEAST_LOGPROB and most <= MOST_LOGPROB):  # NaN is neither
        raise InvalidGroupError(INVALID_LOGPROB, f"group {group.id}: log-probabilities from {least} to {most}")


def _check_experts(group: Group) -> None:
    """Raises: InvalidGroupError when the experts of a trajectory do not fit its tokens or their own layout."""
    for trajectory in group.trajectories:
        routed = trajectory.routed_experts
        if routed is None:
            continue
        layout, inputs = routed.layout, len(trajectory.action_mask) - 1
        if len(routed.ids) % layout.token_bytes or routed.tokens > inputs:
            problem = f"{len(routed.ids)} bytes of experts, at {layout.token_bytes} for each of {inputs} input tokens"
            raise InvalidGroupError(INVALID_EXPERTS, f"group {group.id}: {problem}")
        largest = np.frombuffer(routed.ids, dtype=layout.dtype).max(initial=0)
        if largest >= layout.experts:
            raise InvalidGroupError(INVALID_EXPERTS, f"group {group.id}: expert {largest} of {layout.experts}")


def _has_actions(trajectory: Trajectory) -> bool:
    """True if a token after the first is an action; the first has no context and is never trained on."""
    return bool(trajectory.spans) and trajectory.action_mask.find(1, 1) >= 0


def _covers_actions(trajectory: Trajectory) -> bool:
    """True if the version spans are in order and together cover exactly the action tokens."""
    mask, end, covered = trajectory.action_mask, 0, 0
    for span in trajectory.spans:
        length = span.end - span.start
        if span.start < end or mask.count(1, span.start, span.end) != length:
            return False
        end, covered = span.end, covered + length
    return covered == len(mask) - mask.count(0)


def _check_lengths(group: Group, rollout: RolloutConfig) -> None:
    """Raises: InvalidGroupError when a context, an episode or an answer has more tokens than the run allows."""
    used = Counter[int]()
    context_tokens, answer_tokens = rollout.engine.max_model_len, rollout.sampling.max_tokens
    for trajectory in group.trajectories:
        tokens = len(trajectory.action_mask)
        if tokens > context_tokens:
            raise InvalidGroupError(
                CONTEXT_TOO_LONG,
                f"group {group.id}: {tokens} tokens, more than rollout.engine.max_model_len={context_tokens}",
            )
        # What precedes the first action is a prompt, or a context that the chat template has rewritten.
        used[trajectory.episode] += tokens - trajectory.action_mask.find(1)
        answer = _longest_answer(trajectory, answer_tokens)
        if group.kind == TRAIN and answer > answer_tokens:
            raise InvalidGroupError(
                ANSWER_TOO_LONG,
                f"group {group.id}: an answer of {answer} tokens, more than "
                f"rollout.sampling.max_tokens={answer_tokens}",
            )
    episode, most = used.most_common(1)[0]
    if most > rollout.episode_tokens:
        raise InvalidGroupError(
            ANSWER_TOO_LONG,
            f"group {group.id}: episode {episode} has {most} tokens after its prompt, more than "
            f"rollout.episode.tokens={rollout.episode_tokens}",
        )


def _longest_answer(trajectory: Trajectory, limit: int) -> int:
    """Tokens of the longest answer, or of all answers if these are at most `limit`.

    Where the observation after an answer is empty, the end of the turn, which has a reward, ends it.
    """
    mask = trajectory.action_mask
    actions = len(mask) - mask.count(0)
    if actions <= limit:
        return actions
    ends = sorted({0, *(span.end for span in trajectory.rewards), len(mask)})
    return max(len(answer) for start, end in pairwise(ends) for answer in mask[start:end].split(b"\0"))


def _check_training(group: Group, rollout: RolloutConfig) -> None:
    """Raises: InvalidGroupError when it is not of one task, has another number of episodes than a ticket asks for, or
    lost a longer one than there may be.
    """
    if len(group.indices) != 1:
        raise InvalidGroupError(OTHER_TICKET, f"group {group.id}: {len(group.indices)} tasks, and its ticket has one")
    longest_lost = max((length for lengths in group.lost.values() for length in lengths), default=0)
    if longest_lost > rollout.episode_tokens:
        raise InvalidGroupError(ANSWER_TOO_LONG, f"group {group.id}: a lost episode of {longest_lost} tokens")
    episodes = _episodes(group)
    if episodes < rollout.fewest_episodes or episodes + group.missing != rollout.group_size:
        raise InvalidGroupError(
            WRONG_EPISODES,
            f"group {group.id}: {episodes} episodes and {group.missing} missing, but "
            f"rollout.group_size={rollout.group_size} and at least {rollout.fewest_episodes} must be there",
        )


def _check_evaluation(group: Group, *, version: int, first: int, samples: int) -> None:
    """Raises: InvalidGroupError when it has other tasks than `first` and those that follow, another number of episodes
    or another policy version; FrameError when it has several versions.
    """
    if group.epoch or group.indices != list(range(first, first + len(group.indices))):
        raise InvalidGroupError(OTHER_TICKET, f"group {group.id}: epoch {group.epoch}, tasks {group.indices[:8]}")
    failed, episodes = sum(group.failures.values()), _episodes(group)
    if episodes + group.missing != samples * len(group.indices) or failed * samples != group.missing:
        raise InvalidGroupError(
            WRONG_EPISODES,
            f"group {group.id}: {episodes} answers, {group.missing} missing and {failed} failures to "
            f"{len(group.indices)} tasks with eval.samples={samples}",
        )
    versions = sorted({span.version for trajectory in group.trajectories for span in trajectory.spans})
    if len(versions) > 1:
        raise FrameError(
            f"group {group.id}: an evaluation must have one policy version, but its tokens have {versions}"
        )
    if versions != [version]:
        raise InvalidGroupError(OTHER_TICKET, f"group {group.id}: tokens of version {versions[0]}")


def _episodes(group: Group) -> int:
    return len({trajectory.episode for trajectory in group.trajectories})
