"""`slipstream top`: the live table of a run that another process runs, from the files in its folder alone."""

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.cli import printable, table_console
from slipstream.tools.dashboard.runs import TAIL_BYTES, Run
from slipstream.tools.follow import JsonLinesFollower, number
from slipstream.tools.launch.progress import ENDED, Plan, Progress, apply_log, apply_metrics, table
from slipstream.tools.launch.screens import LiveScreen, PlainScreen, can_draw
from slipstream.tools.ledger.open import RUN_HELP, find_folder

EVERY_S: Final = 0.5
MIN_COLUMNS: Final = 110
MOST_SERVERS: Final = 12
MOST_NOTES: Final = 6
"""Latest warnings and events."""
_COLUMNS: Final = {
    "version": ("version", "{:.0f}"), "lag": ("lag", "{:.0f}"), "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "idle": ("idle_fraction", "{:.0%}"), "KV cache": ("kv_cache_use", "{:.0%}"),
    "hits": ("prefix_hits", "{:.0%}"), "running": ("running", "{:.0f}"),
    "waiting": ("waiting", "{:.0f}"), "stall": ("stall_s", "{:.3f} s"), "restarts": ("engine_deaths", "{:.0f}"),
}  # fmt: skip
"""Heading of each column, its key in `servers.json`, and its format."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream top` until the run ends, or `q`; returns 0. Raises: ConfigError when there is no such run."""
    parser = argparse.ArgumentParser(
        prog="slipstream top",
        description="Show a run that another process runs as a live table, from the files in its folder; q or Ctrl-C "
        "leaves it. A run that has ended is shown once.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    folder = find_folder(parser.parse_args(argv).run)
    if not (folder.config.is_file() or folder.metrics.is_file()):
        raise ConfigError(f"{folder.root} is no run's folder: it holds no {folder.config.name}; name one")
    run = Run(folder.name, folder)
    watch, console = Watch(run), Console()
    progress = watch.progress()
    if progress.stage in ENDED:
        table_console(min_width=MIN_COLUMNS).print(_view(run, progress))
    elif can_draw(console):
        with _keys() as pressed, LiveScreen(console, lambda shown: _view(run, shown)) as screen:
            while progress.stage not in ENDED and "q" not in pressed(EVERY_S):
                progress = watch.progress()
                screen.show(progress)
    else:
        with PlainScreen() as screen:
            while progress.stage not in ENDED:
                screen.show(progress)
                time.sleep(EVERY_S)
                progress = watch.progress()
        print(f"the run is {progress.stage}")
    return 0


class Watch:
    """The progress of a run, from its files."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics = JsonLinesFollower(run.folder.metrics, last_bytes=TAIL_BYTES)
        self._logs = {path.stem: JsonLinesFollower(path, last_bytes=TAIL_BYTES) for path in _logs(run)}
        self._progress = Progress(_plan(run))
        self._read()
        # They may be hours old; `_notes` shows them with their times.
        self._progress = replace(self._progress, warnings={}, failures={})

    def progress(self) -> Progress:
        """The present state; its stage is that of the run once that has ended."""
        self._read()
        state = self._run.state
        if state in ENDED:
            return replace(self._progress, stage=state)
        since_record_s = time.time() - (self._run.updated_at or _started_at(self._run))
        return replace(self._progress, elapsed_s=self._progress.elapsed_s + max(0.0, since_record_s))

    def _read(self) -> None:
        for path in _logs(self._run):
            log = self._logs.setdefault(path.stem, JsonLinesFollower(path))
            for record in log.new_records():
                self._progress = apply_log(self._progress, path.stem, record)
        for record in self._metrics.new_records():
            time_s = number(record, "time_s") or 0.0
            self._progress = apply_metrics(replace(self._progress, elapsed_s=time_s), record)


def _logs(run: Run) -> list[Path]:
    return sorted(run.folder.logs.glob("*.jsonl"))


def _started_at(run: Run) -> float:
    try:
        return run.folder.config.stat().st_mtime
    except OSError:
        return time.time()


def _plan(run: Run) -> Plan:
    """The settings that the table shows, also of a configuration of another release."""
    config = run.config()

    def setting(section: str, key: str) -> Any:
        values = config.get(section) if isinstance(config, dict) else None
        return values.get(key) if isinstance(values, dict) else None

    steps, bound, reward = setting("learner", "steps"), setting("buffer", "max_staleness"), setting("eval", "reward")
    return Plan(
        run.folder.name,
        steps if isinstance(steps, int) else 0,
        bound if isinstance(bound, int) else 0,
        reward if isinstance(reward, str) else None,
        is_rl=run.trainer == "rl",
    )


def _view(run: Run, progress: Progress) -> RenderableType:
    """The table of `slipstream up`, the servers, and the latest warnings and events."""
    parts = [table(progress), *_servers(run.servers()), *_notes(run)]
    return Group(*parts)


def _servers(state: Any) -> Iterator[RenderableType]:
    """The servers, those that are furthest behind first."""
    listed = state.get("servers") if isinstance(state, dict) else None
    servers = [server for server in listed or [] if isinstance(server, dict)]
    if not servers:
        return
    servers.sort(key=lambda server: (-(number(server, "lag") or 0), -(number(server, "idle_fraction") or 0)))
    rows = Table(border_style="cyan", title_justify="left")
    rows.add_column("server", style="bold cyan", no_wrap=True)
    for heading in _COLUMNS:
        rows.add_column(heading, justify="right", no_wrap=True)
    for server in servers[:MOST_SERVERS]:
        rows.add_row(Text(printable(str(server.get("server", "")))), *(_cell(server, *c) for c in _COLUMNS.values()))
    yield rows
    if len(servers) > MOST_SERVERS:
        yield Text(f"and {len(servers) - MOST_SERVERS:,} servers more, which are less behind")


def _cell(server: Mapping[str, Any], key: str, form: str) -> str:
    value = number(server, key)
    return "-" if value is None else form.format(value)


def _notes(run: Run) -> list[Text]:
    """The latest warnings of the processes' logs, then the latest events of the run."""
    warnings = [
        f"{warning['time'][:19]}  {warning['process']}: {warning['text']}" for warning in run.warnings()[-MOST_NOTES:]
    ]
    events = [
        f"step {event.get('step', '-')}  {event.get('kind', '')}: {event.get('text', '')}"
        for event in run.events()[-MOST_NOTES:]
    ]
    return [
        *(Text(printable(line), style="yellow") for line in warnings),
        *(Text(printable(line)) for line in events),
    ]


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a time and returns the keys that were pressed; none where stdin is no terminal."""

    def wait(seconds: float) -> str:
        if not sys.stdin.isatty():
            time.sleep(seconds)
            return ""
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") or "q"  # the end of a terminal that is gone

    if not sys.stdin.isatty():
        yield wait
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
