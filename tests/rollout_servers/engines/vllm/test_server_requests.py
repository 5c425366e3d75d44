"""What vLLM's server is asked."""

import pytest

from slipstream.rollout_servers.engines.base import Generation
from slipstream.rollout_servers.engines.vllm.server_requests import generate_request

GENERATION = Generation(max_tokens=40, temperature=0.7, ignore_eos=False, stop_token_ids=(1,))


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
