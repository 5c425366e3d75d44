"""Prompts that an engine is not asked."""

import pytest

from slipstream.rollout_servers.engines.base import PromptLimits, RequestRefused

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
def test_a_prompt_that_an_engine_could_die_of_or_would_not_answer_is_refused(prompt: list[int], complaint: str) -> None:
    with pytest.raises(RequestRefused, match=complaint):
        LIMITS.check(prompt)


def test_a_prompt_that_leaves_room_for_one_token_is_not_refused() -> None:
    LIMITS.check([0, 31, 3, 3, 3, 3, 3])
