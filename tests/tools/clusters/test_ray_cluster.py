"""Runs through `slipstream ray` on a real Ray cluster of three nodes on this machine: `make ray-check`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tools.run_command import DEMO, slipstream, until_within

RAY_PYTHON = "SLIPSTREAM_RAY_PYTHON"
RUN_S = 900.0
"""For a whole run of the demo on a busy machine."""
pytestmark = [
    pytest.mark.skipif(RAY_PYTHON not in os.environ, reason=f"{RAY_PYTHON} names no environment with Ray"),
    pytest.mark.timeout(2 * RUN_S),
]


class Cluster:
    """The cluster, and runs of the demo on it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self._runs: list[Run] = []
        self.address = address

    def __call__(self, action: str) -> None:
        """Ends or adds a node."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{action}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def start(self, folder: Path, *arguments: str) -> "Run":
        options = (f"--address={self.address}", "--plain", f"--python={sys.executable}")
        words = ("ray", DEMO, f"run.dir={folder / 'runs'}", *options, *arguments)
        command = [os.environ[RAY_PYTHON], "-W", "ignore", "-m", "slipstream.tools.cli", *map(str, words)]
        with (folder / "out").open("wb") as output:
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self._runs.append(Run(process, folder))
        return self._runs[-1]

    def kill_runs(self) -> None:
        """Ends what a failed test has left: the actors end with the command."""
        for run in self._runs:
            run.process.kill()
            run.process.wait()


class Run:
    """A run of the demo."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder / "runs" / "demo"
        self._out = folder / "out"

    @property
    def output(self) -> str:
        return self._out.read_text()

    def wait_for_steps(self, steps: int) -> None:
        file = self.folder / "metrics.jsonl"

        def reached() -> bool:
            assert self.process.poll() is None, self.output
            lines = file.read_text().splitlines() if file.exists() else []
            return any(json.loads(line).get("step", 0) >= steps for line in lines)

        until_within(RUN_S, reached)

    def processes(self) -> dict[int, str]:
        """Names of the processes on the nodes, by id: those that an actor started, and what these have started."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                name = (folder / "environ").read_bytes().decode(errors="replace").partition("SLIPSTREAM_HELD=")[2]
                if name and any(str(self.folder) in word for word in command):
                    found[int(folder.name)] = name.partition("\0")[0].rpartition("-")[0]
        return found

    def wait_for_end(self) -> int:
        code = self.process.wait(RUN_S)
        until_within(60.0, lambda: not self.processes())
        return code

    def require_trained(self) -> None:
        """Fails unless the run ended well, with a sound ledger and nothing left."""
        assert self.wait_for_end() == 0, self.output
        assert json.loads((self.folder / "summary.json").read_text())["eval_score"] >= 0.99
        verified = slipstream("ledger", "verify", self.folder, folder=self.folder)
        assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.fixture
def cores() -> tuple[int, ...]:
    """Of the head and the other nodes."""
    return 3, 1, 1


@pytest.fixture
def cluster(cores: tuple[int, ...]) -> Iterator[Cluster]:
    program = Path(__file__).with_name("ray_cluster.py")
    command = [os.environ[RAY_PYTHON], "-W", "ignore", str(program), *map(str, cores)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip()
        cluster = Cluster(process, address)
        yield cluster
        cluster.kill_runs()
        process.stdin.close()  # ends it
        process.wait(60)


def test_lost_node_of_a_server_leaves_run_whole(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "rollout.servers=2")
    run.wait_for_steps(40)
    cluster("kill 0")
    until_within(RUN_S, lambda: "its node was lost" in run.output)
    cluster("add")  # with room for the server that was there
    run.require_trained()
    logs = (run.folder / "logs" / "buffer.jsonl").read_text()
    assert logs.count('"server joined"') >= 3


def test_killed_learner_and_buffer_are_started_again(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "rollout.servers=1", "learner.steps=80", "learner.checkpoint.every_steps=20")
    run.wait_for_steps(30)
    for name in ("buffer", "learner"):
        os.kill(next(process for process, held in run.processes().items() if held == name), signal.SIGKILL)
    assert run.wait_for_end() == 0, run.output
    assert "the learner continues from the checkpoint of step 20" in run.output


@pytest.mark.parametrize("cores", [(0, 4)], ids=["all on one node"])
def test_lost_node_of_all_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "learner.steps=60", "learner.checkpoint.every_steps=20")
    run.wait_for_steps(25)
    cluster("kill 0")
    until_within(RUN_S, lambda: "all processes are placed again" in run.output)
    cluster("add")
    assert run.wait_for_end() == 0, run.output
    (summary,) = run.folder.glob("summary.json")
    assert json.loads(summary.read_text())["eval_score"] is not None


def test_ctrl_c_saves_step_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "rollout.servers=1")
    run.wait_for_steps(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait_for_end() == 128 + signal.SIGINT
    assert list((run.folder / "checkpoints").glob("step-*")), run.output
