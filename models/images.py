"""Encoded images of tasks: read from what an env gives, bounded, and decoded to pixels.

Env, rollout server and learner decode by the same function, so that engine and learner get the same pixels. Pillow is
imported where it is used: most processes see no image.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from slipstream.configs.runtime.errors import SlipstreamError

MOST_IMAGES: Final = 64
"""Most images of one prompt."""
MOST_IMAGE_BYTES: Final = 20 << 20
"""Most bytes of one encoded image."""
MOST_PROMPT_BYTES: Final = 64 << 20
"""Of the encoded images of one prompt: they travel with each group, whose frames are bounded."""
MOST_PIXELS: Final = 1 << 26
"""Of one image, checked before it is decoded: a small file may hold a huge one."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_DATA_URL: Final = "data:image/"

ImageReason = Literal["image_unreadable", "image_too_large"]


class ImageError(SlipstreamError):
    """An image that can't be used; it costs its task.

    Attributes:
        reason: the reason code under which the task's group is counted.
    """

    def __init__(self, reason: ImageReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: ImageReason = reason
        self.detail = detail


def read_image(source: Any) -> bytes:
    """The encoded bytes of an image.

    Args:
        source: bytes; a path or a `data:` URL; `{"bytes": …}`, `{"path": …}` or `{"url": …}`, as data sets and chat
            messages have them; or a picture of Pillow, which is encoded as PNG.

    Raises: ImageError when it can't be read, or is too large.
    """
    match source:
        case bytes() | bytearray() | memoryview():
            encoded = bytes(source)
        case Mapping():
            inner = next((source[key] for key in ("bytes", "path", "url") if source.get(key) is not None), None)
            if inner is None or isinstance(inner, Mapping):
                raise ImageError("image_unreadable", f"a mapping with the keys {sorted(map(str, source))}")
            return read_image(inner)
        case str() | Path():
            encoded = _read_text(str(source))
        case _ if callable(getattr(source, "save", None)):
            stream = io.BytesIO()
            source.save(stream, format="PNG")
            encoded = stream.getvalue()
        case _:
            raise ImageError("image_unreadable", f"{type(source).__name__} is no image: give bytes or a path")
    if len(encoded) > MOST_IMAGE_BYTES:
        raise ImageError("image_too_large", f"{len(encoded)} bytes, the most are {MOST_IMAGE_BYTES}")
    return encoded


def _read_text(source: str) -> bytes:
    """The bytes that a path or a `data:` URL names."""
    if source.startswith(_DATA_URL):
        head, _, data = source.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError(f"{head} is not base64")
            return base64.b64decode(data, validate=True)
        except (ValueError, binascii.Error) as error:
            raise ImageError("image_unreadable", f"a data URL: {error}") from None
    if source.startswith(("http://", "https://")):
        raise ImageError("image_unreadable", f"{source[:200]} is on the network: download images beforehand")
    path = Path(source.removeprefix("file://"))
    try:
        size = path.stat().st_size
        if size > MOST_IMAGE_BYTES:
            raise ImageError("image_too_large", f"{path} has {size} bytes, the most are {MOST_IMAGE_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise ImageError("image_unreadable", f"{source[:200]}: {error}") from None


def decode_image(encoded: bytes) -> Any:
    """The picture in RGB, of Pillow. Raises: ImageError when it is no PNG, JPEG or WebP, or is too large."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ImageError("image_too_large", f"{width} x {height} pixels, the most are {MOST_PIXELS}")
            return image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # decoders raise many kinds for damaged bytes
        raise ImageError("image_unreadable", f"{type(error).__name__}: {error}") from error
