"""The dashboard's server: the first answer over a long run, and its CPU time by the number of clients that listen."""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.figures import Figure, Figures, Goal
from slipstream.tools.cli import at_least, seconds
from tests.tools.dashboard.recorded import append, step
from tests.tools.dashboard.served import Server, served

LOAD = Goal("<", 1.0)
KEYS = 74
"""With those of `step`, 80 keys of a record."""
_random = random.Random(0)


def _record(number: int) -> dict[str, Any]:
    return step(number, **{f"key/{key}": _random.random() for key in range(KEYS)})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    parser.add_argument("--steps", type=at_least(1), default=10_000, help="steps of the run")
    parser.add_argument("--clients", type=at_least(0), nargs="+", default=[0, 1, 5, 20], help="numbers of listeners")
    parser.add_argument("--rate", type=seconds, default=10.0, help="records per second")
    parser.add_argument("--seconds", type=seconds, default=20.0, help="time for each number of listeners")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "long"
        run.mkdir()
        append(run / "metrics.jsonl", *map(_record, range(1, options.steps + 1)))
        with served(run) as server:
            process = psutil.Process(server.process.pid)
            server.get("metrics")  # imports and threads
            loads = [_load(server, process) for _ in range(2)]
            shares = {clients: _share(server, process, run, clients, options) for clients in options.clients}
            memory = process.memory_info().rss
    first, again = loads
    figures.show(
        Figure("all columns, 2,000 points: first answer, CPU", first["cpu_s"], "s", LOAD),
        Figure("  wall clock", first["wall_s"], "s"),
        Figure("  again, CPU", again["cpu_s"], "s"),
        Figure("  bytes, compressed", first["bytes"] / 1e6, "MB"),
    )
    figures.show(*(Figure(f"CPU with {count} clients", 100 * share, "%") for count, share in shares.items()))
    figures.show(Figure("memory", memory / 1e6, "MB"))
    return {"loads": loads, "cpu_share": shares, "memory_bytes": memory}


def _load(server: Server, process: psutil.Process) -> dict[str, float]:
    """Time and size of the series of all columns."""
    cpu_s, began = _cpu_s(process), time.perf_counter()
    reply = server.client.get("/api/runs/long/series")
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": _cpu_s(process) - cpu_s,
        "bytes": float(reply.num_bytes_downloaded),
    }


def _share(server: Server, process: psutil.Process, run: Path, clients: int, options: argparse.Namespace) -> float:
    """Share of a core that the server needs while records arrive and `clients` get them."""
    with _listening(server, clients) as received:
        cpu_s, began = _cpu_s(process), time.perf_counter()
        sent = 0
        while (passed_s := time.perf_counter() - began) < options.seconds:
            if sent < passed_s * options.rate:
                sent += 1
                append(run / "metrics.jsonl", _record(options.steps + sent))
            time.sleep(0.5 / options.rate)
        share = (_cpu_s(process) - cpu_s) / (time.perf_counter() - began)
    lost = [count for count in received if count < sent - options.rate]
    assert not lost, f"of {sent} records, clients got only {lost}"
    return share


@contextmanager
def _listening(server: Server, clients: int) -> Iterator[list[int]]:
    """Clients that count the records that they get."""
    received, ready, stop = [0] * clients, threading.Barrier(clients + 1), threading.Event()

    def listen(client: int) -> None:
        with (
            suppress(httpx.RemoteProtocolError),  # the server ends first
            httpx.stream("GET", f"{server.url}/api/runs/long/stream", timeout=None) as reply,
        ):
            for part in reply.iter_bytes():
                if not received[client] and b"event: state" in part:
                    ready.wait()
                received[client] += part.count(b"event: step\n")
                if stop.is_set():
                    return

    threads = [threading.Thread(target=listen, args=(client,), daemon=True) for client in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    yield received
    stop.set()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
