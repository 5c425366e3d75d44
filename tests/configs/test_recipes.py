"""The recipes: each one algorithm over the demo, or a task of its own."""

import re
from pathlib import Path

import pytest
import yaml

from slipstream.configs.load import dump_config, load_config
from tests.configs.conftest import DEMO

RECIPES = sorted((DEMO.parent / "recipes").glob("*.yaml"))

TREES = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in RECIPES}
ALGORITHMS = [
    path
    for path, tree in TREES.items()
    if not ({"trainer", "distill"} & tree["learner"].keys() or "env" in tree) and path.stem != "smollm2_ppo"
]
each_algorithm = pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def test_there_are_recipes() -> None:
    assert len(ALGORITHMS) >= 25


@each_recipe
def test_recipe_is_short_and_names_its_source(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(f"# {path.stem}: ")
    assert re.search(r"arXiv \d{4}\.\d{5}|\w+\.notion\.site", lines[0])
    assert len(lines) < 30


@each_algorithm
def test_recipe_differs_from_the_demo_in_the_algorithm(path: Path) -> None:
    tree, config, demo = yaml.safe_load(path.read_text(encoding="utf-8")), load_config(path), load_config(DEMO)
    assert tree["extends"] == "../demo.yaml"
    assert tree["learner"]["advantage"]["name"] == config.learner.advantage.name
    assert tree["learner"]["loss"]["name"] == config.learner.loss.name
    assert config.run.name == path.stem
    assert (config.model, config.env, config.eval) == (demo.model, demo.env, demo.eval)
    assert config.learner.steps == demo.learner.steps
    assert config.learner.loss.entropy_bonus == demo.learner.loss.entropy_bonus
    assert config.model_copy(update={"run": demo.run}) != demo


@each_recipe
def test_recipe_survives_its_resolved_form(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
