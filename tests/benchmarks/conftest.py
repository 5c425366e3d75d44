"""Benches run in this process, and a check for processes and files that they leave."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.__main__ import command


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if the test leaves a process or a temporary file."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before
    assert list(temporary.iterdir()) == []


def measured(part: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Runs a part of `slipstream bench`; returns the record in its file."""
    assert command([part, *arguments, "--runs", str(folder)]) == 0
    (file,) = (folder / "bench").glob(f"{part}-*.json")
    record: dict[str, Any] = json.loads(file.read_text())
    return record
