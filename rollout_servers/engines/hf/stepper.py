"""Which answers run, and how their next tokens are drawn: one per answer and step."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.engines.hf.batch import Batch
from slipstream.rollout_servers.engines.hf.policy import Policy
from slipstream.rollout_servers.engines.hf.request import Answer, Request

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
