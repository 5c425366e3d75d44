"""The processes that a bench starts, in a temporary folder; nothing of them stays."""

import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.supervise import Child, Supervisor

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Stopped(SlipstreamError):
    """The user has asked for the end."""


class Processes:
    """Starts them, and says when one has died or the user asks for the end."""

    def __init__(self, folder: Path, supervisor: Supervisor, signals: StopSignals) -> None:
        """What `supervised` gives."""
        self.folder = folder
        self._supervisor = supervisor
        self._signals = signals

    @contextlib.contextmanager
    def running(
        self, name: str, module: str, *words: str, environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Child]:
        """A process that runs a module of Python with these words."""
        yield self._supervisor.start(name, [sys.executable, "-m", module, *words], environment)
        self._supervisor.stop(name)

    def pause(self, timeout_s: float) -> None:
        """Waits, or less if something happens. Raises: SlipstreamError as `go_on` does."""
        self._signals.wait(timeout_s)
        self.go_on()

    def go_on(self) -> None:
        """Raises: Stopped when the user has asked for the end, SlipstreamError when a process has died."""
        heed(self._signals)
        for child in self._supervisor.ended():
            raise SlipstreamError("\n".join([f"{child.name} ended with {child.ending}:", *child.last_lines(20)]))


@contextlib.contextmanager
def supervised() -> Iterator[tuple[Path, Supervisor, StopSignals]]:
    """What `Processes` needs; all processes are stopped and the folder is deleted in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder,
        StopSignals() as signals,
        Supervisor(Path(folder), signals) as supervisor,
    ):
        yield Path(folder), supervisor, signals


def heed(signals: StopSignals) -> None:
    """Raises: Stopped when the user has asked for the end."""
    if signals.received:
        raise Stopped(f"{signals.received[0].name} received; everything is stopped")


def free_port() -> int:
    """A port of this host on which nothing listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
