"""What a rollout server remembers of tickets."""

from slipstream.rollout_servers.tickets import TicketBook


def test_a_ticket_is_accepted_once_and_held_until_it_is_settled() -> None:
    book = TicketBook()
    assert [book.accept(name, "first") for name in "aba"] == [True, True, False]
    assert book.held == ["a", "b"]
    book.settle("a")
    assert book.held == ["b"]
    assert not book.accept("a", "first")
    assert book.held == ["b"]


def test_an_id_that_redis_has_lost_and_given_again_is_another_ticket() -> None:
    book = TicketBook()
    book.accept("a", "first")
    assert not book.accept("a", "second"), "the group that is under way serves for both"
    book.settle("a")
    assert book.accept("a", "second")
    book.settle("a")
    assert [book.accept("a", grant) for grant in ("first", "second", "third")] == [False, False, True]


def test_only_the_tickets_that_were_settled_last_are_remembered() -> None:
    book = TicketBook(remembered=2)
    for name in "abc":
        book.accept(name, "first")
        book.settle(name)
    assert [book.accept(name, "first") for name in "cba"] == [False, False, True]


def test_tickets_in_hand_are_never_forgotten() -> None:
    book = TicketBook(remembered=1)
    book.accept("held", "first")
    for name in "abc":
        book.accept(name, "first")
        book.settle(name)
    assert not book.accept("held", "first")
    assert book.held == ["held"]
