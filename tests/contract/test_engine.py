"""What every engine must do, whatever it is made of.

Requests, updates and deaths are one module because they share an engine, which takes long to start; deaths come last.
"""

import asyncio
from contextlib import suppress

import pytest

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused, UpdateFailed
from tests.contract.engine_requests import *  # noqa: F403
from tests.contract.engine_updates import *  # noqa: F403
from tests.contract.engines import VLLM_WARNINGS
from tests.contract.policies import policy_of
from tests.contract.subject import DEADLINE_S, LONGEST, PROMPT, Subject

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    VLLM_WARNINGS,
]


async def test_update_without_a_tensor_is_refused_or_a_crash(subject: Subject) -> None:
    version = subject.engine.version
    manifest = subject.trainer.stage(leave_out_last=True)
    asking = await subject.begin(samples=2, max_tokens=LONGEST)
    left_out = [name for name, _ in policy_of(version, tied=subject.kind.tied).named_parameters()][-1]
    with pytest.raises(EngineError, match=left_out) as end:
        await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    if isinstance(end.value, UpdateFailed):  # it looked before it touched anything
        asking.cancel()
        assert await subject.serves(version)
        return
    with pytest.raises(EngineError, match=f"half of version {manifest.version}") as death:
        await asking
    assert death.value.unfinished is not None
    assert {span.version for answer in death.value.unfinished for span in answer.spans} == {version}
    assert all(map(subject.faithful, death.value.unfinished))
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


async def test_closing_fails_running_requests(
    subject: Subject,
) -> None:
    """Engines that are of no use any more are closed while they work; their requests go on at the next one."""
    one, many = [await subject.begin(samples=n, max_tokens=LONGEST) for n in (1, 8)]
    async with asyncio.timeout(DEADLINE_S):
        await subject.close()
        for asking in (one, many):
            with pytest.raises(EngineError, match="was closed"):
                await asking


async def test_another_seed_gives_other_answers(subject: Subject) -> None:
    """The servers of a run are to try different things."""
    first = subject.first
    await subject.start_again(seed=1)
    assert [answer.token_ids for answer in subject.first] != [answer.token_ids for answer in first]


async def test_crash_fails_requests_with_their_answers_so_far(subject: Subject) -> None:
    across = await subject.begin(samples=2, max_tokens=LONGEST)
    await subject.trainer.update()
    version = subject.engine.version
    one, many = [await subject.begin(samples=n, max_tokens=LONGEST) for n in (1, 8)]
    async with asyncio.timeout(DEADLINE_S):
        await subject.kind.adapter.kill(subject.engine)
        with pytest.raises(EngineError, match=subject.kind.dies_of) as death:
            await across
        assert death.value.unfinished is not None
        for answer in death.value.unfinished:
            assert len(answer.token_ids) == len(answer.logprobs) >= 20, "what was there before the update, at least"
            assert answer.spans[0].version == version - 1
            assert subject.faithful(answer)
        for asking, samples in ((one, 1), (many, 8)):
            with pytest.raises(EngineError) as death:
                await asking
            assert not isinstance(death.value, RequestRefused | UpdateFailed)
            left = death.value.unfinished
            assert left is not None
            assert [answer.finish_reason for answer in left] == ["abort"] * samples
            for answer in left:
                length = len(answer.token_ids)
                assert 20 <= length == len(answer.logprobs), "killed in the middle"
                spans = [(span.version, span.start, span.end) for span in answer.spans]
                assert spans == ([(version, 0, length)] if length else [])
                assert subject.faithful(answer)
        for call in (subject.answers(), subject.engine.score(PROMPT), subject.engine.pressure()):
            with pytest.raises(EngineError, match=subject.kind.dies_of):
                await call
        with suppress(EngineError):
            assert await subject.engine.checksums() is None, "hidden from the beginning"
