"""A request and its answers while they grow."""

from collections.abc import Sequence

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, Generation


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
