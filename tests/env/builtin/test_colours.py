"""Pictures of squares: the same for the same index, and as coloured as the answer says."""

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.builtin.colours import COLOURS, Colours
from slipstream.models.images import decode_image


def nearest(picture: bytes) -> str:
    """The colour of the picture's middle, which every square covers."""
    pixel = decode_image(picture).getpixel((28, 28))
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], pixel, strict=True)))


def test_answer_is_the_colour_of_the_picture() -> None:
    env = Colours(train_tasks=40, eval_tasks=8, images=2)
    tasks = [env.task("train", index) for index in range(40)]
    assert {letter for task in tasks for letter in task.reference} == set(COLOURS)
    for task in tasks:
        assert "".join(map(nearest, task.images)) == task.reference
    assert len({bytes(task.images[0]) for task in tasks}) == 40


def test_tasks_depend_on_options_alone() -> None:
    one, same, other = Colours(), Colours(), Colours(seed=1)
    assert (one.size("train"), one.size("eval")) == (10_000, 256)
    assert one.task("eval", 3) == same.task("eval", 3)
    assert one.task("eval", 3).images != one.task("train", 3).images != other.task("train", 3).images
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("options", [{"images": 0}, {"images": 9}, {"train_tasks": 0}, {"eval_tasks": -1}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        Colours(**options)


def test_index_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError):
        Colours(train_tasks=2).task("train", 2)
