"""Configurations that hold only what differs from another."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.configs.load import dump_config, load_config, read_tree
from slipstream.configs.runtime.errors import ConfigError

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problem_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("base", "own", "merged"),
    [
        ("a: {x: 1, y: 2}", "a: {y: 3, z: 4}", {"a": {"x": 1, "y": 3, "z": 4}}),
        ("a: {b: {x: 1}}", "a: {b: {y: 2}}", {"a": {"b": {"x": 1, "y": 2}}}),
        ("a: [1, 2]", "a: [3]", {"a": [3]}),
        ("a: {x: 1}", "a: 5", {"a": 5}),
        ("a: 5", "a: {x: 1}", {"a": {"x": 1}}),
        ("learner: {kl: {coefficient: 1}}", "learner: {kl: null}", {"learner": {"kl": None}}),
        ("rewards: [{name: a, weight: 2}]", "rewards: [{name: b}]", {"rewards": [{"name": "b"}]}),
        ("run: {name: a, seed: 3}", "run: {name: b}", {"run": {"name": "b", "seed": 3}}),
        ("a: 1", "", {"a": 1}),
        ("", "a: 1", {"a": 1}),
    ],
    ids=str,
)
def test_mappings_are_merged_and_everything_else_is_replaced(
    write: Write, base: str, own: str, merged: dict[str, object]
) -> None:
    write("base.yaml", base)
    assert read_tree(write("own.yaml", f"extends: base.yaml\n{own}")) == merged


@pytest.mark.parametrize(
    ("base", "own", "merged"),
    [
        ("loss: {name: gspo, clip_low: 1}", "loss: {name: cispo}", {"loss": {"name": "cispo"}}),
        ("loss: {name: gspo, clip_low: 1}", "loss: {name: gspo, clip_high: 2}",
         {"loss": {"name": "gspo", "clip_low": 1, "clip_high": 2}}),
        ("loss: {name: gspo, clip_low: 1}", "loss: {clip_high: 2}",
         {"loss": {"name": "gspo", "clip_low": 1, "clip_high": 2}}),
        ("loss: {dual_clip: 3}", "loss: {name: gspo}", {"loss": {"name": "gspo"}}),
        ("loss: {dual_clip: 3}", "loss: {name: ppo}", {"loss": {"name": "ppo", "dual_clip": 3}}),
        ("advantage: {epsilon: 1}", "advantage: rloo", {"advantage": {"name": "rloo"}}),
        ("advantage: {epsilon: 1}", "advantage: grpo", {"advantage": {"name": "grpo", "epsilon": 1}}),
        ("advantage: gdpo", "advantage: {epsilon: 1}", {"advantage": {"name": "gdpo", "epsilon": 1}}),
        ("advantage: {name: 'm:f', options: {x: 1}}", "advantage: {name: 'm:g'}", {"advantage": {"name": "m:g"}}),
    ],
    ids=str,
)  # fmt: skip
def test_a_section_with_another_name_keeps_nothing_of_the_one_before(
    write: Write, base: str, own: str, merged: dict[str, object]
) -> None:
    write("base.yaml", f"learner: {{{base}}}")
    assert read_tree(write("own.yaml", f"extends: base.yaml\nlearner: {{{own}}}")) == {"learner": merged}


def test_another_env_does_not_get_the_options_of_the_one_before(write: Write) -> None:
    write("base.yaml", "env: {options: {length: 3}}")
    assert read_tree(write("own.yaml", "extends: base.yaml\nenv: {name: jsonl}")) == {"env": {"name": "jsonl"}}


def test_a_path_is_relative_to_the_file_that_names_it_and_chains_go_on(write: Write) -> None:
    write("base.yaml", "run: {name: a, seed: 1}\nmodel: {build: digits}\n")
    write("team/shared.yaml", "extends: ../base.yaml\nrun: {name: b, log_level: debug}\n")
    own = write("own.yaml", "extends: team/shared.yaml\nrun: {name: c}\n")
    config = load_config(own, ["run.seed=2"])
    assert (config.run.name, config.run.seed, config.run.log_level) == ("c", 2, "debug")
    assert "extends" not in dump_config(config)


def test_a_base_may_lie_in_the_home_directory(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write("home/base.yaml", "learner: {steps: 7}\n")
    own = write("own.yaml", "extends: ~/base.yaml\nmodel: {build: digits}\n")
    assert load_config(own).learner.steps == 7
    with pytest.raises(ConfigError, match=r"own.yaml: extends ~nobody-here/x.yaml: Could not determine home directory"):
        load_config(write("own.yaml", "extends: ~nobody-here/x.yaml\n"))


def test_a_circle_is_an_error_that_names_it(write: Write) -> None:
    one, two = write("one.yaml", "extends: two.yaml"), write("two.yaml", "extends: one.yaml")
    assert problem_of(one) == f"configuration files extend each other in a circle: {one} -> {two} -> {one}"
    itself = write("itself.yaml", "extends: itself.yaml")
    assert problem_of(itself) == f"configuration files extend each other in a circle: {itself} -> {itself}"


def test_a_missing_base_is_an_error_that_names_who_wanted_it(write: Write) -> None:
    own = write("own.yaml", "extends: none.yaml")
    assert problem_of(own) == f"there is no configuration file {own.parent / 'none.yaml'}, which {own} extends"


@pytest.mark.parametrize("value", ["[a.yaml, b.yaml]", "3", "{name: a.yaml}"])
def test_what_is_extended_must_be_one_path(write: Write, value: str) -> None:
    problem = problem_of(write("own.yaml", f"extends: {value}"))
    assert "own.yaml: extends must be the path of one YAML file (given: " in problem


def test_a_base_that_is_no_configuration_is_named(write: Write) -> None:
    base = write("base.yaml", "- a")
    problem = problem_of(write("own.yaml", "extends: base.yaml"))
    assert problem == f"{base} must hold a mapping of sections, not a list"


def test_a_mistake_in_a_base_is_reported_with_those_of_the_file_itself(write: Write) -> None:
    write("base.yaml", "model: {build: digits}\nlearner: {stepz: 3}")
    with pytest.raises(ConfigError) as caught:
        load_config(write("own.yaml", "extends: base.yaml\nrun: {sed: 1}"))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["run.sed", "learner.stepz"]


@pytest.mark.parametrize(("value", "why"), [("/", "Is a directory"), ('"a\\0b"', "embedded null byte")])
def test_what_is_no_file_is_an_error_in_one_line(write: Write, value: str, why: str) -> None:
    assert problem_of(write("own.yaml", f"extends: {value}")).endswith(f" can't be read: {why}")


def test_null_extends_nothing(write: Write) -> None:
    assert read_tree(write("own.yaml", "extends: null\na: 1")) == {"a": 1}
