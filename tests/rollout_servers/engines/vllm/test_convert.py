"""What vLLM's answers are in our terms."""

import pytest

# vLLM and what it imports warn of their own futures.
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize(
    ("vllms", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("error", "abort"), (None, "abort")]
)
def test_an_answer_that_vllm_did_not_finish_was_cut_short(vllms: str | None, ours: str) -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    from slipstream.rollout_servers.engines.vllm.engine import completions

    answer = CompletionOutput(
        index=0,
        text="",
        token_ids=[7, 8],
        cumulative_logprob=None,
        logprobs=FlatLogprobs(logprobs=[-1.0, -2.0]),
        finish_reason=vllms,
    )
    answer.weight_versions = [WeightVersionSpan("3", 0, 2)]
    (completion,) = completions(RequestOutput("1", None, [1], None, [answer], finished=True))
    assert (completion.finish_reason, list(completion.token_ids)) == (ours, [7, 8])
