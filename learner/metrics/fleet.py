"""State of the rollout servers in the run folder: `servers.json` has the latest one, `servers.jsonl` the history."""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from slipstream.buffer.wire.messages import ServerStatus, State
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.trackers import append_record

log = get_log("learner.fleet")

STATE_EVERY_S: Final = 1.0
HISTORY_EVERY_S: Final = 10.0
RATE_S: Final = 10.0
"""Rates and idle shares of a server are over so much of its time: tokens count when their group is finished."""
MOST_LINES: Final = 8192
"""Beyond that, every other line of the older half of the history is removed."""
FEW_SERVERS: Final = 16
"""Up to so many servers, the history has each of them."""
_IN_HISTORY: Final = (
    *("server", "version", "lag", "tokens_per_s", "idle_fraction"),
    *("kv_cache_use", "prefix_hits", "running", "waiting"),
)


class FleetRecord:
    """Writes the files. A failure to write is logged once, and costs only these."""

    def __init__(
        self, paths: RunPaths, events: EventLog, *, started: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
        events: gets servers that join or leave, and crashes of their engines.
        started: start of the run, by this host's monotonic clock.
        """
        self._paths = paths
        self._events = events
        self._started = started
        self._clock = clock
        self._written_at = self._appended_at = -HISTORY_EVERY_S
        self._lines: int | None = None
        self._is_broken = False
        self._latest: dict[str, ServerStatus] = {}
        self._readings: dict[str, deque[ServerStatus]] = {}

    def observe(self, state: State, *, step: int, final: bool = False) -> None:
        """Takes the buffer's state when `step` steps are done; writes it at most once in `STATE_EVERY_S`.

        Args:
            final: the run's last state, which is written in any case.
        """
        servers = {server.server: server for server in state.servers}
        if not final:  # at the end all of them leave
            self._note_changes(servers, step)
        now = self._clock()
        if self._is_broken or (now - self._written_at < STATE_EVERY_S and not final):
            return
        self._written_at = now
        record = self._record(state, step)
        try:
            content = json.dumps(record, allow_nan=False).encode()
            write_atomically(self._paths.servers, [content, b"\n"], durable=final)
            if final or now - self._appended_at >= HISTORY_EVERY_S:
                self._appended_at = now
                self._append(fleet_line(record))
        except OSError as error:
            self._is_broken = True
            log.warning("the rollout servers' state is no longer written", error=str(error))

    def _record(self, state: State, step: int) -> dict[str, Any]:
        return {
            "time_s": self._clock() - self._started,
            "at": time.time(),
            "step": step,
            "version": state.version,
            "servers": [self._of_server(server, state.version) for server in state.servers],
        }

    def _of_server(self, server: ServerStatus, latest: int) -> dict[str, Any]:
        readings = list(self._readings.get(server.server, ()))
        tokens_per_s, idle_fraction = rates(readings)
        values = {
            "server": server.server,
            "version": server.version,
            "lag": max(0, latest - server.version),
            "tokens_generated": server.tokens_generated,
            "busy_s": server.busy_s,
            "up_s": server.up_s,
            "tokens_per_s": tokens_per_s,
            "idle_fraction": idle_fraction,
            "kv_cache_use": server.kv_cache_use,
            "prefix_hits": prefix_hits(*readings[:: len(readings) - 1]) if len(readings) > 1 else None,
            "running": server.running,
            "waiting": server.waiting,
            "groups_limit": server.groups_limit,
            "engine_deaths": server.engine_deaths,
            "requests_restarted": server.requests_restarted,
            "stall_s": server.stall_s,
            "update_s": server.update_s,
            "gpus": server.gpus,
        }
        non_finite = {name for name, value in values.items() if isinstance(value, float) and not isfinite(value)}
        return values | dict.fromkeys(non_finite)  # JSON lacks them

    def _note_changes(self, servers: dict[str, ServerStatus], step: int) -> None:
        for name, server in servers.items():
            readings = self._readings.setdefault(name, deque())
            if readings and server.up_s < readings[-1].up_s:  # started anew
                readings.clear()
            if not readings or server.up_s > readings[-1].up_s:
                readings.append(server)
            while len(readings) > 2 and server.up_s - readings[1].up_s >= RATE_S:
                readings.popleft()
            before = self._latest.get(name)
            if before is None:
                self._events.add("server_joined", "rollout server joined", step=step, server=name)
            elif server.engine_deaths > before.engine_deaths:
                deaths = server.engine_deaths
                self._events.add("engine_death", "engine crashed", step=step, server=name, engine_deaths=deaths)
        for name in self._latest.keys() - servers.keys():
            self._events.add("server_lost", "rollout server left", step=step, server=name)
            del self._readings[name]
        self._latest = servers

    def _append(self, line: dict[str, Any]) -> None:
        path = self._paths.servers_history
        append_record(path, line)
        self._lines = _count_lines(path) if self._lines is None else self._lines + 1
        if self._lines > MOST_LINES:
            self._lines = _thin(path)


def rates(readings: Sequence[ServerStatus]) -> tuple[float | None, float | None]:
    """Tokens per second of a server, and its share of time without work, between its first and last reading."""
    if len(readings) < 2:
        return None, None
    first, last = readings[0], readings[-1]
    up_s = last.up_s - first.up_s
    idle = 1 - (last.busy_s - first.busy_s) / up_s
    return (last.tokens_generated - first.tokens_generated) / up_s, min(1.0, max(0.0, idle))


def prefix_hits(first: ServerStatus, last: ServerStatus) -> float | None:
    """Share of prompt tokens that a server's engine took from its KV cache between two readings; None without any."""
    prompt_tokens = last.prompt_tokens - first.prompt_tokens
    return (last.cached_tokens - first.cached_tokens) / prompt_tokens if prompt_tokens > 0 else None


def fleet_line(record: dict[str, Any]) -> dict[str, Any]:
    """A line of the history: sums or means over all servers, and where they are few, each of them."""
    servers = record["servers"]

    def known(name: str) -> list[float]:
        return [server[name] for server in servers if server[name] is not None]

    def mean(name: str) -> float | None:
        return fmean(known(name)) if known(name) else None

    line = {
        **{name: record[name] for name in ("time_s", "at", "step", "version")},
        "server_count": len(servers),
        "lag_max": max(known("lag"), default=None),
        "kv_cache_use": mean("kv_cache_use"),
        "prefix_hits": mean("prefix_hits"),
        "idle_fraction": mean("idle_fraction"),
        **{name: sum(known(name)) if known(name) else None for name in ("tokens_per_s", "running", "waiting")},
        "stall_s_max": max(known("stall_s"), default=None),
    }
    if len(servers) <= FEW_SERVERS:
        line["servers"] = [{name: server[name] for name in _IN_HISTORY} for server in servers]
    return line


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _thin(path: Path) -> int:
    """Removes every other line of the older half; returns how many are left. Raises: OSError."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines) if number >= len(lines) // 2 or number % 2 == 0]
    write_atomically(path, kept)
    return len(kept)
