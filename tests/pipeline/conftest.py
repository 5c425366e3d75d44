"""Whole runs of `slipstream up` in a folder of the test's own, on ports of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.learner.parallel.mesh import World, join_world, leave_world
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.yaml"
DEADLINE_S = 300.0


@dataclass
class Services:
    """Processes of one run that are started one by one, as on several hosts."""

    arguments: list[str]
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, module: str, *options: str) -> "subprocess.Popen[str]":
        """Starts a module with the run's arguments."""
        return self.spawn([sys.executable, "-m", module, *options, *self.arguments])

    def spawn(self, command: Sequence[str]) -> "subprocess.Popen[str]":
        """Starts a command."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """Ends them all, the youngest first."""
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=60)


@dataclass
class Pipeline:
    """One run's command line and files."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(5)])

    def command(self, *overrides: str) -> list[str]:
        """`slipstream up configs/demo.yaml` with this run's ports and folder."""
        return [sys.executable, "-m", "slipstream.tools.cli", "up", "--plain", *self.arguments(*overrides)]

    def arguments(self, *overrides: str, file: Path = DEMO) -> list[str]:
        """A configuration and its overrides, as every process takes them."""
        redis, buffer, control, store, stream = self.ports
        return [
            str(file), "run.name=test", f"run.dir={self.folder}", f"redis.port={redis}",
            f"buffer.bind=tcp://127.0.0.1:{buffer}", f"buffer.endpoint=tcp://127.0.0.1:{buffer}",
            f"weights.control_port={control}", f"weights.store_port={store}", f"weights.stream_port={stream}",
            *overrides,
        ]  # fmt: skip

    @contextmanager
    def no_services_yet(self, *overrides: str, file: Path = DEMO) -> Iterator["Services"]:
        """Ends all processes that were started through it."""
        services = Services(self.arguments(*overrides, file=file))
        try:
            yield services
        finally:
            services.stop()

    def start(self, *overrides: str) -> "subprocess.Popen[str]":
        """Starts it in a session of its own."""
        return subprocess.Popen(
            self.command(*overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *overrides: str) -> "subprocess.CompletedProcess[str]":
        """Runs it to its end."""
        return subprocess.run(self.command(*overrides), capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return self.folder / "test"

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        summary: dict[str, Any] = json.loads((self.run_folder / "summary.json").read_text())
        return summary

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The metrics records of one kind, so far."""
        path = self.run_folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["kind"] == kind]


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """A run that has not been started."""
    return Pipeline(tmp_path)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of this process alone, with the run's number of threads: others' sums have other roundings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield join_world()
    leave_world()
    torch.set_num_threads(threads)
