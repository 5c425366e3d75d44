"""What a user might name as an env; found by `env_plugins:<attribute>`."""

from slipstream.env.base import Split, Task


class Constant:
    def __init__(self, *, word: str) -> None:
        self.word = word

    def size(self, split: Split) -> int:
        return 1 if split == "train" else 0

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt="say it: ", reference=self.word)

    def fingerprint(self) -> str:
        return self.word


def without_tasks() -> object:
    return object()


def with_a_bug() -> Constant:
    return Constant(wrd="x")  # type: ignore[call-arg]


not_callable = 3
