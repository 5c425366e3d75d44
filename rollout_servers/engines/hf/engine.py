"""The engine `hf`: generation with transformers' forward pass in a thread of the rollout server."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.rollout_servers.engines.base import (
    BaseEngine,
    Completion,
    EngineSettings,
    Generation,
    Pressure,
    PromptLimits,
    Request,
)
from slipstream.rollout_servers.engines.hf.cache import MARGIN, spare
from slipstream.rollout_servers.engines.hf.model import Batch, HfModel, check_padding
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.thread import EngineThread


class Answer:
    """One answer in progress.

    Attributes:
        token_ids: of the prompt and of the answer so far.
        finish_reason: None while it is unfinished.
        number: in the order of arrival.
        cached_tokens: of the prompt, those that were computed for another sample of it.
    """

    def __init__(self, request: "InFlight", prompt_ids: Sequence[int]) -> None:
        self.request = request
        self.number = self.cached_tokens = 0
        self.token_ids = list(prompt_ids)
        self.finish_reason: str | None = None
        self._prompt_length = len(prompt_ids)
        self._logprobs: list[float] = []
        self._kept: list[NDArray[np.int32]] = []
        self._versions: list[tuple[int, int]] = []  # each version with the index of its first token

    def add(self, token: int, logprob: float, version: int, kept: NDArray[np.int32] | None = None) -> None:
        """Appends a token, which may finish the answer.

        Args:
            kept: tokens that it was drawn from; None: all.
        """
        if kept is not None:
            self._kept.append(kept)
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self._logprobs)))
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self._logprobs) == self.request.max_tokens:
            self.finish_reason = "length"

    @property
    def tokens(self) -> int:
        """Number of its tokens so far."""
        return len(self._logprobs)

    def completion(self) -> Completion:
        """The answer so far; `abort` if it is unfinished."""
        starts = [start for _, start in self._versions] + [len(self._logprobs)]
        return Completion(
            token_ids=self.token_ids[self._prompt_length :],
            logprobs=list(self._logprobs),
            spans=[
                VersionSpan(version=version, start=start, end=end)
                for (version, start), end in zip(self._versions, starts[1:], strict=True)
            ],
            finish_reason=self.finish_reason or "abort",
            kept=list(self._kept) or None,
            cached_tokens=self.cached_tokens,
        )


class InFlight:
    """A request in flight.

    Attributes:
        temperature: None for greedy answers.
    """

    def __init__(self, request: Request, generation: Generation, *, max_tokens: int) -> None:
        """`max_tokens`: of an answer."""
        self.temperature = None if request.greedy else generation.temperature
        self.stop_token_ids = frozenset(generation.stop_token_ids)
        self.max_tokens = max_tokens
        self.answers = [Answer(self, request.prompt_ids) for _ in range(request.samples)]

    @property
    def finished(self) -> bool:
        """True if all answers are finished."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(answer.tokens for answer in self.answers)

    def completions(self) -> list[Completion]:
        """The answers so far."""
        return [answer.completion() for answer in self.answers]


PREFILL_TOKENS = 16384
"""Maximal tokens, with padding, of prompts that are computed at once; bounds the memory for it."""

# B answers, V vocabulary


class Stepper:
    """Runs requests step by step, in the order of their arrival.

    Attributes:
        policy: the model.
        version: the policy version of new tokens.
        preemptions: number of answers whose KV cache was dropped for want of room.
    """

    def __init__(
        self,
        policy: HfModel,
        batch: Batch,
        *,
        max_sequences: int,
        seed: int,
        top_k: int | None = None,
        top_p: float = 1,
    ) -> None:
        """`batch`: empty."""
        self.policy = policy
        self._top_k, self._top_p = top_k, top_p
        self._max_sequences = max_sequences
        self._generator = torch.Generator(policy.device).manual_seed(seed)
        self._arrivals = itertools.count()
        self._waiting: deque[Answer] = deque()
        self._batch = batch  # has all but the last token of each running answer, in this order
        self._running: list[Answer] = []
        self._tokens_B = torch.empty(0, dtype=torch.long)  # the last token of each, on the device
        self._temperature_B1: Tensor | None = None  # 0 for greedy answers; None: the answers are others
        self.version = 0
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        """True if no answer is unfinished."""
        return not self._running and not self._waiting

    @property
    def pressure(self) -> Pressure:
        """The load now; of the KV cache, the share that is in use."""
        return Pressure(self._batch.slots.usage, self.preemptions, len(self._running), len(self._waiting))

    def add(self, request: InFlight) -> None:
        """Queues a request."""
        for answer in request.answers:
            answer.number = next(self._arrivals)
        self._waiting.extend(request.answers)

    def abort(self, request: InFlight) -> list[Completion]:
        """Ends the unfinished answers of a request. Returns all of its answers."""
        for answer in request.answers:
            answer.finish_reason = answer.finish_reason or "abort"
        self._waiting = deque(answer for answer in self._waiting if answer.finish_reason is None)
        self._drop_finished()
        return request.completions()

    def unfinished(self, requests: Sequence[InFlight]) -> dict[InFlight, list[Completion] | None]:
        """Answers so far of requests."""
        return {request: request.completions() for request in requests}

    def install(self, manifest: Manifest, staging: Staging, *, keep_stale_kv: bool) -> float:
        """Loads a version between two steps. Returns the seconds that it took. Raises: UpdateFailed."""
        paused_at = time.perf_counter()
        self.policy.install(manifest, staging)
        self.version = manifest.version
        if not keep_stale_kv:
            self._recompute()
        return time.perf_counter() - paused_at

    def step(self) -> list[tuple[InFlight, list[Completion]]]:
        """Samples one token of as many answers as fit. Returns the requests that this finishes, with their answers."""
        if self.idle:
            return []
        self._preempt()
        newcomers, logits = self._admit(), []
        if self._running:
            logits.append(self._batch.advance(self._tokens_B))
        for group in self._prefills(newcomers):
            logits.append(self._batch.add([answer.token_ids for answer in group]))
        if newcomers:
            self._running += newcomers
            self._temperature_B1 = None
        self._sample(torch.cat(logits))
        finished = {answer.request: None for answer in self._running if answer.finish_reason is not None}
        self._drop_finished()
        return [(request, request.completions()) for request in finished if request.finished]

    def close(self) -> None:
        """Frees the model and its cache."""
        del self.policy, self._batch

    def _recompute(self) -> None:
        """Drops the KV cache; the next step recomputes it, under the weights of then."""
        self._waiting.extendleft(sorted(self._running, key=_number, reverse=True))
        self._running = []
        self._batch.slots.clear()

    def _preempt(self) -> None:
        """Puts the last arrivals back into the queue until there is memory for the next tokens of the others."""
        slots, count = self._batch.slots, len(self._running)
        if not slots.full:
            return
        while count > 1 and not slots.fits(count, slots.longest + MARGIN):
            count -= 1
        dropped = sorted(self._running, key=_number)[count:]
        self.preemptions += len(dropped)
        self._waiting.extendleft(reversed(dropped))
        if dropped:
            self._keep(lambda answer: answer not in dropped)

    def _admit(self) -> list[Answer]:
        """Takes answers out of the queue for which there is memory, also when the longest have grown by some tokens."""
        slots, admitted = self._batch.slots, list[Answer]()
        longest = slots.longest
        while self._waiting and len(self._running) + len(admitted) < self._max_sequences:
            count, tokens = len(self._running) + len(admitted) + 1, max(longest, len(self._waiting[0].token_ids))
            if count > 1 and not slots.fits(count, tokens + spare(tokens)):
                break
            admitted.append(self._waiting.popleft())
            longest = tokens
        return admitted

    def _prefills(self, newcomers: list[Answer]) -> list[list[Answer]]:
        """Splits newcomers into groups that are computed at once; samples of one prompt count once."""
        groups: list[list[Answer]] = []
        longest = different = 0
        previous: list[int] = []
        for answer in newcomers:
            if answer.token_ids != previous:
                longest, different = max(longest, len(answer.token_ids)), different + 1
                if not groups or longest * different > PREFILL_TOKENS:
                    groups.append([])
                    longest, different = len(answer.token_ids), 1
            elif not answer.tokens:
                answer.cached_tokens = len(answer.token_ids)
            groups[-1].append(answer)
            previous = answer.token_ids
        return groups

    def _sample(self, logits_BV: Tensor) -> None:
        if self._temperature_B1 is None:
            temperatures = [answer.request.temperature or 0.0 for answer in self._running]
            self._temperature_B1 = torch.tensor(temperatures, device=logits_BV.device)[:, None]
        greedy_B1 = self._temperature_B1 == 0
        logprobs_BV = (logits_BV / self._temperature_B1.masked_fill(greedy_B1, 1.0)).log_softmax(-1)
        kept: list[NDArray[np.int32] | None] = [None] * len(self._running)
        if self._top_k is not None:
            logprobs_BV, kept = self._cut(logprobs_BV, self._top_k, greedy_B1)
        # The first of V exponential clocks with these rates; torch.multinomial draws likewise, but waits for the GPU.
        clocks_BV = torch.empty_like(logprobs_BV).exponential_(generator=self._generator)
        drawn_B1 = (logprobs_BV.exp() / clocks_BV).argmax(-1, keepdim=True)
        token_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), drawn_B1)
        self._tokens_B = token_B1[:, 0]
        # One copy to the host, in float32, which has all token ids exactly.
        tokens, logprobs = torch.cat([token_B1, logprobs_BV.gather(-1, token_B1)], dim=1).T.tolist()
        for answer, token, logprob, left in zip(self._running, tokens, logprobs, kept, strict=True):
            if math.isnan(logprob):
                raise RuntimeError(f"the model's log-probs are NaN after {len(answer.token_ids)} tokens")
            answer.add(int(token), logprob, self.version, left)

    def _cut(self, logprobs_BV: Tensor, top_k: int, greedy_B1: Tensor) -> tuple[Tensor, list[NDArray[np.int32] | None]]:
        """The distributions that top-k and top-p leave, and their tokens; greedy answers keep theirs."""
        values_BK, ids_BK = logprobs_BV.topk(min(top_k, logprobs_BV.shape[-1]))
        probabilities_BK = values_BK.softmax(-1)
        # Of the tokens before each: the one that reaches top-p is left in.
        left_BK = probabilities_BK.cumsum(-1) - probabilities_BK < self._top_p
        left_BK[:, 0] = True
        values_BK = values_BK.masked_fill(~left_BK, -torch.inf).log_softmax(-1)
        cut_BV = torch.full_like(logprobs_BV, -torch.inf).scatter_(-1, ids_BK, values_BK)
        counts, ids = left_BK.sum(-1).tolist(), ids_BK.to(torch.int32).numpy(force=True)
        greedy = greedy_B1[:, 0].tolist()
        kept = [None if whole else row[:count] for row, count, whole in zip(ids, counts, greedy, strict=True)]
        return torch.where(greedy_B1, logprobs_BV, cut_BV), kept

    def _drop_finished(self) -> None:
        if any(answer.finish_reason is not None for answer in self._running):
            self._keep(lambda answer: answer.finish_reason is None)

    def _keep(self, kept: Callable[[Answer], bool]) -> None:
        """Drops all other running answers."""
        places = [place for place, answer in enumerate(self._running) if kept(answer)]
        self._temperature_B1 = None
        if not places:
            self._running = []
            self._batch.slots.clear()
            return
        order = self._batch.slots.keep(places)
        self._running = [self._running[place] for place in order]
        self._tokens_B = self._tokens_B[torch.tensor(order, device=self._tokens_B.device)]


def _number(answer: Answer) -> int:
    return answer.number


class HfEngine(BaseEngine):
    """transformers in one engine thread.

    The pause of `install` does not include the recomputation of the KV cache, which is part of the next step.
    """

    name = "hf"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.generation, adapts=settings.config.model.lora is not None)
        self._settings = settings
        self._thread = EngineThread("transformers", self._loaded, deadline_s=2 * settings.config.weights.deadline_s)

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Loads the model.

        Raises: ConfigError when it does not fit the configuration, EngineError when it can't be loaded or that takes
        longer than `rollout.engine.start_deadline_s`.
        """
        engine = cls(settings)
        await engine._thread.start(deadline_s=settings.config.rollout.engine.start_deadline_s)
        return engine

    @property
    def version(self) -> int:
        return self._stepped.version

    async def generate(self, request: Request) -> list[Completion]:
        self._limits.check(request.prompt_ids)
        room = self._limits.context - len(request.prompt_ids)
        most = min(room, request.max_tokens or self.generation.max_tokens)
        in_flight = InFlight(request, self.generation, max_tokens=most)
        request.tally.follow(lambda: in_flight.tokens)
        return await self._thread.request(
            in_flight, lambda: self._stepped.add(in_flight), deadline_s=request.deadline_s
        )

    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        keep = self._settings.config.weights.keep_stale_kv
        return await self._thread.call(lambda: self._stepped.install(manifest, staging, keep_stale_kv=keep))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._limits.check(token_ids)
        return await self._thread.call(lambda: self._stepped.policy.score(list(token_ids)))

    async def checksums(self) -> dict[str, int]:
        return await self._thread.call(lambda: self._stepped.policy.checksums())  # noqa: PLW0108  (closed: no policy)

    async def pressure(self) -> Pressure:
        return await self._thread.call(lambda: self._stepped.pressure)

    async def close(self) -> None:
        await self._thread.close()

    @contextmanager
    def _loaded(self) -> Iterator[Stepper]:
        """Loads and frees the model; entered and left in the thread."""
        with torch.inference_mode():
            policy, limits = HfModel(self._settings), self._settings.config.rollout.engine
            self.device = policy.device
            batch = Batch(policy, limits)
            check_padding(policy, batch, dtype=self._settings.config.model.dtype_here)
            self._limits = PromptLimits(vocabulary=policy.vocabulary, context=limits.max_model_len)
            seed = self._settings.config.run.seed
            self._stepped = Stepper(
                policy,
                batch,
                max_sequences=limits.max_sequences,
                seed=seed,
                top_k=self.generation.top_k,
                top_p=self.generation.top_p,
            )
            yield self._stepped
            self._stepped.close()
