"""A run whose reward asks a service that fails or hangs for some of the answers."""

import itertools
import threading
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from tests.pipeline.conftest import Pipeline
from tests.pipeline.runs import train
from tests.rewards.functions.http_server import serving

STEPS, GROUPS = 4, 16


class Service:
    """Fails for 3 % of the requests, and never answers 1 %, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.failed = self.hung = 0
        self._numbers = itertools.count(1)

    def __call__(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        number = next(self._numbers)
        if number % 33 == 0:
            self.failed += 1
            return 500, "overloaded"
        if number % 100 == 0:
            self.hung += 1
            self.over.wait(600)
        return 200, {"score": sum(map(str.__eq__, body["answer"], body["reference"])) / 3}


@pytest.mark.timeout(300)
def test_run_with_an_unreliable_reward_drops_no_groups(forks: ForkServerContext, pipeline: Pipeline) -> None:
    service = Service()
    with serving(service) as address:
        reward = (
            f"{{name: correct, function: 'tests.pipeline.asks_a_server:Correct', options: {{address: '{address}'}}}}"
        )
        try:
            overrides = (
                f"rewards=[{reward}]",
                "rollout.engine.name=hf", "scoring={workers: 2, deadline_s: 3}", "eval={tasks: 0, reward: null}",
                f"learner.steps={STEPS}", "learner.optimizer.warmup_steps=0", f"learner.groups_per_step={GROUPS}",
            )  # fmt: skip
            assert train(forks, pipeline, *overrides) == 0
        finally:
            service.over.set()
    assert service.failed >= 10
    assert service.hung >= 4
    last = pipeline.records("step")[-1]
    assert last["buffer/filtered"] == 0
    assert last["buffer/trained"] >= (STEPS - 1) * GROUPS
