"""Processes of vLLM, for which a stub stands, after their server was killed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 60.0
FAMILY = """
import time
from multiprocessing import get_context
from slipstream.rollout_servers.engines.vllm.arguments import claim_children

def core(below):
    if below:
        start(below - 1)
    else:
        import slipstream.rollout_servers.engines.vllm.worker  # calls `end_with_server`
        print("started", flush=True)
    time.sleep(600)

def start(below):
    get_context("spawn").Process(target=core, args=(below,)).start()

if __name__ == "__main__":
    claim_children()
    start(1)
    time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[psutil.Popen]:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    with psutil.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        yield process


def test_core_and_worker_end_with_their_server(server: psutil.Popen) -> None:
    assert server.stdout.readline() == b"started\n"
    below = server.children(recursive=True)
    server.kill()
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    assert not alive
