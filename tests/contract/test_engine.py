"""Behaviour that all engines share: requests, updates, crashes.

One module, because the tests share an engine, which takes long to start; crashes come last.
"""

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from slipstream.buffer.wire.weights.protocol import Form
from slipstream.rollout_servers.engines.base import Completion, DirectSource, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.tally import Tally
from slipstream.rollout_servers.weights.verify import WrongWeights, verify
from tests.contract.engines import VLLM_WARNINGS
from tests.contract.policies import CONTEXT, distributions, policy_of, scores
from tests.contract.subject import DEADLINE_S, EOS, LONGEST, PROMPT, SEQUENCES, Subject

pytestmark = [pytest.mark.asyncio(loop_scope="module"), VLLM_WARNINGS]


def spans(answer: Completion) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.spans]


def whole(answer: Completion, version: int) -> bool:
    """True if all tokens of an answer, which may have none, have a log-prob and come from one version."""
    length = len(answer.token_ids)
    return len(answer.logprobs) == length and spans(answer) == ([(version, 0, length)] if length else [])


# --- requests ------------------------------------------------------------------------------------------------


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


async def test_greedy_answer_is_the_likeliest_at_temperature_1(subject: Subject) -> None:
    first, again = [await subject.answers(greedy=True, temperature=0.5) for _ in range(2)]
    assert first == again
    (answer,) = first
    assert subject.distance_to(subject.engine.version, answer) < subject.kind.exact
    policy = policy_of(subject.engine.version, tied=subject.kind.tied)
    likeliest = distributions(policy, PROMPT, answer.token_ids, temperature=1.0).max(-1).values
    assert list(answer.logprobs) == pytest.approx(likeliest.tolist(), abs=1e-3)


async def test_concurrent_requests_keep_their_sampling(subject: Subject) -> None:
    """As those of a training task, of its greedy baseline and of an evaluation."""
    (alone,) = await subject.answers(greedy=True)
    hot = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100, temperature=1.0))
    cool = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100, temperature=0.5))
    await asyncio.sleep(0)  # they go first
    (beside,) = await subject.answers(greedy=True)
    assert beside.token_ids == alone.token_ids
    version, exact = subject.engine.version, subject.kind.exact
    for asking, temperature in ((hot, 1.0), (cool, 0.5)):
        for answer in await asking:
            assert subject.distance_to(version, answer, temperature=temperature) < exact
            assert subject.distance_to(version, answer, temperature=1.5 - temperature) > 100 * exact


@pytest.mark.parametrize("most", [40, 1], ids=["inside", "last-token"])
async def test_answer_ends_with_its_first_stop_token(subject: Subject, most: int) -> None:
    (full,) = await subject.answers(greedy=True, max_tokens=most)
    assert (full.finish_reason, len(full.token_ids)) == ("length", most)
    end = full.token_ids[most // 8]
    (stopped,) = await subject.answers(greedy=True, max_tokens=most, ignore_eos=False, stop_token_ids=(end,))
    assert stopped.finish_reason == "stop"
    assert list(stopped.token_ids) == list(full.token_ids[: list(full.token_ids).index(end) + 1])


async def test_tally_follows_answers_in_flight(subject: Subject) -> None:
    tally = Tally()
    asking = await subject.begin(samples=3, max_tokens=300, tally=tally)
    begun = tally.sampled
    assert 0 < begun < sum(len(answer.token_ids) for answer in await asking)


@pytest.mark.parametrize("room", [1, 3])
async def test_answer_ends_at_the_end_of_the_context(subject: Subject, room: int) -> None:
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


async def test_max_tokens_of_a_request_replace_the_configured(subject: Subject) -> None:
    lengths = (3, None, 50)
    shorter, usual, longer = [(await subject.answers(greedy=True, most=most))[0] for most in lengths]
    assert [len(each.token_ids) for each in (shorter, usual, longer)] == [3, 40, 50]
    assert {each.finish_reason for each in (shorter, usual, longer)} == {"length"}
    assert list(longer.token_ids[:3]) == list(usual.token_ids[:3]) == list(shorter.token_ids)


async def test_cancelled_request_is_aborted_alone(subject: Subject) -> None:
    asking = await subject.begin(samples=8, max_tokens=LONGEST)  # for many seconds
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await subject.idle(DEADLINE_S)
    assert await subject.serves(subject.engine.version)


async def test_deadline_cuts_only_unfinished_answers(subject: Subject) -> None:
    version, deadline_s = subject.engine.version, 0.05
    sampling: dict[str, Any] = {"max_tokens": LONGEST, "ignore_eos": False, "stop_token_ids": (EOS,)}
    for _ in range(20):  # the deadline that some answers meet depends on the machine
        answers = await subject.answers(samples=32, deadline_s=deadline_s, **sampling)
        reasons = {answer.finish_reason for answer in answers}
        if reasons == {"stop", "abort"}:
            break
        deadline_s *= 0.6 if "stop" in reasons else 2
    assert reasons == {"stop", "abort"}
    assert len(answers) == 32
    for answer in answers:
        assert (EOS in answer.token_ids) == (answer.finish_reason == "stop")
        assert whole(answer, version)
        assert not answer.token_ids or subject.distance_to(version, answer) < subject.kind.exact
    await subject.idle(DEADLINE_S)


@pytest.mark.parametrize("samples", [1, 4])
async def test_engine_serves_after_a_deadline_cut_all_answers(subject: Subject, samples: int) -> None:
    answers = await subject.answers(samples=samples, max_tokens=LONGEST, deadline_s=0.5)
    assert [answer.finish_reason for answer in answers] == ["abort"] * samples
    assert all(len(answer.token_ids) == len(answer.logprobs) < LONGEST for answer in answers)
    await subject.idle(DEADLINE_S)
    assert await subject.serves(subject.engine.version)


async def test_answer_cut_before_its_first_token_is_empty(subject: Subject) -> None:
    running = asyncio.ensure_future(subject.answers(samples=SEQUENCES, max_tokens=LONGEST))  # no room for more
    await asyncio.sleep(0)
    answers = await subject.answers(samples=3, deadline_s=0.0)
    running.cancel()
    empty = [(*answer.token_ids, *answer.logprobs, *answer.spans, answer.finish_reason) for answer in answers]
    assert empty == [("abort",)] * 3
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
    """Every server of a fleet is probed after an update, however busy it is."""
    if not subject.kind.scores_first:
        pytest.skip("this engine runs requests in their order")
    batches = [asyncio.ensure_future(subject.answers(samples=SEQUENCES)) for _ in range(4)]
    await asyncio.sleep(0)  # all of them are queued
    await subject.engine.score(PROMPT)
    assert not any(batch.done() for batch in batches[2:])
    await asyncio.gather(*batches)


async def test_pressure_follows_running_requests(subject: Subject) -> None:
    await subject.idle(DEADLINE_S)
    idle = await subject.engine.pressure()
    assert (idle.kv_cache_usage < 0.01, idle.running, idle.waiting) == (True, 0, 0)
    running = asyncio.ensure_future(subject.answers(samples=48, max_tokens=LONGEST))
    async with asyncio.timeout(DEADLINE_S):
        while (pressure := await subject.engine.pressure()).kv_cache_usage < 0.05:
            await asyncio.sleep(0.01)
    assert 0 < pressure.running <= pressure.running + pressure.waiting <= 48
    running.cancel()
    await subject.idle(DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while (await subject.engine.pressure()).kv_cache_usage > 0.01:
            await asyncio.sleep(0.01)


async def test_preempted_requests_are_counted_and_exact(subject: Subject) -> None:
    if not subject.kind.preempts:
        pytest.skip("this engine has room for all requests that it runs")
    before = (await subject.engine.pressure()).preemptions
    answers = await subject.answers(samples=48, max_tokens=200)
    assert (await subject.engine.pressure()).preemptions > before
    assert {len(answer.token_ids) for answer in answers} == {200}
    assert all(map(subject.faithful, answers[::8]))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([3] * (CONTEXT + 1), "maximum context length"), ([3, 32], "vocabulary of 32"), ([-1], "token -1"),
        ([], "empty"),
    ],
    ids=["too-long", "unknown-token", "negative-token", "empty"],
)  # fmt: skip
async def test_invalid_prompt_is_refused_alone(subject: Subject, prompt: list[int], reason: str) -> None:
    neighbour = asyncio.ensure_future(subject.answers(max_tokens=100))
    with pytest.raises(RequestRefused, match=reason):
        await subject.answers(prompt)
    if 32 in prompt:
        with pytest.raises(RequestRefused, match=reason):
            await subject.engine.score(prompt)
    assert len((await neighbour)[0].token_ids) == 100


# --- updates -------------------------------------------------------------------------------------------------


async def test_updates_split_running_answers_and_abort_none(subject: Subject) -> None:
    first, exact = subject.engine.version, subject.kind.exact
    preemptions = (await subject.engine.pressure()).preemptions
    asking = await subject.begin(samples=3, max_tokens=600)
    for version in (first + 1, first + 2, first + 3):
        assert 0 < await subject.trainer.update() < 60
        assert await subject.serves(version)
    for answer in await asking:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 600)
        assert [span.version for span in answer.spans] == [first, first + 1, first + 2, first + 3]
        ends = [span.end for span in answer.spans]
        assert [span.start for span in answer.spans] == [0, *ends[:-1]]
        assert 25 <= ends[0] < ends[-1] == 600
        assert subject.faithful(answer)
        for span in answer.spans:
            assert subject.distance_to(span.version + 1, answer, span.start, span.end) > 100 * exact
    assert (await subject.engine.pressure()).preemptions == preemptions, "updates are not counted"


async def test_requests_may_end_or_start_during_an_update(subject: Subject) -> None:
    old = subject.engine.version
    for turn in range(1, 4):
        cancelled = [asyncio.ensure_future(subject.answers(samples=4, max_tokens=LONGEST)) for _ in range(4)]
        late = [
            asyncio.ensure_future(subject.answers(samples=2, max_tokens=LONGEST, deadline_s=0.1 * (number + 1)))
            for number in range(4)
        ]
        await asyncio.sleep(0)  # they go first
        await subject.answers(max_tokens=8)
        update = asyncio.ensure_future(subject.trainer.update())
        for request in cancelled:
            await asyncio.sleep(0.002 * turn)  # some before the update, some in the middle of it
            request.cancel()
        fresh = asyncio.ensure_future(subject.answers(samples=2))
        await update
        assert subject.engine.version == old + turn
        assert all(map(subject.faithful, itertools.chain(*await asyncio.gather(fresh, *late))))
        await subject.idle(DEADLINE_S)
    assert await subject.serves(old + 3)


async def test_cached_prompts_are_dropped_with_an_update(subject: Subject) -> None:
    prompt, exact = PROMPT * 100, subject.kind.exact  # longer than the blocks that engines share
    for _ in range(2):
        for answer in await subject.answers(prompt, samples=4):
            assert subject.distance_to(subject.engine.version, answer, prompt=prompt) < exact
        await subject.trainer.update()
    (answer,) = await subject.answers(prompt)
    assert subject.distance_to(subject.engine.version, answer, prompt=prompt) < exact
    assert subject.distance_to(subject.engine.version - 1, answer, prompt=prompt) > 100 * exact


async def test_tokens_of_earlier_turns_are_cached(subject: Subject) -> None:
    prompt = [9, *PROMPT * 100]  # longer than three blocks of any engine, and no other test's
    (first,) = await subject.answers(prompt)
    (second,) = await subject.answers(context := [*prompt, *first.token_ids, *PROMPT])
    assert first.cached_tokens == 0
    assert second.cached_tokens == 0 if not subject.kind.keeps_prefixes else 384 <= second.cached_tokens < len(context)
    await subject.trainer.update()
    (third,) = await subject.answers(context)
    assert third.cached_tokens == 0


async def test_many_updates_take_no_more_memory(subject: Subject) -> None:
    for _ in range(4):
        await subject.trainer.update()
        assert await subject.serves(subject.engine.version)
    before = subject.memory_bytes()
    for _ in range(25):  # of 7 MB each
        await subject.trainer.update()
    assert await subject.serves(subject.engine.version)
    assert subject.memory_bytes() - before < 60 << 20


async def test_verification_tells_versions_apart(subject: Subject) -> None:
    manifest = subject.trainer.stage(probe=PROMPT)
    with pytest.raises(WrongWeights):
        await verify(subject.engine, manifest, subject.config.weights, dtype="float32")
    await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    await verify(subject.engine, manifest, subject.config.weights, dtype="float32")

    held = await subject.engine.checksums()
    if held is not None:
        assert [held[tensor.name] for tensor in manifest.tensors] == manifest.checksums


async def test_verification_finds_a_stale_head(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    untie = subject.kind.adapter.leave_head_behind
    if untie is None or not subject.kind.tied:
        pytest.skip("this engine can't be made to")

    async def update() -> None:
        manifest = subject.trainer.stage(probe=PROMPT)
        await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
        await verify(subject.engine, manifest, subject.config.weights, dtype="float32")

    with monkeypatch.context() as patches:
        untie(patches)
        with pytest.raises(WrongWeights):
            await update()
    await update()


async def test_missing_staging_memory_fails_the_update_alone(subject: Subject) -> None:
    if not subject.engine.shares_memory:
        pytest.skip("this engine is given the memory itself")
    old = subject.engine.version
    manifest = subject.trainer.stage()
    subject.trainer.staging.path.unlink()
    with pytest.raises(UpdateFailed):
        await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    assert subject.engine.version == old
    assert await subject.serves(old)
    subject.trainer.staging.abandon()
    await subject.trainer.update()
    assert await subject.serves(old + 1)


async def test_unsupported_updates_are_refused(subject: Subject) -> None:
    engine, old, staging = subject.engine, subject.engine.version, subject.trainer.staging
    manifest = subject.trainer.stage()
    form = Form(transfer=1, epoch=1, transport="nccl", host="127.0.0.1", port=1, rank=1, world=2, deadline_s=1.0)
    for call, reason in (
        (engine.install(old + 1, msgspec.structs.replace(manifest, adapter={"r": 4}), staging), "adapter"),
        (engine.install(old + 2, manifest, staging), str(old + 2)),
        (engine.install(old + 1, manifest, DirectSource("nccl")), "nccl"),
        (engine.join(form), "nccl"),
    ):
        with pytest.raises(UpdateFailed, match=f"{engine.name} .*{reason}"):
            await call
    assert engine.version == old
    await engine.install(old + 1, manifest, staging)
    assert await subject.serves(old + 1)


# --- crashes -------------------------------------------------------------------------------------------------


async def test_update_without_a_tensor_is_refused_or_a_crash(subject: Subject) -> None:
    version = subject.engine.version
    manifest = subject.trainer.stage(leave_out_last=True)
    asking = await subject.begin(samples=2, max_tokens=LONGEST)
    left_out = [name for name, _ in policy_of(version, tied=subject.kind.tied).named_parameters()][-1]
    with pytest.raises(EngineError, match=left_out) as end:
        await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    if isinstance(end.value, UpdateFailed):  # nothing was changed
        asking.cancel()
        assert await subject.serves(version)
        return
    with pytest.raises(EngineError, match=f"half of version {manifest.version}") as crash:
        await asking
    assert crash.value.unfinished is not None
    assert {span.version for answer in crash.value.unfinished for span in answer.spans} == {version}
    assert all(map(subject.faithful, crash.value.unfinished))
    with pytest.raises(EngineError, match="half of version"):
        await subject.answers()


async def test_restarted_engine_repeats_its_first_answers(subject: Subject) -> None:
    first = subject.first
    await subject.close()
    await subject.start_again()
    assert subject.first == first
    assert subject.engine.version == 0
    assert await subject.serves(0)
    await subject.trainer.update()
    assert await subject.serves(1)


async def test_closing_fails_running_requests(subject: Subject) -> None:
    """An unusable engine is closed while it works; its requests continue at the next one."""
    running = [await subject.begin(samples=samples, max_tokens=LONGEST) for samples in (1, 8)]
    async with asyncio.timeout(DEADLINE_S):
        await subject.close()
        for asking in running:
            with pytest.raises(EngineError, match="was closed"):
                await asking


async def test_another_seed_gives_other_answers(subject: Subject) -> None:
    first = subject.first
    await subject.start_again(seed=1)
    assert [answer.token_ids for answer in subject.first] != [answer.token_ids for answer in first]


async def test_crash_fails_requests_with_their_answers_so_far(subject: Subject) -> None:
    across = await subject.begin(samples=2, max_tokens=LONGEST)
    await subject.trainer.update()
    version = subject.engine.version
    one, many = [await subject.begin(samples=samples, max_tokens=LONGEST) for samples in (1, 8)]
    async with asyncio.timeout(DEADLINE_S):
        await subject.kind.adapter.kill(subject.engine)
        with pytest.raises(EngineError, match=subject.kind.dies_of) as crash:
            await across
        assert crash.value.unfinished is not None
        for answer in crash.value.unfinished:
            assert len(answer.token_ids) == len(answer.logprobs) >= 20, "those before the update, at least"
            assert answer.spans[0].version == version - 1
            assert subject.faithful(answer)
        for asking, samples in ((one, 1), (many, 8)):
            with pytest.raises(EngineError) as crash:
                await asking
            assert not isinstance(crash.value, RequestRefused | UpdateFailed)
            assert crash.value.unfinished is not None
            assert [answer.finish_reason for answer in crash.value.unfinished] == ["abort"] * samples
            for answer in crash.value.unfinished:
                assert len(answer.token_ids) >= 20
                assert whole(answer, version)
                assert subject.faithful(answer)
        for call in (subject.answers(), subject.engine.score(PROMPT), subject.engine.pressure()):
            with pytest.raises(EngineError, match=subject.kind.dies_of):
                await call
        with suppress(EngineError):
            assert await subject.engine.checksums() is None, "this engine never has any"
