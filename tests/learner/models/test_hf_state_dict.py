"""State dicts in the format of transformers' files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.core_model_loading import Concatenate, ConversionOps, Interleave, WeightConverter

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models.hf_state_dict import HfStateDict
from tests.contract.experts import MODELS, change, write_experts


@pytest.mark.parametrize("kind", MODELS)
def test_tensors_equal_those_that_transformers_saves(kind: str, tmp_path: Path) -> None:
    write_experts(tmp_path, kind)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    form = HfStateDict(model, dtype=torch.float32)
    for seed in (1, 2):
        change(model, seed=seed)
        model.save_pretrained(tmp_path / "written")
        written = load_file(tmp_path / "written" / "model.safetensors")
        found = dict(form.gather())
        assert found.keys() == form.tensors.keys() == written.keys()
        for name, tensor in written.items():
            assert torch.equal(found[name], tensor), name
            assert found[name].untyped_storage().data_ptr() in {
                held.untyped_storage().data_ptr() for held in model.state_dict().values()
            }, "no copy"


def test_parameters_are_cast_and_router_biases_are_not(tmp_path: Path) -> None:
    write_experts(tmp_path, "glm4_moe")
    form = HfStateDict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), dtype=torch.bfloat16)
    as_they_are = [name for name, tensor in form.tensors.items() if tensor.dtype == torch.float32]
    assert as_they_are == ["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert {tensor.dtype for tensor in form.tensors.values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("saved_as", "held", "converted"),
    [
        ("ln.weight", ["ln_1.weight", "ln_2.weight"], Concatenate()),
        ("c_attn.weight", ["c_attn.weight"], Interleave()),
    ],
    ids=["put-together", "in-another-order"],
)
def test_saved_tensors_must_be_parts_of_those_in_memory(
    saved_as: str, held: list[str], converted: ConversionOps
) -> None:
    build: Any = GPT2LMHeadModel
    model = build(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    model._weight_conversions = [WeightConverter(saved_as, held, [converted.reverse_op])]
    with pytest.raises(ConfigError, match=rf"transformer\.h\.0\S*\.{saved_as}"):
        HfStateDict(model, dtype=torch.float32)
