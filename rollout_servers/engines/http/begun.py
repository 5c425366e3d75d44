"""What is left of requests when their server dies: it tells of versions only as an answer ends."""

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.engines.http.answers import whole


@dataclass(eq=False)
class Begun:
    """A request that a server works on.

    Attributes:
        version: the engine's when it was asked.
        so_far: its answers as they have come; what has not ended is taken to be of that version.
        certain: how many tokens of each had come before the next version did; None until then.
    """

    version: int
    so_far: Callable[[], list[Completion]]
    certain: list[int] | None = None

    def before_update(self, version: int) -> None:
        """Tokens that come from now on may be of the version that follows `version`."""
        if self.certain is None and self.version == version:
            self.certain = [len(answer.token_ids) for answer in self.so_far()]

    def left(self, version: int) -> list[Completion] | None:
        """What is left of it when the server dies with `version`; None if nothing is certain."""
        if version == self.version:
            return self.so_far()
        if self.certain is None:  # it was asked during an update
            return None
        return [
            self._first(answer, tokens) if answer.finish_reason == "abort" else answer
            for answer, tokens in zip(self.so_far(), self.certain, strict=True)
        ]

    def _first(self, answer: Completion, tokens: int) -> Completion:
        return Completion(
            token_ids=answer.token_ids[:tokens],
            logprobs=answer.logprobs[:tokens],
            spans=whole(self.version, tokens),
            finish_reason=answer.finish_reason,
        )
