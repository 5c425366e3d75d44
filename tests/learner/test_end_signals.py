"""A learner's signals: while it trains the first one is only noted."""

import os
import signal
from collections.abc import Iterator

import pytest

from slipstream.configs.runtime.signals import GracefulStop

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def signals() -> Iterator[GracefulStop]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    signals = GracefulStop()
    signals.install()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_while_it_trains_the_first_is_noted_and_the_second_ends_the_process(
    number: signal.Signals, signals: GracefulStop, capfd: pytest.CaptureFixture[str]
) -> None:
    with signals.deferred():
        assert signals.number == 0
        os.kill(os.getpid(), number)
        assert signals.number == number
        assert "this step" in capfd.readouterr().err
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number


@pytest.mark.parametrize("trains_first", [False, True])
def test_before_and_after_it_trains_the_first_ends_the_process(trains_first: bool, signals: GracefulStop) -> None:
    if trains_first:
        with signals.deferred():
            pass
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_what_is_ignored_as_under_nohup_stays_ignored(signals: GracefulStop) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.number == 0
