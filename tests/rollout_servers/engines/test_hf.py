"""What is the engine `hf`'s own; what every engine must do is asked in tests/contract/test_engine.py."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.buffer.wire.weights.protocol import BY_CHECKSUM, Manifest, TensorInfo
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import (
    Completion,
    EngineError,
    EngineSettings,
    Generation,
    Request,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.hf import engine as stepping
from slipstream.rollout_servers.engines.hf.engine import HfEngine, InFlight, Stepper
from slipstream.rollout_servers.engines.hf.model import Policy, check_padding
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.verify import verify

torch.set_num_threads(1)

VOCABULARY, CONTEXT = 64, 512
PROMPT = [3, 5, 7, 12]
EXACT = 1e-4
"""Mean |Δ| of log-probs in fp32; another policy's are further away by orders of magnitude."""

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32}
_ATTENTION: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
ARCHITECTURES: dict[str, Any] = {
    "attention": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_ATTENTION, head_dim=16, num_hidden_layers=2, tie_word_embeddings=True)
    ),
    "sliding-window": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_ATTENTION, head_dim=16, num_hidden_layers=6, sliding_window=8)
    ),
    "convolution": lambda: Lfm2ForCausalLM(
        Lfm2Config(**_ATTENTION, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    ),
    "no-attention": lambda: MambaForCausalLM(MambaConfig(**_SIZES, num_hidden_layers=2, state_size=8)),
}


def model_of(architecture: str, seed: int) -> Any:
    """A model with peaked distributions, unlike those of other seeds."""
    model = ARCHITECTURES[architecture]()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.eval()


def configured(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    engine = {"name": "hf", "max_model_len": CONTEXT, "max_sequences": 8, **sections.pop("engine", {})}
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": "float32"},
            "rollout": {"engine": engine, "sampling": {"max_tokens": 40}},
            **sections,
        }
    )


def drawn(max_tokens: int) -> Generation:
    return Generation(max_tokens=max_tokens, temperature=0.7, ignore_eos=True, stop_token_ids=())


def settings(config: RunConfig, max_tokens: int = 40) -> EngineSettings:
    assert config.model.path is not None, "given above"
    made = EngineSettings.from_config(config, config.model.path, eos_token_ids=())
    return replace(made, generation=drawn(max_tokens))


@asynccontextmanager
async def started(folder: Path, max_tokens: int = 40, **sections: dict[str, Any]) -> AsyncIterator[HfEngine]:
    """The engine with version 0, which is `model_of("attention", 0)`."""
    model_of("attention", 0).save_pretrained(folder)
    engine = await HfEngine.start(settings(configured(folder, **sections), max_tokens))
    try:
        yield engine
    finally:
        await engine.close()


def staged(model: Any, version: int, *, without: str = "") -> tuple[Manifest, Staging]:
    """A version as it lies in a rollout server, perhaps with a tensor too few."""
    return staged_tensors({name: each for name, each in model.named_parameters() if name != without}, version)


def staged_tensors(weights: dict[str, Tensor], version: int) -> tuple[Manifest, Staging]:
    """The same of any tensors."""
    manifest = Manifest(
        version=version,
        tensors=[
            TensorInfo(name=name, dtype=str(each.dtype).removeprefix("torch."), shape=list(each.shape))
            for name, each in weights.items()
        ],
        bucket_bytes=1 << 20,
        evaluate=False,
        checksums=[
            xxhash.xxh3_64_intdigest(each.detach().reshape(-1).view(torch.uint8).numpy().data)
            for each in weights.values()
        ],
    )
    staging = Staging("test", shared=False)
    staging.begin(manifest)
    for name, place in staging.named_tensors(manifest):
        place.copy_(weights[name])
    staging.finish(manifest)
    return manifest, staging


@torch.no_grad()
def distance(answer: Completion, model: Any, prompt: list[int], start: int = 0, end: int | None = None) -> float:
    """Mean |Δ| between the engine's log-probs of tokens [start, end) and those of transformers without a cache."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    off: float = (torch.tensor(answer.logprobs) - expected)[start:end].abs().mean().item()
    return off


# --- tokens ----------------------------------------------------------------------------------------------


def requests(random_numbers: random.Random) -> Iterator[tuple[list[int], InFlight]]:
    """Requests of all lengths, each with one to three samples."""
    for _ in range(10):
        prompt = [random_numbers.randrange(VOCABULARY) for _ in range(random_numbers.randint(1, 20))]
        tokens, samples = random_numbers.randint(1, 20), random_numbers.randint(1, 3)
        yield prompt, InFlight(Request(prompt, 60.0, samples=samples), drawn(tokens), max_tokens=tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # transformers would rather have kernels for a GPU
@torch.inference_mode()
def test_answers_of_different_lengths_that_join_and_leave_one_another_are_exact(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(architecture, 0)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(stepping, "PREFILL_TOKENS", 64)  # several prefills a step
    stepper = Stepper(Policy(settings(configured(tmp_path))), max_sequences=12, seed=0)
    coming, asked = list(requests(random.Random(0))), []
    steps = 0
    while coming or not stepper.idle:
        if coming and steps % 3 == 0:
            asked.append(coming.pop())
            stepper.add(asked[-1][1])
        if steps == 14:
            stepper._recompute()
        stepper.step()
        steps += 1
    for prompt, request in asked:
        for answer in request.completions():
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", request.max_tokens)
            assert distance(answer, model, prompt) < EXACT


@torch.inference_mode()
def test_samples_of_one_prompt_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("attention", 0).save_pretrained(tmp_path)
    policy = Policy(settings(configured(tmp_path)))
    sizes: list[tuple[int, ...]] = []
    compute = policy.next_logits

    def spy(ids_BN: Tensor, mask_BT: Tensor, cache: Any) -> Tensor:
        sizes.append(tuple(ids_BN.shape))
        return compute(ids_BN, mask_BT, cache)

    monkeypatch.setattr(policy, "next_logits", spy)
    stepper = Stepper(policy, max_sequences=8, seed=0)
    stepper.add(InFlight(Request(PROMPT, 60.0, samples=8), drawn(2), max_tokens=2))
    stepper.step()
    stepper.step()
    assert sizes == [(1, len(PROMPT)), (8, 1)]


@torch.inference_mode()
def test_a_model_that_looks_at_its_padding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("attention", 0).save_pretrained(tmp_path)
    policy = Policy(settings(configured(tmp_path)))
    check_padding(policy, dtype="float32")
    compute = policy.next_logits
    monkeypatch.setattr(policy, "next_logits", lambda ids, mask, cache: compute(ids, torch.ones_like(mask), cache))
    with pytest.raises(ConfigError, match="padded batch"):
        check_padding(policy, dtype="float32")


def test_more_tokens_than_a_model_has_positions_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=f"max_model_len={CONTEXT} is more than the 64 positions"):
        Policy(settings(configured(tmp_path)))


# --- the engine ------------------------------------------------------------------------------------------


async def test_options_reach_transformers(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nonsense"):
        async with started(tmp_path, engine={"options": {"attn_implementation": "nonsense"}}):
            pass


async def test_after_an_update_the_engine_shows_the_checksums_of_the_published_tensors(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        manifest, staging = staged(model_of("attention", 1), 1)
        published = {tensor.name: each for tensor, each in zip(manifest.tensors, manifest.checksums, strict=True)}
        assert await engine.checksums() != published
        assert await engine.install(manifest.version, manifest, staging) > 0
        assert engine.version == 1
        assert await engine.checksums() == published


async def test_buffers_are_published_in_float32_and_held_so_in_a_model_of_bfloat16_too(tmp_path: Path) -> None:
    build: Any = ApertusForCausalLM
    model = build(ApertusConfig(**_ATTENTION, num_hidden_layers=1, hidden_act="xielu"))
    model.save_pretrained(tmp_path)
    model.model.layers[0].mlp.act_fn.beta.fill_(0.123)  # no number of bfloat16
    parameters = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    config = configured(tmp_path, model={"path": tmp_path, "dtype": "bfloat16"})
    engine = await HfEngine.start(settings(config, 4))
    try:
        manifest, staging = staged_tensors(model.state_dict() | parameters, 1)
        await engine.install(manifest.version, manifest, staging)
        assert (await verify(engine, manifest, config.weights, dtype=config.model.dtype)).how == BY_CHECKSUM
        (answer,) = await engine.generate(Request(PROMPT, deadline_s=60))
        assert len(answer.token_ids) == 4
    finally:
        await engine.close()


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "dtype", "version"])
async def test_an_update_that_does_not_fit_is_refused_and_the_engine_goes_on_with_the_old_weights(
    damage: str, tmp_path: Path
) -> None:
    async with started(tmp_path) as engine:
        before = await engine.checksums()
        manifest, staging = staged(model_of("attention", 1), 1, without="model.norm.weight" * (damage == "missing"))
        norm = next((each for each in manifest.tensors if each.name == "model.norm.weight"), manifest.tensors[0])
        wrong = {
            "unknown": TensorInfo(name="model.strange.weight", dtype="float32", shape=norm.shape),
            "shape": TensorInfo(name=norm.name, dtype="float32", shape=[2, *norm.shape]),
            "dtype": TensorInfo(name=norm.name, dtype="bfloat16", shape=norm.shape),
        }
        if damage in wrong:
            manifest.tensors[manifest.tensors.index(norm)] = wrong[damage]
        if damage == "version":
            staging.version = 7
        with pytest.raises(UpdateFailed, match="version 7 is" if damage == "version" else "model.norm.weight"):
            await engine.install(manifest.version, manifest, staging)
        assert (engine.version, await engine.checksums()) == (0, before)
        (answer,) = await engine.generate(Request(PROMPT, deadline_s=60))
        assert distance(answer, model_of("attention", 0), PROMPT) < EXACT


@pytest.mark.parametrize("stale", [False, True], ids=["recomputed", "kept"])
async def test_the_kv_cache_of_running_answers_is_recomputed_unless_it_may_be_stale(
    stale: bool, tmp_path: Path
) -> None:
    async with started(tmp_path, max_tokens=500, weights={"keep_stale_kv": stale}) as engine:
        asking = asyncio.ensure_future(engine.generate(Request(PROMPT, samples=2, deadline_s=60)))
        await asyncio.sleep(0)  # it goes first
        await engine.generate(Request(PROMPT, deadline_s=60, max_tokens=10))
        await engine.install(1, *staged(model_of("attention", 1), 1))
        for answer in await asking:
            before, after = answer.spans
            assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 500)
            assert 10 <= before.end == after.start
            assert distance(answer, model_of("attention", 0), PROMPT, 0, before.end) < EXACT
            # Only the first tokens behind the boundary are sure to look at what lies before it.
            off = distance(answer, model_of("attention", 1), PROMPT, after.start, after.start + 10)
            assert off > 100 * EXACT if stale else off < EXACT


async def test_when_the_engine_dies_whoever_waits_hears_of_it_and_of_what_was_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path, max_tokens=500) as engine:
        finished = await engine.generate(Request(PROMPT, deadline_s=60, max_tokens=10))
        assert finished[0].finish_reason == "length"
        compute, calls = Policy.next_logits, iter(range(30))

        def failing(policy: Policy, ids_BN: Tensor, mask_BT: Tensor, cache: Any) -> Tensor:
            if next(calls, None) is None:
                raise RuntimeError("no memory is left")
            return compute(policy, ids_BN, mask_BT, cache)

        monkeypatch.setattr(Policy, "next_logits", failing)
        with pytest.raises(EngineError, match="no memory is left") as death:
            await engine.generate(Request(PROMPT, samples=3, deadline_s=60))
        assert death.value.unfinished is not None
        assert [(len(each.token_ids), each.finish_reason) for each in death.value.unfinished] == [(30, "abort")] * 3
        assert distance(death.value.unfinished[2], model_of("attention", 0), PROMPT) < EXACT
        with pytest.raises(EngineError, match="no memory is left"):
            await engine.score(PROMPT)


async def test_whoever_waits_for_an_engine_that_is_closed_hears_of_it(tmp_path: Path) -> None:
    async with started(tmp_path, max_tokens=500) as engine:
        asking = asyncio.ensure_future(engine.generate(Request(PROMPT, deadline_s=60)))
        await engine.generate(Request(PROMPT, deadline_s=60, max_tokens=4))
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asking


async def test_pressure_is_the_share_of_the_tokens_that_the_engine_can_hold(tmp_path: Path) -> None:
    async with started(tmp_path, max_tokens=500) as engine:
        assert (await engine.pressure()).kv_cache_usage == 0
        asking = asyncio.ensure_future(engine.generate(Request(PROMPT, samples=8, deadline_s=60)))
        usage = 0.0
        async with asyncio.timeout(30):
            while not usage:
                usage = (await engine.pressure()).kv_cache_usage
        assert len(PROMPT) / CONTEXT < usage <= 1
        asking.cancel()
        async with asyncio.timeout(30):
            while (await engine.pressure()).kv_cache_usage:
                pass
