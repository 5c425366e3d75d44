"""What happens a lot is said now and then."""

from slipstream.configs.logs import NowAndThen


def test_what_was_said_is_due_again_when_its_time_has_passed() -> None:
    times = iter((0.0, 4.9, 5.0, 9.0, 20.0, 20.1))
    news = NowAndThen(5.0, clock=lambda: next(times))
    assert [news.due() for _ in range(6)] == [True, False, True, False, True, False]
