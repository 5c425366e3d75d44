"""What vLLM's server is asked, and what it must not be asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.rollout_servers.engines.base import Generation, RequestRefused

GENERATE = "/inference/v1/generate"
PIECE_TOKENS = 8
"""An answer comes in pieces of so many tokens: what is lost of it at most when the server dies."""


@dataclass(frozen=True)
class PromptLimits:
    """What the model can read: token ids below `vocabulary`, `context` of them together with the answer's."""

    vocabulary: int
    context: int

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises: RequestRefused. Without a tokenizer vLLM looks at no token id, and dies of a strange one."""
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


def generate_request(
    request: str,
    prompt_ids: Sequence[int],
    generation: Generation,
    *,
    samples: int,
    greedy: bool,
    max_tokens: int | None,
) -> dict[str, Any]:
    """Asks for a stream of answers, as one event per piece of each."""
    sampling = {
        "n": samples,
        "temperature": 0.0 if greedy else generation.temperature,
        "max_tokens": generation.max_tokens if max_tokens is None else max_tokens,
        "ignore_eos": generation.ignore_eos,
        "stop_token_ids": list(generation.stop_token_ids),
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": PIECE_TOKENS,
    }
    return {"request_id": request, "token_ids": list(prompt_ids), "stream": True, "sampling_params": sampling}


def abort_request(request: str) -> dict[str, Any]:
    """Ends a request with what it has come to; the prefix is what the server puts before ids of its path."""
    return {"request_ids": [f"generate-tokens-{request}"]}


def score_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Asks for the log-probs of the tokens of a prompt."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": list(token_ids), "sampling_params": sampling}
