"""Images of prompts, in the order of their placeholders."""

from typing import Any

import pytest

from slipstream.env.images import separate_images
from slipstream.models.images import MOST_IMAGES, ImageError

A, B = b"image a", b"image b"
PLACE: dict[str, Any] = {"type": "image"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


@pytest.mark.parametrize(
    ("prompt", "images", "parts"),
    [
        ("colour?", [A], [PLACE, text("colour?")]),
        (user("colour?"), [A, B], [PLACE, PLACE, text("colour?")]),
        (user("Is <image> like <image>?"), [A, B], [text("Is "), PLACE, text(" like "), PLACE, text("?")]),
        (user(text("x"), PLACE), [A], [text("x"), PLACE]),
        (user({"type": "image", "image": B}, PLACE), [A], [PLACE, PLACE]),
        (user({"type": "image_url", "image_url": {"bytes": A}}, text("x")), [], [PLACE, text("x")]),
    ],
)
def test_each_image_has_a_place(prompt: Any, images: list[bytes], parts: list[Any]) -> None:
    messages, found = separate_images(prompt, images)
    assert messages == [{"role": "user", "content": parts}]
    assert len(found) == sum(part == PLACE for part in parts)


def test_order_is_that_of_the_places() -> None:
    assert separate_images(user({"type": "image", "image": B}, PLACE), [A])[1] == (B, A)


def test_prompts_without_images_stay_as_they_are() -> None:
    for prompt in ("<image>?", user("<image>?"), user(text("x"))):
        assert separate_images(prompt, ()) == (prompt, ())


@pytest.mark.parametrize(
    ("prompt", "images", "reason"),
    [
        (user(PLACE), [], "image_unreadable"),
        (user("<image>"), [A, B], "image_unreadable"),
        ([{"role": "system", "content": "x"}], [A], "image_unreadable"),
        (user("x"), [3], "image_unreadable"),
        (user("x"), [A] * (MOST_IMAGES + 1), "image_too_large"),
    ],
)
def test_places_and_images_must_match(prompt: Any, images: list[Any], reason: str) -> None:
    with pytest.raises(ImageError) as refused:
        separate_images(prompt, images)
    assert refused.value.reason == reason
