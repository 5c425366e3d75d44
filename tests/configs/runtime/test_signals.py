"""Stop signals, and the garbage collector during imports."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from slipstream.configs.runtime.signals import STOP_SIGNALS, GracefulStop, heavy_imports

each_signal = pytest.mark.parametrize("number", STOP_SIGNALS)


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    before = gc.get_freeze_count()
    yield
    if not before:
        gc.unfreeze()


# --- heavy imports ---------------------------------------------------------------------------------------------------


def test_imported_objects_are_frozen_without_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import gc\ncollects = gc.isenabled()\ndefined = [[] for _ in range(1000)]\n"
    (tmp_path / "large_library.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    with heavy_imports():
        large_library = import_module("large_library")
    assert not large_library.collects
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 1000
    del sys.modules["large_library"]


def test_nothing_is_frozen_without_a_new_module() -> None:
    frozen = gc.get_freeze_count()
    with heavy_imports():
        import_module("json")
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), heavy_imports():
        import_module("no_such_library")
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen  # objects that were frozen before may be freed meanwhile


@each_signal
@pytest.mark.parametrize(
    "library",
    [
        "{kill}\nraise AssertionError('not interrupted')",
        "try:\n    {kill}\nexcept BaseException:\n    pass",
        "try:\n    {kill}\nexcept BaseException:\n    raise ImportError('broken')",
    ],
    ids=["stops", "goes on", "raises its own"],
)
def test_signal_exits_during_an_import_in_an_event_loop(
    number: signal.Signals, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = f"os.kill(os.getpid(), {int(number)})"
    (tmp_path / "endless_library.py").write_text("import os\n" + library.format(kill=kill))
    monkeypatch.delitem(sys.modules, "endless_library", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    restored: list[bool] = []

    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        before = signal.getsignal(number)
        try:
            with heavy_imports():
                import_module("endless_library")
        finally:
            restored.append(signal.getsignal(number) == before)

    with pytest.raises(SystemExit) as ended:
        asyncio.run(serve())
    assert ended.value.code == 128 + number
    assert restored == [True]


def test_other_threads_can_import() -> None:
    def imported() -> object:
        with heavy_imports():
            return import_module("json")

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(imported).result() is sys.modules["json"]


# --- Ctrl-C during the start of a command ----------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
from importlib import import_module

signal.signal(signal.SIGINT, signal.{before})  # a shell starts background jobs with Ctrl-C ignored
cli, imported = import_module(sys.argv.pop(1)), sys.argv.pop(1)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == imported:
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
cli.main()
"""


def interrupted(command: str, imported: str, *, before: str) -> subprocess.CompletedProcess[str]:
    code = INTERRUPTED.format(before=before)
    arguments = [sys.executable, "-c", code, command, imported, "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        ("slipstream.buffer.cli", "uvloop"),
        ("slipstream.learner.cli", "slipstream.configs.schema"),
        ("slipstream.rollout_servers.cli", "slipstream.configs.load"),
        ("slipstream.tools.cli", "slipstream.configs.runtime.errors"),
        ("slipstream.tools.cli", "importlib.metadata"),
    ],
)
def test_ctrl_c_during_imports_shows_no_traceback(command: str, imported: str) -> None:
    done = interrupted(command, imported, before="default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "interrupted\n", "")


def test_ignored_ctrl_c_stays_ignored() -> None:
    done = interrupted("slipstream.buffer.cli", "uvloop", before="SIG_IGN")
    assert done.returncode == 0
    assert done.stdout.startswith("interrupted\nusage: ")


# --- graceful stop ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stop() -> Iterator[GracefulStop]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    stop = GracefulStop()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@each_signal
def test_first_deferred_signal_is_recorded_and_second_exits(
    number: signal.Signals, stop: GracefulStop, capfd: pytest.CaptureFixture[str]
) -> None:
    with stop.deferred():
        assert not stop.is_requested()
        os.kill(os.getpid(), number)
        assert (stop.number, stop.is_requested()) == (number, True)
        assert capfd.readouterr().err.count("\n") == 1
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number


@pytest.mark.parametrize("after_deferral", [False, True])
def test_signal_exits_outside_of_deferral(after_deferral: bool, stop: GracefulStop) -> None:
    if after_deferral:
        with stop.deferred():
            pass
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_ignored_signal_gets_no_handler(stop: GracefulStop) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.number == 0
