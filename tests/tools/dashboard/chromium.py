"""A headless Chromium driven by its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from websockets.sync.client import ClientConnection, connect

EXECUTABLE: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S: Final = 60.0
KEY_CODES: Final = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


class Page:
    """One tab. `problems` collects exceptions, errors on the console and reports of the content security policy."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last_id = 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result. Raises: RuntimeError on an error."""
        self._last_id += 1
        self._connection.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message = json.loads(self._connection.recv(timeout=max(0.01, deadline - time.monotonic())))
            if message.get("id") != self._last_id:
                self._note(message)
            elif "error" in message:
                raise RuntimeError(f"{method}: {message['error']}")
            else:
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        details = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(details["exceptionDetails"])[:500])
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                self.problems.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "assert"):
                self.problems.append(json.dumps(details["args"])[:500])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, once it is there. Raises: RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def wait(self, expression: str, *, deadline_s: float = DEADLINE_S) -> Any:
        """Waits until an expression is true and returns its value. Raises: TimeoutError with the page's text."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)
        text = self.evaluate("document.body.innerText.slice(0, 1500)")
        raise TimeoutError(f"{expression} was not true within {deadline_s} s; problems: {self.problems}; page: {text}")

    def open(self, url: str) -> None:
        """Goes to an address and waits until the view is there."""
        self.call("Page.navigate", url="about:blank")  # otherwise a change of the hash loads nothing
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.querySelector('main .view > :nth-child(2)') !== null")

    def show(self, width: int, height: int = 900, *, dark: bool = False, scale: float = 1) -> None:
        """Sets the size of the window in CSS pixels, and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Presses a key."""
        code = KEY_CODES.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """An event of the mouse: `mouseMoved`, `mousePressed` or `mouseReleased`, with the left button."""
        button = "none" if kind == "mouseMoved" else "left"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def screenshot(self, *, full: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        clip = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full, **clip)
        return base64.b64decode(answer["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A tab of a headless Chromium with a profile of its own."""
    assert EXECUTABLE is not None, "no Chromium is installed"
    process = subprocess.Popen(
        [
            EXECUTABLE,
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--no-sandbox",  # containers run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = _debugging_port(process, profile / "DevToolsActivePort")
        tab = httpx.put(f"http://127.0.0.1:{port}/json/new?about:blank", timeout=DEADLINE_S).json()
        with connect(tab["webSocketDebuggerUrl"], max_size=None, open_timeout=DEADLINE_S) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _debugging_port(process: subprocess.Popen[bytes], file: Path) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        if file.is_file() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise TimeoutError(f"Chromium opened no debugging port within {DEADLINE_S} s")
