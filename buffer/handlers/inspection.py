"""Inspection of a delivered group: checked against itself and its ticket, then filtered; without side effects."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from slipstream.buffer.policies.filters import EpisodeFacts, Verdict, apply_filters, draws, group_outcome
from slipstream.buffer.policies.sampling import order, races
from slipstream.buffer.policies.statistics import histogram, tally, task_scores
from slipstream.buffer.store.types import UNKNOWN_ORIGIN, DeliveredGroup, EvalSlice, Facts, Origin
from slipstream.buffer.wire.codec import FrameError, decode_group, encode_group, version_range
from slipstream.buffer.wire.messages import (
    CUT_OFF,
    EVAL,
    LOGPROB_DTYPE,
    MAJORITY,
    TOKEN_DTYPE,
    TRAIN,
    Group,
    Trajectory,
)
from slipstream.configs import RunConfig
from slipstream.configs.schema.buffer import DynamicSamplingConfig
from slipstream.configs.schema.rollout import RolloutConfig

NO_BASELINE = "no_baseline"
"""Drop reason: the group lacks the greedy reward that the run needs."""
NO_SCORE = "no_score"
"""Drop reason: the group lacks a score that is trained on or that a filter uses."""


@dataclass(frozen=True)
class EvalSliceResult:
    """Scored answers to held-out tasks, which are never trained on."""

    work: EvalSlice
    version: int
    failures: Mapping[str, int]
    """Tasks of the slice without an answer, by reason."""
    tallies: Mapping[str, tuple[float, float]]
    """Sum and sum of squares over the answered tasks, by the names of `task_scores`."""
    blob: bytes | memoryview
    tokens: int
    """Action tokens of the answers."""
    unused: Mapping[str, int]
    """Other tokens that were sampled for the slice, by reason."""


@dataclass(frozen=True)
class Dropped:
    """A group that is never trained on."""

    reason: str
    facts: Facts


@dataclass(frozen=True)
class Inspected:
    """Result of inspecting a delivered group."""

    id: str
    result: DeliveredGroup | EvalSliceResult | Dropped | FrameError
    origin: Origin
    largest_token: int = 0
    """The largest token id of the group (`largest_token`)."""
    epoch: int = 0
    task: int = 0
    """Index of its task, of a group to train on."""


class Inspector:
    """Decodes, checks and filters delivered groups; without side effects."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._buffer = config.buffer
        trained = {reward.name for reward in config.rewards if reward.weight}
        filters = [chosen for chosen in config.buffer.filters if isinstance(chosen, DynamicSamplingConfig)]
        self._needed_scores = trained | {chosen.score for chosen in filters if chosen.score}

    def inspect(self, group_id: str, blob: bytes | memoryview, origin: Origin = UNKNOWN_ORIGIN) -> Inspected:
        """The result for what was delivered under `group_id`."""
        try:
            group = check_group(group_id, blob, self._config.rollout, eval_samples=self._config.eval.samples)
        except FrameError as error:
            return Inspected(group_id, error, origin)
        if group.kind == EVAL:
            work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
            version, _ = version_range(group)
            tokens = sum(episode.tokens for episode in _episodes(group))
            answers = EvalSliceResult(work, version, group.failures, _tallies(group), blob, tokens, group.unused)
            return Inspected(group_id, answers, origin, largest_token(group))
        result = self.admit(group, blob, origin)
        return Inspected(group_id, result, origin, largest_token(group), epoch=group.epoch, task=group.indices[0])

    def admit(
        self, group: Group, blob: bytes | memoryview, origin: Origin = UNKNOWN_ORIGIN
    ) -> DeliveredGroup | Dropped:
        """The group as it will be stored, unless it is dropped. Deterministic: a repeated one has the same result.

        Args:
            group: a train group that passed `check_group`.
            blob: its frame.
        """
        number = int(group.id) if group.id.isdecimal() else 0
        rng = self._random_numbers(number)
        episodes = _episodes(group)
        lengths = [episode.tokens for episode in episodes]
        verdict = self._verdict(group, episodes, rng)
        kept = _select(group, verdict.keep, len(episodes))
        lost = [length for of_reason in group.lost.values() for length in of_reason]
        scored = histogram(lengths)
        facts = Facts(
            tokens=sum(lengths) + sum(lost),
            delivered=histogram([*lengths, *lost]) if lost else scored,
            kept=scored if kept is group else histogram(lengths[index] for index in verdict.keep),
            dropped=_by_reason(verdict.dropped, lengths, group.lost),
            missing=group.missing - len(lost),
            kept_tokens=sum(lengths[index] for index in set(verdict.keep)),
            lost=_lost_tokens(group, verdict.dropped, lengths),
            task=group.indices[0],
            outcome=verdict.outcome,
        )
        if verdict.reason is not None:
            return Dropped(verdict.reason, facts)
        oldest, newest = version_range(kept)
        return DeliveredGroup(
            id=group.id,
            blob=blob if kept is group else encode_group(kept),
            oldest_version=oldest,
            newest_version=newest,
            order=order(
                self._buffer.sampler,
                number=number,
                oldest_version=oldest,
                rewards=[episodes[index].reward for index in verdict.keep],
                rng=rng,
            ),
            facts=facts,
            origin=origin,
        )

    def _random_numbers(self, number: int) -> np.random.Generator | None:
        """The group's random generator; None if nothing is drawn, because creating one takes as long as the rest."""
        if races(self._buffer.sampler) or draws(self._buffer.filters):
            return np.random.default_rng([self._config.run.seed, number])
        return None

    def _verdict(self, group: Group, episodes: Sequence[EpisodeFacts], rng: np.random.Generator | None) -> Verdict:
        lacking = self._missing_part(group)
        if lacking is not None:
            return Verdict(keep=(), dropped=tuple((index, lacking) for index in range(len(episodes))), outcome=None)
        verdict = apply_filters(episodes, self._buffer.filters, rng)
        if self._buffer.curriculum is None:
            return verdict
        return replace(verdict, outcome=group_outcome(episodes, self._buffer.filters))

    def _missing_part(self, group: Group) -> str | None:
        """The drop reason if the group lacks a baseline or score: its server may run another configuration."""
        if self._config.greedy_baseline and group.greedy_reward is None:
            return NO_BASELINE
        if not all(self._needed_scores <= trajectory.scores.keys() for trajectory in group.trajectories):
            return NO_SCORE
        return None


def _tallies(group: Group) -> dict[str, tuple[float, float]]:
    """Tallies of the tasks that an evaluation's group answers, all equally often."""
    first = {trajectory.episode: trajectory for trajectory in reversed(group.trajectories)}
    answers = [first[index] for index in sorted(first)]
    samples = len(answers) // (len(group.indices) - sum(group.failures.values()))
    of_tasks = [answers[start : start + samples] for start in range(0, len(answers), samples)]
    scores = task_scores(
        [[answer.reward for answer in of_task] for of_task in of_tasks],
        [of_task[0].scores.get(MAJORITY) for of_task in of_tasks],
    )
    return {name: tally(values) for name, values in scores.items()}


def _episodes(group: Group) -> list[EpisodeFacts]:
    """The group's episodes in the order of their indices; the action tokens of their trajectories add up."""
    parts: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in group.trajectories:
        parts[trajectory.episode].append(trajectory)
    return [
        EpisodeFacts(
            tokens=sum(span.end - span.start for trajectory in parts[index] for span in trajectory.spans),
            reward=parts[index][0].reward,
            scores=parts[index][0].scores,
            truncated=parts[index][-1].finish_reason in CUT_OFF,
        )
        for index in sorted(parts)
    ]


def _select(group: Group, keep: Sequence[int], episodes: int) -> Group:
    """The group with the episodes `keep`, itself if these are all; an episode drawn twice becomes two."""
    if keep == tuple(range(episodes)):
        return group
    indices = sorted({trajectory.episode for trajectory in group.trajectories})
    trajectories = [
        msgspec.structs.replace(trajectory, episode=number)
        for number, position in enumerate(keep)
        for trajectory in group.trajectories
        if trajectory.episode == indices[position]
    ]
    return msgspec.structs.replace(group, trajectories=trajectories)


def _lost_tokens(group: Group, dropped: Sequence[tuple[int, str]], lengths: Sequence[int]) -> Mapping[str, int]:
    """Tokens sampled for a group that are not trained on, by reason."""
    tokens = Counter(group.unused)
    for reason, lengths_lost in group.lost.items():
        tokens[reason] += sum(lengths_lost)
    for index, reason in dropped:
        tokens[reason] += lengths[index]
    return tokens


def _by_reason(
    dropped: Sequence[tuple[int, str]], lengths: Sequence[int], lost: Mapping[str, Sequence[int]]
) -> Mapping[str, Mapping[int, int]]:
    of_reason = defaultdict[str, list[int]](list, {reason: list(lengths_lost) for reason, lengths_lost in lost.items()})
    for index, reason in dropped:
        of_reason[reason].append(lengths[index])
    return {reason: histogram(lengths_of) for reason, lengths_of in of_reason.items()}


# --- checks -----------------------------------------------------------------------------------------------------------

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
    episodes = _episode_count(group)
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
    failed, episodes = sum(group.failures.values()), _episode_count(group)
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


def _episode_count(group: Group) -> int:
    return len({trajectory.episode for trajectory in group.trajectories})
