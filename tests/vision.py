"""Tiny vision-language models, with weights large enough that their outputs depend on the pictures."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from slipstream.env.builtin.colours import Colours
from slipstream.learner.data.images import ImageReader
from slipstream.learner.data.packing import TokenSequence, pack
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from slipstream.models.tiny import VISION, build_model

VOCABULARY = len(VISION.tokens)
PLACEHOLDERS = tuple(range(2, 6))
"""Start, end, image and video."""
IMAGE_TOKEN = 4
FAMILIES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": 6, "pad_token_id": 0, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 6, 6]},
}  # fmt: skip
_TOKENS: Final = {
    "vision_start_token_id": 2, "vision_end_token_id": 3, "image_token_id": IMAGE_TOKEN, "video_token_id": 5
}  # fmt: skip
_VISION: Final[dict[str, dict[str, Any]]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
    "qwen3_vl": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 16,
    },
}  # fmt: skip
_KINDS: Final[dict[str, tuple[Any, Any, str]]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, "Qwen2VLProcessor"),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, "Qwen3VLProcessor"),
}


def write_vision_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Writes the model and returns its folder."""
    build_model(folder, VISION, seed=1)
    if family != "qwen2_5_vl":
        _write_other(folder, family)
    path = folder / "model.safetensors"
    tensors = {name: tensor * (6 if tensor.ndim > 1 else 1) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _write_other(folder: Path, family: str) -> None:
    """Writes a model of another family over the built one, whose tokenizer it keeps."""
    config, kind, processor = _KINDS[family]
    head: dict[str, Any] = {}
    if family == "qwen3_vl":
        rope = {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}
        head = {"head_dim": 32, "rope_parameters": _TEXT["rope_parameters"] | rope}
    torch.manual_seed(0)
    made = kind(config(text_config=_TEXT | head, vision_config=_VISION[family], tie_word_embeddings=True, **_TOKENS))
    made.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    fields = json.loads(file.read_text())
    patch = _VISION[family]["patch_size"]
    sizes = {"patch_size": patch, "min_pixels": (2 * patch) ** 2, "max_pixels": 64 * (2 * patch) ** 2}
    file.write_text(json.dumps(fields | sizes | {"processor_class": processor}))


def vision_sequences(folder: Path) -> list[TokenSequence]:
    """With two images, none, one, and none; of three actions each."""
    reader, made = ImageReader(folder), []
    for number, images in enumerate((2, 0, 1, 0)):
        task = Colours(images=max(1, images)).task("train", number)
        tokens = np.array([10, *[3, *[IMAGE_TOKEN] * 4, 2] * images, *range(11, 15 + number), 30, 31, 32])
        mask = np.arange(len(tokens)) >= len(tokens) - 3
        made.append(TokenSequence(tokens, mask, reader.read(tokens, task.images[:images])))
    return made


def gradient_norms(folder: Path, world: World) -> dict[str, float]:
    """Norm of the gradient of each parameter, encoder included; of two ranks, one has no image. A collective."""
    options = ModelOptions(dtype=torch.float32, attention="segments", train_vision_encoder=True)
    model = load_model(folder, options, world)
    (batch,) = pack(vision_sequences(folder)[world.rank :: world.size], token_budget=1000)
    torch.autograd.backward(score_actions(model, batch, temperature=1.0).logprobs_A.sum() * world.size)
    norms = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        norms[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).norm().item()
    return norms
