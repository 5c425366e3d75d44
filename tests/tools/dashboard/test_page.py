"""The dashboard's page in a headless Chromium: views, live updates, keys, narrow windows, contrast, hostile texts."""

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.paths import hold_run_lock
from slipstream.configs.runtime.files import write_atomically
from slipstream.tools.dashboard.app import server_of
from slipstream.tools.dashboard.command import listening
from slipstream.tools.dashboard.report import command as report
from slipstream.tools.dashboard.runs import Runs
from tests.conftest import free_port
from tests.tools.dashboard.chromium import EXECUTABLE, Page, chromium
from tests.tools.dashboard.recorded import HOSTILE, event, run_config, servers_record, step_record, write_run
from tests.tools.ledger.conftest import embedded, play

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed")

STEPS = 60
SERVERS = 12
BIG_STEPS = 10_000
BIG_SERVERS = 1_000
NARROW = 390
LEAST_CONTRAST = 4.5

VIEWS = {
    "overview": (".tile, .pipeline svg, .uplot", True),
    "metrics": (".uplot", True),
    "servers": (".servers .row", True),
    "account": (".stack, .equation", True),
    "samples": (".browsed .row", True),
    "samples/step-000000060-0": (".token", True),
    "prompts/0": (".card", True),
    "groups/3": (".strip, .answer, .browsed .row", False),
    "compare": (".uplot, tbody tr", False),
    "run": ("tbody tr, .events li", True),
}
"""Views by their path, with what they must show, and whether hostile texts are among it."""

CONTRASTS = """
(() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
  const background = (element) => {
    if (!element) return [255, 255, 255];
    const colour = rgba(element instanceof SVGElement ? "transparent" : getComputedStyle(element).backgroundColor);
    return colour[3] === 1 ? colour : over(colour, background(element.parentElement));
  };
  const light = (colour) => {
    const linear = (share) => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest(".visually-hidden, .skip")) continue;
    const style = getComputedStyle(element);
    const below = background(element);
    const [a, b] = [light(over(rgba(element instanceof SVGElement ? style.fill : style.color), below)), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < LEAST) found.set(`${element.tagName}.${element.getAttribute("class")} ${ratio.toFixed(2)}`, 1);
  }
  return [...found.keys()];
})()
""".replace("LEAST", str(LEAST_CONTRAST))


class Served:
    """Runs in a folder, served at one port; `stop` and `start` again."""

    def __init__(self, folder: Path) -> None:
        self._runs = folder / "runs"
        self.port = free_port()
        self.start()

    def start(self) -> None:
        listener = listening(self.port)
        self._server = server_of(Runs([self._runs]))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"

    def url(self, view: str, *runs: str) -> str:
        return f"http://127.0.0.1:{self.port}/#/{view}{'&' if '?' in view else '?'}runs={','.join(runs)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[RunConfig]:
    """A running run with a ledger."""
    config = run_config(folder, "live", port=free_port())
    write_run(config, steps=STEPS, servers=SERVERS)
    with embedded(config), hold_run_lock(config.paths, by="learner"):
        play(config)
        yield config


@pytest.fixture(scope="module")
def served(folder: Path, live: RunConfig) -> Iterator[Served]:
    write_run(run_config(folder, "other", port=free_port(), lr=1e-5), steps=STEPS, servers=2)
    serving = Served(folder)
    yield serving
    serving.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The browser in a wide, light window; a test fails if a script or the content security policy complained."""
    browser.show(1280)
    browser.problems.clear()
    yield browser
    assert browser.problems == []


def append(config: RunConfig, *records: dict[str, Any]) -> None:
    with config.paths.metrics.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def tile(page: Page, label: str) -> str:
    """The value of a tile of the overview."""
    find = f"[...document.querySelectorAll('.tile')].find((tile) => tile.textContent.startsWith('{label}'))"
    text: str = page.evaluate(f"{find}?.querySelector('.tile-value').textContent ?? ''")
    return text


@pytest.mark.parametrize("view", VIEWS)
def test_view_shows_real_data_and_is_readable(page: Page, served: Served, view: str) -> None:
    page.open(served.url(view, "live", *(["other"] if view == "compare" else [])))
    selectors, is_hostile = VIEWS[view]
    for selector in selectors.split(", "):
        page.wait(f"document.querySelector('main {selector}') !== null")
    assert not is_hostile or page.wait(f"document.querySelector('main').textContent.includes({json.dumps(HOSTILE)})")
    assert page.evaluate("document.querySelectorAll('main img, script:not([src]), iframe, [onerror]').length") == 0
    assert "owned" not in page.evaluate("document.title")
    for dark in (False, True):
        page.show(1280, dark=dark)
        assert page.evaluate(CONTRASTS) == []
    page.show(NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW


def test_new_records_change_the_numbers(page: Page, served: Served, live: RunConfig) -> None:
    page.open(served.url("overview", "live"))
    page.wait("document.querySelector('.state').textContent === 'live'")
    assert tile(page, "Step") == f"{STEPS}"
    append(live, step_record(STEPS + 1, STEPS + 10, reward=0.123))
    with (live.paths.root / "events.jsonl").open("a") as file:
        file.write(json.dumps(event(STEPS + 1, "restart")) + "\n")
    page.wait(f"[...document.querySelectorAll('.tile-value')][0].textContent === '{STEPS + 1}'")
    assert tile(page, "Reward") == "0.123"
    page.wait(f"document.querySelector('.events').textContent.includes('restart at step {STEPS + 1}')")
    page.evaluate("location.hash = '#/servers?runs=live'")
    page.wait("document.querySelector('.servers .row') !== null")
    changed = servers_record(2 * STEPS, SERVERS + 1)
    write_atomically(live.paths.root / "servers.json", [json.dumps(changed).encode()])
    page.wait(f"document.querySelector('.tile-value').textContent === '{SERVERS + 1}'")


def test_stream_goes_on_after_a_restart_of_the_server(page: Page, served: Served, live: RunConfig) -> None:
    page.open(served.url("overview", "live"))
    page.wait("document.querySelector('.state').textContent === 'live'")
    first = int(tile(page, "Step"))
    page.evaluate(
        "{ window.seen = []; const append = S.Columns.prototype.append;"
        " S.Columns.prototype.append = function (record) { seen.push(record.step); append.call(this, record) } }"
    )
    append(live, step_record(first + 1, first + 10))
    page.wait(f"seen.includes({first + 1})")
    served.stop()
    page.wait("document.querySelector('.state').textContent === 'reconnecting'")
    append(live, *(step_record(step, first + 10) for step in (first + 2, first + 3)))
    served.start()
    page.wait("document.querySelector('.state').textContent === 'live'")
    page.problems[:] = [problem for problem in page.problems if "ERR_" not in problem]  # of the connection
    append(live, step_record(first + 4, first + 10))
    page.wait(f"seen.includes({first + 4})")
    assert page.evaluate("seen") == list(range(first + 1, first + 5)), "each record once and in order"
    page.wait(f"[...document.querySelectorAll('.tile-value')][0].textContent === '{first + 4}'")


def test_report_shows_the_same_views_from_its_file(page: Page, live: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    with contextlib.redirect_stdout(io.StringIO()):
        report([str(live.paths.root), "-o", str(file)])
    for view in ("overview", "metrics", "servers", "account", "samples", "groups", "run"):
        page.open(f"{file.as_uri()}#/{view}")
        for selector in VIEWS[view.replace("groups", "samples")][0].split(", "):
            page.wait(f"document.querySelector('main {selector}') !== null")
    assert page.evaluate("document.querySelector('.state').textContent") == "report"
    assert "owned" not in page.evaluate("document.title")


def test_everything_is_reached_by_keys(page: Page, served: Served) -> None:
    page.open(served.url("overview", "live"))
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "it is seen while it has the focus"
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.press("5")
    page.wait("document.querySelectorAll('.browsed [role=option]').length > 5")
    page.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    for letter in "step 60":
        page.press(letter)
    page.wait("document.querySelector('.count').textContent === '1 samples'")
    page.press("Escape")
    page.evaluate("document.querySelector('.list').focus()")
    for key in ("ArrowDown", "Enter"):
        page.press(key)
    page.wait("document.querySelector('.turn.action .token') !== null")
    assert page.evaluate("location.hash").startswith("#/samples/step-000000060-0?")
    page.evaluate("document.querySelector('.turn.action:has(.token) .turn-text').focus()")
    page.press("ArrowRight")
    facts = page.evaluate("document.querySelector('.token-fact').textContent")
    for name in ("version", "log-prob", "ratio", "advantage", "entropy"):
        assert name in facts
    page.press("?")
    page.wait("document.querySelector('dialog').open")
    page.press("Escape")
    page.wait("!document.querySelector('dialog').open")
    page.press("r")
    assert page.evaluate("document.activeElement.type") == "checkbox"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_drag_in_a_chart_asks_for_the_range(page: Page, served: Served) -> None:
    page.open(served.url("metrics?filter=^reward$", "live"))
    x, y, width = page.wait(
        "(() => { const chart = document.querySelector('.chart:not([hidden])');"
        " const box = chart?.querySelector('.u-over')?.getBoundingClientRect();"
        " return chart?.querySelector('.value') && [box.x, box.y + box.height / 2, box.width] })()"
    )
    page.mouse("mouseMoved", x + width * 0.25, y)
    page.mouse("mousePressed", x + width * 0.25, y)
    page.mouse("mouseMoved", x + width * 0.5, y)
    page.mouse("mouseReleased", x + width * 0.5, y)
    page.wait("/from=\\d+&to=\\d+/.test(location.hash)")
    asked = "performance.getEntriesByType('resource').map(({ name }) => name)"
    page.wait(f"{asked}.some((name) => name.includes('keys=reward') && /from=\\d/.test(name))")
    page.press("Escape")
    page.wait("!location.hash.includes('from=')")


def test_long_run_of_many_servers_stays_small(page: Page, folder: Path, served: Served) -> None:
    config = run_config(folder, "long", port=free_port())
    write_run(config, steps=BIG_STEPS, servers=BIG_SERVERS)
    page.open(served.url("overview", "long"))
    page.wait("document.querySelectorAll('.uplot').length === 4")
    assert tile(page, "Step") == f"{BIG_STEPS:,}"
    assert page.evaluate("document.querySelectorAll('*').length") < 2000
    bytes_sent = page.evaluate(
        "performance.getEntriesByType('resource').reduce((sum, { transferSize }) => sum + transferSize, 0)"
    )
    assert bytes_sent < 1_000_000
    page.open(served.url("servers", "long"))
    page.wait("document.querySelectorAll('.servers .row').length > 10")
    page.evaluate("document.querySelector('.servers.list').scrollTop = 15000")
    page.wait("[...document.querySelectorAll('.servers .row .name')].some((row) => row.textContent === 'rollout-0500')")
    assert page.evaluate("document.querySelectorAll('.servers .row').length") < 60
    assert page.evaluate("document.querySelectorAll('.outlier').length") == 0
    page.evaluate(
        "[...document.querySelectorAll('.grid-head button')].find((b) => b.textContent === 'Tokens/s').click()"
    )
    page.evaluate(
        "[...document.querySelectorAll('.grid-head button')].find((b) => b.textContent === 'Tokens/s').click()"
    )
    page.evaluate("document.querySelector('.servers.list').scrollTop = 0")
    page.wait("document.querySelector('.servers .row .outlier') !== null")
