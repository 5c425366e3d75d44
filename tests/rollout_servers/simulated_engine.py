"""An engine with a KV cache and no model, which admits and preempts as vLLM does."""

import math
import random
from collections import deque
from dataclasses import dataclass
from statistics import mean

from slipstream.rollout_servers.concurrency import ConcurrencyLimiter, Move
from slipstream.rollout_servers.engines.base import Pressure

READING_STEPS = 50
"""Steps between two readings of the load."""


@dataclass(frozen=True)
class Workload:
    """Groups of answers of log-normal length, and the engine that generates them.

    Attributes:
        cache_tokens: room of the KV cache.
        prefill_cost: of a prompt's token, and of one computed again, in steps.
        update_every: steps between two weight updates, after each of which the whole cache is computed again.
    """

    cache_tokens: int = 8192
    max_sequences: int = 512
    group_size: int = 8
    prompt_tokens: int = 64
    median_tokens: float = 48
    sigma: float = 1.0
    most_tokens: int = 512
    prefill_cost: float = 1 / 500
    update_every: float = math.inf


@dataclass(eq=False)
class Answer:
    """An answer of `length` tokens in the group of a number."""

    group: int
    length: int
    tokens: int = 0


class SimulatedEngine:
    """Every running answer gets a token in each step; older ones take the cache of the youngest.

    Attributes:
        work: may change on the way.
        time: in steps without prefill.
        tokens: generated in all.
        finished: groups.
        unfinished: answers of each group in flight, by its number.
        ages: of the finished groups, in steps.
    """

    def __init__(self, work: Workload, *, seed: int = 0) -> None:
        self.time = 0.0
        self.tokens = self.finished = self.preemptions = 0
        self.unfinished: dict[int, int] = {}
        self.ages: list[float] = []
        self.work = work
        self._random = random.Random(seed)
        self._submitted_at: list[float] = []
        self._running: list[Answer] = []
        self._waiting: deque[Answer] = deque()
        self._cached = 0

    @property
    def pressure(self) -> Pressure:
        """The load now."""
        usage = self._cached / self.work.cache_tokens
        return Pressure(usage, self.preemptions, len(self._running), len(self._waiting))

    def submit(self) -> None:
        """Queues a group."""
        group = len(self._submitted_at)
        self._submitted_at.append(self.time)
        self.unfinished[group] = self.work.group_size
        for _ in range(self.work.group_size):
            length = round(self._random.lognormvariate(math.log(self.work.median_tokens), self.work.sigma))
            self._waiting.append(Answer(group, min(self.work.most_tokens, max(1, length))))

    def update(self) -> None:
        """Drops the cache."""
        while self._running:
            self._withdraw_youngest()

    def step(self) -> None:
        """Generates a token of each running answer."""
        served = 0
        while served < len(self._running):
            if self._cached < self.work.cache_tokens:
                self._cached += 1
                served += 1
            else:
                self._withdraw_youngest()
                self.preemptions += 1
        prefilled = self._admit()
        for answer in self._running:
            answer.tokens += 1
            self.tokens += 1
            if answer.tokens == answer.length:
                self._finish(answer)
        self._running = [answer for answer in self._running if answer.tokens < answer.length]
        self.time += 1 + self.work.prefill_cost * prefilled

    def _withdraw_youngest(self) -> None:
        answer = self._running.pop()
        self._cached -= self.work.prompt_tokens + answer.tokens
        self._waiting.appendleft(answer)

    def _admit(self) -> int:
        """Starts waiting answers while there is room; returns the tokens that are computed for them."""
        prefilled = 0
        while self._waiting and len(self._running) < self.work.max_sequences:
            needed = self.work.prompt_tokens + self._waiting[0].tokens + 1
            if self._cached + needed > self.work.cache_tokens:
                break
            self._running.append(self._waiting.popleft())
            self._cached += needed
            prefilled += needed
        return prefilled

    def _finish(self, answer: Answer) -> None:
        self._cached -= self.work.prompt_tokens + answer.tokens
        self.unfinished[answer.group] -= 1
        if not self.unfinished[answer.group]:
            del self.unfinished[answer.group]
            self.finished += 1
            self.ages.append(self.time - self._submitted_at[answer.group])


def run(engine: SimulatedEngine, limiter: ConcurrencyLimiter | int, *, steps: float) -> list[Move]:
    """Runs an engine with as many groups as the limiter allows, or a fixed number; returns the limiter's moves."""
    until, moves = engine.time + steps, list[Move]()
    reading_at, update_at = engine.time + READING_STEPS, engine.time + engine.work.update_every
    while engine.time < until:
        limit = limiter if isinstance(limiter, int) else limiter.limit
        while len(engine.unfinished) < limit:
            engine.submit()
        engine.step()
        if engine.time >= update_at:
            engine.update()
            update_at += engine.work.update_every
        if engine.time >= reading_at and isinstance(limiter, ConcurrencyLimiter):
            reading_at += READING_STEPS
            move = limiter.observe(engine.pressure, groups=len(engine.unfinished), finished=engine.finished)
            moves += [move] if move else []
    return moves


def speed(work: Workload, limiter: ConcurrencyLimiter | int, *, warm_up: float, steps: float) -> tuple[float, float]:
    """Tokens per step after the warm-up, and the mean age of the groups that finish then, in steps."""
    engine = SimulatedEngine(work)
    run(engine, limiter, steps=warm_up)
    tokens, began = engine.tokens, engine.time
    engine.ages.clear()
    run(engine, limiter, steps=steps)
    return (engine.tokens - tokens) / (engine.time - began), mean(engine.ages)
