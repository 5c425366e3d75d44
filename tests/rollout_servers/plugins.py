"""An env and a reward with faults; found by `tests.rollout_servers.plugins:<attribute>`."""

from collections.abc import Mapping
from typing import Any

from slipstream.env.base import Split, Task

FAULTY_PROMPTS = {"prompt_too_long": "1" * 40, "prompt_untokenizable": "12x", "reward_error": "99r"}


class Faulty:
    """One sound task, and one for each fault."""

    prompts = ("12r", *FAULTY_PROMPTS.values())

    def size(self, split: Split) -> int:
        return len(self.prompts)

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt=self.prompts[index], reference="21", info={"prompt": self.prompts[index]})

    def fingerprint(self) -> str:
        return "faulty"


class Chat:
    """Chat messages alone, for a model without a chat template; of 100 tasks the last ones may be texts."""

    def __init__(self, texts: int = 0) -> None:
        self.texts = texts

    def size(self, split: Split) -> int:
        return 100 if split == "train" else 0

    def task(self, split: Split, index: int) -> Task:
        return Task("12r" if index >= 100 - self.texts else [{"role": "user", "content": "12r"}], "21")

    def fingerprint(self) -> str:
        return "chat"


def raises_for_99r(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return 1.0 / float(info["prompt"] != "99r")
