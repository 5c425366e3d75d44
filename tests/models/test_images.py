"""Encoded images: sources, limits and decoding."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from slipstream.models import images
from slipstream.models.images import ImageError, decode_image, read_image


def encoded(kind: str = "PNG", size: tuple[int, int] = (3, 2), mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, 7).save(stream, format=kind)
    return stream.getvalue()


PNG = encoded()


def test_sources_give_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    nested: list[Any] = [{"bytes": PNG, "path": None}, {"bytes": None, "path": str(path)}, {"url": url}]
    for source in (PNG, bytearray(PNG), path, str(path), f"file://{path}", url, *nested):
        assert read_image(source) == PNG
    assert decode_image(read_image(Image.open(path))).size == (3, 2)


@pytest.mark.parametrize(
    "source",
    [
        *("/none.png", "a\0b.png", "https://example.org/a.png", "data:image/png;base64,?", "data:image/png,aa"),
        *(3, None, {}, {"path": {}}),
    ],
)
def test_unreadable_sources_are_refused(source: object) -> None:
    with pytest.raises(ImageError) as refused:
        read_image(source)
    assert refused.value.reason == "image_unreadable"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_images_are_decoded_to_rgb(kind: str) -> None:
    assert decode_image(encoded(kind)).mode == decode_image(encoded(mode="L")).mode == "RGB"


@pytest.mark.parametrize("damaged", [b"", b"text", PNG[:20], PNG[:-30], encoded("BMP")])
def test_damaged_images_and_other_formats_are_refused(damaged: bytes) -> None:
    with pytest.raises(ImageError) as refused:
        decode_image(damaged)
    assert refused.value.reason == "image_unreadable"


def test_large_images_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    monkeypatch.setattr(images, "MOST_PIXELS", 5)
    monkeypatch.setattr(images, "MOST_IMAGE_BYTES", len(PNG) - 1)
    for call in (lambda: decode_image(PNG), lambda: read_image(PNG), lambda: read_image(tmp_path / "a.png")):
        with pytest.raises(ImageError) as refused:
            call()
        assert refused.value.reason == "image_too_large"
