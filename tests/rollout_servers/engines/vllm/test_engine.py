"""Completions from vLLM's outputs."""

import pytest

from tests.contract.engines import VLLM_WARNINGS

pytestmark = [pytest.mark.usefixtures("vllm_environment"), VLLM_WARNINGS]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("error", "abort"), (None, "abort")],
)
def test_unfinished_answer_is_aborted(reason: str | None, expected: str) -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    from slipstream.rollout_servers.engines.vllm.engine import completions

    answer = CompletionOutput(0, "", [7, 8], None, FlatLogprobs(logprobs=[-1.0, -2.0]), finish_reason=reason)
    answer.weight_versions = [WeightVersionSpan("3", 0, 2)]
    (completion,) = completions(RequestOutput("1", None, [1], None, [answer], finished=True))
    assert (completion.finish_reason, list(completion.token_ids)) == (expected, [7, 8])
