"""Patches and numbers of tokens of images."""

import io

import pytest
import torch
from PIL import Image

from slipstream.models.image_processor import ImageProcessor
from slipstream.models.images import ImageError
from tests.vision import IMAGE_TOKEN, write_vision_model


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    return ImageProcessor(write_vision_model(tmp_path_factory.mktemp("vision") / "model"))


@pytest.mark.parametrize("size", [(56, 56), (112, 28), (301, 97)])
def test_prompt_has_a_token_for_each_merged_patch(processor: ImageProcessor, size: tuple[int, int]) -> None:
    stream = io.BytesIO()
    Image.new("RGB", size, (200, 10, 10)).save(stream, format="PNG")
    patches_PD, (t, h, w) = processor.patches(stream.getvalue())
    assert patches_PD.dtype == torch.float32
    assert len(patches_PD) == t * h * w
    assert processor.tokens(*size) == t * h * w // processor.merge**2
    assert processor.placeholder == IMAGE_TOKEN


def test_unusable_images_are_refused(processor: ImageProcessor) -> None:
    with pytest.raises(ImageError):
        processor.patches(b"no image")
    with pytest.raises(ValueError, match="aspect ratio"):
        processor.tokens(10_000, 1)
