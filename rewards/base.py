"""What a reward is: a function from an answer and what it is judged by to a number."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from slipstream.configs.runtime.errors import SlipstreamError

FailureReason = Literal["reward_error", "reward_timeout", "reward_crash", "scoring_timeout"]


class Reward(Protocol):
    """Scores one answer. It may raise: that costs the group it belongs to, which is dropped and counted."""

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any], /) -> float:
        """The score, finite and usually in [0, 1].

        Args:
            answer: its text, without special tokens.
            reference: the task's reference.
            info: the task's other values.
        """
        ...


class RewardFailed(SlipstreamError):
    """A group can't be scored.

    Attributes:
        reason: what it is counted under: a reward raised or returned no finite number (`reward_error`), took
            too long (`reward_timeout`), or took its worker process down (`reward_crash`), or no worker was free in
            time (`scoring_timeout`).
        detail: which reward, and what happened.
    """

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(reason, detail)  # both, because exceptions are pickled by their arguments
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"
