"""An env of two turns, found by `tests.pipeline.two_turns:TwoTurns`."""

from slipstream.env.base import Action, Split, Task, Turn

HINT = "3r"


class TwoTurns:
    """Two attempts at a digit with a hint between; each turn earns 1 for the right first character."""

    def size(self, split: Split) -> int:
        return 10

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt=f"{index}{'r' if split == 'train' else 's'}", reference=str(index))

    def fingerprint(self) -> str:
        return "two turns"

    def session(self, task: Task) -> "Session":
        return Session(task)


class Session:
    """The dialogue about one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.turns = 0

    async def reset(self) -> str:
        return str(self.task.prompt)

    async def step(self, action: Action) -> Turn:
        self.turns += 1
        reward = float(action.text[:1] == self.task.reference)
        return Turn(HINT, reward, done=self.turns == 2, metrics={"turns": 1})

    async def close(self) -> None:
        assert self.turns
