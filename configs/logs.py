"""Logging: constant messages with fields aside, as JSON lines in a file and readable text on stderr."""

import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog

Log = structlog.stdlib.BoundLogger


def configure_logging(process: str, *, level: str, folder: Path | None, **says: str) -> None:
    """Sends this process's logs to stderr, and to `<folder>/<process>.jsonl` when a folder is given.

    There, every line has the fields `says` too: who writes it, where several may write to one file.
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
            logging.FileHandler(folder / f"{process}.jsonl", encoding="utf-8"),
            lambda _, __, line: {**says, **line},
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


def get_log(room: str) -> Log:
    """The logger of one room, e.g. `buffer.service`."""
    log: Log = structlog.stdlib.get_logger(f"slipstream.{room}")
    return log


class NowAndThen:
    """Lets something be said at most every `every_s`: what happens a lot must not fill the log."""

    def __init__(self, every_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._said_at = -math.inf

    def due(self) -> bool:
        """Whether it is time to say it (again); then it counts as said."""
        now = self._clock()
        if now - self._said_at < self._every_s:
            return False
        self._said_at = now
        return True
