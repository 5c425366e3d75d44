"""What SGLang's server is asked."""

import pytest

from slipstream.rollout_servers.engines.base import Generation, Request
from slipstream.rollout_servers.engines.sglang.protocol import generate_request, request_id

GENERATION = Generation(max_tokens=40, temperature=0.7, ignore_eos=False, stop_token_ids=(1,))


@pytest.mark.parametrize(
    ("greedy", "most", "temperature", "max_tokens"), [(False, None, 0.7, 40), (True, 5, 0.0, 5), (False, 90, 0.7, 90)]
)
def test_greedy_answers_have_no_temperature_and_a_length_of_ones_own_goes_before_the_configured(
    greedy: bool, most: int | None, temperature: float, max_tokens: int
) -> None:
    body = generate_request("a", Request([3, 5], 1.0, greedy=greedy, max_tokens=most), GENERATION, context=100)
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["max_new_tokens"]) == (temperature, max_tokens)
    assert (body["input_ids"], sampling["stop_token_ids"]) == ([3, 5], [1])


def test_no_more_is_asked_for_than_the_context_has_room_for() -> None:
    body = generate_request("a", Request([3, 5, 7], 1.0), GENERATION, context=10)
    assert body["sampling_params"]["max_new_tokens"] == 7


def test_no_request_has_an_id_that_begins_with_that_of_another() -> None:
    ids = [request_id(number) for number in (0, 1, 10, 11, 10**9)]
    assert [other for one in ids for other in ids if other.startswith(one)] == ids
