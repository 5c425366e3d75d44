"""Pictures with a square of one colour; the answer is the colour's first letter. Task i is drawn, not stored."""

import hashlib
import io
import json
import random
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import Split, Task

COLOURS: Final = {"r": (215, 40, 40), "g": (40, 180, 60), "b": (50, 70, 215), "y": (225, 205, 50)}
_SIZE: Final = 56
"""Pixels of a picture's side: four tokens of Qwen's vision-language models, which merge patches of 28 pixels."""
_NOISE: Final = 24
"""Largest change of a channel of the colours, and of the grey behind them."""


class Colours:
    """Tasks "which colour?" over pictures of a square on grey, with random place, size and shade.

    The first line of the prompt is the same in all tasks: without the picture one of four answers is right by chance.

    Raises: ConfigError for numbers of tasks or of pictures out of range.
    """

    def __init__(self, train_tasks: int = 10_000, eval_tasks: int = 256, images: int = 1, seed: int = 0) -> None:
        """With several `images` in a prompt, the answer has the letters of all in order."""
        if not isinstance(images, int) or not 1 <= images <= 8:
            raise ConfigError(f"env colours: images={images!r} must be a whole number from 1 to 8")
        for name, count, least in (("train_tasks", train_tasks, 1), ("eval_tasks", eval_tasks, 0)):
            if not isinstance(count, int) or not least <= count <= 10**7:
                raise ConfigError(f"env colours: {name}={count!r} must be a whole number from {least} to {10**7}")
        self._sizes: dict[Split, int] = {"train": train_tasks, "eval": eval_tasks}
        self._images = images
        self._seed = seed

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`. Raises: IndexError unless 0 <= index < size(split)."""
        if not 0 <= index < self.size(split):
            raise IndexError(f"env colours: {split} task {index} does not exist; there are {self.size(split)}")
        rng = random.Random(f"{self._seed} {split} {index}")
        letters = [rng.choice(list(COLOURS)) for _ in range(self._images)]
        places: list[dict[str, Any]] = [{"type": "image"}] * self._images
        return Task(
            prompt=[{"role": "user", "content": [*places, {"type": "text", "text": "colour?"}]}],
            reference="".join(letters),
            images=[_picture(letter, rng) for letter in letters],
        )

    def fingerprint(self) -> str:
        """Hash of the options, which alone determine every task."""
        options = [*self._sizes.values(), self._images, self._seed]
        return hashlib.sha256(json.dumps(["colours", 1, *options]).encode()).hexdigest()


def _picture(letter: str, rng: random.Random) -> bytes:
    """A PNG of about 120 bytes."""
    from PIL import Image, ImageDraw

    grey = 128 + rng.randint(-_NOISE, _NOISE)
    image = Image.new("RGB", (_SIZE, _SIZE), (grey, grey, grey))
    red, green, blue = (channel + rng.randint(-_NOISE, _NOISE) for channel in COLOURS[letter])
    side = rng.randint(_SIZE // 2, _SIZE - 8)
    left, top = rng.randint(0, _SIZE - side), rng.randint(0, _SIZE - side)
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=(red, green, blue))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
