"""A part measured in this process, and a check for processes and files that it leaves."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.__main__ import command

Record = dict[str, Any]
Measure = Callable[..., Record]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Measure]:
    """Measures a part, whose figures are finite, printed and saved; it leaves no process and no temporary file.

    Its options are one string, and others that may have spaces. The record has its figures by name too, in `value`.
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before, threads = set(psutil.Process().children()), torch.get_num_threads()

    def measure(part: str, options: str, *others: str) -> Record:
        file = tmp_path / f"{part}.json"
        assert command([part, "--json", str(file), *options.split(), *others]) == 0
        record: Record = json.loads(file.read_text(encoding="utf-8"))
        printed = [line[:46].rstrip() for line in capsys.readouterr().out.splitlines()]
        names = [figure["name"] for figure in record["figures"]]
        assert names and [name for name in names if name[:46] not in printed] == []
        assert all(math.isfinite(figure["value"]) for figure in record["figures"])
        assert record["machine"]["cores"] >= 1
        return {**record, "value": {figure["name"].strip(): figure["value"] for figure in record["figures"]}}

    yield measure
    torch.set_num_threads(threads)
    assert set(psutil.Process().children()) <= before
    assert list(temporary.iterdir()) == []


def with_goals(record: Record) -> set[str]:
    """Names of the figures that have a goal."""
    return {figure["name"].strip() for figure in record["figures"] if figure["goal"]}
