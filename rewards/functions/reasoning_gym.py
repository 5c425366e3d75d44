"""The reward of tasks of the env `reasoning_gym`: the score that the package itself gives."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.rewards.base import Score

DATASETS_IN_MEMORY = 8
ENTRIES_IN_MEMORY = 64
_ANSWER_ERRORS = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""Some datasets raise these where an answer can't be parsed."""


def reasoning_gym(answer: str, reference: str, info: Mapping[str, Any]) -> Score:
    """The package's score of an answer, in [0, 1]: of the text between the last `<answer>` tags, or else of all of it.

    The part `parsed` is 0 where the package raised instead of scoring: the value is 0 then.

    Raises: ValueError for a task of another env, or one that this process generates differently.
    """
    if "reasoning_gym" not in info:
        raise ValueError("the task's info has no reasoning_gym: this reward is for tasks of the env reasoning_gym")
    place = {**info["reasoning_gym"]}
    index, digest = place.pop("index"), place.pop("digest")
    dataset, entry = _entry(json.dumps(place, sort_keys=True), index)
    if hashlib.sha256(entry["question"].encode()).hexdigest()[:16] != digest:
        raise ValueError(f"entry {index} of {place['dataset']} is another one here: are all processes' packages alike?")
    from reasoning_gym.utils import extract_answer

    text = extract_answer(answer)
    try:
        return Score(float(dataset.score_answer(answer.strip() if text is None else text, entry)), {"parsed": 1.0})
    except _ANSWER_ERRORS:
        return Score(0.0, {"parsed": 0.0})


@lru_cache(maxsize=ENTRIES_IN_MEMORY)
def _entry(place: str, index: int) -> tuple[Any, Any]:
    """A dataset and one of its entries; the answers of a group ask for the same one."""
    dataset = _dataset(place)
    return dataset, dataset[index]


@lru_cache(maxsize=DATASETS_IN_MEMORY)
def _dataset(place: str) -> Any:
    """Raises: ConfigError without the package."""
    try:
        from reasoning_gym import create_dataset
    except ModuleNotFoundError:
        raise ConfigError(
            'reward reasoning_gym needs the package reasoning_gym: pip install "slipstream[reasoning-gym]"'
        ) from None
    made = json.loads(place)
    return create_dataset(made["dataset"], **made["config"], seed=made["seed"], size=made["size"])
