"""The engine `hf`; tests/contract/test_engine.py has what all engines share."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.configs.schema.weights import WeightsConfig
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
from slipstream.rollout_servers.engines.hf.graphs import StepGraphs
from slipstream.rollout_servers.engines.hf.model import Batch, HfModel, check_padding
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


def settings(folder: Path, max_tokens: int = 40, dtype: str = "float32", **sections: dict[str, Any]) -> EngineSettings:
    engine = {"name": "hf", "max_model_len": CONTEXT, "max_sequences": 8, **sections.pop("engine", {})}
    sampling = {"max_tokens": max_tokens, "temperature": 0.7, "ignore_eos": True}
    config = RunConfig.model_validate(
        {"model": {"path": folder, "dtype": dtype}, "rollout": {"engine": engine, "sampling": sampling}, **sections}
    )
    return EngineSettings(config, folder, eos_token_ids=())


@asynccontextmanager
async def started(folder: Path, model: Any = None, **changes: Any) -> AsyncIterator[HfEngine]:
    """The engine with version 0, `model_of("attention", 0)` unless another model is given."""
    (model or model_of("attention", 0)).save_pretrained(folder)
    engine = await HfEngine.start(settings(folder, **changes))
    try:
        yield engine
    finally:
        await engine.close()


def ask(engine: HfEngine, samples: int = 1, max_tokens: int | None = None) -> "asyncio.Future[list[Completion]]":
    return asyncio.ensure_future(engine.generate(Request(PROMPT, 60.0, samples=samples, max_tokens=max_tokens)))


def staged(weights: dict[str, Tensor], version: int = 1) -> tuple[Manifest, Staging]:
    """A version as a rollout server stages it."""
    manifest = Manifest(
        version=version,
        tensors=[
            TensorInfo(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in weights.items()
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


def in_flight(prompt: list[int], samples: int, max_tokens: int) -> InFlight:
    generation = Generation(max_tokens=max_tokens, temperature=0.7, ignore_eos=True, stop_token_ids=())
    return InFlight(Request(prompt, 60.0, samples=samples), generation, max_tokens=max_tokens)


def stepper_of(policy: HfModel, top_k: int | None = None, top_p: float = 1, **sizes: Any) -> Stepper:
    limits = EngineConfig(**{"max_model_len": CONTEXT, "max_sequences": 8, **sizes})
    batch = Batch(policy, limits)
    return Stepper(policy, batch, max_sequences=limits.max_sequences, seed=0, top_k=top_k, top_p=top_p)


async def test_samples_of_a_prompt_share_its_cache(tmp_path: Path) -> None:
    async with started(tmp_path / "model") as engine:
        answers = await ask(engine, samples=3, max_tokens=2)
        (alone,) = await ask(engine, max_tokens=2)
    assert [answer.cached_tokens for answer in [*answers, alone]] == [0, len(PROMPT), len(PROMPT), 0]


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (12, 0.8), (VOCABULARY + 9, 0.5)])
@torch.inference_mode()
def test_answers_are_drawn_from_top_k_and_top_p(top_k: int, top_p: float, tmp_path: Path) -> None:
    model = model_of("attention", 0)
    model.save_pretrained(tmp_path)
    stepper = stepper_of(HfModel(settings(tmp_path)), top_k, top_p)
    sampled, greedy = in_flight(PROMPT, 6, 20), in_flight(PROMPT, 1, 20)
    greedy.temperature = None
    for request in (sampled, greedy):
        stepper.add(request)
    while not stepper.idle:
        stepper.step()
    (first,) = greedy.completions()
    assert first.kept is None
    assert distance(first, model, PROMPT) > EXACT  # of temperature 1
    drawn = set()
    for answer in sampled.completions():
        ids = torch.tensor([[*PROMPT, *answer.token_ids]])
        logits_TV = model(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1] / 0.7
        assert answer.kept is not None
        for logits_V, token, logprob, kept in zip(
            logits_TV, answer.token_ids, answer.logprobs, answer.kept, strict=True
        ):
            ordered, order = logits_V.sort(descending=True)
            of_top_k = ordered[:top_k].softmax(0)
            count = int((of_top_k.cumsum(0) < top_p - 1e-6).sum()) + 1 if top_p < 1 else min(top_k, VOCABULARY)
            assert sorted(kept) == sorted(order[:count].tolist())
            among = ordered[:count].log_softmax(0)[order[:count] == token]
            assert logprob == pytest.approx(among.item(), abs=1e-4)
            drawn.add(int((order == token).nonzero()))
    assert len(drawn) > 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # transformers recommends kernels for a GPU
@torch.inference_mode()
def test_answers_that_join_and_leave_a_batch_are_exact(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(architecture, 0)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(stepping, "PREFILL_TOKENS", 64)  # several prefills a step
    stepper = stepper_of(HfModel(settings(tmp_path)), max_sequences=12)
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))] for _ in range(10)]
    waiting = [(prompt, in_flight(prompt, draw.randint(1, 3), draw.randint(1, 20))) for prompt in prompts]
    requests, steps = list(waiting), 0
    while waiting or not stepper.idle:
        if waiting and steps % 3 == 0:
            stepper.add(waiting.pop()[1])
        if steps == 14:
            stepper._recompute()
        stepper.step()
        steps += 1
    for prompt, request in requests:
        for answer in request.completions():
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", request.max_tokens)
            assert distance(answer, model, prompt) < EXACT


def finish(stepper: Stepper, lengths: Sequence[int]) -> list[Completion]:
    """One answer of each length to `PROMPT`."""
    requests = [in_flight(PROMPT, 1, length) for length in lengths]
    for request in requests:
        stepper.add(request)
    while not stepper.idle:
        stepper.step()
    answers = [answer for request in requests for answer in request.completions()]
    assert [len(answer.token_ids) for answer in answers] == list(lengths)
    return answers


@pytest.mark.parametrize("architecture", ["attention", "sliding-window", "convolution"])
@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_answers_without_memory_are_preempted_and_exact(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture, 0)
    model.save_pretrained(tmp_path)
    stepper = stepper_of(HfModel(settings(tmp_path)), max_model_len=120)
    slots = stepper._batch.slots
    slots.limit(3 * slots.least_bytes)
    for answer in finish(stepper, [100, 100, 1, 90, 100, 95, 100]):
        assert distance(answer, model, PROMPT) < EXACT
    assert stepper.preemptions > 0
    assert stepper.pressure.kv_cache_usage == 0


@torch.inference_mode()
def test_steps_of_fixed_shape_are_exact(policy: HfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that is recorded on a GPU, called anew here for each replay."""
    forms: list[tuple[int, ...]] = []

    def capture(forward: Callable[[], Tensor], pool: object) -> tuple[Tensor, Callable[[], None]]:
        grid, logits_RV = stepper._batch.slots.grid, forward()
        forms.append((len(logits_RV), grid.columns))

        def replay() -> None:
            grid.cursor = graphs._cursor
            logits_RV.copy_(forward())
            grid.cursor = None

        return logits_RV, replay

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr("slipstream.rollout_servers.engines.hf.graphs.capture", capture)
    stepper = stepper_of(policy)
    graphs = stepper._batch._graphs = StepGraphs(policy, stepper._batch.slots)
    for answer in finish(stepper, [1, 3, 60, 20, 25, 7]):
        assert distance(answer, model_of("attention", 0), PROMPT) < EXACT
    assert {rows for rows, _ in forms} == {1, 2, 4, 8}
    assert len(forms) == len(set(forms))  # a replay for all other steps


@torch.inference_mode()
def test_failed_capture_is_no_failed_step(policy: HfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr("slipstream.rollout_servers.engines.hf.graphs.capture", refuse)
    stepper = stepper_of(policy)
    stepper._batch._graphs = StepGraphs(policy, stepper._batch.slots)
    for answer in finish(stepper, [9, 5]):
        assert distance(answer, model_of("attention", 0), PROMPT) < EXACT


@torch.inference_mode()
def test_cache_without_room_for_one_answer_is_refused(policy: HfModel) -> None:
    with pytest.raises(ConfigError, match=r"1048576 .*max_model_len=100000.*kv_cache_bytes"):
        Batch(policy, EngineConfig(max_model_len=100_000, kv_cache_bytes=1 << 20))


@pytest.fixture
def policy(tmp_path: Path) -> HfModel:
    model_of("attention", 0).save_pretrained(tmp_path)
    with torch.inference_mode():
        return HfModel(settings(tmp_path))


@torch.inference_mode()
def test_samples_of_one_prompt_are_computed_once(policy: HfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    compute = policy.next_logits

    def spy(ids_BN: Tensor, *others: Any) -> Tensor:
        sizes.append(tuple(ids_BN.shape))
        return compute(ids_BN, *others)

    stepper = stepper_of(policy, max_sequences=8)
    monkeypatch.setattr(policy, "next_logits", spy)
    stepper.add(in_flight(PROMPT, 8, 2))
    stepper.step()
    stepper.step()
    assert sizes == [(1, len(PROMPT)), (8, 1)]


@torch.inference_mode()
def test_the_head_gets_hidden_states_without_gaps(policy: HfModel) -> None:
    strides: list[tuple[int, ...]] = []
    head = policy._model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: strides.append(inputs[0].stride()))
    policy.prefill([PROMPT, PROMPT])
    size = head.weight.shape[1]
    assert strides == [(size, size, 1)]


def test_model_that_attends_to_padding_is_refused(policy: HfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(policy, EngineConfig(max_model_len=64))
    check_padding(policy, batch, dtype="float32")
    compute = policy.next_logits
    monkeypatch.setattr(policy, "next_logits", lambda ids, mask, *others: compute(ids, torch.ones_like(mask), *others))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.name=hf"):
        check_padding(policy, batch, dtype="float32")


def test_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=rf"max_model_len={CONTEXT} .* 64"):
        HfModel(settings(tmp_path))


# --- the engine ------------------------------------------------------------------------------------------


async def test_options_reach_transformers(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nonsense"):
        async with started(tmp_path, engine={"options": {"attn_implementation": "nonsense"}}):
            pass


async def test_buffers_stay_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    build: Any = ApertusForCausalLM
    model = build(ApertusConfig(**_ATTENTION, num_hidden_layers=1, hidden_act="xielu"))
    async with started(tmp_path, model, max_tokens=4, dtype="bfloat16") as engine:
        model.model.layers[0].mlp.act_fn.beta.fill_(0.123)  # no number of bfloat16
        parameters = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
        manifest, staging = staged(model.state_dict() | parameters)
        await engine.install(manifest.version, manifest, staging)
        assert (await verify(engine, manifest, WeightsConfig(), dtype="bfloat16")).how == BY_CHECKSUM
        assert len((await ask(engine))[0].token_ids) == 4


async def test_version_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    weights, name = dict(model_of("attention", 1).named_parameters()), "model.norm.weight"
    norm, others = weights[name], {other: tensor for other, tensor in weights.items() if other != name}
    async with started(tmp_path) as engine:
        before = await engine.checksums()
        for damaged in (
            others,
            others | {"model.strange.weight": norm},
            weights | {name: norm.expand(2, -1).contiguous()},
            weights | {name: norm.bfloat16()},
            weights,  # of another version than it is said to be
        ):
            manifest, staging = staged(damaged)
            staging.version = 7 if damaged is weights else 1
            with pytest.raises(UpdateFailed, match="version 7" if damaged is weights else name):
                await engine.install(manifest.version, manifest, staging)
            assert (engine.version, await engine.checksums()) == (0, before)
        assert distance((await ask(engine))[0], model_of("attention", 0), PROMPT) < EXACT


@pytest.mark.parametrize("stale", [False, True], ids=["recomputed", "kept"])
async def test_kv_cache_is_recomputed_unless_it_may_be_stale(stale: bool, tmp_path: Path) -> None:
    async with started(tmp_path, max_tokens=500, weights={"keep_stale_kv": stale}) as engine:
        running = ask(engine, samples=2)
        await asyncio.sleep(0)  # it goes first
        await ask(engine, max_tokens=10)
        await engine.install(1, *staged(dict(model_of("attention", 1).named_parameters())))
        for answer in await running:
            before, after = answer.spans
            assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 500)
            assert 10 <= before.end == after.start
            assert distance(answer, model_of("attention", 0), PROMPT, 0, before.end) < EXACT
            # Only the first tokens after the boundary surely attend to those before it.
            off = distance(answer, model_of("attention", 1), PROMPT, after.start, after.start + 10)
            assert off > 100 * EXACT if stale else off < EXACT


async def test_crash_fails_requests_with_their_answers_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(tmp_path, max_tokens=500) as engine:
        assert (await ask(engine, max_tokens=10))[0].finish_reason == "length"
        compute, calls = HfModel.next_logits, iter(range(30))

        def failing(policy: HfModel, *inputs: Any) -> Tensor:
            if next(calls, None) is None:
                raise RuntimeError("no memory is left")
            return compute(policy, *inputs)

        monkeypatch.setattr(HfModel, "next_logits", failing)
        with pytest.raises(EngineError, match="no memory is left") as crash:
            await ask(engine, samples=3)
        assert crash.value.unfinished is not None
        assert [(len(each.token_ids), each.finish_reason) for each in crash.value.unfinished] == [(30, "abort")] * 3
        assert distance(crash.value.unfinished[2], model_of("attention", 0), PROMPT) < EXACT
        with pytest.raises(EngineError, match="no memory is left"):
            await engine.score(PROMPT)
