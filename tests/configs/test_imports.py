"""What the garbage collector and signals do while libraries are imported."""

import asyncio
import gc
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from slipstream.configs.runtime.signals import heavy_imports


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    before = gc.get_freeze_count()
    yield
    if not before:
        gc.unfreeze()


def test_nothing_is_collected_during_an_import_and_what_it_defines_is_left_alone_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_library.py").write_text(
        "import gc\ncollects = gc.isenabled()\ndefined = [[] for _ in range(1000)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    with heavy_imports():
        large_library = import_module("large_library")
    assert not large_library.collects
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 1000
    del sys.modules["large_library"]


def test_a_process_at_work_keeps_its_garbage_collected_when_nothing_is_imported() -> None:
    frozen = gc.get_freeze_count()
    with heavy_imports():
        import_module("json")
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_the_collector_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), heavy_imports():
        import_module("no_such_library")
    assert gc.isenabled()


@pytest.fixture
def large_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Half of it is there when its process is told to end by the signal of the environment."""
    text = "import os\nos.kill(os.getpid(), int(os.environ['SIGNAL']))\nraise AssertionError('the rest of it')\n"
    (tmp_path / "endless_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return "endless_library"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_in_the_middle_of_an_import_although_an_event_loop_would_hear_of_it_afterwards(
    number: signal.Signals, large_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNAL", str(int(number)))
    cleaned_up: list[bool] = []

    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        before = signal.getsignal(number)
        try:
            with heavy_imports():
                import_module(large_library)
        finally:
            cleaned_up.append(signal.getsignal(number) == before)

    with pytest.raises(SystemExit) as ended:
        asyncio.run(serve())
    assert ended.value.code == 128 + number
    assert cleaned_up == [True]


def test_other_threads_which_hear_of_no_signals_import_as_well() -> None:
    def imported() -> object:
        with heavy_imports():
            return import_module("json")

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(imported).result() is sys.modules["json"]
