"""The image processor of a vision-language model: patches of an image, and its number of tokens."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoImageProcessor

from slipstream.models.architecture import read_config
from slipstream.models.images import decode_image


class ImageProcessor:
    """The processor in a model's folder.

    Attributes:
        placeholder: the token of an image's tokens in a prompt.
        merge: patches of a side that become one token.
    """

    def __init__(self, model: Path) -> None:
        self._processor: Any = AutoImageProcessor.from_pretrained(model)
        self.placeholder: int = read_config(model)["image_token_id"]
        self.merge = int(self._processor.merge_size)

    def patches(self, encoded: bytes) -> tuple[Tensor, list[int]]:
        """Patches of D values, fp32, shape [P, D], and how many there are in time, height and width.

        Raises: ImageError when the image can't be decoded.
        """
        inputs = self._processor(images=[decode_image(encoded)], return_tensors="pt")
        return inputs["pixel_values"].float(), inputs["image_grid_thw"][0].tolist()

    def tokens(self, width: int, height: int) -> int:
        """Number of tokens of an image of so many pixels. Raises: ValueError for a shape that the model refuses."""
        patches: int = self._processor.get_number_of_image_patches(height, width, {})
        return patches // self.merge**2
