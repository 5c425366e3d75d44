"""What an engine's server must not be asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.rollout_servers.engines.base import RequestRefused


@dataclass(frozen=True)
class PromptLimits:
    """What the model can read: token ids below `vocabulary`, `context` of them together with the answer's."""

    vocabulary: int
    context: int

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises: RequestRefused. Asked here: a server without a tokenizer may die of a strange token id."""
        if not token_ids:
            raise RequestRefused("the prompt is empty")
        if len(token_ids) >= self.context:
            raise RequestRefused(
                f"a prompt of {len(token_ids)} tokens leaves no room for an answer: the maximum context length is "
                f"{self.context}"
            )
        strange = [token for token in token_ids if not 0 <= token < self.vocabulary]
        if strange:
            raise RequestRefused(
                f"token {strange[0]} is not in the model's vocabulary of {self.vocabulary}: wrong tokenizer?"
            )
