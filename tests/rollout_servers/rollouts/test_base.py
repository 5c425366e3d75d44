"""Token sequences of episodes: the experts that an engine returned for several answers."""

import numpy as np
import pytest

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import routed_experts
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.base import Prompt, Transcript

LAYOUT = m.ExpertLayout(layers=1, per_token=1, experts=64)


def answer(mark: int, *, context: int, tokens: int = 2, unknown: int = 0) -> Completion:
    """An answer whose experts are all `mark`, but those of the first `unknown` input tokens."""
    known = context + tokens - 1 - unknown
    return Completion(
        token_ids=[1] * tokens,
        logprobs=[-1.0] * tokens,
        spans=[m.VersionSpan(version=0, start=0, end=tokens)] if tokens else [],
        finish_reason="stop",
        routed_experts=None if unknown < 0 else m.RoutedExperts(layout=LAYOUT, ids=bytes([mark] * known)),
    )


def sent(*unknown: int, last_tokens: int = 2) -> list[int] | None:
    """Experts of the input tokens of a prompt of 3 tokens, and answers with an observation of 1 token between them."""
    transcript = Transcript.begin(Prompt([0, 0, 0]))
    for number, of_answer in enumerate(unknown, start=1):
        if number > 1:
            transcript.add_observation([2])
        tokens = last_tokens if number == len(unknown) else 2
        transcript.add_action(answer(number, context=len(transcript.token_ids), tokens=tokens, unknown=of_answer))
    transcript.end_with_action()
    trajectory = transcript.trajectory(reward=0.0, scores={}, finish_reason="stop", episode=0)
    experts = routed_experts(trajectory)
    if experts is None:
        return None
    assert experts.shape == (len(transcript.token_ids) - 1, 1, 1)
    found: list[int] = np.ravel(experts).tolist()
    return found


@pytest.mark.parametrize(
    ("unknown", "experts"),
    [
        ([0], [1] * 4),
        ([2], [-1, -1, 1, 1]),
        ([-1], None),  # none returned
        ([0, 0], [1] * 4 + [2] * 3),
        ([0, 2], [1] * 4 + [2] * 3),
        ([0, 5], [-1] * 5 + [2] * 2),  # a gap
        ([-1, 0], [2] * 7),
        ([-1, 5], [-1] * 5 + [2] * 2),
        ([0, -1], None),
        ([0, -1, 0], [3] * 10),
        ([0, 0, 0], [1] * 4 + [2] * 3 + [3] * 3),
    ],
)
def test_experts_are_those_of_the_first_request(unknown: list[int], experts: list[int] | None) -> None:
    assert sent(*unknown) == experts


def test_experts_end_with_the_last_action() -> None:
    assert sent(0, 0, last_tokens=0) is None  # the sequence ends with an observation
    assert sent(0, last_tokens=0) is None
