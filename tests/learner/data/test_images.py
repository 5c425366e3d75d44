"""Images of sequences, and the positions of their tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from slipstream.env.builtin.colours import Colours
from slipstream.learner.data.images import ImageMismatchError, ImageReader, rope_positions
from slipstream.models.images import ImageError
from tests.vision import IMAGE_TOKEN, write_vision_model

IMAGES = tuple(Colours(images=2).task("train", 0).images)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.parametrize("grids", [[], [(1, 4, 4)], [(1, 2, 8), (1, 6, 2)], [(2, 4, 6)]])
@pytest.mark.parametrize("adjacent", [False, True])
def test_positions_are_those_of_transformers(folder: Path, grids: list[tuple[int, ...]], adjacent: bool) -> None:
    if adjacent and len(grids) > 1:
        pytest.skip("transformers takes adjacent images for one")
    tokens = [] if adjacent else [10, 11]
    for t, h, w in grids:
        tokens += [IMAGE_TOKEN] * (t * h * w // 4) + ([] if adjacent else [12, 13, 14])
    token_ids = torch.tensor([[*tokens, 15, 16]])
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    expected, _ = model.model.get_rope_index(
        token_ids, mm_token_type_ids=(token_ids == IMAGE_TOKEN).int(), image_grid_thw=torch.tensor(grids)
    )
    found = rope_positions(token_ids[0].numpy(), grids, token=IMAGE_TOKEN, merge=2)
    assert found.tolist() == expected[:, 0].tolist()


def test_images_are_read_in_their_order(folder: Path) -> None:
    reader = ImageReader.of(folder)
    assert reader is not None
    token_ids = np.array([10, *[IMAGE_TOKEN] * 4, 11, *[IMAGE_TOKEN] * 4, 12])
    read = reader.read(token_ids, IMAGES)
    other = reader.read(token_ids, IMAGES[::-1])
    assert read is not None and other is not None
    assert read.grids_I3.tolist() == [[1, 4, 4]] * 2
    assert read.pixels_PD.shape == (32, 1176)
    assert torch.equal(read.pixels_PD, torch.cat(other.pixels_PD.split(16)[::-1]))
    assert reader.read(np.array([10, 11]), ()) is None


def test_sequence_that_does_not_fit_its_images_is_refused(folder: Path) -> None:
    reader = ImageReader(folder)
    for token_ids, images in (([10], IMAGES), ([IMAGE_TOKEN] * 4, ()), ([IMAGE_TOKEN] * 5, IMAGES[:1])):
        with pytest.raises(ImageMismatchError):
            reader.read(np.array(token_ids), images)
    with pytest.raises(ImageError):
        reader.read(np.array([IMAGE_TOKEN]), [b"no image"])


def test_model_of_texts_has_no_reader(digits_model: Path) -> None:
    assert ImageReader.of(digits_model) is None
