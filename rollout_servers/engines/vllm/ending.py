"""A process of vLLM's own ends soon after it is told to."""

import gc
import signal
import threading
from types import FrameType


def end_without_collecting() -> None:
    """From SIGTERM on this process collects no garbage, if vLLM has it to itself.

    vLLM collects as it ends, twice, and so does Python, through all that was loaded: that took 2 to 4 s, and after 5 s
    vLLM kills its core.
    """
    of_vllm = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(of_vllm):
        return  # a rollout server, which has vLLM in a thread

    def end(number: int, frame: FrameType | None) -> None:
        gc.callbacks.append(lambda phase, info: gc.freeze())
        of_vllm(number, frame)

    signal.signal(signal.SIGTERM, end)
