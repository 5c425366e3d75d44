"""What every engine must do, whatever it is made of."""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.build import start_engine
from slipstream.rollout_servers.engines.vllm.arguments import Generation
from tests.contract.policies import CONTEXT, distance, distributions, policy_of, write_policy
from tests.contract.trainer import Trainer

EOS = 1
PROMPT = [3, 5, 7, 12]
LONGEST = CONTEXT - len(PROMPT)
IDLE_S = 20.0
EXACT = 1e-4
"""Mean |Δ| of log-probs in fp32; another policy's are further away by orders of magnitude."""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@dataclass
class Subject:
    """An engine under test; its version v serves `policy_of(v)`."""

    engine: Any
    core: str
    tied: bool

    async def answers(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        samples: int = 1,
        greedy: bool = False,
        deadline_s: float = 100.0,
        **drawn: object,
    ) -> list[Completion]:
        """Answers of 40 tokens at temperature 1, past any EOS, unless `drawn` says otherwise."""
        plain: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True, "stop_token_ids": ()}
        self.engine.generation = Generation(**(plain | drawn))
        answers: list[Completion] = await self.engine.generate(
            prompt, samples=samples, greedy=greedy, deadline_s=deadline_s
        )
        return answers

    def distance_to(
        self, version: int, answer: Completion, start: int = 0, end: int | None = None, *, temperature: float = 1.0
    ) -> float:
        end = len(answer.token_ids) if end is None else end
        return distance(answer, policy_of(version, tied=self.tied), PROMPT, start, end, temperature=temperature)

    async def serves(self, version: int) -> bool:
        """Whether a new request is answered by that version and by no other."""
        (answer,) = await self.answers()
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(version, 0, len(answer.token_ids))]
        return self.distance_to(version, answer) < EXACT and self.distance_to(version + 1, answer) > 100 * EXACT

    async def idle(self, deadline_s: float) -> None:
        """Waits until nothing is left to do for the engine core, nor kept beside it. Raises: TimeoutError."""
        client = self.engine._llm.engine_core
        async with asyncio.timeout(deadline_s):
            while (
                client.engine_core.scheduler.has_requests()
                if self.core == "inline"
                else await client.call_utility_async("has_work")
            ):
                await asyncio.sleep(0.01)
        processor = self.engine._llm.output_processor
        assert not (processor.request_states or processor.parent_requests or processor.external_req_ids)

    def memory_bytes(self) -> int:
        """Resident memory of this process and of the engine's."""
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        return pages * os.sysconf("SC_PAGE_SIZE")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("inline", True), ("process", True), ("inline", False)],
    ids=["inline", "process", "inline-untied"],
)
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    core, tied = request.param
    folder = tmp_path_factory.mktemp("policy") / "model"
    write_policy(folder, tied=tied)
    config = RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": "float32"},
            "weights": {"transport": "gloo"},
            "rollout": {
                "engine": {
                    "core": core,
                    "max_model_len": CONTEXT,
                    "max_sequences": 64,
                    "kv_cache_bytes": 128 << 20,
                    "start_deadline_s": 100,
                },
            },
        }
    )
    engine = await start_engine(config, folder, eos_token_ids=(EOS,))
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    yield Subject(engine, core, tied)
    await engine.close()
    # Engines of one process share these; one that died has taken them apart.
    _ROPE_DICT.clear()
    assert not torch.distributed.is_initialized(), "a closed engine leaves no process group to the tests that follow"


# --- requests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_the_distribution_that_was_sampled(subject: Subject, temperature: float) -> None:
    (answer,) = await subject.answers(max_tokens=200, temperature=temperature)
    version = subject.engine.version
    assert subject.distance_to(version, answer, temperature=temperature) < EXACT
    assert subject.distance_to(version, answer, temperature=1.7 - temperature) > 100 * EXACT


async def test_every_sample_of_a_prompt_is_an_answer_of_its_own(subject: Subject) -> None:
    answers = await subject.answers(samples=5)
    assert len({tuple(answer.token_ids) for answer in answers}) == 5
    for answer in answers:
        assert subject.distance_to(subject.engine.version, answer) < EXACT
        assert len(answer.token_ids) == len(answer.logprobs) == 40


async def test_a_greedy_answer_is_the_likeliest_and_its_log_probs_are_of_the_unscaled_distribution(
    subject: Subject,
) -> None:
    first, again = [await subject.answers(greedy=True, temperature=0.5) for _ in range(2)]
    assert first == again
    (answer,) = first
    assert subject.distance_to(subject.engine.version, answer, temperature=1.0) < EXACT
    policy = policy_of(subject.engine.version, tied=subject.tied)
    likeliest = distributions(policy, PROMPT, answer.token_ids, temperature=1.0).max(-1).values
    assert list(answer.logprobs) == pytest.approx(likeliest.tolist(), abs=1e-3)


async def test_an_answer_ends_with_its_first_stop_token_and_is_called_stopped(subject: Subject) -> None:
    (whole,) = await subject.answers(greedy=True)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 40)
    end = whole.token_ids[5]
    (cut,) = await subject.answers(greedy=True, ignore_eos=False, stop_token_ids=(end,))
    assert cut.finish_reason == "stop"
    assert list(cut.token_ids) == list(whole.token_ids[: list(whole.token_ids).index(end) + 1])


async def test_eos_ends_an_answer_unless_it_is_ignored(subject: Subject) -> None:
    ended = await subject.answers(samples=16, max_tokens=150, ignore_eos=False, stop_token_ids=(EOS,))
    stopped = [answer for answer in ended if answer.finish_reason == "stop"]
    assert stopped
    assert all(answer.token_ids[-1] == EOS for answer in stopped)
    assert all(EOS not in answer.token_ids[:-1] for answer in ended)

    ignored = await subject.answers(samples=16, max_tokens=150)
    assert any(EOS in answer.token_ids[:-1] for answer in ignored)
    assert {(answer.finish_reason, len(answer.token_ids)) for answer in ignored} == {("length", 150)}


async def test_cancelling_a_request_aborts_it_and_the_engine_goes_on(subject: Subject) -> None:
    asking = asyncio.ensure_future(subject.answers(samples=8, max_tokens=LONGEST))  # for many seconds
    await subject.answers(max_tokens=8)  # now the first request runs
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await subject.idle(IDLE_S)
    assert await subject.serves(subject.engine.version)


async def test_at_the_deadline_finished_answers_are_whole_and_the_others_are_cut_short(subject: Subject) -> None:
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
        assert (EOS in answer.token_ids) == (answer.finish_reason == "stop")
        assert len(answer.token_ids) == len(answer.logprobs)
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(version, 0, len(answer.token_ids))]
        assert subject.distance_to(version, answer) < EXACT
    await subject.idle(IDLE_S)


@pytest.mark.parametrize("samples", [1, 4])
async def test_a_deadline_at_which_nothing_is_finished_cuts_every_answer_short_and_the_engine_goes_on(
    subject: Subject, samples: int
) -> None:
    answers = await subject.answers(samples=samples, max_tokens=LONGEST, deadline_s=0.5)
    assert [answer.finish_reason for answer in answers] == ["abort"] * samples
    assert all(len(answer.token_ids) == len(answer.logprobs) < LONGEST for answer in answers)
    await subject.idle(IDLE_S)
    assert await subject.serves(subject.engine.version)


async def test_an_answer_that_is_cut_short_before_its_first_token_is_empty(subject: Subject) -> None:
    running = asyncio.ensure_future(subject.answers(samples=64, max_tokens=LONGEST))  # as many as the engine takes
    await asyncio.sleep(0)
    answers = await subject.answers(samples=3, deadline_s=0.0)
    running.cancel()
    assert [(*answer.token_ids, *answer.logprobs, *answer.spans) for answer in answers] == [()] * 3
    assert {answer.finish_reason for answer in answers} == {"abort"}
    await subject.idle(IDLE_S)


async def test_a_request_that_finishes_before_its_deadline_is_not_cut_short(subject: Subject) -> None:
    (answer,) = await subject.answers(max_tokens=4, deadline_s=30.0)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [([3] * (CONTEXT + 1), "maximum context length"), ([3, 32], "vocabulary of 32"), ([], "empty")],
    ids=["longer-than-the-context", "unknown-token", "empty"],
)
async def test_a_prompt_that_can_not_be_answered_is_refused_and_costs_nobody_else(
    subject: Subject, prompt: list[int], complaint: str
) -> None:
    neighbour = asyncio.ensure_future(subject.answers(max_tokens=100))
    with pytest.raises(RequestRefused, match=complaint):
        await subject.answers(prompt)
    assert len((await neighbour)[0].token_ids) == 100


# --- weights ---------------------------------------------------------------------------------------------


async def test_an_update_in_flight_splits_running_answers_at_its_boundary_and_aborts_none(subject: Subject) -> None:
    old = subject.engine.version
    trainer = Trainer(subject.engine, tied=subject.tied)
    await trainer.join()
    asking = asyncio.ensure_future(subject.answers(samples=4, max_tokens=1000))
    await subject.answers(max_tokens=30)  # now the long answers are at least this long
    stall_s = await trainer.update()
    assert not asking.done()

    assert subject.engine.version == old + 1
    assert 0 < stall_s < 60
    assert await subject.serves(old + 1)
    for answer in await asking:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 1000)
        before, after = answer.spans
        assert (before.version, before.start, after.version, after.end) == (old, 0, old + 1, 1000)
        assert 25 <= before.end == after.start
        assert subject.distance_to(old, answer, 0, before.end) < EXACT
        assert subject.distance_to(old + 1, answer, after.start) < EXACT
        assert subject.distance_to(old, answer, after.start) > 100 * EXACT


async def test_a_version_that_is_received_but_not_applied_changes_nothing(subject: Subject) -> None:
    old = subject.engine.version
    trainer = Trainer(subject.engine, tied=subject.tied)
    await trainer.join()
    manifest = await trainer.send()
    assert await subject.serves(old)
    await subject.engine.apply(manifest)
    assert await subject.serves(old + 1)


async def test_update_after_update_is_served_without_eating_memory(subject: Subject) -> None:
    trainer = Trainer(subject.engine, tied=subject.tied)
    await trainer.join()
    for _ in range(4):
        await trainer.update()
        assert await subject.serves(subject.engine.version)
    before = subject.memory_bytes()
    for _ in range(25):  # of 7 MB each
        await trainer.update()
    assert await subject.serves(subject.engine.version)
    assert subject.memory_bytes() - before < 60 << 20


async def test_a_sender_that_dies_in_a_transfer_leaves_the_engine_with_its_weights(subject: Subject) -> None:
    old = subject.engine.version
    dying = Trainer(subject.engine, tied=subject.tied, deadline_s=5.0)
    await dying.join()
    manifest = await dying.send_only_the_first_bucket()
    del dying
    assert await subject.serves(old)
    with pytest.raises(UpdateFailed):
        await subject.engine.apply(manifest)
    assert subject.engine.version == old
    assert await subject.serves(old)

    successor = Trainer(subject.engine, tied=subject.tied)
    await successor.join()
    await successor.update()
    assert await subject.serves(old + 1)


async def test_a_group_that_is_never_complete_leaves_the_engine_with_its_weights(subject: Subject) -> None:
    old = subject.engine.version
    trainer = Trainer(subject.engine, tied=subject.tied, deadline_s=1.0)
    joining = asyncio.ensure_future(trainer.join(world=3))
    with pytest.raises(RuntimeError):
        await joining
    manifest = trainer.snapshot().manifest
    await subject.engine.receive(manifest)
    with pytest.raises(UpdateFailed):
        await subject.engine.apply(manifest)
    assert await subject.serves(old)


async def test_an_update_that_leaves_a_tensor_out_ends_the_engine_aloud(subject: Subject) -> None:
    """The last test: nothing is left of the engine."""
    trainer = Trainer(subject.engine, tied=subject.tied)
    await trainer.join()
    manifest = await trainer.send_without_the_last_tensor()
    with pytest.raises(EngineError, match=f"half of version {manifest.version}.*no weights came for") as death:
        await subject.engine.apply(manifest)
    assert not isinstance(death.value, UpdateFailed)
    with pytest.raises(EngineError, match="half of version"):
        await subject.answers()
