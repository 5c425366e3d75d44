"""Requests to SGLang's server, and recorded answers of it."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import (
    Completion,
    EngineError,
    ExpertReader,
    Generation,
    Request,
    RequestRefused,
)
from slipstream.rollout_servers.engines.sglang.protocol import (
    Draft,
    ServerInfo,
    ServerLoad,
    generate_request,
    prompt_logprobs,
    request_id,
    server_info,
    server_load,
)
from slipstream.rollout_servers.engines.sglang.server import FailedAnswer
from tests.rollout_servers.engines.sglang.recorded import ENDED_STREAMS, answer, draft, recorded


@pytest.mark.parametrize("name", ENDED_STREAMS)
def test_spans_cover_the_answer_of_a_stream(name: str) -> None:
    completion = draft(name).completion()
    entries = [entry for event in recorded(name)["events"] for entry in event["meta_info"]["output_token_logprobs"]]
    length = recorded(name)["events"][-1]["meta_info"]["completion_tokens"]
    found = [[*pair, None] for pair in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert found == (entries[-length:] if length else [])
    assert [place for span in completion.spans for place in range(span.start, span.end)] == list(range(length))


@pytest.mark.parametrize(
    ("name", "tokens", "reason"),
    [
        ("stream_length", 20, "length"),
        ("stream_greedy", 10, "length"),
        ("stream_stop", 10, "stop"),
        ("stream_aborted", 20, "abort"),
        ("stream_aborted_while_paused", 17, "abort"),
        ("stream_aborted_while_waiting", 0, "abort"),
        ("stream_across_update", 100, "length"),
        ("stream_preempted", 200, "length"),
    ],
)
def test_answer_has_its_finish_reason(name: str, tokens: int, reason: str) -> None:
    completion = draft(name).completion()
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, reason)
    assert completion.cached_tokens == (3 if tokens else 0)
    if reason == "stop":
        assert list(completion.token_ids).index(7) == tokens - 1


@pytest.mark.parametrize(("stops", "reason"), [((), "abort"), ((7,), "abort"), ((7, 23), "stop")])
def test_answer_aborted_in_its_last_step_is_stopped(stops: tuple[int, ...], reason: str) -> None:
    aborted = Draft(stops)
    for event in recorded("stream_aborted")["events"]:
        aborted.take(json.dumps(event))
    assert aborted.completion().token_ids[-1] == 23
    assert aborted.completion().finish_reason == reason


def test_repeated_tokens_of_an_aborted_answer_count_once() -> None:
    *pieces, last = [event["meta_info"] for event in recorded("stream_aborted_while_paused")["events"]]
    assert sum(len(piece["output_token_logprobs"]) for piece in pieces) == len(last["output_token_logprobs"]) == 17
    assert len(draft("stream_aborted_while_paused").completion().token_ids) == 17
    both = recorded("stream_aborted_while_paused")["events"][-1]
    both["meta_info"]["output_token_logprobs"] = pieces[-1]["output_token_logprobs"] + last["output_token_logprobs"]
    merged = draft("stream_aborted_while_paused", -2)
    merged.take(json.dumps(both))  # as SGLang merges events that wait for one another
    assert merged.completion() == draft("stream_aborted_while_paused").completion()


def test_update_begins_a_span_and_is_no_preemption() -> None:
    across = draft("stream_across_update")
    assert across.completion().spans == [
        VersionSpan(version=14, start=0, end=48),
        VersionSpan(version=15, start=48, end=100),
    ]
    assert recorded("stream_across_update")["events"][-1]["meta_info"]["num_retractions"] == 1
    assert across.preemptions == 0


def test_preemption_is_counted_when_the_answer_ends() -> None:
    assert draft("stream_preempted").preemptions == 1
    assert draft("stream_preempted", -1).preemptions == 0


def test_unfinished_answer_has_its_first_version() -> None:
    in_flight = draft("stream_length", 2).unfinished(4)
    assert (len(in_flight.token_ids), len(in_flight.logprobs), in_flight.finish_reason) == (9, 9, "abort")
    assert in_flight.spans == [VersionSpan(version=4, start=0, end=9)]
    assert draft("stream_stop").unfinished(4) == draft("stream_stop").completion()
    assert Draft().unfinished(4).spans == []


def test_refusal_in_a_stream_refuses_the_request() -> None:
    with pytest.raises(RequestRefused, match="400"):
        draft("stream_refused")


@pytest.mark.parametrize(("code", "kind"), [(400, RequestRefused), (500, FailedAnswer)])
def test_status_of_an_answer_gives_the_kind_of_error(code: int, kind: type[EngineError]) -> None:
    event = recorded("stream_aborted_while_waiting")["events"][-1]
    event["meta_info"]["finish_reason"] = {"type": "abort", "message": "no", "status_code": code}
    with pytest.raises(kind, match=f"{code}: no"):
        Draft().take(json.dumps(event))


def test_missing_end_or_tokens_are_an_error() -> None:
    with pytest.raises(EngineError, match="weight versions"):
        draft("stream_length", -1).completion()
    last = recorded("stream_length")["events"][-1]
    with pytest.raises(EngineError, match="9 to 17"):
        draft("stream_length", 2).take(json.dumps(last))


@pytest.mark.parametrize("garbage", ["", "{", "{}", '{"meta_info": {"finish_reason": "stop"}}'])
def test_unknown_event_is_an_error(garbage: str) -> None:
    with pytest.raises(EngineError, match="unknown event"):
        Draft().take(garbage)


def test_scored_prompt_has_log_probs_from_its_second_token() -> None:
    places = recorded("score")["answer"]["meta_info"]["input_token_logprobs"]
    expected = [place[0] for place in places[1:]]
    assert prompt_logprobs(answer("score"), [3, 5, 7, 12]) == expected
    assert prompt_logprobs(answer("score_one"), [3]) == []
    # SGLang returns the id of the vocabulary's last token as 0.
    assert prompt_logprobs(answer("score").replace(b" 12, null]", b" 0, null]"), [3, 5, 7, 31]) == expected


def test_prompt_that_was_not_scored_is_an_error() -> None:
    with pytest.raises(EngineError, match="did not score"):
        prompt_logprobs(answer("score"), [3, 5, 7, 13])


def test_load_is_that_of_the_fullest_cache() -> None:
    assert server_load(answer("loads")) == ServerLoad(token_usage=0.0, num_running_reqs=0, num_waiting_reqs=0)
    fullest = b'{"token_usage": 0.5, "num_running_reqs": 3, "num_waiting_reqs": 2}'
    assert server_load(b'{"loads": [{"token_usage": 0.25}, %s]}' % fullest) == ServerLoad(0.5, 3, 2)


@pytest.mark.parametrize("load", [b"{}", b'{"loads": []}'])
def test_unknown_load_is_an_error(load: bytes) -> None:
    with pytest.raises(EngineError, match="unknown load"):
        server_load(load)


def test_server_info_has_prompt_length_and_workers() -> None:
    assert server_info(answer("info")) == ServerInfo(max_req_input_len=4096, tp_size=1)
    with pytest.raises(EngineError, match="unknown settings"):
        server_info(b"{}")


@pytest.mark.parametrize(
    ("greedy", "most", "context", "temperature", "max_tokens"),
    [(False, None, 100, 0.7, 40), (True, 5, 100, 0.0, 5), (False, 90, 100, 0.7, 90), (False, None, 10, 0.7, 8)],
    ids=["configured", "greedy-and-shorter", "longer", "end-of-context"],
)
def test_request_has_temperature_and_length(
    greedy: bool, most: int | None, context: int, temperature: float, max_tokens: int
) -> None:
    generation = Generation(max_tokens=40, temperature=0.7, ignore_eos=False, stop_token_ids=(1,))
    request = Request([3, 5], 1.0, greedy=greedy, max_tokens=most)
    body = generate_request("a", request, generation, context=context)
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["max_new_tokens"]) == (temperature, max_tokens)
    assert (body["input_ids"], sampling["stop_token_ids"]) == ([3, 5], [1])


EXPERTS = ExpertReader.of([1, 2], per_token=2, experts=8)
"""Of a model of three layers, of which the first has none."""


def with_experts(ids: NDArray[Any] | None) -> Completion:
    """A recorded answer of 10 tokens to a prompt of 4, whose last event has these experts."""
    made = Draft(experts=EXPERTS, prompt_tokens=4)
    for event in recorded("stream_stop")["events"]:
        if event["meta_info"]["finish_reason"] is not None and ids is not None:
            event["meta_info"]["routed_experts"] = base64.b64encode(ids.astype("<i4").tobytes()).decode()
        made.take(json.dumps(event))
    return made.completion()


def test_experts_are_those_of_layers_that_have_them() -> None:
    ids = np.random.default_rng(0).integers(0, 8, (13, 3, 2))
    routed = with_experts(ids).routed_experts
    assert routed is not None
    assert (routed.layout, routed.tokens) == (EXPERTS.layout, 13)
    assert np.array_equal(np.frombuffer(routed.ids, "u1").reshape(13, 2, 2), ids[:, 1:])
    assert with_experts(None).routed_experts is None


@pytest.mark.parametrize("shape", [(13, 2, 2), (12, 3, 2), (13, 3, 1)])
def test_experts_of_a_wrong_size_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="experts"):
        with_experts(np.zeros(shape))


def test_experts_are_requested_where_they_are_wanted() -> None:
    generation = Generation(max_tokens=40, temperature=0.7, ignore_eos=False, stop_token_ids=(1,))
    plain, asked = (
        generate_request("a", Request([3, 5], 1.0), generation, context=100, return_experts=wanted)
        for wanted in (False, True)
    )
    assert asked == plain | {"return_routed_experts": True}


def test_no_request_id_is_a_prefix_of_another() -> None:
    ids = [request_id(number) for number in (0, 1, 10, 11, 10**9)]
    assert [other for one in ids for other in ids if other.startswith(one)] == ids
