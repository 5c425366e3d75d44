"""`slipstream up` with two rollout servers and two learner ranks, while processes are killed."""

import json
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import psutil
import pytest

from slipstream.rollout_servers.cli import PROCESS_VARIABLE
from slipstream.tools.ledger.inspect import verify
from slipstream.tools.ledger.open import OpenLedger, with_ledger
from tests.pipeline.conftest import Pipeline
from tests.pipeline.test_run import alive, wait_until

STEPS = 80
"""The killed server is back after 30, on a busy machine too: its start and the steps share the cores."""
SERVER = "rollout-1"
KILLED = (SERVER, "buffer", "redis")
OVERRIDES = (
    "rollout.engine.name=hf", "rollout.servers=2", "learner.ranks=2", f"learner.steps={STEPS}",
    "learner.checkpoint.every_steps=20", "eval.every_steps=0", "buffer.server_deadline_s=3",
)  # fmt: skip


def servers_of_groups(folder: str) -> Counter[str]:
    """Number of groups that were trained on, by the server that generated them."""
    servers: Counter[str] = Counter()

    async def count(opened: OpenLedger) -> int:
        ids = [each for state in ("trained", "durable") for each in await opened.reader.ids(state)]
        servers.update(record.fields["server"] for record in await opened.reader.groups(ids) if record is not None)
        return 0

    assert with_ledger(folder, count) == 0
    return servers


def kill(up: psutil.Process, names: Collection[str]) -> None:
    """SIGKILL for these children of `slipstream up`, all at once."""
    found = {}
    for child in up.children():
        with suppress(psutil.Error):  # it has ended meanwhile
            # The embedded server overwrites its environment.
            name = "redis" if "valkey" in " ".join(child.cmdline()) else child.environ().get(PROCESS_VARIABLE, "")
            found[name] = child
    for name in names:
        found[name].kill()


@pytest.mark.timeout(600)
def test_killed_processes_return_and_nothing_is_lost(pipeline: Pipeline) -> None:
    run = pipeline.start(*OVERRIDES)
    logs = pipeline.run_folder / "logs"

    def records(process: str, event: str) -> list[dict[str, Any]]:
        lines = (logs / f"{process}.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]

    def happened(process: str, event: str, times: int) -> Callable[[], bool]:
        return lambda: len(records(process, event)) >= times

    try:
        wait_until(lambda: len(pipeline.records("step")) >= 3, "3 steps", run)
        # It may still be loading torch while the other one has begun.
        wait_until(happened(SERVER, "joined the buffer", 1), "both servers", run)
        kill(psutil.Process(run.pid), KILLED)
        wait_until(happened("buffer", "buffer serves", 2), "the buffer's return", run)
        wait_until(happened(SERVER, "joined the buffer", 2), "the server's return", run)
        children = psutil.Process(run.pid).children(recursive=True)
        output = run.communicate(timeout=300)[0]
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0, output
    psutil.wait_procs(children, timeout=5)
    assert not [child for child in children if alive(child)]
    summary = pipeline.summary()
    assert summary["restarts"] == dict.fromkeys(KILLED, 1)
    assert summary["placement"]["processes"].keys() == {"redis", "buffer", "rollout", SERVER, "learner", "learner-1"}
    assert [record["step"] for record in pipeline.records("step")] == list(range(1, STEPS + 1))
    assert summary["groups"]["trained"] == STEPS * 32
    assert verify([str(pipeline.run_folder)]) == 0
    first, second = (record["server"] for record in records(SERVER, "engine ready"))
    trained = servers_of_groups(str(pipeline.run_folder))
    assert first != second
    assert trained[second] > 0
