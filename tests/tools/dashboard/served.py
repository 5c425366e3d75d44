"""`slipstream dashboard` as a process, and run folders for it."""

import json
import re
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx
import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.learner.metrics.samples import ActionColumns, SampleStore, Source
from slipstream.models.folder import initial_model
from tests.tools.run_command import DEADLINE_S, command, demo_config

HOSTILE = "<script>alert(1)</script>\x1b[31m\x00\u2028\ud800"
"""HTML, a terminal's escape sequence, NUL, a line end of JavaScript, and a half of a surrogate pair."""


class Server:
    """A dashboard that serves."""

    def __init__(self, process: Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)

    def get(self, path: str, status: int = 200, **parameters: Any) -> Any:
        """The JSON of a path below `/api/`."""
        reply = self.client.get(f"/api/{path}", params=parameters or None)
        assert reply.status_code == status, reply.text
        return reply.json()


@contextmanager
def served(*places: Path, ending: int = 0) -> Iterator[Server]:
    """A dashboard over these folders, which SIGTERM ends at last; its exit code is `ending`."""
    with Popen(command("dashboard", *places, "--port", 0), stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it did not start in time"
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "it printed no address"
            server = Server(process, found[0])
            with server.client:
                yield server
            process.terminate()
            assert process.wait(DEADLINE_S) == ending
        finally:
            process.kill()


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "step", "time_s": float(number), "step": number, "steps": 9, "policy_version": number // 2,
        "reward": number / 10, "score/exact_match": 0.5, **fields,
    }  # fmt: skip


def evaluation(version: int, score: float) -> dict[str, Any]:
    return {"kind": "eval", "time_s": version + 0.5, "step": 2 * version + 1, "policy_version": version, "score": score}


def append(path: Path, *records: Mapping[str, Any]) -> None:
    """Appends records to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def make_run(folder: Path, name: str, *overrides: str) -> RunConfig:
    """A run's folder with 4 steps, 2 evaluations, samples of both, events, servers, versions and a warning."""
    config = demo_config(folder, f"run.name={name}", *overrides)
    paths = config.paths
    create_run_folder(paths, config)
    initial_model(config)
    append(paths.metrics, evaluation(0, 0.0), *map(step, range(1, 5)), evaluation(1, 0.25))
    append(paths.root / "events.jsonl", {"time_s": 1.0, "step": 2, "kind": "throttle", "text": HOSTILE})
    append(paths.logs / "learner.jsonl", {"event": HOSTILE, "level": "warning", "timestamp": "2026-01-01T00:00:00Z"})
    server = {"server": "r0", "version": 1, "lag": 1, "idle_fraction": 0.5, "tokens_per_s": 1234.0}
    (paths.root / "servers.json").write_text(json.dumps({"time_s": 1.0, "step": 4, "version": 2, "servers": [server]}))
    append(paths.root / "servers.jsonl", *({"time_s": 10.0 * n, "tokens_per_s": n} for n in range(3)))
    (paths.root / "run.json").write_text(json.dumps([{"started_at": 1000.5, "packages": {"torch": "2.13.0"}}]))
    store = SampleStore(paths.samples, env="digits")
    for number in (1, 3):
        answers = [trajectory([7, 7, number], 0.0), trajectory([3, number, 5], 1.0)]
        store.keep("step", number, answers, [Source("12", 5)] * 2, actions={index: columns() for index in range(2)})
    store.keep("eval", 1, [trajectory([5, 5], 0.5)])
    return config


def trajectory(answer: list[int], reward: float) -> m.Trajectory:
    """An answer to the prompt 5, 4, 3, 13; its first token is of version 0, the others are of version 2."""
    ids = [5, 4, 3, 13, *answer]
    return m.Trajectory(
        token_ids=np.array(ids, dtype=m.TOKEN_DTYPE).tobytes(),
        action_mask=np.array([0] * 4 + [1] * len(answer), dtype=m.MASK_DTYPE).tobytes(),
        behaviour_logprobs=np.full(len(ids), -0.5, dtype=m.LOGPROB_DTYPE).tobytes(),
        spans=[m.VersionSpan(version=0, start=4, end=5), m.VersionSpan(version=2, start=5, end=len(ids))],
        reward=reward,
        scores={"exact_match": reward},
        finish_reason="length",
    )


def columns() -> ActionColumns:
    """Of three actions, the last of which is not trained on."""
    values = np.array([1.0, 2.0, 0.5], dtype="<f4").tobytes()
    return ActionColumns(ratio=values, advantage=values, trained=np.array([1, 1, 0], "<f4").tobytes(), entropy=values)
