"""Answers from what vLLM's server streams, which is written down here as it sends it."""

import json
from typing import Any

import pytest

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.http.requests import FailedAnswer
from slipstream.rollout_servers.engines.vllm.server_answers import Answers, complaints, prompt_logprobs

SPANS = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]


def event(index: int, *tokens: int, end: str | None = None, spans: list[dict[str, Any]] | None = None) -> str:
    """A piece of sample `index`; token t has log-prob -t."""
    content = [{"token_id": token, "logprob": -float(token), "rank": 1, "top_logprobs": []} for token in tokens]
    choice = {
        "index": index,
        "finish_reason": end,
        "stop_reason": None,
        "token_ids": list(tokens),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }
    return json.dumps({"request_id": "generate-tokens-7", "usage": None, "output_mode": "tokens", "choices": [choice]})


def test_pieces_that_come_mixed_up_make_whole_answers() -> None:
    answers = Answers(2)
    for piece in (
        event(0, 9),
        event(1, 7),
        event(1, 6, end="abort", spans=[{"version": "4", "start": 0, "end": 2}]),
        event(0, 8, 7, end="length", spans=SPANS),
    ):
        answers.take(piece)
    first, second = answers.completions()
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([9, 8, 7], [-9.0, -8.0, -7.0], "length")
    assert first.spans == [VersionSpan(version=4, start=0, end=2), VersionSpan(version=5, start=2, end=3)]
    assert (second.token_ids, second.finish_reason) == ([7, 6], "abort")


def test_an_answer_that_was_cut_short_before_its_first_token_is_empty() -> None:
    answers = Answers(1)
    answers.take(event(0, end="abort", spans=[]))
    (empty,) = answers.completions()
    assert (empty.token_ids, empty.logprobs, empty.spans, empty.finish_reason) == ([], [], [], "abort")


def test_what_has_come_of_an_answer_that_breaks_off_is_of_the_version_that_it_began_with() -> None:
    answers = Answers(3)
    answers.take(event(0, 9, 8, end="stop", spans=[{"version": "3", "start": 0, "end": 2}]))
    answers.take(event(1, 7))
    finished, begun, nothing = answers.unfinished(4)
    assert finished.finish_reason == "stop"
    assert finished.spans == [VersionSpan(version=3, start=0, end=2)], "as it was told"
    assert (begun.token_ids, begun.finish_reason) == ([7], "abort")
    assert begun.spans == [VersionSpan(version=4, start=0, end=1)]
    assert (nothing.token_ids, nothing.spans) == ([], [])


def test_an_answer_without_its_versions_is_an_error() -> None:
    answers = Answers(1)
    answers.take(event(0, 9, end="length"))
    with pytest.raises(EngineError, match="without weight versions"):
        answers.completions()


def test_an_answer_without_a_log_prob_for_each_token_is_an_error() -> None:
    answers = Answers(1)
    told = json.loads(event(0, 9, 8, 7, end="length", spans=SPANS))
    told["choices"][0]["logprobs"]["content"].pop()
    answers.take(json.dumps(told))
    with pytest.raises(EngineError, match="without log-probs"):
        answers.completions()


@pytest.mark.parametrize(("code", "kind"), [(400, RequestRefused), (500, FailedAnswer)])
def test_an_error_in_the_stream_is_one_of_the_request_or_of_the_server(code: int, kind: type[EngineError]) -> None:
    error = {"error": {"message": "no", "type": "any", "param": None, "code": code}}
    with pytest.raises(kind, match=f"{code}: no"):
        Answers(1).take(json.dumps(error))


@pytest.mark.parametrize("garbage", ["", "{", '{"choices": [{"index": 0}]}'])
def test_what_can_not_be_read_is_an_error_that_shows_it(garbage: str) -> None:
    with pytest.raises(EngineError, match="sent what it should not"):
        Answers(1).take(garbage)


def test_a_scored_prompt_has_a_log_prob_for_each_token_but_the_first() -> None:
    places = [None, {"5": {"logprob": -1.5, "rank": 1}}, {"7": {"logprob": -2.5, "rank": 1}}]
    assert prompt_logprobs(json.dumps({"prompt_logprobs": places}).encode(), [3, 5, 7]) == [-1.5, -2.5]


@pytest.mark.parametrize("places", [None, [None], [None, None], [None, {"6": {"logprob": -1.0}}]])
def test_a_prompt_that_was_not_scored_is_an_error(places: object) -> None:
    with pytest.raises(EngineError, match="did not score"):
        prompt_logprobs(json.dumps({"prompt_logprobs": places}).encode(), [3, 5])


def test_what_workers_complain_of_is_told_and_the_others_are_not_counted() -> None:
    assert complaints(b'{"results": [null, "no such file", null]}') == ["no such file"]
    assert complaints(b'{"results": [null, null]}') == []
    with pytest.raises(EngineError, match="what its workers return"):
        complaints(b"{}")
