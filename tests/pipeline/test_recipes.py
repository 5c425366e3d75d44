"""Every recipe trains for a few steps: real Redis, buffer, vLLM and learner, a verified ledger at the end."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import yaml

from slipstream.configs.folder import RunFolder
from slipstream.configs.load import load_config
from slipstream.tools.ledger.cli import command as ledger
from slipstream.tools.redis_server import redis_command, wait_until_ready
from tests.pipeline.conftest import ROOT, Pipeline
from tests.pipeline.forked import DEADLINE_S, fork_server, running

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STEPS = 3


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServerContext]:
    yield fork_server()


def train(forks: ForkServerContext, pipeline: Pipeline, recipe: Path) -> int | None:
    """Runs a recipe to its end; returns the learner's exit code."""
    overrides = [f"learner.steps={STEPS}", "eval.tasks=0"]
    if "critic" in yaml.safe_load(recipe.read_text(encoding="utf-8"))["learner"]:
        overrides.append("learner.critic.pretrain_steps=1")
    arguments = [str(recipe), *pipeline.arguments(*overrides)[1:]]
    config = load_config(recipe, arguments[1:])
    RunFolder.of(config).create(config)
    with ExitStack() as processes:
        services = processes.enter_context(pipeline.plain_services())
        services.spawn(redis_command(config))
        wait_until_ready(config.redis, DEADLINE_S)
        processes.enter_context(running(forks, "slipstream.buffer.cli", arguments))
        processes.enter_context(running(forks, "slipstream.rollout_servers.cli", arguments))
        learner = processes.enter_context(running(forks, "slipstream.learner.cli", arguments))
        learner.join(DEADLINE_S)
        return learner.exitcode


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_recipe_trains(
    recipe: Path, pipeline: Pipeline, forks: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the forked processes inherit it, and find this package
    assert train(forks, pipeline, recipe) == 0
    steps = pipeline.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float)), step
    assert steps[-1]["grad_norm"] > 0
    assert ledger(["verify", str(pipeline.run_folder)]) == 0
