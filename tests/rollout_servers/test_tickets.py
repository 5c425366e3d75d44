"""What a rollout server remembers of tickets."""

from slipstream.rollout_servers.tickets import TicketBook


def test_a_ticket_is_accepted_once_and_held_until_it_is_settled() -> None:
    book = TicketBook()
    assert [book.accept("a"), book.accept("b"), book.accept("a")] == [True, True, False]
    assert book.held == ["a", "b"]
    book.settle("a")
    assert book.held == ["b"]
    assert not book.accept("a")
    assert book.held == ["b"]


def test_only_the_tickets_that_were_settled_last_are_remembered() -> None:
    book = TicketBook(remembered=2)
    for name in "abc":
        book.accept(name)
        book.settle(name)
    assert [book.accept(name) for name in "cba"] == [False, False, True]


def test_tickets_in_hand_are_never_forgotten() -> None:
    book = TicketBook(remembered=1)
    book.accept("held")
    for name in "abc":
        book.accept(name)
        book.settle(name)
    assert not book.accept("held")
    assert book.held == ["held"]
