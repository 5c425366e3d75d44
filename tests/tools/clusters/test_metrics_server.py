"""The figures of a run for autoscalers."""

import json
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from slipstream.configs.paths import RunPaths
from slipstream.tools.clusters.metrics_server import STEPS, figures, serve


def step(number: int, *, learner: float, generator: float, servers: int) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "learner_idle_fraction": learner, "generator_idle_fraction": generator,
        "weights/members": servers,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("learner", "generator", "servers", "wanted"),
    [
        (0.0, 0.0, 4, 4.0),
        (0.5, 0.0, 4, 8.0),
        (0.0, 0.5, 4, 2.0),
        (1.0, 0.0, 4, 16.0),  # four times as many at most
        (0.0, 1.0, 4, 1.0),
        (0.2, 0.2, 3, 3.0),
    ],
)
def test_servers_that_leave_nobody_idle(learner: float, generator: float, servers: int, wanted: float) -> None:
    found = figures([step(1, learner=learner, generator=generator, servers=servers)])
    assert found is not None
    assert found["servers_wanted"] == pytest.approx(wanted)


def test_only_the_last_steps_count() -> None:
    old = [step(number, learner=1.0, generator=0.0, servers=9) for number in range(5)]
    found = figures(old + [step(number, learner=0.0, generator=0.0, servers=2) for number in range(5, 5 + STEPS)])
    assert found == {
        "step": 4 + STEPS, "learner_idle_fraction": 0.0, "generator_idle_fraction": 0.0, "servers": 2.0,
        "servers_wanted": 2.0,
    }  # fmt: skip


def test_answers_follow_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with serve(paths, host="127.0.0.1", port=0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            assert httpx.get(url).status_code == HTTPStatus.SERVICE_UNAVAILABLE
            paths.root.mkdir()
            lines = [{"kind": "eval", "step": 0}, step(3, learner=0.5, generator=0.0, servers=2)]
            paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
            assert httpx.get(url).json()["servers_wanted"] == pytest.approx(4.0)
        finally:
            server.shutdown()
            thread.join()
