"""Pictures of squares: the same for the same index, and as coloured as the answer says."""

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
