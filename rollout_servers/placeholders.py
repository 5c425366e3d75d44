"""Placeholders of images in prompts: one in the tokens of a text, as many as an image takes in those of a prompt."""

from collections.abc import Sequence
from pathlib import Path

from slipstream.models.architecture import takes_images
from slipstream.models.image_processor import ImageProcessor
from slipstream.models.images import decode_image
from slipstream.models.tokenizer import PromptError
from slipstream.rollout_servers.engines.base import PromptImage


class ImagePlaceholders:
    """The placeholders of one model."""

    def __init__(self, model: Path) -> None:
        self._processor = ImageProcessor(model)

    @classmethod
    def of(cls, model: Path) -> "ImagePlaceholders | None":
        """Those of a model; None if it takes no images."""
        return cls(model) if takes_images(model) else None

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """The prompt with all placeholders, and its images.

        Args:
            token_ids: with one placeholder for each image.
            images: encoded.

        Raises: ImageError when an image can't be decoded; PromptError when placeholders and images don't match.
        """
        placeholder = self._processor.placeholder
        places = [place for place, token in enumerate(token_ids) if token == placeholder]
        if len(places) != len(images):
            raise PromptError(f"{len(places)} placeholders of images in the prompt, for {len(images)} images")
        expanded, found, end = list[int](), list[PromptImage](), 0
        for place, encoded in zip(places, images, strict=True):
            pixels = decode_image(encoded)
            expanded += token_ids[end:place]
            tokens = self._tokens(pixels.width, pixels.height)
            found.append(PromptImage(encoded, pixels, start=len(expanded), tokens=tokens))
            expanded += [placeholder] * tokens
            end = place + 1
        return [*expanded, *token_ids[end:]], tuple(found)

    def _tokens(self, width: int, height: int) -> int:
        try:
            return self._processor.tokens(width, height)
        except ValueError as error:  # a shape that the model refuses, such as a line
            raise PromptError(f"an image of {width} x {height} pixels: {error}") from error
