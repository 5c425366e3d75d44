"""What takes time to be destroyed ends in threads, which can be waited for."""

import threading

from slipstream.configs.runtime.threads import Teardown

DEADLINE_S = 60.0


class Slow:
    """Its end takes until it is let go."""

    def __init__(self, may_end: threading.Event, ended: list[str]) -> None:
        self._may_end = may_end
        self._ended = ended

    def __del__(self) -> None:
        self._may_end.wait(DEADLINE_S)
        self._ended.append("ended")


def test_an_end_holds_nobody_up_until_it_is_waited_for() -> None:
    endings, may_end, ended = Teardown(), threading.Event(), list[str]()
    for _ in range(3):
        endings.release([Slow(may_end, ended)])
    endings.wait(0.01)
    assert ended == []
    may_end.set()
    endings.wait(DEADLINE_S)
    assert ended == ["ended"] * 3
