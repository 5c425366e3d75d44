"""vLLM's processes end with the rollout server that started them, also while they start: vLLM does not see to that."""

import os
import select
import signal
import threading
from contextlib import suppress
from multiprocessing import parent_process

_SERVER = "SLIPSTREAM_ROLLOUT_SERVER"


def claim_children() -> None:
    """Whatever this process starts from now on, and calls `end_with_server`, ends with it."""
    os.environ[_SERVER] = str(os.getpid())


def end_with_server() -> None:
    """Kills this worker of vLLM, and the engine core that started it, once the server that claimed them has ended.

    By a thread: the kernel's own signal (PR_SET_PDEATHSIG) comes already when the thread ends that started the core.
    """
    server = int(os.environ.get(_SERVER, os.getpid()))
    starter = parent_process()
    if server != os.getpid() and starter is not None:
        threading.Thread(target=_outlive, args=(server, starter.pid), daemon=True).start()


def _outlive(server: int, starter: int) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(server)], [], [])
    # The core, with tensor parallelism; without, this is the core. Whoever inherited an orphan is not to be harmed.
    if starter != server and os.getppid() == starter:
        os.kill(starter, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
