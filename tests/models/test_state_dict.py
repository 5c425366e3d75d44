"""Tensors of models as files have them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.models.state_dict import published_buffers, saved_buffers, saved_parts
from slipstream.models.tensors import typed_view
from tests.contract.families import write_family


@pytest.mark.parametrize("family", ["Qwen3-MoE", "GLM-4.5"])
def test_parts_are_views_of_what_a_file_has(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    parts = saved_parts(model, dict(model.named_parameters()) | published_buffers(model))
    held = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert {part.untyped_storage().data_ptr() for part in parts.values()} <= held
    model.save_pretrained(tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert parts.keys() == written.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in written.items())


def test_tables_of_whole_numbers_are_saved_but_not_published() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.arange(3))
    module.register_buffer("bias", torch.zeros(3))
    module.register_buffer("mask", torch.zeros(3), persistent=False)
    assert saved_buffers(module).keys() == {"table", "bias"}
    assert published_buffers(module).keys() == {"bias"}
    assert saved_parts(module, published_buffers(module)) == {"bias": module.bias}


def test_typed_view_shares_the_bytes() -> None:
    data = torch.zeros(12, dtype=torch.uint8)
    typed_view(data, "bfloat16", [2, 3]).fill_(1)
    assert data.view(torch.bfloat16).tolist() == [1.0] * 6
