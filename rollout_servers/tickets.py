"""Which tickets a rollout server has in hand, and which it has had: one that arrives twice is played once."""

from collections import OrderedDict

REMEMBERED = 10_000


class TicketBook:
    """Tickets from their arrival to the buffer's word on their group, and for a while after it.

    One whose id was settled is another ticket if it was granted another time: Redis has lost the first one. While that
    is still in hand, its group is taken for the other's.
    """

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        """The last `remembered` tickets that were settled are known as such."""
        self._remembered = remembered
        self._held: dict[str, str] = {}
        self._settled: OrderedDict[tuple[str, str], None] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """Ids of tickets whose group is being generated or is not acknowledged, in the order of their arrival."""
        return list(self._held)

    def accept(self, ticket_id: str, grant: str) -> bool:
        """Takes a ticket in hand; False if it has come before."""
        if ticket_id in self._held or (ticket_id, grant) in self._settled:
            return False
        self._held[ticket_id] = grant
        return True

    def settle(self, ticket_id: str) -> None:
        """The buffer has the ticket's group, or the word that it came to nothing."""
        self._settled[ticket_id, self._held.pop(ticket_id)] = None
        if len(self._settled) > self._remembered:
            self._settled.popitem(last=False)
