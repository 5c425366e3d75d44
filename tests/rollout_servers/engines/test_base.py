"""Prompts that every engine refuses."""

import pytest

from slipstream.rollout_servers.engines.base import PromptLimits, RequestRefused

LIMITS = PromptLimits(vocabulary=32, context=8)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "empty"), ([3] * 8, "8 tokens"), ([3, 32], "token 32"), ([-1], "token -1")],
    ids=["empty", "no-room", "unknown", "negative"],
)
def test_invalid_prompt_is_refused(prompt: list[int], reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        LIMITS.check(prompt)


def test_prompt_with_room_for_one_token_is_accepted() -> None:
    LIMITS.check([0, 31, 3, 3, 3, 3, 3])
