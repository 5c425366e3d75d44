"""What takes seconds at a start, such as importing vLLM, and signals that come meanwhile. Quickly imported itself."""

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the import of large libraries.

    Python's garbage collector would walk through what they define again and again, for a fifth of the time that a start
    takes. So it pauses, and leaves alone what is there by then.

    Exits: as `ended_by_signals` does.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        with ended_by_signals():
            yield
    finally:
        gc.enable()
        if len(sys.modules) > known:  # otherwise what is there are the objects of a process at work
            gc.freeze()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Around what an event loop waits for: it hears of no signal, so in the main thread they end the process here.

    Exits: 128 + the signal's number, at SIGINT or SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        told.append(number)
        raise KeyboardInterrupt  # not SystemExit: that is what a plug-in raises which calls sys.exit()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + (told[-1] if told else signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_on_ctrl_c() -> None:
    """From now on Ctrl-C ends this process at once and without a traceback, until something else is made of it.

    To be called before what takes most of a second to import: there is nothing to clean up yet. An exception would not
    do, because libraries in Rust and C make a panic of it, or nothing at all.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
