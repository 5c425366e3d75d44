"""Adapters: every engine generates with those that the learner publishes, and with no other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs import RunConfig
from slipstream.learner.models.lora import add_adapters, init_adapters
from slipstream.rollout_servers.engines.base import Completion, Generation, Request, UpdateFailed
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.verify import WrongWeights, verify
from tests.contract.engines import ENGINES, VLLM_WARNINGS
from tests.contract.policies import CONTEXT, distance, scores, write_policy
from tests.contract.trainer import publish

pytestmark = [pytest.mark.asyncio(loop_scope="module"), VLLM_WARNINGS]

EXACT = 1e-4
EOS = 1
PROMPT = [3, 5, 7, 12]
LONG_PROMPT = PROMPT * 100
"""Longer than the blocks whose KV cache engines share between requests."""


@dataclass
class Adapted:
    """A learner and an engine with adapters of the same base model; a version is a seed of the adapter's values."""

    config: RunConfig
    engine: Any
    learner: Any
    staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self.staging = Staging("adapter", shared=self.engine.shares_memory)

    def policy(self, version: int) -> nn.Module:
        """The learner with the adapter of a version; that of 0 has no effect."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.learner.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(std=0.1 if version else 0.0, generator=generator)
        model: nn.Module = self.learner
        return model

    def stage(self) -> Manifest:
        """Puts the next version into the staging memory."""
        version = self.engine.version + 1
        return publish(self.policy(version), version, self.staging, probe=PROMPT)

    async def update(self) -> None:
        """Installs and verifies the next version."""
        manifest = self.stage()
        await self.engine.install(manifest.version, manifest, self.staging)
        await verify(self.engine, manifest, self.config.weights, dtype="float32")

    async def answers(
        self, prompt: Sequence[int] = PROMPT, *, samples: int = 1, max_tokens: int = 40
    ) -> list[Completion]:
        self.engine.generation = Generation(max_tokens=max_tokens, temperature=1.0, ignore_eos=True, stop_token_ids=())
        answers: list[Completion] = await self.engine.generate(Request(prompt, samples=samples, deadline_s=100.0))
        return answers

    def distances(self, answer: Completion, prompt: Sequence[int] = PROMPT, *, off: int = 0) -> list[float]:
        """Mean |Δ| of the log-probs of each version span to those of its version, or of one that is `off` later."""
        return [
            distance(answer, self.policy(span.version + off), prompt, span.start, span.end, temperature=1.0)
            for span in answer.spans
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm-inline", "vllm-process", "hf"])
async def adapted(
    request: pytest.FixtureRequest, prompt_vllm: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Adapted]:
    kind = ENGINES[request.param]
    if not kind.installed():
        pytest.skip(f"{request.param} is not installed here")
    folder = tmp_path_factory.mktemp("base") / "model"
    write_policy(folder, tied=True)
    sizes = {"max_model_len": CONTEXT, "max_sequences": 16, "kv_cache_bytes": 4 << 20, "start_deadline_s": 200.0}
    config = RunConfig.model_validate(
        {
            "run": {"dir": folder.parent},
            "model": {"path": folder, "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
            "rollout": {"engine": {**sizes, **kind.options}},
        }
    )
    learner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert config.model.lora is not None
    add_adapters(learner, learner.model, config.model.lora, dtype=torch.float32)
    init_adapters(learner)
    subject = Adapted(config, await start_engine(config, folder, eos_token_ids=(EOS,)), learner)
    yield subject
    await subject.engine.close()
    subject.staging.abandon()


async def test_running_answers_go_on_with_each_adapter(adapted: Adapted) -> None:
    """From version 0 on, which has no adapter."""
    first = adapted.engine.version
    asking = asyncio.create_task(adapted.answers(samples=3, max_tokens=250))
    await asyncio.sleep(0)  # it goes first
    await adapted.answers(max_tokens=20)
    for _ in range(2):
        await adapted.update()
        await adapted.answers(max_tokens=20)
    for answer in await asking:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 250)
        assert [span.version for span in answer.spans] == [first, first + 1, first + 2]
        assert max(adapted.distances(answer)) < EXACT
        assert min(adapted.distances(answer, off=1)) > 100 * EXACT


async def test_cached_prompts_are_dropped_with_an_adapter(adapted: Adapted) -> None:
    for _ in range(3):
        for answer in await adapted.answers(LONG_PROMPT, samples=2):
            assert [span.version for span in answer.spans] == [adapted.engine.version]
            assert max(adapted.distances(answer, LONG_PROMPT)) < EXACT
        await adapted.update()
    (answer,) = await adapted.answers(LONG_PROMPT)
    assert max(adapted.distances(answer, LONG_PROMPT)) < EXACT
    assert min(adapted.distances(answer, LONG_PROMPT, off=-1)) > 100 * EXACT


async def test_staging_memory_may_be_reused(adapted: Adapted) -> None:
    await adapted.update()
    adapted.staging.data.zero_()
    text = [*PROMPT, *range(2, 32)]
    expected = scores(adapted.policy(adapted.engine.version), text)
    assert await adapted.engine.score(text) == pytest.approx(expected, abs=10 * EXACT)


async def test_verification_tells_adapters_apart(adapted: Adapted) -> None:
    manifest = adapted.stage()
    with pytest.raises(WrongWeights):
        await verify(adapted.engine, manifest, adapted.config.weights, dtype="float32")
    await adapted.engine.install(manifest.version, manifest, adapted.staging)
    await verify(adapted.engine, manifest, adapted.config.weights, dtype="float32")


async def test_other_weights_are_refused(adapted: Adapted) -> None:
    old, manifest = adapted.engine.version, adapted.stage()
    assert manifest.adapter is not None
    renamed = [
        msgspec.structs.replace(tensor, name=tensor.name.replace("q_proj", "p_proj")) for tensor in manifest.tensors
    ]
    for other in (
        msgspec.structs.replace(manifest, adapter=None),
        msgspec.structs.replace(manifest, adapter=manifest.adapter | {"r": 600}),
        msgspec.structs.replace(manifest, tensors=renamed),
    ):
        with pytest.raises(UpdateFailed):
            await adapted.engine.install(other.version, other, adapted.staging)
    assert adapted.engine.version == old
    (answer,) = await adapted.answers()
    assert max(adapted.distances(answer)) < EXACT
    await adapted.update()
