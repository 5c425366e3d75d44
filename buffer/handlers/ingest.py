"""Delivered groups: inspection, filters, sampling order, storage in batches, acknowledgement."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.peers import MalformedCounter, Send
from slipstream.buffer.policies.evaluation import tally, task_scores
from slipstream.buffer.policies.filters import Episode, Verdict, apply_filters, draws, group_outcome
from slipstream.buffer.policies.lengths import histogram
from slipstream.buffer.policies.sampling import order, races
from slipstream.buffer.store.ledger import STORED_AT_ONCE, STORED_AT_ONCE_BYTES, Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import DeliveredGroup, EvalSlice, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode_group, encode_group, version_range
from slipstream.buffer.wire.messages import CUT_OFF, EVAL, LOGPROB_DTYPE, MAJORITY, TOKEN_DTYPE, Group, Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.buffer import DynamicSamplingConfig, Filter, SamplerConfig

log = get_log("buffer.ingest")

MOST_LOGPROB = 1e-3
"""A log-probability may exceed 0 by so much, for the rounding of an engine's log-softmax."""
LEAST_LOGPROB = -104.0
"""Logarithm of float32's smallest number: a less likely token is never sampled."""
NO_BASELINE = "no_baseline"
"""Drop reason: the group lacks the greedy reward that the run needs."""
NO_SCORE = "no_score"
"""Drop reason: the group lacks a score that is trained on or that a filter uses."""


INVALID_LOGPROB = "invalid_logprob"
UNCOVERED_ACTION = "uncovered_action"
OUT_OF_VOCABULARY = "token_out_of_vocabulary"
FUTURE_VERSION = "future_version"
INVALID_EXPERTS = "invalid_experts"


class InvalidGroupError(FrameError):
    """A group that can't be trained on: it would end the learner.

    Attributes:
        reason: the reason code under which it is counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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


@dataclass(frozen=True)
class Dropped:
    """A group that is never trained on."""

    reason: str
    facts: Facts


@dataclass(frozen=True)
class Inspected:
    """Result of inspecting a delivered group."""

    id: str
    found: DeliveredGroup | EvalSliceResult | Dropped | FrameError
    largest_token: int = 0
    """As `largest_token` gives it."""


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """Settings that decide on the use of delivered groups."""

    seed: int
    filters: Sequence[Filter]
    sampler: SamplerConfig
    needs_baseline: bool
    needed_scores: frozenset[str]
    """Scores that are trained on or that a filter uses."""
    curriculum: bool
    """True if the task's outcome is needed whatever the filters are."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "IngestSettings":
        """The settings of a run."""
        filters = config.buffer.filters
        trained = {reward.name for reward in config.rewards if reward.weight}
        filtered = {each.score for each in filters if isinstance(each, DynamicSamplingConfig) and each.score}
        return cls(
            seed=config.run.seed,
            filters=filters,
            sampler=config.buffer.sampler,
            needs_baseline=config.greedy_baseline,
            needed_scores=frozenset(trained | filtered),
            curriculum=config.buffer.curriculum is not None,
        )


def inspect(group_id: str, blob: bytes | memoryview, settings: IngestSettings) -> Inspected:
    """Decodes, checks and filters what was delivered under `group_id`; without side effects."""
    try:
        group = check_group(group_id, blob)
    except FrameError as error:
        return Inspected(group_id, error)
    if group.kind == EVAL:
        work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
        version, _ = version_range(group)
        answers = EvalSliceResult(work, version, group.failures, _tallies(group), blob)
        return Inspected(group_id, answers, largest_token(group))
    return Inspected(group_id, admit(group, blob, settings), largest_token(group))


def largest_token(group: Group) -> int:
    """The group's largest token id; a negative one counts as beyond any vocabulary."""
    token_ids = b"".join([trajectory.token_ids for trajectory in group.trajectories])
    return int(np.frombuffer(token_ids, dtype=TOKEN_DTYPE).view(np.uint32).max())


def check_group(group_id: str, blob: bytes | memoryview) -> Group:
    """The group in `blob`.

    Raises: FrameError when it is not the announced group, does not match its kind, or can't be trained on.
    """
    group = decode_group(blob)
    if group.id != group_id:
        raise FrameError(f"group {group_id}: another id inside, {group.id}")
    if not group.trajectories or not all(_has_actions(trajectory) for trajectory in group.trajectories):
        raise FrameError(f"group {group_id}: an answer without action tokens")
    if not all(_covers_actions(trajectory) for trajectory in group.trajectories):
        raise InvalidGroupError(UNCOVERED_ACTION, f"group {group_id}: the version spans are not those of its actions")
    # One call for all trajectories is faster.
    joined = b"".join([trajectory.behaviour_logprobs for trajectory in group.trajectories])
    logprobs = np.frombuffer(joined, dtype=LOGPROB_DTYPE)
    least, most = float(logprobs.min()), float(logprobs.max())
    if not (least >= LEAST_LOGPROB and most <= MOST_LOGPROB):  # NaN is neither
        raise InvalidGroupError(INVALID_LOGPROB, f"group {group_id}: log-probabilities from {least} to {most}")
    _check_experts(group)
    if not group.indices:
        raise FrameError(f"group {group_id}: no task")
    if group.kind == EVAL:
        _check_evaluation(group)
    return group


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


def _check_evaluation(group: Group) -> None:
    failed, episodes = sum(group.failures.values()), len({trajectory.episode for trajectory in group.trajectories})
    samples, rest = divmod(episodes + group.missing, len(group.indices))
    if rest or failed * samples != group.missing:
        raise FrameError(
            f"group {group.id}: {episodes} answers, {group.missing} missing and {failed} failures to "
            f"{len(group.indices)} tasks"
        )
    versions = sorted({span.version for trajectory in group.trajectories for span in trajectory.spans})
    if len(versions) > 1:
        raise FrameError(
            f"group {group.id}: an evaluation must have one policy version, but its tokens have {versions}"
        )


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


def admit(group: Group, blob: bytes | memoryview, settings: IngestSettings) -> DeliveredGroup | Dropped:
    """The group as it will be stored, unless it is dropped. Deterministic: repeated deliveries get the same verdict.

    Args:
        group: a train group that passed `check_group`.
        blob: its frame.
    """
    number = int(group.id) if group.id.isdecimal() else 0
    rng = _random_numbers(settings, number)
    episodes = _episodes(group)
    lengths = [episode.tokens for episode in episodes]
    verdict = _verdict(group, episodes, settings, rng)
    kept = _select(group, verdict.keep, len(episodes))
    lost = [length for of_reason in group.lost.values() for length in of_reason]
    scored = histogram(lengths)
    facts = Facts(
        tokens=sum(lengths) + sum(lost),
        delivered=histogram([*lengths, *lost]) if lost else scored,
        kept=scored if kept is group else histogram(lengths[index] for index in verdict.keep),
        dropped=_by_reason(verdict.dropped, lengths, group.lost),
        missing=group.missing - len(lost),
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
            settings.sampler,
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
            truncated=parts[index][-1].finish_reason in CUT_OFF,
        )
        for index in sorted(parts)
    ]


def _random_numbers(settings: IngestSettings, number: int) -> np.random.Generator | None:
    """The group's random generator; None if nothing is drawn, because creating one takes as long as the rest."""
    if races(settings.sampler) or draws(settings.filters):
        return np.random.default_rng([settings.seed, number])
    return None


def _verdict(
    group: Group, episodes: Sequence[Episode], settings: IngestSettings, rng: np.random.Generator | None
) -> Verdict:
    lacking = _missing_part(group, settings)
    if lacking is not None:
        return Verdict(keep=(), dropped=tuple((index, lacking) for index in range(len(episodes))), outcome=None)
    verdict = apply_filters(episodes, settings.filters, rng)
    return replace(verdict, outcome=group_outcome(episodes, settings.filters)) if settings.curriculum else verdict


def _missing_part(group: Group, settings: IngestSettings) -> str | None:
    """The drop reason if the group lacks a baseline or score: its server may run another configuration."""
    if settings.needs_baseline and group.greedy_reward is None:
        return NO_BASELINE
    if not all(settings.needed_scores <= trajectory.scores.keys() for trajectory in group.trajectories):
        return NO_SCORE
    return None


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


def _by_reason(
    dropped: Sequence[tuple[int, str]], lengths: Sequence[int], lost: Mapping[str, Sequence[int]]
) -> Mapping[str, Mapping[int, int]]:
    of_reason = defaultdict[str, list[int]](list, {reason: list(found) for reason, found in lost.items()})
    for index, reason in dropped:
        of_reason[reason].append(lengths[index])
    return {reason: histogram(found) for reason, found in of_reason.items()}


MALFORMED_PATIENCE = 3
"""Times that a refused group is requested again: the network may have damaged it."""


@dataclass(frozen=True)
class Delivery:
    """A delivery whose groups are not stored yet."""

    peer: bytes
    outcomes: dict[str, str]
    """Outcomes of the groups that will not be stored."""
    groups: list[DeliveredGroup]


class Ingest:
    """Stores delivered groups in batches, then acknowledges them.

    A group lost here by a failure was not acknowledged, so its sender still has it and sends it again.
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

    async def take(self, peer: bytes, groups: Sequence[Inspected], *, vocab_size: int) -> None:
        """Queues a delivery for `store`, which runs at once if the queue is long.

        Args:
            vocab_size: the model's number of token ids; a group with another token id is refused.
        """
        await self._memory.attempt(self._take(peer, [_within(group, vocab_size) for group in groups]))

    async def store(self) -> None:
        """Stores and acknowledges all queued deliveries, unless Redis is full."""
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
                log.warning("Redis lost the bytes of arriving groups, requesting them again", groups=lost)
            for group_id in [group_id for group_id, outcome in stored.items() if outcome == "future"]:
                error = InvalidGroupError(FUTURE_VERSION, f"group {group_id}: a policy version that was not published")
                stored[group_id] = await self._not_stored(group_id, error)
            for delivery in waiting:
                outcomes = delivery.outcomes | {group.id: stored[group.id] for group in delivery.groups}
                generated = sum(outcome in ("ready", "filtered") for outcome in outcomes.values())
                self._fleet.ticket_returned(delivery.peer, delivered=generated)
                await self._send(delivery.peer, m.Acknowledge(outcomes=outcomes))

    async def _not_stored(self, group_id: str, found: EvalSliceResult | Dropped | FrameError) -> str:
        """The outcome of a group that is not stored with the others."""
        match found:
            case EvalSliceResult():
                return await self._ledger.evaluations.record(
                    found.work,
                    version=found.version,
                    failures=found.failures,
                    tallies=found.tallies,
                    blob=found.blob,
                )
            case Dropped():
                return await self._ledger.filter(group_id, reason=found.reason, facts=found.facts)
            case FrameError():
                outcome = await self._reject(group_id, found.reason)
                self._malformed.add("group refused", group=group_id, code=found.reason, reason=str(found))
                if outcome == "filtered":  # a slice of an evaluation may go to another server
                    self._fleet.offer_evaluation()
                return outcome

    async def _reject(self, group_id: str, reason: str) -> str:
        # A malformed group has no readable kind, so first try it as a slice of an evaluation.
        outcome = await self._ledger.evaluations.record_failure(group_id, reason=reason, patience=MALFORMED_PATIENCE)
        if outcome != "void":
            return outcome
        return await self._ledger.filter(group_id, reason=reason, facts=Facts(), patience=MALFORMED_PATIENCE)


def _within(group: Inspected, vocab_size: int) -> Inspected:
    """The inspected group, refused if it has a token id outside the model's vocabulary."""
    if group.largest_token < vocab_size:
        return group
    detail = f"group {group.id}: token id {group.largest_token} is outside the vocabulary of {vocab_size}"
    return Inspected(group.id, InvalidGroupError(OUT_OF_VOCABULARY, detail))
