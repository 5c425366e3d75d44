"""The forced lag: a queue that lets groups out only when they are so many steps old."""

from collections import deque
from collections.abc import Callable, Sequence

from slipstream.buffer.wire.messages import Group


class HeldBack:
    """A step's groups go in with each version, and come out `lag` versions later.

    The first `lag` steps train on groups of the initial weights. A lag that shrinks drops the oldest groups, as the
    buffer lets those expire that are beyond its bound; one that grows has more groups generated at once.
    """

    def __init__(self, generate: Callable[[int], Sequence[Group]]) -> None:
        self._generate = generate
        self._waiting: deque[Sequence[Group]] = deque()
        self.newest: Sequence[Group] = ()
        """What was generated last, with the weights that were asked for last."""
        self.dropped = 0
        """Groups that a shrinking lag has cost."""

    def take(self, version: int, *, lag: int) -> Sequence[Group]:
        """The groups to train on at `version`, which the present weights are; to be called for each version in turn."""
        while len(self._waiting) > lag:
            self.dropped += len(self._waiting.popleft())
        while len(self._waiting) <= lag:
            self.newest = self._generate(version)
            self._waiting.append(self.newest)
        return self._waiting.popleft()
