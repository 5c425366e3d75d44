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


def raises_for_99r(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return 1.0 / float(info["prompt"] != "99r")
