"""Logging: constant messages with fields aside, as JSON lines in a file and readable text on stderr."""

import contextlib
import logging
import logging.handlers
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import structlog

Log = structlog.stdlib.BoundLogger

WAIT_LOG_AFTER_S = 10.0
WAIT_LOG_EVERY_S = 60.0


def configure_logging(process: str, *, level: str, folder: Path | None, **fields: str) -> None:
    """Sends this process's logs to stderr, and to `<folder>/<process>.jsonl` when a folder is given.

    Args:
        fields: added to each line of the file, such as the writer's name where several processes share it.

    Raises: OSError when the file can't be opened.
    """
    stamps: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(),
    ]

    def add(handler: logging.Handler, *last: structlog.typing.Processor) -> None:
        processors = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=stamps, processors=processors))
        root.addHandler(handler)

    root = logging.getLogger()
    root.handlers = []
    add(
        logging.StreamHandler(sys.stderr),
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28),
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        add(
            LogFile(folder / f"{process}.jsonl"),
            lambda _, __, line: {**fields, **line},
            structlog.processors.JSONRenderer(default=str),
        )
    root.setLevel(logging.WARNING)  # third-party modules
    logging.getLogger("slipstream").setLevel(level.upper())
    structlog.configure(
        processors=[*stamps, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def get_log(name: str) -> Log:
    """The logger of a module, such as `buffer.service`."""
    log: Log = structlog.stdlib.get_logger(f"slipstream.{name}")
    return log


def log_crashes() -> None:
    """Logs unexpected exceptions that end this process or one of its threads: stderr may be closed."""

    def log_crash(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
        if kind is not KeyboardInterrupt:
            get_log("crash").critical("ended by an unexpected error", error=str(error), exc_info=(kind, error, where))

    def log_thread_crash(crash: threading.ExceptHookArgs) -> None:
        if crash.exc_type is not SystemExit:  # by which a thread may end
            log_crash(crash.exc_type, crash.exc_value, crash.exc_traceback)

    sys.excepthook = log_crash
    threading.excepthook = log_thread_crash


class LogInterval:
    """Limits a repeated message to one every `every_s` seconds."""

    def __init__(self, every_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._logged_at = -math.inf

    def due(self) -> bool:
        """True if the message may be logged now; if so, the interval starts again."""
        now = self._clock()
        if now - self._logged_at < self._every_s:
            return False
        self._logged_at = now
        return True


class LogFile(logging.handlers.WatchedFileHandler):
    """A log file that is created again when renamed or deleted; write errors are reported on stderr, at intervals."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError when it can't be opened."""
        super().__init__(path, encoding="utf-8")
        self._interval = LogInterval(WAIT_LOG_EVERY_S)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line; raises no OSError."""
        try:
            super().emit(record)
        except OSError:  # from checking whether the file exists, and from creating it again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Writes one line to stderr instead of a traceback per record."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self._interval.due():
            with contextlib.suppress(OSError):  # stderr may lead to the same disk
                sys.stderr.write(f"can't write {self.baseFilename}: {error.strerror}; lines of this log are missing\n")


class WaitLog:
    """Logs a long wait for another process, and its end."""

    def __init__(self, log: Log, peer: str, *, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`peer` names the process in the log, as in `waiting for the buffer`."""
        self._log = log
        self._peer = peer
        self._address = address
        self._clock = clock
        self._since: float | None = None
        self._interval = LogInterval(WAIT_LOG_EVERY_S, clock=clock)
        self._logged = False

    def waiting(self, *, request: str) -> None:
        """Notes that the peer has not answered; to be called repeatedly. `request`: what it was asked for."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        for_s = now - self._since
        if for_s >= WAIT_LOG_AFTER_S and self._interval.due():
            self._logged = True
            self._log.warning(f"waiting for {self._peer}", address=self._address, request=request, for_s=round(for_s))

    def arrived(self) -> None:
        """Notes that the peer has answered."""
        if self._logged and self._since is not None:
            self._log.info(f"{self._peer} is there", after_s=round(self._clock() - self._since))
        self._since, self._logged = None, False
