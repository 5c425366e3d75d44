"""A learner's signals: while it trains the first one is only noted."""

import os
import signal
from collections.abc import Iterator

import pytest

from slipstream.configs.runtime.signals import EndSignals

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def signals() -> Iterator[EndSignals]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    signals = EndSignals()
    signals.listen()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_while_it_trains_the_first_is_noted_and_the_second_ends_the_process(
    number: signal.Signals, signals: EndSignals, capfd: pytest.CaptureFixture[str]
) -> None:
    with signals.noted():
        assert signals.told == 0
        os.kill(os.getpid(), number)
        assert signals.told == number
        assert capfd.readouterr().err.startswith("told to end: after this step")
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number


@pytest.mark.parametrize("trains_first", [False, True])
def test_before_and_after_it_trains_the_first_ends_the_process(trains_first: bool, signals: EndSignals) -> None:
    if trains_first:
        with signals.noted():
            pass
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_what_is_ignored_as_under_nohup_stays_ignored(signals: EndSignals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.told == 0
