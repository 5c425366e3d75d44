"""What is left of requests when their server dies."""

from dataclasses import replace

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.engines.http.requests import Begun


def answer(*token_ids: int, end: str = "abort", version: int = 4) -> Completion:
    spans = [VersionSpan(version=version, start=0, end=len(token_ids))]
    return Completion(token_ids, [-float(token) for token in token_ids], spans, end)


def test_all_that_has_come_is_left_while_the_version_is_the_one_that_it_began_with() -> None:
    answers = [answer(7)]
    begun = Begun(4, lambda: answers)
    answers[0] = answer(7, 8)
    assert begun.left(4) == [answer(7, 8)]
    begun.before_update(4)  # which the server dies of
    assert begun.left(4) == [answer(7, 8)]


def test_of_an_answer_that_updates_have_overtaken_what_came_before_the_first_of_them_is_left() -> None:
    answers = [answer(7, 8), answer()]
    begun = Begun(4, lambda: answers)
    begun.before_update(4)
    answers[:] = [answer(7, 8, 9), answer(5)]
    begun.before_update(5)
    answers[:] = [answer(7, 8, 9, 6), answer(5, 3)]
    assert begun.left(6) == [answer(7, 8), replace(answer(), spans=[])]


def test_an_answer_that_has_ended_is_left_whole_with_the_versions_that_the_server_told() -> None:
    answers = [answer(7), answer(6)]
    begun = Begun(4, lambda: answers)
    begun.before_update(4)
    answers[0] = answer(7, 8, 9, end="stop", version=5)
    assert begun.left(5) == [answer(7, 8, 9, end="stop", version=5), answer(6)]


def test_nothing_is_certain_of_a_request_that_was_asked_during_an_update() -> None:
    answers = [answer(7)]
    begun = Begun(4, lambda: answers)
    assert begun.left(5) is None
    begun.before_update(5)
    assert begun.left(6) is None
