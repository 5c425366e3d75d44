"""State dicts in the format of transformers' files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.core_model_loading import Concatenate, ConversionOps, Interleave, WeightConverter

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models.hf_state_dict import HfStateDict
from tests.contract.families import write_family


def test_parameters_are_cast_and_router_biases_are_not(tmp_path: Path) -> None:
    write_family(tmp_path, "GLM-4.5")
    form = HfStateDict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), dtype=torch.bfloat16)
    as_they_are = [name for name, tensor in form.tensors.items() if tensor.dtype == torch.float32]
    assert as_they_are == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)]
    assert {tensor.dtype for tensor in form.tensors.values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("saved_as", "held", "converted"),
    [("ln.weight", ["ln_1.weight", "ln_2.weight"], Concatenate()), ("c_attn.weight", ["c_attn.weight"], Interleave())],
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
