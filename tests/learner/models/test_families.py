"""The families of models: packed training, publication and export of each, compared with transformers."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slipstream.learner.data.packing import TokenSequence, all_actions, empty_micro_batch, pack
from slipstream.learner.data.prefix_tree import PrefixSharing
from slipstream.learner.export import export_model
from slipstream.learner.models import attention_tree
from slipstream.learner.models.fused_layers import rotary
from slipstream.learner.models.hf_state_dict import HfStateDict
from slipstream.learner.models.load import load_model
from slipstream.learner.models.prefix_sharing import common_sharing
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from tests.contract.families import FAMILIES, write_family
from tests.learner.recorded import options_of, run_config

LENGTHS = (30, 13, 13, 12, 5, 2)
"""Tokens of the packed sequences, the longest first; some of nearly one length."""

SHARE_NOTHING = {
    "Qwen3NextConfig", "Qwen3_5TextConfig", "Lfm2Config", "GraniteMoeHybridConfig", "FalconH1Config", "NemotronHConfig",
}  # fmt: skip
"""Kinds of models with layers that have a state."""


@dataclass(frozen=True)
class Loaded:
    """A family's model twice: as the learner trains it, and as transformers runs it."""

    folder: Path
    learner: Any
    plain: Any


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("family")
    write_family(folder, request.param)
    learner = load_model(folder, options_of(run_config(folder, folder)), world)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    yield Loaded(folder, learner, plain.eval())


def sequences() -> list[TokenSequence]:
    rng = np.random.default_rng(3)
    return [all_actions(rng.integers(64, size=length)) for length in LENGTHS]


def logprobs_alone(model: Any, temperature: float) -> Tensor:
    """log π of all tokens but the first, by transformers, one forward pass a sequence."""
    scores = []
    for sequence in sequences():
        ids = torch.from_numpy(sequence.token_ids)[None]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0] / temperature
        scores.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(scores)


def restore_rotary(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Undoes what the learner does to all models of a class; returns the functions that were in their place."""
    replaced = []
    for name in {type(part).__module__ for part in model.modules()}:
        if (found := getattr(sys.modules[name], "apply_rotary_pos_emb", None)) is not None:
            spec = find_spec(name)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(again := module_from_spec(spec))
            monkeypatch.setattr(sys.modules[name], "apply_rotary_pos_emb", again.apply_rotary_pos_emb)
            replaced.append(found)
    return replaced


def test_packed_log_probs_and_gradients_equal_unpacked_ones(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = pack(sequences(), token_budget=sum(LENGTHS))
    packed = score_actions(loaded.learner, batch, temperature=0.7).logprobs_A
    weights = torch.linspace(-1, 1, len(packed))
    (packed * weights).mean().backward()
    is_fused = set(restore_rotary(loaded.plain, monkeypatch)) == {rotary}
    assert is_fused == (type(loaded.plain).__name__ != "GptOssForCausalLM"), "whose angles are given once"
    alone = logprobs_alone(loaded.plain, 0.7)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)
    (alone * weights).mean().backward()
    references = dict(loaded.plain.named_parameters())
    for name, parameter in loaded.learner.named_parameters():
        reference = references[name].grad
        assert parameter.grad is not None and reference is not None, name
        assert reference.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad, reference, atol=1e-5 + 1e-5 * reference.abs().max(), rtol=1e-4, msg=name
        )


def branching(vocabulary: int) -> list[TokenSequence]:
    """Two groups of sequences that branch off from each other on up to three levels, and a single sequence."""
    rng = np.random.default_rng(4)
    trunks = [rng.integers(vocabulary, size=30) for _ in range(3)]

    def branch(trunk: Any, at: int, tokens: int) -> Any:
        own = rng.integers(vocabulary, size=tokens)
        own[:1] = (trunk[at] + 1) % vocabulary
        return np.concatenate([trunk[:at], own])

    inner = branch(trunks[0], 12, 14)
    rows = [trunks[0], inner, branch(inner, 20, 5), branch(inner, 20, 5), branch(trunks[0], 12, 9), inner[:16]]
    rows += [trunks[1], branch(trunks[1], 20, 3), trunks[2]]
    return [TokenSequence(row, np.arange(len(row)) >= 2 + number) for number, row in enumerate(rows)]


def test_shared_prefixes_equal_sequences_alone(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(loaded.plain.config.get_text_config())
    sharing = common_sharing([loaded.learner])
    assert (sharing is None) == (kind.__name__ in SHARE_NOTHING)
    if sharing is None:
        return
    rows = branching(64)
    (alone,), (shared,) = (pack(rows, token_budget=300, sharing=each) for each in (None, PrefixSharing(1)))
    assert shared.input_ids_1N.shape[1] < 0.6 * alone.input_ids_1N.shape[1] == 0.6 * shared.sequence_tokens
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for batch, short in ((alone, 0), (shared, 0), (shared, 128)):  # attention by node, and to whole trees
        monkeypatch.setattr(attention_tree, "SHORT", short)
        attention_tree.tree_forms.cache_clear()
        loaded.learner.zero_grad()
        scores = score_actions(loaded.learner, batch, temperature=0.7, entropy="gradient")
        assert scores.entropy_A is not None
        scores_2BT = torch.zeros(2, len(rows), 40)
        for number, values_A in enumerate((scores.logprobs_A, scores.entropy_A)):
            batch.put(scores_2BT[number], values_A)
        torch.autograd.backward((scores_2BT * torch.linspace(-1, 1, scores_2BT.numel()).view_as(scores_2BT)).mean())
        gradients = {name: parameter.grad.clone() for name, parameter in loaded.learner.named_parameters()}
        found.append((scores_2BT.detach(), gradients))
    (scores_alone, gradients_alone), *of_shared = found
    for scores_shared, gradients_shared in of_shared:
        torch.testing.assert_close(scores_shared, scores_alone, atol=1e-5, rtol=1e-5)
        for name, expected in gradients_alone.items():
            atol = 1e-7 + 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(gradients_shared[name], expected, atol=atol, rtol=1e-5, msg=name)
    loaded.learner.zero_grad()


def test_pass_without_sequences_has_gradients(loaded: Loaded) -> None:
    scores = score_actions(loaded.learner, empty_micro_batch(), temperature=0.7)
    assert scores.logprobs_A.shape == (0,)
    torch.autograd.backward(scores.logprobs_A.sum())


def test_published_tensors_are_those_that_transformers_saves(loaded: Loaded, tmp_path: Path) -> None:
    form = HfStateDict(loaded.learner, dtype=torch.float32)
    loaded.plain.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    found = dict(form.gather())
    assert found.keys() == form.tensors.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(found[name], tensor), name


def test_exported_model_has_equal_logits(loaded: Loaded, world: World, tmp_path: Path) -> None:
    ids = torch.from_numpy(sequences()[0].token_ids)[None]
    export_model(loaded.folder, tmp_path / "exported", loaded.learner, world, dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert type(exported) is type(loaded.plain)
    with torch.no_grad():
        assert torch.equal(exported(ids, use_cache=False).logits, loaded.plain(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["Gemma 2", "DeepSeek-V3", "Qwen3.5", "LFM2"])
def test_recomputation_in_bfloat16_is_near_float32(family: str, world: World, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    (batch,) = pack(sequences(), token_budget=sum(LENGTHS))
    found: list[dict[str, Tensor]] = []
    for dtype, checkpointing in ((torch.float32, "none"), (torch.bfloat16, "full")):
        config = run_config(tmp_path, tmp_path, activation_checkpointing=checkpointing)
        model = load_model(tmp_path, replace(options_of(config), dtype=dtype), world)
        logprobs = score_actions(model, batch, temperature=1.0).logprobs_A
        logprobs.mean().backward()
        gradients = {
            name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        found.append({"logprobs": logprobs.detach(), **gradients})
    exact, rounded = found
    assert exact.keys() == rounded.keys()
    distance = {name: (rounded[name] - exact[name]).norm() / exact[name].norm() for name in exact}
    assert 0 < distance.pop("logprobs") < 0.1
    assert sorted(distance.values())[len(distance) // 2] < 0.2
