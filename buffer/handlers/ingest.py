"""Delivered groups: inspection, filters, sampling order, storage in batches, acknowledgement."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.group_checks import (
    FUTURE_VERSION,
    OTHER_TICKET,
    OUT_OF_VOCABULARY,
    InvalidGroupError,
    check_group,
    largest_token,
)
from slipstream.buffer.handlers.peers import MalformedCounter, Send
from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.filters import EpisodeFacts, Verdict, apply_filters, draws, group_outcome
from slipstream.buffer.policies.sampling import order, races
from slipstream.buffer.policies.statistics import histogram, tally, task_scores
from slipstream.buffer.store.ledger import STORED_AT_ONCE, STORED_AT_ONCE_BYTES, Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import DeliveredGroup, EvalSlice, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, encode_group, version_range
from slipstream.buffer.wire.messages import CUT_OFF, EVAL, MAJORITY, Group, Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.buffer import DynamicSamplingConfig

log = get_log("buffer.ingest")

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

    def inspect(self, group_id: str, blob: bytes | memoryview) -> Inspected:
        """The result for what was delivered under `group_id`."""
        try:
            group = check_group(group_id, blob, self._config.rollout, eval_samples=self._config.eval.samples)
        except FrameError as error:
            return Inspected(group_id, error)
        if group.kind == EVAL:
            work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
            version, _ = version_range(group)
            answers = EvalSliceResult(work, version, group.failures, _tallies(group), blob)
            return Inspected(group_id, answers, largest_token(group))
        result = self.admit(group, blob)
        return Inspected(group_id, result, largest_token(group), epoch=group.epoch, task=group.indices[0])

    def admit(self, group: Group, blob: bytes | memoryview) -> DeliveredGroup | Dropped:
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


def _by_reason(
    dropped: Sequence[tuple[int, str]], lengths: Sequence[int], lost: Mapping[str, Sequence[int]]
) -> Mapping[str, Mapping[int, int]]:
    of_reason = defaultdict[str, list[int]](list, {reason: list(lengths_lost) for reason, lengths_lost in lost.items()})
    for index, reason in dropped:
        of_reason[reason].append(lengths[index])
    return {reason: histogram(lengths_of) for reason, lengths_of in of_reason.items()}


MALFORMED_RETRIES = 3
"""Times that a refused group is requested again: the network may have damaged it."""


@dataclass(frozen=True)
class Delivery:
    """A delivery whose groups are not stored yet."""

    peer: bytes
    train_tasks: int
    """Train tasks of the sender's env."""
    outcomes: dict[str, str]
    """Outcomes of the groups that are neither stored nor dropped with others."""
    groups: list[Inspected]
    """The others: to be stored, or dropped, unless they are not those of their tickets."""


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

    async def take(self, peer: bytes, groups: Sequence[Inspected], *, vocab_size: int, train_tasks: int) -> None:
        """Queues a delivery for `store`, which runs at once if the queue is long.

        Args:
            vocab_size: the model's number of token ids; a group with another token id is refused.
            train_tasks: tasks of the peer's env to train on.
        """
        within = [_within(group, vocab_size) for group in groups]
        await self._memory.attempt(self._take(Delivery(peer, train_tasks, {}, []), within))

    async def store(self) -> None:
        """Stores and acknowledges all queued deliveries, unless Redis is full."""
        await self._memory.attempt(self._store())

    async def _take(self, delivery: Delivery, groups: Sequence[Inspected]) -> None:
        for group in groups:
            if isinstance(group.result, DeliveredGroup | Dropped):
                delivery.groups.append(group)
            else:
                delivery.outcomes[group.id] = await self._not_stored(group.id, group.result)
        self._waiting.append(delivery)
        self._groups += len(delivery.groups)
        results = [group.result for group in delivery.groups]
        self._bytes += sum(len(result.blob) for result in results if isinstance(result, DeliveredGroup))
        if self._groups >= STORED_AT_ONCE or self._bytes >= STORED_AT_ONCE_BYTES:
            await self._store()

    async def _store(self) -> None:
        async with self._storing:
            waiting, self._waiting = self._waiting, []
            self._groups = self._bytes = 0
            groups = await self._sort_out(waiting)
            delivered = await self._ledger.deliver(groups)
            stored = {group.id: outcome for group, outcome in zip(groups, delivered, strict=True)}
            lost = [group_id for group_id, outcome in stored.items() if outcome == m.AGAIN]
            if lost:
                log.warning("Redis lost the bytes of arriving groups, requesting them again", groups=lost)
            for group_id in [group_id for group_id, outcome in stored.items() if outcome == "future"]:
                error = InvalidGroupError(FUTURE_VERSION, f"group {group_id}: a policy version that was not published")
                stored[group_id] = await self._not_stored(group_id, error)
            for delivery in waiting:
                outcomes = {group.id: stored[group.id] for group in delivery.groups if group.id in stored}
                outcomes |= delivery.outcomes
                generated = sum(outcome in ("ready", "filtered") for outcome in outcomes.values())
                self._fleet.ticket_returned(delivery.peer, delivered=generated)
                await self._send(delivery.peer, m.Acknowledge(outcomes=outcomes))

    async def _sort_out(self, waiting: Sequence[Delivery]) -> list[DeliveredGroup]:
        """The groups to store; those that a filter drops or that have another task than their ticket get an outcome."""
        places = await self._ledger.places([group.id for delivery in waiting for group in delivery.groups])
        groups: list[DeliveredGroup] = []
        for delivery in waiting:
            for group in delivery.groups:
                result = self._other_ticket(group, places.get(group.id), delivery.train_tasks) or group.result
                if isinstance(result, DeliveredGroup):
                    groups.append(result)
                else:
                    delivery.outcomes[group.id] = await self._not_stored(group.id, result)
        return groups

    def _other_ticket(self, group: Inspected, place: Place | None, train_tasks: int) -> InvalidGroupError | None:
        """The error of a group whose task is not that of its ticket, which is at `place`; None: not in flight."""
        if place is None:
            return None
        epoch, task = place[0], self._fleet.task(*place, train_tasks=train_tasks)
        if (group.epoch, group.task) == (epoch, task):
            return None
        detail = f"group {group.id}: task {group.task} of epoch {group.epoch}, but its ticket has {task} of {epoch}"
        return InvalidGroupError(OTHER_TICKET, detail)

    async def _not_stored(self, group_id: str, result: EvalSliceResult | Dropped | FrameError) -> str:
        """The outcome of a group that is not stored with the others."""
        match result:
            case EvalSliceResult():
                return await self._ledger.evaluations.record(
                    result.work,
                    version=result.version,
                    failures=result.failures,
                    tallies=result.tallies,
                    blob=result.blob,
                )
            case Dropped():
                return await self._ledger.filter(group_id, reason=result.reason, facts=result.facts)
            case FrameError():
                outcome = await self._reject(group_id, result.reason)
                self._malformed.add("group refused", group=group_id, code=result.reason, reason=str(result))
                if outcome == "filtered":  # a slice of an evaluation may go to another server
                    self._fleet.offer_evaluation()
                return outcome

    async def _reject(self, group_id: str, reason: str) -> str:
        # A malformed group has no readable kind, so first try it as a slice of an evaluation.
        outcome = await self._ledger.evaluations.record_failure(
            group_id, reason=reason, ignored_failures=MALFORMED_RETRIES
        )
        if outcome != "void":
            return outcome
        return await self._ledger.filter(group_id, reason=reason, facts=Facts(), ignored_failures=MALFORMED_RETRIES)


def _within(group: Inspected, vocab_size: int) -> Inspected:
    """The inspected group, refused if it has a token id outside the model's vocabulary."""
    if group.largest_token < vocab_size:
        return group
    detail = f"group {group.id}: token id {group.largest_token} is outside the vocabulary of {vocab_size}"
    return Inspected(group.id, InvalidGroupError(OUT_OF_VOCABULARY, detail))
