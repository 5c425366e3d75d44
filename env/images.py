"""Images in the prompts of tasks: taken out of messages, in the order of their placeholders."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slipstream.env.base import Message
from slipstream.models.images import MOST_IMAGES, MOST_PROMPT_BYTES, ImageError, read_image

_KINDS: Final = ("image", "image_url")
"""Types of a message's parts that are images."""
_SOURCES: Final = ("image", "image_url", "url", "path", "bytes", "base64")
MARK: Final = "<image>"
"""Place of an image in a text, as verl's data sets have it."""


def separate_images(
    prompt: str | Sequence[Message], images: Sequence[Any]
) -> tuple[str | Sequence[Message], tuple[bytes, ...]]:
    """The prompt with `{"type": "image"}` for each image, and the images' encoded bytes in the same order.

    Parts that have their image with them keep their place; the others, and the marks `<image>` in texts, take the next
    of `images`. Without any such place the images stand before the text of the first message of the user.

    Raises: ImageError for an image that can't be read, too many of them, or places and images that don't match.
    """
    if isinstance(prompt, str):
        if not images:
            return prompt, ()
        prompt = [{"role": "user", "content": prompt}]
    messages = [_split_marks(message) if images else message for message in prompt]
    if images and not count_places(messages):
        messages = _put_first(messages, len(images))
    rest, found = iter(images), list[bytes]()
    separated = [_separate(message, rest, found) for message in messages]
    left = sum(1 for _ in rest)
    if left:
        raise ImageError("image_unreadable", f"{left} images more than places in the prompt")
    if len(found) > MOST_IMAGES or sum(map(len, found)) > MOST_PROMPT_BYTES:
        raise ImageError(
            "image_too_large",
            f"{len(found)} images of {sum(map(len, found))} bytes; the most are {MOST_IMAGES} of {MOST_PROMPT_BYTES}",
        )
    return separated, tuple(found)


def count_places(prompt: str | Sequence[Message]) -> int:
    """Number of parts that are the place of an image which is elsewhere."""
    return 0 if isinstance(prompt, str) else sum(_is_bare(part) for message in prompt for part in _parts(message))


def has_marks(prompt: str | Sequence[Message]) -> bool:
    """True if a text has the mark of an image."""
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return any(isinstance(text, str) and MARK in text for text in texts)


def has_images(prompt: object) -> bool:
    """True for chat messages of which one has a part that is an image, or the place of one."""
    messages = prompt if isinstance(prompt, list | tuple) else ()
    return any(part.get("type") in _KINDS for each in messages if isinstance(each, Mapping) for part in _parts(each))


def _separate(message: Message, rest: Iterator[Any], found: list[bytes]) -> Message:
    if not _parts(message):
        return message
    parts: list[Mapping[str, Any]] = []
    for part in _parts(message):
        if part.get("type") not in _KINDS:
            parts.append(part)
            continue
        try:
            source = next(rest) if _is_bare(part) else next(part[key] for key in _SOURCES if part.get(key) is not None)
        except StopIteration:
            raise ImageError("image_unreadable", "more places in the prompt than images") from None
        found.append(read_image(source))
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    """Parts of a message's content; none where that is a text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else ()


def _is_bare(part: Mapping[str, Any]) -> bool:
    """True for the place of an image that is elsewhere."""
    return part.get("type") in _KINDS and all(part.get(key) is None for key in _SOURCES)


def _split_marks(message: Message) -> Message:
    """The message with parts in the place of marks."""
    content = message.get("content")
    if not isinstance(content, str) or MARK not in content:
        return message
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * (text != "")
    return {**message, "content": parts}


def _put_first(messages: Sequence[Message], count: int) -> list[Message]:
    """The messages with places for all images before the text of the first message of the user."""
    changed, places = list(messages), [{"type": "image"}] * count
    for index, message in enumerate(changed):
        if message.get("role") == "user":
            content = message.get("content", "")
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            changed[index] = {**message, "content": [*places, *texts]}
            return changed
    raise ImageError("image_unreadable", f"{count} images, but no message of the user")
