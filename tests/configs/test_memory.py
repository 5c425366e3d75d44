"""What the garbage collector does while libraries are imported."""

import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from slipstream.configs.memory import importing


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
    with importing():
        large_library = import_module("large_library")
    assert not large_library.collects
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 1000
    del sys.modules["large_library"]


def test_a_process_at_work_keeps_its_garbage_collected_when_nothing_is_imported() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        import_module("json")
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_the_collector_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import_module("no_such_library")
    assert gc.isenabled()
