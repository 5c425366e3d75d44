"""What becomes of new weights, in every engine; a part of `test_engine`."""

import asyncio
import itertools

import msgspec
import pytest

from slipstream.buffer.wire.weights.protocol import Form
from slipstream.rollout_servers.engines.base import DirectSource, UpdateFailed
from slipstream.rollout_servers.weights.verify import WrongWeights, verify
from tests.contract.subject import DEADLINE_S, LONGEST, PROMPT, Subject


async def test_updates_split_running_answers_and_abort_none(subject: Subject) -> None:
    first, exact = subject.engine.version, subject.kind.exact
    preemptions = (await subject.engine.pressure()).preemptions
    asking = await subject.begin(samples=3, max_tokens=1000)
    for version in (first + 1, first + 2, first + 3):
        assert 0 < await subject.trainer.update() < 60
        assert await subject.serves(version)
    for answer in await asking:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 1000)
        assert [span.version for span in answer.spans] == [first, first + 1, first + 2, first + 3]
        ends = [span.end for span in answer.spans]
        assert [span.start for span in answer.spans] == [0, *ends[:-1]]
        assert 25 <= ends[0] < ends[-1] == 1000
        assert subject.faithful(answer)
        for span in answer.spans:
            assert subject.distance_to(span.version + 1, answer, span.start, span.end) > 100 * exact
    assert (await subject.engine.pressure()).preemptions == preemptions, "room was not what they wanted for"


async def test_requests_may_end_or_start_during_an_update(subject: Subject) -> None:
    old = subject.engine.version
    for turn in range(1, 4):
        given_up = [asyncio.ensure_future(subject.answers(samples=4, max_tokens=LONGEST)) for _ in range(4)]
        late = [
            asyncio.ensure_future(subject.answers(samples=2, max_tokens=LONGEST, deadline_s=0.1 * (number + 1)))
            for number in range(4)
        ]
        await asyncio.sleep(0)  # they go first
        await subject.answers(max_tokens=8)
        update = asyncio.ensure_future(subject.trainer.update())
        for request in given_up:
            await asyncio.sleep(0.002 * turn)  # some before, some in the middle of it
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
        answers = await subject.answers(prompt, samples=4)
        for answer in answers:
            assert subject.distance_to(subject.engine.version, answer, prompt=prompt) < exact
        await subject.trainer.update()
    (answer,) = await subject.answers(prompt)
    assert subject.distance_to(subject.engine.version, answer, prompt=prompt) < exact
    assert subject.distance_to(subject.engine.version - 1, answer, prompt=prompt) > 100 * exact


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
        await verify(subject.engine, manifest, subject.config.weights, dtype=subject.config.model.dtype)
    await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    await verify(subject.engine, manifest, subject.config.weights, dtype=subject.config.model.dtype)

    held = await subject.engine.checksums()
    if held is not None:  # it shows its tensors
        assert [held[tensor.name] for tensor in manifest.tensors] == manifest.checksums


async def test_verification_finds_a_stale_head(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    untie = subject.kind.adapter.leave_head_behind
    if untie is None or not subject.kind.tied:
        pytest.skip("this engine can't be made to")
    with monkeypatch.context() as patches:
        untie(patches)
        manifest = subject.trainer.stage(probe=PROMPT)
        await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    with pytest.raises(WrongWeights, match="log-probs of the probe"):
        await verify(subject.engine, manifest, subject.config.weights, dtype=subject.config.model.dtype)
    manifest = subject.trainer.stage(probe=PROMPT)
    await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    await verify(subject.engine, manifest, subject.config.weights, dtype=subject.config.model.dtype)


async def test_missing_staging_memory_fails_the_update_alone(subject: Subject) -> None:
    if not subject.engine.shares_memory:
        pytest.skip("it is handed the memory itself")
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


async def test_adapter_is_refused_and_version_stays(subject: Subject) -> None:
    old = subject.engine.version
    manifest = subject.trainer.stage()
    adapter = msgspec.structs.replace(manifest, kind="adapter")
    engine, core = subject.config.rollout.engine.name, subject.kind.options.get("core")
    name = engine if core is None else f"{engine}/{core}"
    with pytest.raises(UpdateFailed, match=name):
        await subject.engine.install(adapter.version, adapter, subject.trainer.staging)
    assert subject.engine.version == old
    await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
    assert subject.engine.version == manifest.version


async def test_manifest_of_another_version_is_refused(subject: Subject) -> None:
    old = subject.engine.version
    manifest = subject.trainer.stage()
    with pytest.raises(UpdateFailed):
        await subject.engine.install(manifest.version + 1, manifest, subject.trainer.staging)
    assert subject.engine.version == old


async def test_direct_source_without_process_group_is_refused(subject: Subject) -> None:
    old = subject.engine.version
    manifest = subject.trainer.stage()
    with pytest.raises(UpdateFailed, match="nccl"):
        await subject.engine.install(manifest.version, manifest, DirectSource("nccl"))
    assert subject.engine.version == old


async def test_group_of_unsupported_transport_is_refused(subject: Subject) -> None:
    form = Form(transfer=1, epoch=1, transport="nccl", host="127.0.0.1", port=1, rank=1, world=2, deadline_s=1.0)
    with pytest.raises(UpdateFailed, match="nccl"):
        await subject.engine.join(form)
    assert await subject.serves(subject.engine.version)
