"""The demo by the commands, files and environment of its pods, on this host: `make k8s-check`."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from slipstream.tools.clusters.metrics_server import PORT
from slipstream.tools.keys import make_keys
from tests.tools.clusters.pods import Pods
from tests.tools.conftest import CommandLine
from tests.tools.run_command import DEMO

DEADLINE_S = 280.0
PASSWORD = "a-password"

pytestmark = [
    pytest.mark.skipif("SLIPSTREAM_CLUSTERS_BIN" not in os.environ, reason="make k8s-check runs it"),
    pytest.mark.timeout(600),
]


def until(condition: Callable[[], bool], processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Returns once the condition holds; fails at the deadline, or when a process has ended."""
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


@pytest.fixture
def pods(cli: CommandLine, tmp_path: Path) -> Pods:
    arguments = [
        "--image=i",
        "--nodes=2",
        "--most-servers=2",
        "run.port_base=21800",
        "learner.steps=40",
        "learner.checkpoint.every_steps=10",
        "eval.tasks=16",
    ]
    assert cli("k8s", DEMO, f"--out={tmp_path / 'base'}", *arguments) == 0, cli.err
    make_keys(tmp_path / "keys")
    secrets = {"demo-secrets": {"SLIPSTREAM_REDIS_PASSWORD": PASSWORD}}
    for line in cli.out.splitlines():
        if "--from-file=keys/" in line:
            words = line.partition("   #")[0].split()
            name = words[words.index("generic") + 1]
            files = [word.removeprefix("--from-file=") for word in words if word.startswith("--from-file=")]
            secrets[name] = {Path(file).name: (tmp_path / file).read_text() for file in files}
    (tmp_path / "pods").mkdir()
    return Pods(tmp_path / "base", tmp_path / "pods", secrets)


@pytest.fixture
def started(pods: Pods) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All pods but the learner's, and the buffer's second container."""
    with ExitStack() as stack:
        running: dict[str, subprocess.Popen[bytes]] = {}
        for workload, container in (("redis", 0), ("buffer", 0), ("buffer", 1), ("rollout", 0)):
            process = pods.start(f"demo-{workload}", container)
            running[f"{workload}-{container}"] = process
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield running


def test_demo_is_trained_by_its_pods(pods: Pods, started: dict[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    run = pods.folder / "runs" / "demo"
    until(lambda: pods.probe("demo-redis", "startupProbe"), started.values())
    learner = pods.start("demo-learner")
    try:
        until(lambda: bool(list((run / "checkpoints").glob("step-*"))), [learner, *started.values()])
        found = httpx.get(f"http://127.0.0.1:{PORT}").json()
        assert found["servers"] == 1.0
        assert found["servers_wanted"] >= 1.0
        # As on an evicted pod: the Job must not take it for done, and starts another.
        children = Path(f"/proc/{learner.pid}/task/{learner.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        assert learner.wait(DEADLINE_S) != 0
        learner = pods.start("demo-learner")
        assert learner.wait(DEADLINE_S) == 0, (pods.folder / "demo-learner-0.log").read_text()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            learner.kill()
        learner.wait()
    assert all(process.poll() is None for process in started.values())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 40
    assert (run / "logs" / "demo-rollout-abcde.jsonl").exists()
    log = (run / "logs" / "buffer.jsonl").read_text()
    assert not re.search("secret key|handshake", log), "keys are read by the group, and nobody is refused"
