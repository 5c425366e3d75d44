"""The dashboard's page over a long run of many servers, in a headless Chromium: loading, and frames of scrolling."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from typing import Any

from benchmarks.figures import Figure, Figures, Goal
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.cli import at_least
from tests.conftest import free_port
from tests.tools.dashboard.chromium import EXECUTABLE, Page, chromium
from tests.tools.dashboard.recorded import run_config, write_run
from tests.tools.run_command import command

LOAD = Goal("<", 1.0)
FRAME = Goal("<", 1000 / 60)

WORK = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration")
VIEWS = {
    "overview": "document.querySelectorAll('.uplot').length === 4",
    "metrics": "document.querySelectorAll('.uplot').length > 3",
    "servers": "document.querySelectorAll('.servers .row').length > 10",
    "samples": "document.querySelectorAll('.browsed .row .excerpt').length > 5",
}
"""For each view, a condition that holds once it is complete."""

WATCH = """
window.complete = new Promise((resolve) => {
  const look = () => (%s ? requestAnimationFrame(() => resolve(performance.now())) : setTimeout(look, 5));
  look();
});
"""
SCROLL = """
new Promise((resolve) => {
  const list = document.querySelector(".list");
  const gaps = [];
  let last = performance.now();
  const frame = (now) => {
    gaps.push(now - last);
    last = now;
    list.scrollTop += 120;
    gaps.length < %d ? requestAnimationFrame(frame) : resolve(gaps.slice(1));
  };
  requestAnimationFrame(frame);
})
"""


@dataclass(frozen=True)
class Load:
    """Seconds from the start of a navigation until its view is drawn, and CPU seconds of the page's main thread."""

    seconds: float
    cpu_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    parser.add_argument("--steps", type=at_least(1), default=10_000, help="steps of the run")
    parser.add_argument("--servers", type=at_least(1), default=1_000, help="its rollout servers")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="loads of each view, after a first one")
    parser.add_argument("--frames", type=at_least(2), default=120, help="frames of scrolling")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: ConfigError without a Chromium."""
    if EXECUTABLE is None:
        raise ConfigError("there is no Chromium; install `chromium` (Debian) and measure again")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        config = run_config(folder, "long", port=free_port())
        write_run(config, steps=options.steps, servers=options.servers)
        with _dashboard(config.paths.root) as address, chromium(folder / "profile") as page:
            page.show(1280)
            page.call("Performance.enable", timeDomain="threadTicks")  # CPU seconds: other processes do not count
            loads = {
                view: [_load(page, f"{address}/#/{view}", view) for _ in range(options.rounds + 1)] for view in VIEWS
            }
            page.open(f"{address}/#/servers")
            page.wait(VIEWS["servers"])
            gaps, per_frame = _scroll(page, options.frames)
    for view, measured in loads.items():
        first, *seconds = [load.seconds for load in measured]
        figures.show(
            Figure(f"{view}: load", median(seconds), "s", LOAD),
            Figure("  CPU time of the page", median(load.cpu_s for load in measured[1:]), "s"),
            Figure("  load, the first time", first, "s"),
        )
    figures.show(
        Figure("scrolling: scripts, style, layout of a frame", sum(per_frame[name] for name in WORK), "ms", FRAME),
        Figure("  main thread with painting, no GPU", per_frame["TaskDuration"], "ms"),
        Figure("  median time between frames", median(gaps), "ms"),
    )
    return {
        "loads": {view: [asdict(load) for load in measured] for view, measured in loads.items()},
        "frame_gaps_ms": gaps,
        "per_frame_ms": per_frame,
    }


@contextmanager
def _dashboard(run: Path) -> Iterator[str]:
    """The address of a dashboard of the run."""
    with Popen(command("dashboard", run, "--port", "0"), stdout=PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "a pipe was asked for"
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def _load(page: Page, url: str, view: str) -> Load:
    page.call("Page.navigate", url="about:blank")
    added = page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH % VIEWS[view])
    page.call("Page.navigate", url=url)
    milliseconds: float = page.evaluate("window.complete")
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    return Load(milliseconds / 1000, _durations_s(page)["TaskDuration"])


def _scroll(page: Page, frames: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds between frames while a list scrolls, and of the main thread in each of them, by kind of work."""
    before = _durations_s(page)
    gaps: list[float] = page.evaluate(SCROLL % frames)
    after = _durations_s(page)
    return gaps, {name: 1000 * (after[name] - before[name]) / frames for name in (*WORK, "TaskDuration")}


def _durations_s(page: Page) -> dict[str, float]:
    return {one["name"]: float(one["value"]) for one in page.call("Performance.getMetrics")["metrics"]}
