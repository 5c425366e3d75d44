"""The count of the tokens that an engine samples for a ticket, and of those that are not used."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENGINE_CRASH = "engine_crash"
"""Reason of tokens that were lost with an engine, and generated again."""
UNFINISHED = "unfinished"
"""Reason of tokens of answers and episodes that were not finished in time."""
BASELINE = "baseline"
"""Reason of the greedy answer's tokens, which are never trained on."""

NOT_RESUMED = "not_resumed"
"""Reason of the tokens of an earlier server's steps from which an episode could not go on."""

EXAMINED = "examined"
"""Reason of the tokens of tasks that are tried where the first groups fail."""


class Tally:
    """Tokens sampled for one ticket, or for a part of its work.

    Attributes:
        env: label of the ticket's env; None until it is known.
        unused: tokens that are in no answer, by reason.
    """

    def __init__(self, whole: "Tally | None" = None, *, taken_over: int = 0) -> None:
        """Begins with the tokens of an earlier server, `taken_over`, which parts take later.

        Args:
            whole: of which it is a part.
        """
        self.env: str | None = None
        self._whole = whole
        self.unused: Counter[str] = Counter()
        self._ended = self._untaken = taken_over
        self._parts: set[Tally] = set()
        self._count: Callable[[], int] | None = None
        self._in_flight = 0

    @property
    def sampled(self) -> int:
        """All tokens so far, those of requests in flight as far as their engine reports them."""
        if self._count is not None:
            self._in_flight = max(self._in_flight, self._count())
        return self._ended + self._in_flight + sum(part.sampled for part in self._parts)

    @contextmanager
    def part(self) -> Iterator["Tally"]:
        """The tally of a part of the work, added to this one when that ends."""
        part = Tally(self)
        self._parts.add(part)
        try:
            yield part
        finally:
            self._parts.remove(part)
            self._ended += part.sampled
            self.unused.update(part.unused)

    def take(self, tokens: int) -> None:
        """Makes tokens of an earlier server those of this part."""
        ticket = self
        while ticket._whole is not None:
            ticket = ticket._whole
        ticket._ended -= tokens
        ticket._untaken -= tokens
        self._ended += tokens

    def lose_untaken(self) -> None:
        """Counts the tokens of an earlier server that no part has taken as not used."""
        self.discard(NOT_RESUMED, self._untaken)
        self._untaken = 0

    def name(self, env: str) -> None:
        """Sets the label of the ticket's env, unless it is set."""
        if self.env is None:
            self.env = env
        if self._whole is not None:
            self._whole.name(env)

    def follow(self, count: Callable[[], int]) -> None:
        """Reads the tokens so far of a request in flight from `count`, until `add` or `lose`."""
        self._count = count

    def add(self, tokens: int) -> None:
        """Counts the tokens of a request that has ended."""
        self._count, self._in_flight = None, 0
        self._ended += tokens

    def discard(self, reason: str, tokens: int) -> None:
        """Counts tokens that are not used."""
        if tokens:
            self.unused[reason] += tokens

    def lose(self, reason: str, *, kept: int = 0) -> None:
        """Counts all tokens except `kept` of them as not used; those that were discarded before keep their reason."""
        in_flight = self.sampled - self._ended - sum(part.sampled for part in self._parts)
        self.add(max(in_flight, kept))
        self.discard(reason, self.sampled - self.unused.total() - kept)
