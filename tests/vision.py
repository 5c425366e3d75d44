"""The tiny vision-language model, with weights large enough that its outputs depend on the pictures."""

from pathlib import Path

from safetensors.numpy import load_file, save_file

from slipstream.configs.tiny_models import VISION, build_model

VOCABULARY = len(VISION.tokens)
PLACEHOLDERS = tuple(range(2, 6))
"""Start, end, image and video."""
IMAGE_TOKEN = 4


def write_vision_model(folder: Path) -> Path:
    """Writes the model and returns its folder."""
    build_model(folder, VISION, seed=1)
    path = folder / "model.safetensors"
    tensors = {name: tensor * (6 if tensor.ndim > 1 else 1) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
