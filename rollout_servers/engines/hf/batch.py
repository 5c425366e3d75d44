"""Which answers run, and how their next tokens are drawn: one per answer and step."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, Generation
from slipstream.rollout_servers.engines.hf.model import Policy

# B sequences, T tokens in the cache (padding on the left), V vocabulary


class Batch:
    """The KV cache of B sequences."""

    def __init__(self, policy: Policy, cache: Cache, mask_BT: Tensor) -> None:
        self._policy = policy
        self._cache: Any = cache  # its layers are of many kinds
        self._mask_BT = mask_BT

    @classmethod
    def of(cls, policy: Policy, sequences: Sequence[Sequence[int]]) -> tuple["Batch", Tensor]:
        """The cache of these tokens, and the logits of those that follow, shape [B, V]; of equal ones computed once."""
        places: dict[tuple[int, ...], int] = {}
        place_B = [places.setdefault(tuple(sequence), len(places)) for sequence in sequences]
        longest = max(map(len, places))
        ids = [[0] * (longest - len(each)) + list(each) for each in places]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in places]
        cache, mask_BT = policy.new_cache(), torch.tensor(mask, device=policy.device)
        logits_BV = policy.next_logits(torch.tensor(ids, device=policy.device), mask_BT, cache)
        batch = cls(policy, cache, mask_BT)
        if len(places) < len(place_B):
            index_B = torch.tensor(place_B, device=policy.device)
            batch._reorder(index_B)
            logits_BV = logits_BV[index_B]
        return batch, logits_BV

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Adds a token to each sequence; logits of the next, shape [B, V]."""
        ids_B1 = torch.tensor(token_ids, device=self._policy.device)[:, None]
        self._mask_BT = pad(self._mask_BT, (0, 1), value=1)
        return self._policy.next_logits(ids_B1, self._mask_BT, self._cache)

    def join(self, other: "Batch") -> None:
        """Takes in the sequences of another batch, behind its own; only where `policy.joins`."""
        length = max(self._mask_BT.shape[1], other._mask_BT.shape[1])
        self._resize(length)
        other._resize(length)
        self._mask_BT = torch.cat([self._mask_BT, other._mask_BT])
        for mine, others in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([mine.keys, others.keys])
            mine.values = torch.cat([mine.values, others.values])

    def keep(self, places: Sequence[int]) -> None:
        """Drops all sequences but these, and the padding that no other needs."""
        self._reorder(torch.tensor(places, device=self._policy.device))
        if self._policy.joins:
            self._resize(int(self._mask_BT.sum(-1).max()))

    def _reorder(self, index_B: Tensor) -> None:
        self._cache.reorder_cache(index_B)
        self._mask_BT = self._mask_BT[index_B]

    def _resize(self, length: int) -> None:
        """Adds or removes padding on the left, to T = `length`; a negative pad removes."""
        self._mask_BT = pad(self._mask_BT, (length - self._mask_BT.shape[1], 0))
        for layer in self._cache.layers:
            kept = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                kept = min(length, layer.sliding_window - 1)
                layer.cumulative_length = length
            more = kept - layer.keys.shape[-2]
            layer.keys = pad(layer.keys, (0, 0, more, 0))
            layer.values = pad(layer.values, (0, 0, more, 0))


class Answer:
    """One answer while it grows.

    Attributes:
        token_ids: the prompt, and what has been generated.
        finish_reason: None while it grows.
    """

    def __init__(self, request: "Request", prompt_ids: Sequence[int]) -> None:
        self.request = request
        self.token_ids = list(prompt_ids)
        self.finish_reason: str | None = None
        self._prompt_length = len(prompt_ids)
        self._logprobs: list[float] = []
        self._versions: list[tuple[int, int]] = []  # a version, and the first of the tokens that came from it

    def add(self, token: int, logprob: float, version: int) -> None:
        """Appends a token and sees whether it is the last."""
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self._logprobs)))
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self._logprobs) == self.request.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """What it has come to; cut short if it is not finished."""
        starts = [start for _, start in self._versions] + [len(self._logprobs)]
        return Completion(
            token_ids=self.token_ids[self._prompt_length :],
            logprobs=list(self._logprobs),
            spans=[
                VersionSpan(version=version, start=start, end=end)
                for (version, start), end in zip(self._versions, starts[1:], strict=True)
            ],
            finish_reason=self.finish_reason or "abort",
        )


class Request:
    """`samples` answers to one prompt, drawn as `generation` says.

    Attributes:
        temperature: None for greedy answers.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        generation: Generation,
        *,
        samples: int,
        greedy: bool,
        max_tokens: int,
    ) -> None:
        self.temperature = None if greedy else generation.temperature
        self.stop_token_ids = frozenset(generation.stop_token_ids)
        self.max_tokens = max_tokens
        self.answers = [Answer(self, prompt_ids) for _ in range(samples)]

    @property
    def finished(self) -> bool:
        """Whether all answers are."""
        return all(answer.finish_reason is not None for answer in self.answers)

    def completions(self) -> list[Completion]:
        """What the answers have come to."""
        return [answer.completion() for answer in self.answers]


PREFILL_TOKENS = 16384
"""Most tokens, padding included, of prompts that are computed at once; bounds the memory that it takes."""

# B answers, V vocabulary


class Stepper:
    """Runs requests step by step, first come, first served.

    Attributes:
        policy: the model that runs.
        version: the policy version with which new tokens are stamped.
    """

    def __init__(self, policy: Policy, *, max_sequences: int, seed: int) -> None:
        self.policy = policy
        self._max_sequences = max_sequences
        self._generator = torch.Generator(policy.device).manual_seed(seed)
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []  # all but the last token of each is in the batch, in this order
        self._batch: Batch | None = None
        self.version = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    @property
    def tokens(self) -> int:
        """How many tokens the running answers and their prompts have."""
        return sum(len(answer.token_ids) for answer in self._running)

    def checksums(self) -> dict[str, int]:
        """xxh3 (64 bits) of what is published of the model, by name."""
        return self.policy.checksums()

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._waiting.extend(request.answers)

    def cut_short(self, request: Request) -> list[Completion]:
        """Ends those of its answers that are not finished; what all of them have come to."""
        for answer in request.answers:
            answer.finish_reason = answer.finish_reason or "abort"
        self._waiting = deque(answer for answer in self._waiting if answer.finish_reason is None)
        self._drop_finished()
        return request.completions()

    def left_behind(self, requests: Sequence[Request]) -> dict[Request, list[Completion] | None]:
        """What their answers have come to."""
        return {request: request.completions() for request in requests}

    def recompute(self) -> None:
        """Forgets the KV cache; the next step computes it again, under the weights that are in place then."""
        self._waiting.extendleft(reversed(self._running))
        self._running, self._batch = [], None

    def step(self) -> list[tuple[Request, list[Completion]]]:
        """Draws the next token of as many answers as may run; the requests that this finishes, with all answers."""
        if self.idle:
            return []
        newcomers = self._admit()
        logits = []
        if self._batch is not None:
            logits.append(self._batch.advance([answer.token_ids[-1] for answer in self._running]))
        for group in self._prefills(newcomers):
            batch, logits_BV = Batch.of(self.policy, [answer.token_ids for answer in group])
            logits.append(logits_BV)
            if self._batch is None:
                self._batch = batch
            else:
                self._batch.join(batch)
        self._running += newcomers
        self._draw(torch.cat(logits))
        finished = {answer.request: None for answer in self._running if answer.finish_reason is not None}
        self._drop_finished()
        return [(request, request.completions()) for request in finished if request.finished]

    def close(self) -> None:
        """Frees the model and its cache."""
        del self.policy, self._batch

    def _admit(self) -> list[Answer]:
        """Takes answers out of the queue; with those that run, where their cache can't be joined."""
        free = min(self._max_sequences - len(self._running), len(self._waiting))
        if free and not self.policy.joins:
            free += len(self._running)
            self.recompute()
        return [self._waiting.popleft() for _ in range(free)]

    def _prefills(self, newcomers: list[Answer]) -> list[list[Answer]]:
        """Cuts newcomers into groups that are computed at once; samples of one prompt count once."""
        groups: list[list[Answer]] = []
        longest = different = 0
        previous: list[int] = []
        for answer in newcomers:
            if answer.token_ids != previous:
                longest, different = max(longest, len(answer.token_ids)), different + 1
                if not groups or (longest * different > PREFILL_TOKENS and self.policy.joins):
                    groups.append([])
                    longest, different = len(answer.token_ids), 1
            groups[-1].append(answer)
            previous = answer.token_ids
        return groups

    def _draw(self, logits_BV: Tensor) -> None:
        temperatures = [answer.request.temperature for answer in self._running]
        scale_B1 = torch.tensor([each or 1.0 for each in temperatures], device=logits_BV.device)[:, None]
        greedy_B1 = torch.tensor([each is None for each in temperatures], device=logits_BV.device)[:, None]
        logprobs_BV = (logits_BV / scale_B1).log_softmax(-1)
        drawn_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=self._generator)
        token_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), drawn_B1)
        logprob_B1 = logprobs_BV.gather(-1, token_B1)
        tokens, logprobs = token_B1[:, 0].tolist(), logprob_B1[:, 0].tolist()
        for answer, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            answer.add(token, logprob, self.version)

    def _drop_finished(self) -> None:
        places = [place for place, answer in enumerate(self._running) if answer.finish_reason is None]
        if len(places) == len(self._running):
            return
        self._running = [self._running[place] for place in places]
        if self._batch is not None and places:
            self._batch.keep(places)
        else:
            self._batch = None
