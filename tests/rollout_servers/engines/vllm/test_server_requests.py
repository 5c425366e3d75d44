"""What vLLM's server is asked."""

import pytest

from slipstream.rollout_servers.engines.base import Generation, RequestRefused
from slipstream.rollout_servers.engines.vllm.server_requests import PromptLimits, generate_request

GENERATION = Generation(max_tokens=40, temperature=0.7, ignore_eos=False, stop_token_ids=(1,))
LIMITS = PromptLimits(vocabulary=32, context=8)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "empty"),
        ([3] * 8, "a prompt of 8 tokens leaves no room for an answer: the maximum context length is 8"),
        ([3, 32], "token 32 is not in the model's vocabulary of 32"),
        ([-1], "token -1 is not"),
    ],
)
def test_a_prompt_that_vllm_would_die_of_or_not_answer_is_refused(prompt: list[int], complaint: str) -> None:
    with pytest.raises(RequestRefused, match=complaint):
        LIMITS.check(prompt)


def test_a_prompt_that_leaves_room_for_one_token_is_not_refused() -> None:
    LIMITS.check([0, 31, 3, 3, 3, 3, 3])


@pytest.mark.parametrize(
    ("greedy", "most", "temperature", "max_tokens"), [(False, None, 0.7, 40), (True, 5, 0.0, 5), (False, 90, 0.7, 90)]
)
def test_greedy_answers_have_no_temperature_and_a_length_of_ones_own_goes_before_the_configured(
    greedy: bool, most: int | None, temperature: float, max_tokens: int
) -> None:
    body = generate_request("7", [3], GENERATION, samples=4, greedy=greedy, max_tokens=most)
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["max_tokens"], sampling["n"]) == (temperature, max_tokens, 4)
    assert (sampling["stop_token_ids"], sampling["ignore_eos"]) == ([1], False)
