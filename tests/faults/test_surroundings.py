"""A real run whose rollout server, sandbox, judge and env servers are killed in the middle of episodes."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.wire.messages import LedgerCounts
from tests.conftest import free_port
from tests.faults.accounting import History
from tests.faults.processes import DEADLINE_S, Fault, Run, running
from tests.faults.surroundings import TURN_REWARD, TURNS
from tests.pipeline.conftest import ROOT
from tests.rollout_servers.rollouts.chat import build_chat_model

MCP = [str(ROOT / "tests" / "env" / "tools" / "mcp_server.py")]
JUDGE, OPENENV = (["-m", "tests.faults.surroundings", name] for name in ("judge", "openenv"))
BUBBLEWRAP = shutil.which("bwrap")
ENDLESS = "learner.steps=100000"
STEPS_AT_THE_END = 6
FAILURES = {
    "judge killed": ("reward_unavailable", r"judge: \w+: http"),
    "sandbox killed": ("reward_unavailable", r"program: .*signal 9"),
    "sandbox missing": ("reward_unavailable", r"program: .*bwrap"),
    "MCP server killed": ("env_error", r"MCP server http"),
    "OpenEnv server killed": ("env_error", r": Connection\w+Error"),
}
"""Reason and detail of the groups that each fault costs."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(BUBBLEWRAP is None, reason="bubblewrap is not installed")]


@dataclass(frozen=True)
class Survived:
    """The run after its end."""

    history: History
    counts: LedgerCounts
    failures: list[tuple[str, str]]
    steps: list[dict[str, Any]]


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """A folder with bubblewrap alone, which other users may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "bwrap").symlink_to(str(BUBBLEWRAP))
        yield Path(folder)


class Server:
    """A server in a process of its own, at a port that it keeps."""

    def __init__(self, command: list[str]) -> None:
        self._command, self.port = command, free_port()
        self.start()

    def start(self) -> None:
        """Returns once it listens."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, *self._command, str(self.port)], env=environment, stderr=subprocess.DEVNULL
        )
        give_up = time.monotonic() + DEADLINE_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.process.poll() is None, f"{self._command} ended"
            assert time.monotonic() < give_up, f"{self._command} does not listen"
            time.sleep(0.02)

    def kill(self) -> None:
        """Returns once it has ended."""
        self.process.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory, forks: ForkServerContext, programs: Path) -> Survived:
    """Each fault once, some steps apart; then the run ends."""
    pytest.importorskip("mcp")
    pytest.importorskip("websockets")
    folder = tmp_path_factory.mktemp("surroundings")
    with ExitStack() as stack:
        servers = [Server(command) for command in (JUDGE, MCP, OPENENV)]
        for server in servers:
            stack.callback(server.kill)
        model = build_chat_model(folder / "model", "chatml")
        overrides = settings(model, programs, *(server.port for server in servers))
        run = stack.enter_context(running(folder, forks, *overrides))
        for name, server in zip(("judge killed", "MCP server killed", "OpenEnv server killed"), servers, strict=True):
            server.kill()
            until_failed(run, name)
            server.start()
            run.until_steps(3, f"training after {name}")
        until_failed(run, "sandbox killed", lambda: kill_bubblewraps(run))
        (programs / "bwrap").unlink()
        until_failed(run, "sandbox missing")
        (programs / "bwrap").symlink_to(str(BUBBLEWRAP))
        run.inject(Fault("rollout", signal.SIGKILL, away_s=0.0), ENDLESS)
        run.until(lambda: read_counts(run).reissued > 0, "tickets of the killed server are issued again")
        history = run.finish_soon(STEPS_AT_THE_END)
        return Survived(history, read_counts(run), failures(run), run.pipeline.records("step"))


def settings(model: Path, programs: Path, judge: int, mcp: int, openenv: int) -> list[str]:
    """Overrides of the demo, with the ports of the servers."""
    adding = {"url": f"http://127.0.0.1:{mcp}/mcp", "programs": str(programs)}
    playing = {"url": f"ws://127.0.0.1:{openenv}", "action_field": "text", "observation_field": "text"}
    judging = {"url": f"http://127.0.0.1:{judge}/v1", "model": "any", "retries": 0}
    sections: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "env": {
            "name": "mix",
            "options": {
                "envs": [
                    {"name": "tests.faults.surroundings:Adding", "label": "adding", "options": adding},
                    {"name": "openenv", "options": playing},
                ]
            },
        },
        "rewards": [
            {"name": "judge", "options": judging},
            {"name": "program", "function": "tests.faults.surroundings:RunsProgram"},
        ],
        "scoring": {"workers": 1}, "eval": {"tasks": 0}, "rollout.group_size": 2, "rollout.groups_in_flight": 8,
        "rollout.sampling": {"max_tokens": 8}, "rollout.episode": {"tokens": 256},
        "rollout.engine": {"name": "hf", "max_model_len": 512, "max_sequences": 64}, "learner.groups_per_step": 2,
        "buffer.server_deadline_s": 3,
    }  # fmt: skip
    return [f"{key}={json.dumps(value)}" for key, value in sections.items()]


def failures(run: Run) -> list[tuple[str, str]]:
    """Reason and detail of the failed groups so far."""
    lines = (run.config.paths.logs / "buffer.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(record["reason"], record["detail"]) for record in records if {"reason", "detail"} <= record.keys()]


def is_of(name: str, failure: tuple[str, str]) -> bool:
    reason, detail = FAILURES[name]
    return failure[0] == reason and re.search(detail, failure[1]) is not None


def until_failed(run: Run, name: str, act: Callable[[], None] = lambda: None) -> None:
    """Waits for a group that failed because of this fault; calls `act` meanwhile."""

    def has_failed() -> bool:
        act()
        return any(is_of(name, failure) for failure in failures(run))

    run.until(has_failed, f"a group failed by: {name}")


def kill_bubblewraps(run: Run) -> None:
    """Kills the bubblewraps that the rollout server's reward worker has started."""
    for process in psutil.Process(run.processes["rollout"].pid).children(recursive=True):
        try:
            parent = process.parent()  # each has started another one
            if process.name() == "bwrap" and parent is not None and parent.name() != "bwrap":
                process.kill()
        except psutil.NoSuchProcess:
            continue


def read_counts(run: Run) -> LedgerCounts:
    async def read() -> LedgerCounts:
        async with Redis.from_url(run.config.redis.address) as redis:
            return await Ledger(redis, run.config).counts()

    return asyncio.run(read())


def test_run_ends_with_a_sound_ledger(survived: Survived) -> None:
    assert len(survived.history) >= STEPS_AT_THE_END + 5
    assert survived.counts.reissued > 0


@pytest.mark.parametrize("name", FAILURES)
def test_failed_groups_are_counted_with_their_reason(survived: Survived, name: str) -> None:
    assert any(is_of(name, failure) for failure in survived.failures)
    assert survived.counts.reasons[f"filtered:{FAILURES[name][0]}"] > 0


def test_no_failure_of_the_surroundings_is_a_reward(survived: Survived) -> None:
    for step in survived.steps:
        assert step["score/judge"] == step["score/program"] == 1.0
        assert step["score/env"] == pytest.approx(TURNS * TURN_REWARD)
