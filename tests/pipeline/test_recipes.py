"""Every recipe trains for a few steps: real Redis, buffer, engine and learner, a verified ledger at the end."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import yaml

from slipstream.tools.cli import ledger
from tests.pipeline.conftest import ROOT, Pipeline
from tests.pipeline.forked import DEADLINE_S
from tests.pipeline.runs import train

OTHERS = ("constants", "gsm8k", "mbpp", "on_policy_distillation", "sft", "sft_smollm2", "smollm2_arithmetic")
"""Recipes over rows of files, which have tests of their own, and one from a model that another run has trained."""
RECIPES = sorted(path for path in (ROOT / "configs" / "recipes").glob("*.yaml") if path.stem not in OTHERS)
IMAGES = "colours"
"""The recipe whose model only vLLM runs."""
SELF = "self_distillation"
"""The recipe that starts from a model of another run."""
STEPS = 3
CRITIC = ("learner.critic.pretrain_steps=1", "learner.critic.optimizer.warmup_steps=0")
AT_ONCE = 2
"""While one run's engine starts, which keeps a core busy, another's processes wait for each other."""


@pytest.fixture(scope="module")
def runs(
    forks: ForkServerContext, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, tuple[Pipeline, "Future[int]"]]]:
    """Of each recipe that a test wants: its run, and the learner's exit code when it is over."""
    names = {item.name for item in request.session.items}
    wanted = [recipe for recipe in RECIPES if f"test_a_recipe_trains[{recipe.stem}]" in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pipelines = {recipe: Pipeline(tmp_path_factory.mktemp(recipe.stem)) for recipe in wanted}
        yield {
            recipe: (pipeline, pool.submit(train, forks, pipeline, *overrides_of(recipe), file=recipe))
            for recipe, pipeline in pipelines.items()
        }
        pool.shutdown(cancel_futures=True)


def overrides_of(recipe: Path) -> list[str]:
    learner = yaml.safe_load(recipe.read_text(encoding="utf-8"))["learner"]
    return [
        "eval.tasks=0",
        *([] if recipe.stem == IMAGES else ["rollout.engine.name=hf"]),  # it starts in a second
        f"learner.steps={STEPS}",
        "learner.optimizer.warmup_steps=0",
        *(CRITIC if "critic" in learner else []),
        *(["model.path=null", "model.build=digits"] if recipe.stem == SELF else []),
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_recipe_trains(recipe: Path, runs: dict[Path, tuple[Pipeline, "Future[int]"]]) -> None:
    pipeline, exit_code = runs[recipe]
    assert exit_code.result(timeout=2 * DEADLINE_S) == 0
    steps = pipeline.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float)), step
    assert steps[-1]["grad_norm"] > 0
    assert ledger(["verify", str(pipeline.run_folder)]) == 0


def test_a_breached_throttle_brings_the_staleness_to_0(pipeline: Pipeline, forks: ForkServerContext) -> None:
    overrides = (
        "rollout.engine.name=hf", "eval.tasks=0", "buffer.max_staleness=4", "weights.publish_every_steps=1",
        "learner.steps=16", "learner.optimizer.warmup_steps=0",
        "learner.throttle={max_kl: 1.0e-9, hold_steps: 0, learning_rate: true}",
    )  # fmt: skip
    assert train(forks, pipeline, *overrides) == 0
    steps = pipeline.records("step")
    assert [step["throttle/max_staleness"] for step in steps[-2:]] == [0, 0]
    assert steps[-1]["throttle/lr_scale"] < 1
    # What had been issued under the wider bound is used up first.
    assert max(step["staleness_max"] for step in steps) > 0
    assert steps[-1]["staleness_max"] == 0
    assert ledger(["verify", str(pipeline.run_folder)]) == 0
