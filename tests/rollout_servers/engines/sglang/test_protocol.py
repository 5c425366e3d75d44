"""Answers from what SGLang's server sent, as it was recorded."""

import json

import pytest

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import EngineError, Generation, Request, RequestRefused
from slipstream.rollout_servers.engines.sglang.protocol import (
    Draft,
    ServerInfo,
    cache_usage,
    generate_request,
    prompt_logprobs,
    request_id,
    server_info,
)
from slipstream.rollout_servers.engines.sglang.server import FailedAnswer
from tests.rollout_servers.engines.sglang.recorded import ENDED_STREAMS, answer, draft, recorded


@pytest.mark.parametrize("name", ENDED_STREAMS)
def test_a_stream_makes_a_whole_answer_whose_spans_cover_it(name: str) -> None:
    completion = draft(name).completion()
    entries = [entry for event in recorded(name)["events"] for entry in event["meta_info"]["output_token_logprobs"]]
    length = recorded(name)["events"][-1]["meta_info"]["completion_tokens"]
    assert [
        [logprob, token, None] for logprob, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ] == (entries[-length:] if length else [])
    covered = [place for span in completion.spans for place in range(span.start, span.end)]
    assert covered == list(range(length))


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
def test_every_way_in_which_an_answer_ends_is_told_apart(name: str, tokens: int, reason: str) -> None:
    completion = draft(name).completion()
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, reason)


def test_the_stop_token_is_the_last_of_an_answer() -> None:
    assert list(draft("stream_stop").completion().token_ids).index(7) == 9


@pytest.mark.parametrize(("stops", "reason"), [((), "abort"), ((7,), "abort"), ((7, 23), "stop")])
def test_an_answer_that_is_aborted_in_the_very_step_that_ends_it_has_ended(stops: tuple[int, ...], reason: str) -> None:
    aborted = Draft(stops)
    for event in recorded("stream_aborted")["events"]:
        aborted.take(json.dumps(event))
    assert aborted.completion().token_ids[-1] == 23
    assert aborted.completion().finish_reason == reason


def test_tokens_that_are_sent_again_when_a_paused_answer_is_aborted_are_not_counted_twice() -> None:
    *pieces, last = [event["meta_info"] for event in recorded("stream_aborted_while_paused")["events"]]
    assert sum(len(piece["output_token_logprobs"]) for piece in pieces) == len(last["output_token_logprobs"]) == 17
    assert len(draft("stream_aborted_while_paused").completion().token_ids) == 17
    both = recorded("stream_aborted_while_paused")["events"][-1]
    both["meta_info"]["output_token_logprobs"] = pieces[-1]["output_token_logprobs"] + last["output_token_logprobs"]
    merged = draft("stream_aborted_while_paused", -2)
    merged.take(json.dumps(both))  # as SGLang merges events that wait for one another
    assert merged.completion() == draft("stream_aborted_while_paused").completion()


def test_an_update_begins_a_span_and_is_no_preemption() -> None:
    across = draft("stream_across_update")
    assert across.completion().spans == [
        VersionSpan(version=14, start=0, end=48),
        VersionSpan(version=15, start=48, end=100),
    ]
    assert recorded("stream_across_update")["events"][-1]["meta_info"]["num_retractions"] == 1
    assert across.preemptions == 0


def test_being_thrown_out_of_the_cache_is_counted_when_the_answer_ends() -> None:
    assert draft("stream_preempted").preemptions == 1
    assert draft("stream_preempted", -1).preemptions == 0


def test_what_has_come_of_an_answer_that_breaks_off_is_of_the_version_that_it_began_with() -> None:
    in_flight = draft("stream_length", 2).unfinished(4)
    assert (len(in_flight.token_ids), len(in_flight.logprobs), in_flight.finish_reason) == (9, 9, "abort")
    assert in_flight.spans == [VersionSpan(version=4, start=0, end=9)]
    assert draft("stream_stop").unfinished(4) == draft("stream_stop").completion()
    assert Draft().unfinished(4).spans == []


def test_a_request_that_is_refused_in_its_stream_is_refused() -> None:
    with pytest.raises(RequestRefused, match="400: Requested token count exceeds"):
        draft("stream_refused")


@pytest.mark.parametrize(("code", "kind"), [(400, RequestRefused), (500, FailedAnswer)])
def test_an_answer_that_ends_with_an_error_is_one_of_the_request_or_of_the_server(
    code: int, kind: type[EngineError]
) -> None:
    event = recorded("stream_aborted_while_waiting")["events"][-1]
    event["meta_info"]["finish_reason"] = {"type": "abort", "message": "no", "status_code": code}
    with pytest.raises(kind, match=f"{code}: no"):
        Draft().take(json.dumps(event))


def test_an_answer_without_its_end_or_without_tokens_in_between_is_an_error() -> None:
    with pytest.raises(EngineError, match="without its end"):
        draft("stream_length", -1).completion()
    last = recorded("stream_length")["events"][-1]
    with pytest.raises(EngineError, match="left out tokens 9 to 17"):
        draft("stream_length", 2).take(json.dumps(last))


@pytest.mark.parametrize("garbage", ["", "{", "{}", '{"meta_info": {"finish_reason": "stop"}}'])
def test_what_can_not_be_read_is_an_error_that_shows_it(garbage: str) -> None:
    with pytest.raises(EngineError, match="unknown event"):
        Draft().take(garbage)


def test_a_scored_prompt_has_a_log_prob_for_each_token_but_the_first() -> None:
    places = recorded("score")["answer"]["meta_info"]["input_token_logprobs"]
    assert prompt_logprobs(answer("score"), [3, 5, 7, 12]) == [place[0] for place in places[1:]]
    assert prompt_logprobs(answer("score_one"), [3]) == []


def test_the_last_token_of_the_vocabulary_is_scored_though_sglang_calls_it_0() -> None:
    assert len(prompt_logprobs(answer("score").replace(b" 12, null]", b" 0, null]"), [3, 5, 7, 31])) == 3


def test_a_prompt_that_was_not_scored_is_an_error() -> None:
    with pytest.raises(EngineError, match="did not score"):
        prompt_logprobs(answer("score"), [3, 5, 7, 13])


def test_of_several_caches_the_fullest_counts() -> None:
    assert cache_usage(answer("loads")) == 0.0
    assert cache_usage(b'{"loads": [{"token_usage": 0.25}, {"token_usage": 0.5}]}') == 0.5


@pytest.mark.parametrize("told", [b"{}", b'{"loads": []}'])
def test_a_server_that_does_not_say_what_it_has_to_do_is_an_error(told: bytes) -> None:
    with pytest.raises(EngineError, match="unknown load"):
        cache_usage(told)


def test_a_server_says_how_long_a_prompt_may_be_and_how_many_workers_it_has() -> None:
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


def test_no_request_id_is_a_prefix_of_another() -> None:
    ids = [request_id(number) for number in (0, 1, 10, 11, 10**9)]
    assert [other for one in ids for other in ids if other.startswith(one)] == ids
