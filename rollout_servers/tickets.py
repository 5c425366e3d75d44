"""Which tickets a rollout server has in hand, and which it has had: one that arrives twice is played once."""

from collections import OrderedDict

REMEMBERED = 10_000


class TicketBook:
    """Ids of tickets, from their arrival to the buffer's word on their group, and for a while after it."""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        """The last `remembered` tickets that were settled are known as such."""
        self._remembered = remembered
        self._held: dict[str, None] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """Tickets whose group is being generated or is not acknowledged, in the order of their arrival."""
        return list(self._held)

    def accept(self, ticket_id: str) -> bool:
        """Takes a ticket in hand; False if it has come before."""
        if ticket_id in self._held or ticket_id in self._settled:
            return False
        self._held[ticket_id] = None
        return True

    def settle(self, ticket_id: str) -> None:
        """The buffer has the ticket's group, or the word that it came to nothing."""
        del self._held[ticket_id]
        self._settled[ticket_id] = None
        if len(self._settled) > self._remembered:
            self._settled.popitem(last=False)
