"""A part measured in this process, and a check for processes and files that it leaves."""

import json
import math
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import command
from benchmarks.workers import ONE_THREAD, Workers
from slipstream.tools.launch.supervise import GRACE_S, Child
from tests.contract.subject import children
from tests.pipeline.forked import Forked

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
    before, threads = set(children()), torch.get_num_threads()

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
    assert set(children()) <= before
    assert list(temporary.iterdir()) == []


@pytest.fixture
def forked_workers(forks: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that run a Python module are forked from one that has imported torch: not for measured memory."""
    start = Workers.command

    @contextmanager
    def fork(
        workers: Workers, name: str, command: Sequence[str], environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Child]:
        python, option, module, *arguments = command
        if (python, option) != (sys.executable, "-m"):
            with start(workers, name, command, environment) as child:
                yield child
            return
        console = workers.folder / f"{name}.console"
        run = [json.dumps(dict(environment)), module, *arguments]
        process: Any = Forked(forks, __name__, run, console)
        child = Child(name, process, console, 0, GRACE_S, name, time.monotonic())
        workers._supervisor.children[name] = child
        yield child
        workers._supervisor.stop(name)

    monkeypatch.setattr(Workers, "command", fork)


def main() -> None:
    """Runs a module as `python -m` does, as the leader of a process group. Arguments: ENVIRONMENT MODULE ARGUMENT…"""
    os.setsid()
    _, environment, *sys.argv = sys.argv
    os.environ |= json.loads(environment)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def with_goals(record: Record) -> set[str]:
    """Names of the figures that have a goal."""
    return {figure["name"].strip() for figure in record["figures"] if figure["goal"]}
