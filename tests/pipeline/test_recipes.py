"""Every recipe trains for a few steps with finite figures.

An algorithm of the learner alone trains on the groups of one run of the demo; any other recipe has a run of its own:
real Redis, buffer, engine and learner, a verified ledger at the end.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import yaml

from slipstream.buffer.wire.messages import Group
from slipstream.configs.load import load_config
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.parts import build_train_step
from slipstream.tools.cli import ledger
from tests.pipeline.conftest import ROOT, Pipeline
from tests.pipeline.forked import DEADLINE_S
from tests.pipeline.runs import step_of, train, trained_groups

OTHERS = (
    "constants", "gsm8k", "mbpp", "on_policy_distillation", "smollm2_arithmetic", "smollm2_distill", "smollm2_grpo",
    "smollm2_ppo",
)  # fmt: skip
"""Recipes over rows of files, or from models that other runs have trained, which have tests of their own, as those of
other trainers have."""
RECIPES = sorted(
    path
    for path in (ROOT / "configs" / "recipes").glob("*.yaml")
    if path.stem not in OTHERS and "trainer" not in yaml.safe_load(path.read_text(encoding="utf-8"))["learner"]
)
IMAGES = "colours"
"""The recipe whose model only vLLM runs."""
SELF = "self_distillation"
"""The recipe that starts from a model of another run."""
BASELINE = "remax"
"""The recipe whose groups have the reward of a greedy answer."""
STEPS = 3
PROCESS_REWARD = ("learner.process_reward.optimizer.warmup_steps=0",)
CRITIC = ("learner.critic.pretrain_steps=1", "learner.critic.optimizer.warmup_steps=0")
SMALL = ("learner.groups_per_step=4", "rollout.groups_in_flight=8")
AT_ONCE = 2
"""While one run's engine starts, which keeps a core busy, another's processes wait for each other."""


def is_of_the_learner(recipe: Path) -> bool:
    """Whether the groups that it trains on could be the demo's."""
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    return tree.keys() <= {"extends", "run", "learner"} and recipe.stem != BASELINE


ALGORITHMS = [recipe for recipe in RECIPES if is_of_the_learner(recipe)]
RUNS = [recipe for recipe in RECIPES if recipe not in ALGORITHMS]


def overrides_of(recipe: Path) -> list[str]:
    learner = yaml.safe_load(recipe.read_text(encoding="utf-8"))["learner"]
    return [
        "eval.tasks=0",
        *([] if recipe.stem == IMAGES else ["rollout.engine.name=hf"]),  # it starts in a second
        f"learner.steps={STEPS}",
        "learner.optimizer.warmup_steps=0",
        *(CRITIC if "critic" in learner else []),
        *(PROCESS_REWARD if "process_reward" in learner else []),
        *(["model.path=null", "model.build=digits"] if recipe.stem == SELF else []),
    ]


def require_training(steps: Sequence[Mapping[str, object]]) -> None:
    for step in steps:
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float)), step
    last = steps[-1]["grad_norm"]
    assert isinstance(last, float)
    assert last > 0


@pytest.fixture(scope="module")
def runs(
    forks: ForkServerContext, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, tuple[Pipeline, "Future[int]"]]]:
    """Of each recipe that a test wants: its run, and the learner's exit code when it is over."""
    names = {item.name for item in request.session.items}
    wanted = [recipe for recipe in RUNS if f"test_a_recipe_trains[{recipe.stem}]" in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pipelines = {recipe: Pipeline(tmp_path_factory.mktemp(recipe.stem)) for recipe in wanted}
        yield {
            recipe: (pipeline, pool.submit(train, forks, pipeline, *overrides_of(recipe), *SMALL, file=recipe))
            for recipe, pipeline in pipelines.items()
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("recipe", RUNS, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains(recipe: Path, runs: dict[Path, tuple[Pipeline, "Future[int]"]]) -> None:
    pipeline, exit_code = runs[recipe]
    assert exit_code.result(timeout=2 * DEADLINE_S) == 0
    steps = pipeline.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    require_training(steps)
    assert ledger(["verify", str(pipeline.run_folder)]) == 0


@pytest.fixture(scope="module")
def throttled(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A run of the demo whose throttle is breached at each step."""
    pipeline = Pipeline(tmp_path_factory.mktemp("throttled"))
    overrides = (
        "rollout.engine.name=hf", "eval.tasks=0", "buffer.max_staleness=4", "weights.publish_every_steps=1",
        "learner.steps=16", "learner.optimizer.warmup_steps=0",
        "learner.throttle={max_kl: 1.0e-9, hold_steps: 0, learning_rate: true}",
    )  # fmt: skip
    assert train(forks, pipeline, *overrides) == 0
    return pipeline


def test_a_breached_throttle_brings_the_staleness_to_0(throttled: Pipeline) -> None:
    steps = throttled.records("step")
    assert [step["throttle/max_staleness"] for step in steps[-2:]] == [0, 0]
    assert steps[-1]["throttle/lr_scale"] < 1
    # What had been issued under the wider bound is used up first.
    assert max(step["staleness_max"] for step in steps) > 0
    assert steps[-1]["staleness_max"] == 0
    assert ledger(["verify", str(throttled.run_folder)]) == 0


@pytest.fixture(scope="module")
def groups(throttled: Pipeline) -> list[list[Group]]:
    """Groups of that run's first steps, of several versions."""
    return trained_groups(throttled.run_folder)[:STEPS]


@pytest.mark.parametrize("recipe", ALGORITHMS, ids=lambda recipe: recipe.stem)
def test_an_algorithm_trains(
    recipe: Path, throttled: Pipeline, groups: list[list[Group]], world: World, tmp_path: Path
) -> None:
    config = load_config(recipe, [*overrides_of(recipe), f"run.dir={tmp_path}", "weights.publish_every_steps=1"])
    train_step = build_train_step(config, throttled.run_folder / "initial_model", world)
    steps = enumerate(groups)
    require_training([train_step.run(step_of(each, config, step), unpublished_steps=0) for step, each in steps])
