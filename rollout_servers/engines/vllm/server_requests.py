"""What vLLM's server is asked."""

from collections.abc import Sequence
from typing import Any

from slipstream.rollout_servers.engines.base import Generation
from slipstream.rollout_servers.engines.http.requests import PIECE_TOKENS
from slipstream.rollout_servers.engines.vllm.arguments import SCORED_FIRST

GENERATE = "/inference/v1/generate"
ABORT = "/abort_requests"


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


def abort_request(requests: Sequence[str]) -> dict[str, Any]:
    """Ends requests with what they have come to; the prefix is what the server puts before ids of its path."""
    return {"request_ids": [f"generate-tokens-{request}" for request in requests]}


def score_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Asks for the log-probs of the tokens of a prompt, before those who wait for answers get theirs."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": list(token_ids), "sampling_params": sampling, "priority": SCORED_FIRST}
