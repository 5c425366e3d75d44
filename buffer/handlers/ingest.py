"""Groups that have arrived: stored many at a time, and only then acknowledged."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from slipstream.buffer.handlers.base import Send
from slipstream.buffer.policies.filters import Answer, Verdict, draws, judge
from slipstream.buffer.policies.lengths import histogram
from slipstream.buffer.policies.sampling import order, races
from slipstream.buffer.store.ledger import STORED_AT_ONCE, STORED_AT_ONCE_BYTES, Ledger
from slipstream.buffer.store.types import DeliveredGroup, EvalSlice, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode_group, encode, oldest_version
from slipstream.buffer.wire.messages import EVAL, LOGPROB_DTYPE, Group, Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.buffer import DynamicSamplingConfig

log = get_log("buffer.intake")

TRUNCATED = "length"
"""The finish reason of an answer that was cut off at its limit of tokens."""
NO_BASELINE = "no_baseline"
"""Why a group without the greedy reward that its run needs is dropped."""
NO_SCORE = "no_score"
"""Why a group without a score that is trained on, or that a filter judges, is dropped."""


@dataclass(frozen=True)
class EvalAnswers:
    """Answers to held-out tasks, which are scored and never trained on."""

    work: EvalSlice
    version: int
    answered: int
    """Tasks of the slice; the others have failed."""
    score_sum: float
    blob: bytes | memoryview


@dataclass(frozen=True)
class Dropped:
    """A group that no step will see."""

    reason: str
    facts: Facts


@dataclass(frozen=True)
class Looked:
    """A group that was delivered under this id, and what it turned out to be."""

    id: str
    found: DeliveredGroup | EvalAnswers | Dropped | FrameError


def look_at(group_id: str, blob: bytes | memoryview, config: RunConfig) -> Looked:
    """What was delivered under `group_id`."""
    try:
        group = check_group(group_id, blob)
    except FrameError as error:
        return Looked(group_id, error)
    if group.kind == EVAL:
        work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
        score_sum = sum(trajectory.reward for trajectory in group.trajectories)
        answers = EvalAnswers(work, oldest_version(group), len(group.trajectories), score_sum, blob)
        return Looked(group_id, answers)
    return Looked(group_id, arrive(group, blob, config))


def check_group(group_id: str, blob: bytes | memoryview) -> Group:
    """The group in `blob`.

    Raises: FrameError when it is not the group that was announced, not what its ticket asked for, or nothing that can
    be trained on.
    """
    group = decode_group(blob)
    if group.id != group_id:
        raise FrameError(f"group {group_id}: another id inside, {group.id}")
    if not group.trajectories or not all(_has_actions(trajectory) for trajectory in group.trajectories):
        raise FrameError(f"group {group_id}: an answer without action tokens")
    logprobs = b"".join([trajectory.behaviour_logprobs for trajectory in group.trajectories])  # each alone takes longer
    if not np.isfinite(np.frombuffer(logprobs, dtype=LOGPROB_DTYPE)).all():
        raise FrameError(f"group {group_id}: a log-probability is not finite")
    if not group.indices:
        raise FrameError(f"group {group_id}: no task")
    if group.kind == EVAL:
        _check_evaluation(group)
    return group


def _has_actions(trajectory: Trajectory) -> bool:
    """Whether the policy chose a token. The first one is never trained on: nothing comes before it."""
    return bool(trajectory.spans) and trajectory.action_mask.find(1, 1) >= 0


def _check_evaluation(group: Group) -> None:
    if len(group.trajectories) + group.missing != len(group.indices):
        raise FrameError(
            f"group {group.id}: {len(group.trajectories)} answers and {group.missing} missing to "
            f"{len(group.indices)} tasks"
        )
    versions = sorted({span.version for trajectory in group.trajectories for span in trajectory.spans})
    if len(versions) > 1:
        raise FrameError(f"group {group.id}: an evaluation is of one policy version, but its tokens are of {versions}")


def arrive(group: Group, blob: bytes | memoryview, config: RunConfig) -> DeliveredGroup | Dropped:
    """The group as it is to be stored, unless it is dropped.

    The same group gets the same verdict every time that it is delivered.

    Args:
        group: a train group that `check_group` has passed.
        blob: its frame.
    """
    number = int(group.id) if group.id.isdecimal() else 0
    rng = _random_numbers(config, number)
    lengths = [sum([span.end - span.start for span in trajectory.spans]) for trajectory in group.trajectories]
    verdict = _verdict(group, lengths, config, rng)
    kept = _with(group, verdict.keep)
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
    if verdict.reason is not None:
        return Dropped(verdict.reason, facts)
    oldest = oldest_version(kept)
    return DeliveredGroup(
        id=group.id,
        blob=blob if kept is group else encode(kept),
        oldest_version=oldest,
        order=order(
            config.buffer.sampler,
            number=number,
            oldest_version=oldest,
            rewards=[trajectory.reward for trajectory in kept.trajectories],
            rng=rng,
        ),
        facts=facts,
    )


def _random_numbers(config: RunConfig, number: int) -> np.random.Generator | None:
    """The group's own; None where nothing is drawn, because making them takes about as long as all else here."""
    if races(config.buffer.sampler) or draws(config.buffer.filters):
        return np.random.default_rng([config.run.seed, number])
    return None


def _verdict(group: Group, lengths: Sequence[int], config: RunConfig, rng: np.random.Generator | None) -> Verdict:
    lack = _lack(group, config)
    if lack is not None:
        return Verdict(keep=(), dropped=tuple((index, lack) for index in range(len(lengths))), outcome=None)
    answers = [
        Answer(
            tokens=tokens,
            reward=trajectory.reward,
            scores=trajectory.scores,
            truncated=trajectory.finish_reason == TRUNCATED,
        )
        for tokens, trajectory in zip(lengths, group.trajectories, strict=True)
    ]
    return judge(answers, config.buffer.filters, rng)


def _lack(group: Group, config: RunConfig) -> str | None:
    """What the group comes without, as a reason to drop it: its server may run another configuration."""
    if config.greedy_baseline and group.greedy_reward is None:
        return NO_BASELINE
    needed = {reward.name for reward in config.rewards if reward.weight}
    needed |= {each.score for each in config.buffer.filters if isinstance(each, DynamicSamplingConfig) and each.score}
    if not all(needed <= trajectory.scores.keys() for trajectory in group.trajectories):
        return NO_SCORE
    return None


def _with(group: Group, keep: Sequence[int]) -> Group:
    """The group with these of its trajectories; itself if nothing changes."""
    if keep == tuple(range(len(group.trajectories))):
        return group
    # An episode that was drawn twice counts as two episodes.
    trajectories = [
        msgspec.structs.replace(group.trajectories[index], episode=number) for number, index in enumerate(keep)
    ]
    return msgspec.structs.replace(group, trajectories=trajectories)


def _by_reason(dropped: Sequence[tuple[int, str]], lengths: Sequence[int]) -> Mapping[str, Mapping[int, int]]:
    of_reason: dict[str, list[int]] = defaultdict(list)
    for index, reason in dropped:
        of_reason[reason].append(lengths[index])
    return {reason: histogram(found) for reason, found in of_reason.items()}


Settle = Callable[[], Awaitable[None]]
"""Deals with all groups that have arrived so far, as far as Redis has room for them."""

MALFORMED_PATIENCE = 3
"""A group that arrives malformed is asked for again so many times: the network may have damaged it."""


@dataclass(frozen=True)
class Delivery:
    """A message of a rollout server whose groups are not stored yet."""

    peer: bytes
    outcomes: dict[str, str]
    """Of what was in it besides."""
    groups: list[DeliveredGroup]


class Intake:
    """Deliveries that wait for being stored together: what Redis is asked at once costs it, and us, a fraction.

    What is in here when something fails was not acknowledged, so its sender has it still.
    """

    def __init__(
        self,
        ledger: Ledger,
        send: Send,
        malformed: Callable[[str, FrameError, str], None],
        landed: Callable[[bytes], None],
    ) -> None:
        """Told of what the ledger knows already: `malformed` of every group that is none, what is wrong with it and its
        outcome; `landed` of every server whose groups are dealt with.
        """
        self._ledger = ledger
        self._send = send
        self._malformed = malformed
        self._landed = landed
        self._waiting: list[Delivery] = []
        self._groups = self._bytes = 0
        self._settling = asyncio.Lock()

    async def take(self, peer: bytes, groups: Sequence[Looked]) -> None:
        """Takes what a rollout server has delivered; it waits for `settle`, which happens by itself when it is much."""
        delivery = Delivery(peer, {}, [])
        for group in groups:
            if isinstance(group.found, DeliveredGroup):
                delivery.groups.append(group.found)
            else:
                delivery.outcomes[group.id] = await self._not_stored(group.id, group.found)
        self._waiting.append(delivery)
        self._groups += len(delivery.groups)
        self._bytes += sum(len(group.blob) for group in delivery.groups)
        if self._groups >= STORED_AT_ONCE or self._bytes >= STORED_AT_ONCE_BYTES:
            await self.settle()

    async def settle(self) -> None:
        """Stores what waits, and acknowledges it. Then all is done with that was taken before this was called."""
        async with self._settling:
            waiting, self._waiting = self._waiting, []
            self._groups = self._bytes = 0
            groups = [group for delivery in waiting for group in delivery.groups]
            found = await self._ledger.deliver(groups)
            stored = {group.id: outcome for group, outcome in zip(groups, found, strict=True)}
            lost = [group_id for group_id, outcome in stored.items() if outcome == m.AGAIN]
            if lost:
                log.warning("Redis lost the bytes of groups at their arrival, they are asked for again", groups=lost)
            for delivery in waiting:
                outcomes = delivery.outcomes | {group.id: stored[group.id] for group in delivery.groups}
                self._landed(delivery.peer)
                await self._send(delivery.peer, m.Acknowledge(outcomes=outcomes))

    async def _not_stored(self, group_id: str, found: EvalAnswers | Dropped | FrameError) -> str:
        """The outcome of a group that is not to be stored with the others."""
        match found:
            case EvalAnswers():
                return await self._ledger.evaluated(
                    found.work,
                    version=found.version,
                    answered=found.answered,
                    score_sum=found.score_sum,
                    blob=found.blob,
                )
            case Dropped():
                return await self._ledger.filter(group_id, reason=found.reason, facts=found.facts)
            case FrameError():
                outcome = await self._ask_again(group_id)
                self._malformed(group_id, found, outcome)
                return outcome

    async def _ask_again(self, group_id: str) -> str:
        # Its bytes don't tell whether it is an evaluation's; the ledger knows its tickets.
        outcome = await self._ledger.evaluation_failed(group_id, patience=MALFORMED_PATIENCE)
        if outcome != "void":
            return outcome
        return await self._ledger.filter(group_id, reason="malformed", facts=Facts(), patience=MALFORMED_PATIENCE)
