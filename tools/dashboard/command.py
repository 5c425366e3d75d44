"""`slipstream dashboard`: serves runs, live and finished, as a page on this machine."""

import argparse
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.signals import STOP_SIGNALS, service_exit_code
from slipstream.tools.dashboard.runs import Runs
from slipstream.tools.ledger.open import RUNS, find_folder

PORT: Final = 7788


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream dashboard` until a signal; returns 0 after SIGTERM, 130 after Ctrl-C.

    Raises: ConfigError when there is no such folder, or the port is busy.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream dashboard",
        description="Serve a page over runs, live and finished, at http://127.0.0.1:PORT. It reads the runs' folders "
        "and changes nothing.",
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folders of runs, their names under runs/ or configuration files, or folders that hold runs; default: "
        "runs/",
    )
    parser.add_argument("--port", type=int, metavar="N", help=f"default: {PORT}; 0: a free one")
    arguments = parser.parse_args(argv)
    runs = Runs(places(arguments.runs))
    with listening(PORT if arguments.port is None else arguments.port) as listener:
        return serve(runs, listener)


def places(names: Sequence[str]) -> list[Path]:
    """The named folders; `runs/` without names. Raises: ConfigError for one that is not there."""
    return [find_folder(name).root for name in names] or [RUNS]


def listening(port: int) -> socket.socket:
    """A socket that listens on the loopback. Raises: ConfigError when the port can't be had."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: {error}; another dashboard may serve there, --port 0 takes a free one"
        ) from None
    return listener


def serve(runs: Runs, listener: socket.socket) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a tokenizer comes from the cache, or texts are shown as ids
    from slipstream.tools.dashboard.app import server_of

    host, port = listener.getsockname()
    print(f"dashboard of {len(runs.all())} runs at http://{host}:{port}", flush=True)
    server = server_of(runs)
    received: list[int] = []
    for number in STOP_SIGNALS:  # uvicorn raises them again once it has ended
        signal.signal(number, lambda number, _: received.append(number))
    server.run(sockets=[listener])
    return service_exit_code(received[0]) if received else 1
