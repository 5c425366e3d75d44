"""Images of token sequences as a vision-language model takes them: patches, grids, and positions in three directions.

# T tokens of a sequence, P patches of D values, I images
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.models.architecture import takes_images
from slipstream.models.image_processor import ImageProcessor

CACHED_IMAGES: Final = 64
"""Processed images that are kept: the answers to one task share theirs."""


class ImageMismatchError(SlipstreamError):
    """A sequence has another number of placeholders than its images have tokens."""


@dataclass(frozen=True)
class SequenceImages:
    """The images of one sequence, and the positions that they give its tokens."""

    pixels_PD: Tensor
    grids_I3: Tensor
    """Patches of each image in time, height and width."""
    positions_3T: NDArray[np.int64]


class ImageReader:
    """Turns encoded images into the inputs of one model."""

    def __init__(self, model: Path) -> None:
        self._processor = ImageProcessor(model)
        self._patches = lru_cache(CACHED_IMAGES)(self._processor.patches)

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""
        return self._processor.placeholder

    @classmethod
    def of(cls, model: Path) -> "ImageReader | None":
        """The reader of a model; None if it takes no images."""
        return cls(model) if takes_images(model) else None

    def read(self, token_ids: NDArray[Any], images: Sequence[bytes]) -> SequenceImages | None:
        """The inputs for a sequence; None if it has no images.

        Raises: ImageError when an image can't be decoded, ImageMismatchError when the tokens don't fit the images.
        """
        processed = [self._patches(encoded) for encoded in images]
        grids = [grid for _, grid in processed]
        processor = self._processor
        positions_3T = rope_positions(token_ids, grids, token=processor.placeholder, merge=processor.merge)
        if not images:
            return None
        return SequenceImages(torch.cat([pixels for pixels, _ in processed]), torch.tensor(grids), positions_3T)


def rope_positions(
    token_ids: NDArray[Any], grids: Sequence[Sequence[int]], *, token: int, merge: int
) -> NDArray[np.int64]:
    """Positions in time, height and width, shape [3, T]; in text all three count on.

    An image's tokens have the position before it plus their place in its grid; the text after it continues behind the
    largest.

    Args:
        grids: patches of each image in time, height and width.
        token: the placeholder of images.
        merge: patches of a side that become one token.

    Raises: ImageMismatchError when the placeholders don't fit the images.
    Source: Qwen2-VL, arXiv 2409.12191, section 2.1 (M-RoPE).
    """
    places = np.flatnonzero(token_ids == token)
    sizes = [(t, h // merge, w // merge) for t, h, w in grids]
    wanted = sum(t * h * w for t, h, w in sizes)
    if len(places) != wanted:
        raise ImageMismatchError(
            f"a sequence has {len(places)} placeholders, and its {len(grids)} images have {wanted} tokens: do learner "
            "and rollout server have the same files of the model, and the same version of transformers?"
        )
    positions_3T = np.empty((3, len(token_ids)), dtype=np.int64)
    end, position, used = 0, 0, 0
    for t, h, w in sizes:
        start, count = int(places[used]), t * h * w
        positions_3T[:, end:start] = np.arange(start - end) + position
        position += start - end
        positions_3T[:, start : start + count] = np.indices((t, h, w)).reshape(3, count) + position
        position += max(h, w)
        end, used = start + count, used + count
    positions_3T[:, end:] = np.arange(len(token_ids) - end) + position
    return positions_3T
