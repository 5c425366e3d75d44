"""Mixtures of experts in the learner: replayed experts, routers in fp32, figures of their load.

# N packed input tokens, M layers with experts, E experts of a layer, K of them chosen for a token
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
)

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.packing import MicroBatch, TokenSequence, pack
from slipstream.learner.models.layers import decoder_of
from slipstream.learner.models.load import load_model
from slipstream.learner.models.moe import expert_metrics, layout_of, prepare_experts, routers
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from tests.learner.experts import LAYOUT, build_experts, record_with_experts, write_experts
from tests.learner.recorded import VOCABULARY, build_train_step, options_of, run_config, train

MakeConfig = Callable[..., RunConfig]
LENGTHS = (5, 12, 9)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": build_experts, "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES)),
    "glm4_moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
            v_head_dim=16,
        )
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES)),
}  # fmt: skip


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `build_experts`."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_experts(folder)
    return folder


@pytest.fixture
def moe_config(experts_model: Path, tmp_path: Path) -> MakeConfig:
    """A run on that model with replay; keyword arguments replace settings of `learner`."""
    return lambda **learner: run_config(experts_model, tmp_path, **{"router_replay": True, **learner})


def random_choices(tokens: int, *, seed: int, layers: int = LAYOUT.layers) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Random experts, shape [tokens, layers, K]."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens, layers, LAYOUT.experts)).argsort(-1)[..., : LAYOUT.per_token].astype(np.int16)


def sequences(*, given: bool = True) -> list[TokenSequence]:
    """Sequences, of which only the first tokens are no actions; the router chooses for the first 3 of the second."""
    found = []
    for number, length in enumerate(LENGTHS):
        experts = random_choices(length - 1, seed=number) if given else None
        if given and number == 1:
            experts[:3] = -1  # type: ignore[index]
        ids = np.random.default_rng(number).integers(0, VOCABULARY, length)
        found.append(TokenSequence(ids, np.arange(length) > 0, routed_experts=experts))
    return found


def packed(*, given: bool = True) -> MicroBatch:
    (batch,) = pack(sequences(given=given), token_budget=sum(LENGTHS))
    return batch


def choices_of(model: Any, ids: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Logits of a sequence, and the experts of its tokens, shape [N, M, K]."""
    found: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _m, _i, out: found.append(out[2])) for router in routers(model)]
    logits: Tensor = model(input_ids=ids[None], use_cache=False, **given).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(found, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_given_experts_replace_own_choice(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.set_attn_implementation("eager")
    ids = torch.arange(9) % VOCABULARY
    logits, own_NMK = choices_of(model, ids)
    layers = own_NMK.shape[1]
    layout = layout_of(model)
    assert layout is not None
    assert (layout.layers, layout.per_token, layout.experts) == (layers, 2, 4)
    prepare_experts(model, decoder_of(model).layers, replays=True)
    torch.testing.assert_close(choices_of(model, ids)[0], logits, atol=0, rtol=0)
    torch.testing.assert_close(choices_of(model, ids, routed_experts=own_NMK[None])[0], logits, atol=1e-6, rtol=0)
    wanted = torch.from_numpy(random_choices(9, seed=1, layers=layers)).long()
    wanted[2] = -1
    others, chosen_NMK = choices_of(model, ids, routed_experts=wanted[None])
    known = [0, 1, 3, 4, 5, 6, 7, 8]
    assert torch.equal(chosen_NMK[known], wanted[known])
    assert torch.equal(chosen_NMK[2, 0], own_NMK[2, 0]) or layers > 1  # later layers see other states
    assert (others - logits).abs().max() > 1e-4
    others.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers(model))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("given", [True, False], ids=["replayed", "live"])
def test_packed_experts_equal_single_sequences(world: World, moe_config: MakeConfig, given: bool) -> None:
    config = moe_config()
    assert config.model.path is not None
    model = load_model(config.model.path, options_of(config), world)
    together = score_actions(model, packed(given=given), temperature=1.0).logprobs_A
    longest_first = sorted(sequences(given=given), key=lambda each: -len(each.token_ids))
    alone = [
        score_actions(model, batch, temperature=1.0).logprobs_A
        for each in longest_first
        for batch in pack([each], token_budget=16)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)
    live = score_actions(model, packed(given=False), temperature=1.0).logprobs_A
    assert ((together - live).abs().max() > 0.01) == given


@pytest.mark.parametrize(("dtype", "mode"), [("float32", "full"), ("bfloat16", "full"), ("float32", "selective")])
def test_checkpointed_activations_replay_the_same(world: World, moe_config: MakeConfig, dtype: str, mode: str) -> None:
    gradients = []
    for checkpointing in ("none", mode):
        config = moe_config(activation_checkpointing=checkpointing)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        assert config.model.path is not None
        model = load_model(config.model.path, options_of(config), world)
        scores = score_actions(model, packed(), temperature=1.0).logprobs_A
        # Another batch before the backward pass: its experts must not be taken.
        with torch.no_grad():
            score_actions(model, packed(given=False), temperature=1.0)
        scores.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is not None
        assert other is not None
        torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-5)


def test_routers_compute_in_fp32_under_bfloat16(world: World, moe_config: MakeConfig) -> None:
    config = moe_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    assert config.model.path is not None
    model = load_model(config.model.path, options_of(config), world)
    exact = {name: tensor.clone() for name, tensor in full_weights(model) if name.endswith("gate.weight")}
    seen: list[tuple[Tensor, ...]] = []

    def record(router: Any) -> None:
        forward = router.routing._forward

        def recorded(states: Tensor) -> Any:
            logits, scores, ids = forward(states)
            seen.append((router.weight.detach().clone(), states, logits, scores))
            return logits, scores, ids

        router.routing._forward = recorded

    for router in routers(model):
        record(router)
    score_actions(model, packed(given=False), temperature=1.0)
    for (weight, *others), held in zip(seen, exact.values(), strict=True):
        assert {tensor.dtype for tensor in others} == {torch.float32}
        assert torch.equal(weight, held)


def test_figures_of_the_load(world: World) -> None:
    model = build_experts()
    assert expert_metrics(torch.nn.Linear(2, 2), world) == {}
    prepare_experts(model, decoder_of(model).layers, replays=True)
    ids = torch.arange(8) % VOCABULARY
    with torch.no_grad():
        _, own_NMK = choices_of(model, ids)
    assert expert_metrics(model, world) == {}  # only passes with gradients count
    choices_of(model, ids)
    loads = [torch.bincount(own_NMK[:, layer].flatten(), minlength=4).double() for layer in range(2)]
    expected = {
        "experts/load_max": pytest.approx(sum(float(load.max() / load.mean()) for load in loads) / 2),
        "experts/idle": pytest.approx(sum(float((load == 0).double().mean()) for load in loads) / 2),
    }
    assert expert_metrics(model, world) == expected
    choices_of(model, torch.cat([ids, ids[:3]]), padding_tokens=3)
    assert expert_metrics(model, world) == expected
    choices_of(model, torch.cat([ids, ids[:3]]))
    assert expert_metrics(model, world) != expected
    given = own_NMK.flip(-1).clone()  # in another order: the same experts
    given[:2] = -1
    for layer in range(2):  # the two others
        given[7, layer] = torch.tensor([expert for expert in range(4) if expert not in own_NMK[7, layer]])
    choices_of(model, ids, routed_experts=given[None])
    figures = expert_metrics(model, world)
    assert figures["experts/replayed"] == pytest.approx(6 / 8)
    assert 1 / 12 <= figures["experts/changed"] <= 2 / 12  # the second layer has other states


@pytest.mark.parametrize("replay", [True, False])
def test_training_reports_experts(world: World, moe_config: MakeConfig, tmp_path: Path, replay: bool) -> None:
    config = moe_config(router_replay=replay, kl={"coefficient": 0.1})
    record_with_experts(tmp_path / "groups", 1, config)
    with capture_logs() as logs:
        train_step = build_train_step(config, world)
    (figures,) = train(train_step, tmp_path / "groups", [0])
    assert figures["experts/load_max"] >= 1
    assert 0 <= figures["experts/idle"] < 1
    assert ("experts/replayed" in figures) == replay
    if replay:
        assert 0.4 < figures["experts/replayed"] < 0.7
        assert figures["experts/changed"] > 0.3
    reports = [entry for entry in logs if entry["event"] == "mixture of experts"]
    assert [entry["replay"] for entry in reports] == [replay, False]  # not of the reference
    assert {entry["matrix_products"] for entry in reports} == {"grouped_mm"}


def test_replay_without_experts_is_refused(world: World, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"learner\.router_replay"):
        build_train_step(make_config(router_replay=True), world)
