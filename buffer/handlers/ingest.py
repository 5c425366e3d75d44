"""Delivered groups: inspected, filtered, ordered, stored many at a time, then acknowledged."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.peers import MalformedCounter, Send
from slipstream.buffer.policies.filters import Episode, Verdict, apply_filters, draws
from slipstream.buffer.policies.lengths import histogram
from slipstream.buffer.policies.sampling import order, races
from slipstream.buffer.store.ledger import STORED_AT_ONCE, STORED_AT_ONCE_BYTES, Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import DeliveredGroup, EvalSlice, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode_group, encode, oldest_version
from slipstream.buffer.wire.messages import EVAL, LOGPROB_DTYPE, Group, Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.buffer import DynamicSamplingConfig

log = get_log("buffer.ingest")

TRUNCATED = "length"
"""Finish reason of an episode that reached its limit of tokens."""
NO_BASELINE = "no_baseline"
"""Reason of dropping a group without the greedy reward that its run needs."""
NO_SCORE = "no_score"
"""Reason of dropping a group without a score that is trained on or that a filter judges."""


@dataclass(frozen=True)
class EvalSliceResult:
    """Scored answers to held-out tasks, which are never trained on."""

    work: EvalSlice
    version: int
    answered: int
    """Tasks of the slice; the others have failed."""
    score_sum: float
    blob: bytes | memoryview


@dataclass(frozen=True)
class Dropped:
    """A group that is never trained on."""

    reason: str
    facts: Facts


@dataclass(frozen=True)
class Inspected:
    """What was delivered under a group's id."""

    id: str
    found: DeliveredGroup | EvalSliceResult | Dropped | FrameError


def inspect(group_id: str, blob: bytes | memoryview, config: RunConfig) -> Inspected:
    """Decodes, checks and judges what was delivered under `group_id`. Changes nothing."""
    try:
        group = check_group(group_id, blob)
    except FrameError as error:
        return Inspected(group_id, error)
    if group.kind == EVAL:
        work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
        score_sum = sum(trajectory.reward for trajectory in group.trajectories)
        answers = EvalSliceResult(work, oldest_version(group), len(group.trajectories), score_sum, blob)
        return Inspected(group_id, answers)
    return Inspected(group_id, admit(group, blob, config))


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
    """True if the policy chose a token besides the first, which is never trained on: nothing comes before it."""
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


def admit(group: Group, blob: bytes | memoryview, config: RunConfig) -> DeliveredGroup | Dropped:
    """The group as it is to be stored, unless it is dropped.

    The same group gets the same verdict every time that it is delivered.

    Args:
        group: a train group that passed `check_group`.
        blob: its frame.
    """
    number = int(group.id) if group.id.isdecimal() else 0
    rng = _random_numbers(config, number)
    episodes = _episodes(group)
    lengths = [episode.tokens for episode in episodes]
    verdict = _verdict(group, episodes, config, rng)
    kept = _with(group, verdict.keep, len(episodes))
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
            rewards=[episodes[index].reward for index in verdict.keep],
            rng=rng,
        ),
        facts=facts,
    )


def _episodes(group: Group) -> list[Episode]:
    """The group's episodes in the order of their indices; the action tokens of their trajectories add up."""
    parts: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in group.trajectories:
        parts[trajectory.episode].append(trajectory)
    return [
        Episode(
            tokens=sum(span.end - span.start for trajectory in parts[index] for span in trajectory.spans),
            reward=parts[index][0].reward,
            scores=parts[index][0].scores,
            truncated=parts[index][-1].finish_reason == TRUNCATED,
        )
        for index in sorted(parts)
    ]


def _random_numbers(config: RunConfig, number: int) -> np.random.Generator | None:
    """The group's own; None where nothing is drawn, because making them takes about as long as all else here."""
    if races(config.buffer.sampler) or draws(config.buffer.filters):
        return np.random.default_rng([config.run.seed, number])
    return None


def _verdict(group: Group, episodes: Sequence[Episode], config: RunConfig, rng: np.random.Generator | None) -> Verdict:
    lack = _lack(group, config)
    if lack is not None:
        return Verdict(keep=(), dropped=tuple((index, lack) for index in range(len(episodes))), outcome=None)
    return apply_filters(episodes, config.buffer.filters, rng)


def _lack(group: Group, config: RunConfig) -> str | None:
    """What the group comes without, as a reason to drop it: its server may run another configuration."""
    if config.greedy_baseline and group.greedy_reward is None:
        return NO_BASELINE
    needed = {reward.name for reward in config.rewards if reward.weight}
    needed |= {each.score for each in config.buffer.filters if isinstance(each, DynamicSamplingConfig) and each.score}
    if not all(needed <= trajectory.scores.keys() for trajectory in group.trajectories):
        return NO_SCORE
    return None


def _with(group: Group, keep: Sequence[int], episodes: int) -> Group:
    """The group with these of its episodes; itself if nothing changes. An episode that was drawn twice becomes two."""
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


def _by_reason(dropped: Sequence[tuple[int, str]], lengths: Sequence[int]) -> Mapping[str, Mapping[int, int]]:
    of_reason: dict[str, list[int]] = defaultdict(list)
    for index, reason in dropped:
        of_reason[reason].append(lengths[index])
    return {reason: histogram(found) for reason, found in of_reason.items()}


MALFORMED_PATIENCE = 3
"""How often a malformed group is asked for again: the network may have damaged it."""


@dataclass(frozen=True)
class Delivery:
    """A message of a rollout server whose groups are not stored yet."""

    peer: bytes
    outcomes: dict[str, str]
    """Outcomes of the groups that are not to be stored."""
    groups: list[DeliveredGroup]


class Ingest:
    """Stores delivered groups many at a time, and acknowledges them after that.

    A group that is lost in here by a failure was not acknowledged, so its sender still has it.
    """

    def __init__(
        self, ledger: Ledger, fleet: Fleet, malformed: MalformedCounter, memory: MemoryGuard, send: Send
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._malformed = malformed
        self._memory = memory
        self._send = send
        self._waiting: list[Delivery] = []
        self._groups = self._bytes = 0
        self._storing = asyncio.Lock()

    async def take(self, peer: bytes, groups: Sequence[Inspected]) -> None:
        """Takes a delivery; it waits for `store`, which is called here when there is much to store."""
        await self._memory.attempt(self._take(peer, groups))

    async def store(self) -> None:
        """Stores and acknowledges everything that was taken before, as far as Redis has room."""
        await self._memory.attempt(self._store())

    async def _take(self, peer: bytes, groups: Sequence[Inspected]) -> None:
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
            await self._store()

    async def _store(self) -> None:
        async with self._storing:
            waiting, self._waiting = self._waiting, []
            self._groups = self._bytes = 0
            groups = [group for delivery in waiting for group in delivery.groups]
            found = await self._ledger.deliver(groups)
            stored = {group.id: outcome for group, outcome in zip(groups, found, strict=True)}
            lost = [group_id for group_id, outcome in stored.items() if outcome == m.AGAIN]
            if lost:
                log.warning("Redis lost the bytes of groups at their arrival, asking for them again", groups=lost)
            for delivery in waiting:
                outcomes = delivery.outcomes | {group.id: stored[group.id] for group in delivery.groups}
                self._fleet.ticket_returned(delivery.peer)
                await self._send(delivery.peer, m.Acknowledge(outcomes=outcomes))

    async def _not_stored(self, group_id: str, found: EvalSliceResult | Dropped | FrameError) -> str:
        """The outcome of a group that is not stored with the others."""
        match found:
            case EvalSliceResult():
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
                outcome = await self._reject(group_id)
                self._malformed.add("group malformed", group=group_id, reason=str(found))
                if outcome == "filtered":  # if it was a slice of an evaluation, another server may have it
                    self._fleet.offer_evaluation()
                return outcome

    async def _reject(self, group_id: str) -> str:
        # Its bytes don't tell whether it is an evaluation's; the ledger knows its tickets.
        outcome = await self._ledger.evaluation_failed(group_id, patience=MALFORMED_PATIENCE)
        if outcome != "void":
            return outcome
        return await self._ledger.filter(group_id, reason="malformed", facts=Facts(), patience=MALFORMED_PATIENCE)
