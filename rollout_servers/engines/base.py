"""The seam to an inference engine: token ids in; token ids, log-probs and engine-stamped version spans out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights import Form, Manifest
from slipstream.configs.errors import SlipstreamError


class EngineError(SlipstreamError):
    """The engine is dead, unless it is one of the two below."""


class RequestRefused(EngineError):
    """The engine can't answer this request; the others go on."""


class UpdateFailed(EngineError):
    """Weights could not be received; the engine goes on with those it has."""


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: the generated tokens, shape [T].
        logprobs: log-prob of each under the distribution that it was sampled from, shape [T].
        spans: which of the tokens came from which policy version; together they cover [0, T).
        finish_reason: `stop`, `length`, or `abort` if it was cut short; then T may be 0.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[VersionSpan]
    finish_reason: str


class Engine(Protocol):
    """An inference engine; safe to use from one event loop.

    Weights come in three stages, so that generation stands still only in the last one where the transport allows it:
    `join` a transfer group, `receive` a version in the background, `apply` it between two engine steps.
    """

    @property
    def version(self) -> int:
        """The policy version that new tokens come from."""
        ...

    @property
    def workers(self) -> int:
        """Ranks that the engine takes in a transfer group."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], *, samples: int, greedy: bool, deadline_s: float
    ) -> list[Completion]:
        """`samples` answers to one prompt; those that are not finished at the deadline are cut short.

        Cancelling aborts them all. Raises: RequestRefused, EngineError.
        """
        ...

    async def join(self, group: Form) -> None:
        """Enters a transfer group; returns before the others have entered. Raises: UpdateFailed, EngineError."""
        ...

    async def receive(self, manifest: Manifest) -> None:
        """Gets ready for a version and starts to receive it. Raises: UpdateFailed, EngineError."""
        ...

    async def apply(self, manifest: Manifest) -> float:
        """Makes a received version the one that generates; running requests go on, their KV cache is recomputed.

        Returns: seconds that generation stood still. Raises: UpdateFailed, EngineError.
        """
        ...

    async def close(self) -> None:
        """Frees everything the engine holds."""
        ...
