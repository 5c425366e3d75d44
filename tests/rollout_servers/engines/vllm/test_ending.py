"""How a process of vLLM's ends."""

import gc
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest

from slipstream.rollout_servers.engines.vllm.worker import end_without_collecting


class Node:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def told() -> Iterator[list[int]]:
    """What the handler of SIGTERM, in the place of vLLM's, was called with."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    callbacks = list(gc.callbacks)
    yield numbers
    signal.signal(signal.SIGTERM, before)
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.collect()


def is_collected() -> bool:
    garbage = weakref.ref(Node())
    gc.collect()
    return garbage() is None


def test_a_process_that_is_told_to_end_does_so_without_collecting_garbage(told: list[int]) -> None:
    end_without_collecting()
    assert is_collected()
    signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM]
    assert not is_collected()


def test_a_server_that_has_vllm_in_a_thread_is_let_alone(told: list[int]) -> None:
    thread = threading.Thread(target=end_without_collecting)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM]
    assert is_collected()
