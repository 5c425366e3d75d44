"""What becomes of requests, in every engine; a part of `test_engine`."""

import asyncio
from typing import Any

import pytest

from slipstream.rollout_servers.engines.base import RequestRefused
from tests.contract.policies import CONTEXT, distributions, policy_of, scores
from tests.contract.subject import DEADLINE_S, EOS, LONGEST, PROMPT, SEQUENCES, Subject


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_of_the_sampled_distribution(subject: Subject, temperature: float) -> None:
    (answer,) = await subject.answers(max_tokens=200, temperature=temperature)
    version = subject.engine.version
    assert subject.distance_to(version, answer, temperature=temperature) < subject.kind.exact
    assert subject.distance_to(version, answer, temperature=1.7 - temperature) > 100 * subject.kind.exact


async def test_samples_of_a_prompt_differ(subject: Subject) -> None:
    answers = [*await subject.answers(samples=5), *await subject.answers(samples=5)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 10
    for answer in answers:
        assert subject.distance_to(subject.engine.version, answer) < subject.kind.exact
        assert len(answer.token_ids) == len(answer.logprobs) == 40


async def test_greedy_answer_is_the_likeliest_at_temperature_1(
    subject: Subject,
) -> None:
    first, again = [await subject.answers(greedy=True, temperature=0.5) for _ in range(2)]
    assert first == again
    (answer,) = first
    assert subject.distance_to(subject.engine.version, answer, temperature=1.0) < subject.kind.exact
    policy = policy_of(subject.engine.version, tied=subject.kind.tied)
    likeliest = distributions(policy, PROMPT, answer.token_ids, temperature=1.0).max(-1).values
    assert list(answer.logprobs) == pytest.approx(likeliest.tolist(), abs=1e-3)


async def test_concurrent_requests_keep_their_sampling(subject: Subject) -> None:
    """As those of a training task, of its greedy baseline and of an evaluation are."""
    (alone,) = await subject.answers(greedy=True)
    hot = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100, temperature=1.0))
    cool = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100, temperature=0.5))
    await asyncio.sleep(0)  # they go first
    (beside,) = await subject.answers(greedy=True)
    assert beside.token_ids == alone.token_ids
    for asking, temperature in ((hot, 1.0), (cool, 0.5)):
        for answer in await asking:
            version, exact = subject.engine.version, subject.kind.exact
            assert subject.distance_to(version, answer, temperature=temperature) < exact
            assert subject.distance_to(version, answer, temperature=1.5 - temperature) > 100 * exact


@pytest.mark.parametrize("most", [40, 1], ids=["somewhere", "in-the-last-place"])
async def test_answer_ends_with_its_first_stop_token(subject: Subject, most: int) -> None:
    (whole,) = await subject.answers(greedy=True, max_tokens=most)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", most)
    end = whole.token_ids[most // 8]
    (cut,) = await subject.answers(greedy=True, max_tokens=most, ignore_eos=False, stop_token_ids=(end,))
    assert cut.finish_reason == "stop"
    assert list(cut.token_ids) == list(whole.token_ids[: list(whole.token_ids).index(end) + 1])


async def test_answer_ends_at_the_end_of_the_context(subject: Subject) -> None:
    for room in (1, 3):
        prompt = [3 + place % 20 for place in range(CONTEXT - room)]
        (answer,) = await subject.answers(prompt)
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", room)
        assert subject.distance_to(subject.engine.version, answer, prompt=prompt) < subject.kind.exact


async def test_eos_ends_an_answer_unless_ignored(subject: Subject) -> None:
    ended = await subject.answers(samples=16, max_tokens=150, ignore_eos=False, stop_token_ids=(EOS,))
    stopped = [answer for answer in ended if answer.finish_reason == "stop"]
    assert stopped
    assert all(answer.token_ids[-1] == EOS for answer in stopped)
    assert all(EOS not in answer.token_ids[:-1] for answer in ended)

    ignored = await subject.answers(samples=16, max_tokens=150)
    assert any(EOS in answer.token_ids[:-1] for answer in ignored)
    assert {(answer.finish_reason, len(answer.token_ids)) for answer in ignored} == {("length", 150)}


async def test_cancelled_request_is_aborted_alone(subject: Subject) -> None:
    asking = await subject.begin(samples=8, max_tokens=LONGEST)  # for many seconds
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await subject.idle(DEADLINE_S)
    assert await subject.serves(subject.engine.version)


async def test_max_tokens_of_a_request_replace_the_configured(subject: Subject) -> None:
    answers = [await subject.answers(greedy=True, most=most) for most in (3, None, 50)]
    ((shorter,), (usual,), (longer,)) = answers
    assert [len(each.token_ids) for each in (shorter, usual, longer)] == [3, 40, 50]
    assert {each.finish_reason for each in (shorter, usual, longer)} == {"length"}
    assert list(longer.token_ids[:3]) == list(usual.token_ids[:3]) == list(shorter.token_ids)


async def test_deadline_cuts_only_unfinished_answers(subject: Subject) -> None:
    version, deadline_s = subject.engine.version, 0.05
    drawn: dict[str, Any] = {"max_tokens": LONGEST, "ignore_eos": False, "stop_token_ids": (EOS,)}
    for _ in range(20):  # which deadline some answers keep and others don't depends on the machine
        answers = await subject.answers(samples=32, deadline_s=deadline_s, **drawn)
        reasons = {answer.finish_reason for answer in answers}
        if reasons == {"stop", "abort"}:
            break
        deadline_s *= 0.6 if "stop" in reasons else 2
    assert reasons == {"stop", "abort"}
    assert len(answers) == 32
    for answer in answers:
        tokens = len(answer.token_ids)
        assert (EOS in answer.token_ids) == (answer.finish_reason == "stop")
        assert len(answer.logprobs) == tokens
        spans = [(span.version, span.start, span.end) for span in answer.spans]
        assert spans == ([(version, 0, tokens)] if tokens else [])  # not each may have had its turn
        assert not tokens or subject.distance_to(version, answer) < subject.kind.exact
    await subject.idle(DEADLINE_S)


@pytest.mark.parametrize("samples", [1, 4])
async def test_engine_serves_after_a_deadline_cut_all_answers(subject: Subject, samples: int) -> None:
    answers = await subject.answers(samples=samples, max_tokens=LONGEST, deadline_s=0.5)
    assert [answer.finish_reason for answer in answers] == ["abort"] * samples
    assert all(len(answer.token_ids) == len(answer.logprobs) < LONGEST for answer in answers)
    await subject.idle(DEADLINE_S)
    assert await subject.serves(subject.engine.version)


async def test_answer_cut_before_its_first_token_is_empty(subject: Subject) -> None:
    running = asyncio.ensure_future(subject.answers(samples=SEQUENCES, max_tokens=LONGEST))  # all that it takes
    await asyncio.sleep(0)
    answers = await subject.answers(samples=3, deadline_s=0.0)
    running.cancel()
    assert [(*answer.token_ids, *answer.logprobs, *answer.spans) for answer in answers] == [()] * 3
    assert {answer.finish_reason for answer in answers} == {"abort"}
    await subject.idle(DEADLINE_S)


async def test_scores_are_at_temperature_1(subject: Subject) -> None:
    text = [*PROMPT, *range(2, 32)]
    sampling = asyncio.ensure_future(subject.answers(samples=4, max_tokens=200, temperature=0.3))
    found = await subject.engine.score(text)
    assert len((await sampling)[0].token_ids) == 200
    expected = scores(policy_of(subject.engine.version, tied=subject.kind.tied), text)
    assert found == pytest.approx(expected, abs=10 * subject.kind.exact)
    assert await subject.engine.score([3]) == []


async def test_scoring_overtakes_waiting_requests(subject: Subject) -> None:
    """Every server of a fleet is probed after an update, however much there is to do."""
    if not subject.kind.scores_first:
        pytest.skip("this engine takes turns")
    turns = [asyncio.ensure_future(subject.answers(samples=SEQUENCES)) for _ in range(4)]
    await asyncio.sleep(0)  # all of them are asked for
    await subject.engine.score(PROMPT)
    assert not any(turn.done() for turn in turns[2:])
    await asyncio.gather(*turns)


async def test_invalid_text_is_not_scored(subject: Subject) -> None:
    with pytest.raises(RequestRefused, match="vocabulary of 32"):
        await subject.engine.score([3, 32])


async def test_pressure_follows_running_requests(subject: Subject) -> None:
    await subject.idle(DEADLINE_S)
    assert (await subject.engine.pressure()).kv_cache_usage < 0.01
    running = asyncio.ensure_future(subject.answers(samples=48, max_tokens=LONGEST))
    async with asyncio.timeout(DEADLINE_S):
        while (await subject.engine.pressure()).kv_cache_usage < 0.05:
            await asyncio.sleep(0.01)
    running.cancel()
    await subject.idle(DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while (await subject.engine.pressure()).kv_cache_usage > 0.01:
            await asyncio.sleep(0.01)


async def test_preempted_requests_are_counted_and_exact(
    subject: Subject,
) -> None:
    if not subject.kind.preempts:
        pytest.skip("this engine has room for whatever it takes on")
    before = (await subject.engine.pressure()).preemptions
    answers = await subject.answers(samples=40, max_tokens=200)
    assert (await subject.engine.pressure()).preemptions > before
    assert {len(answer.token_ids) for answer in answers} == {200}
    assert all(map(subject.faithful, answers[::8]))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [([3] * (CONTEXT + 1), "maximum context length"), ([3, 32], "vocabulary of 32"), ([], "empty")],
    ids=["longer-than-the-context", "unknown-token", "empty"],
)
async def test_invalid_prompt_is_refused_alone(subject: Subject, prompt: list[int], complaint: str) -> None:
    neighbour = asyncio.ensure_future(subject.answers(max_tokens=100))
    with pytest.raises(RequestRefused, match=complaint):
        await subject.answers(prompt)
    assert len((await neighbour)[0].token_ids) == 100
