"""What an engine must not be asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.rollout_servers.engines.base import RequestRefused


@dataclass(frozen=True)
class PromptLimits:
    """What the model can read: token ids below `vocabulary`, `context` of them together with the answer's."""

    vocabulary: int
    context: int

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises: RequestRefused."""
        if not token_ids:
            raise RequestRefused("the prompt is empty: there is nothing to go on from")
        if len(token_ids) >= self.context:
            raise RequestRefused(
                f"a prompt of {len(token_ids)} tokens leaves no room for an answer: the maximum context length is "
                f"{self.context} (rollout.engine.max_model_len)"
            )
        check_vocabulary(token_ids, self.vocabulary)


def check_vocabulary(token_ids: Sequence[int], vocabulary: int) -> None:
    """Raises: RequestRefused. Asked here: an engine without a tokenizer may die of a token that it does not know."""
    strange = [token for token in token_ids if not 0 <= token < vocabulary]
    if strange:
        raise RequestRefused(f"token {strange[0]} is not in the model's vocabulary of {vocabulary}: wrong tokenizer?")
