"""Loading of YAML files, `extends`, and `key.path=value` overrides."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import dump_config, load_config, override_config, read_tree
from slipstream.configs.runtime.errors import ConfigError
from tests.configs.conftest import DEMO, problems_of, require_problem

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_mistakes_of_all_files_are_reported_with_suggestions(write: Write) -> None:
    write("base.yaml", "model: {build: digits}\nbuffer: {max_stalenes: 4}\nlearner: {steps: none}\n")
    path = write("run.yaml", "extends: base.yaml\nrewards: [{nam: exact_match, name: x}]\n")
    problems = sorted(problems_of(path, "rollout.group_size"))
    expected = (
        ("buffer.max_stalenes: ", "'max_staleness'"),
        ("learner.steps: ", "'none'"),
        ("override 'rollout.group_size'", "key.path=value"),
        ("rewards.0.nam: ", "'name'"),
    )
    assert len(problems) == len(expected)
    for problem, (start, part) in zip(problems, expected, strict=True):
        assert problem.startswith(start)
        assert part in problem


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("- a\n", "mapping list"),
        ("a: [", "run.yaml:1: YAML"),
        ("", "model:"),
        ("learner: {}\nrun: {}\nlearner: {}\n", "run.yaml:3: 'learner'"),
    ],
    ids=["list", "broken", "empty", "repeated key"],
)
def test_unusable_or_missing_file_is_named(write: Write, tmp_path: Path, text: str, parts: str) -> None:
    require_problem(parts, path=write("run.yaml", text))
    require_problem(str(tmp_path / "none.yaml"), path=tmp_path / "none.yaml")


def test_dumped_configuration_loads_as_an_equal_one(write: Write) -> None:
    overrides = [
        "model={path: /models/x}",
        "tracking.swanlab.mode=offline",
        "learner.optimizer.betas=[0.8, 0.95]",
        "env.options={most: .inf, of: {each: [-.inf]}, rate: 1e-7, word: '1e-7', day: 2026-01-31, sign: =, n: null}",
    ]
    config = load_config(DEMO, overrides)
    assert load_config(write("run.yaml", dump_config(config))) == config


# --- values of the wrong kind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("buffer.filters=[{name: pf_pp, keep: 4}]", "buffer.filters.0.name: 'pf_pp' 'pf_ppo'"),
        ("buffer.filters=[{name: pf_ppo, keep: 4, exponnt: 2}]", "buffer.filters.0.exponnt: 'exponent'"),
        ("buffer.filters=[{name: length}, {name: pf_ppo}]", "buffer.filters.1.keep: required"),
        ("buffer.filters=[{keep: 4}]", "buffer.filters.0: name"),
        ("buffer.max_staleness=true", "buffer: max_staleness true"),
        ("buffer.filters=[{name: pf_ppo, keep: yes}]", "buffer.filters.0: keep true"),
        ("run={name: off}", "run.name: quote false"),
        ("run={name: 1e5}", "run.name: quote 100000.0"),
        ("run={dir: 3}", "run.dir: path 3"),
        ("env=digits", "env: mapping {name: 'digits'"),
        ("learner.loss=3", "learner.loss: mapping {name: 3"),
        ("learner=null", "learner: mapping {trainer: null"),
        ("rewards=[exact_match]", "rewards.0: mapping 'exact_match'"),
        ("env.options=3", "env.options: mapping 3"),
        ("rewards=exact_match", "rewards: list 'exact_match'"),
        ("rewards={name: exact_match}", "rewards: list"),
        ("buffer.max_staleness=99999999999999999999", "buffer: max_staleness 4611686018427387904"),
        ("weights.deadline_s=.inf", "weights.deadline_s: finite"),
        ("learner.optimizer.betas=[0.9, 1]", "learner.optimizer.betas.1:"),
        ("run.dir=~nobody-here/runs", "run.dir: home"),
    ],
)
def test_wrong_value_is_named_where_the_user_wrote_it(override: str, parts: str) -> None:
    require_problem(parts, override)


@pytest.mark.parametrize(
    "override",
    [
        "learner.steps=0", "run.seed=-1", "rollout.groups_in_flight=1000000", "rollout.sampling.temperature=0.009",
        "learner.wait_deadline_s=1e10", "buffer.server_deadline_s=1", "rollout.group_size=20000", "learner.ranks=0",
        "rollout.servers=many",
    ],
)  # fmt: skip
def test_value_out_of_bounds_is_named(override: str) -> None:
    require_problem(f"{override.partition('=')[0]}: Input given:", override)


# --- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("learner.steps", "key.path=value"), ("=3", "key.path=value"), ("learner..steps=3", "key.path=value"),
        (".steps=3", "key.path=value"), ("extends=demo.yaml", "extends"), ("learner.steps=[", "YAML"),
        ("env.options={a: 1, a: 2}", "'a'"), ("run.name.first=x", "'name'"), ("rewards.0.weight=2", "'rewards'"),
    ],
)  # fmt: skip
def test_malformed_override_is_named(override: str, part: str) -> None:
    require_problem(f"override {override.split(maxsplit=1)[0]} {part}", override)


def test_override_reaches_into_a_name_alone_and_into_null(write: Write) -> None:
    path = write("run.yaml", "model: {build: digits}\nlearner: {loss: gspo, kl: null}\n")
    config = load_config(path, ["learner.loss.clip_low=0.25", "learner.kl.coefficient=0.5"])
    learner = config.model_dump()["learner"]
    assert (learner["loss"]["name"], learner["loss"]["clip_low"], learner["kl"]["coefficient"]) == ("gspo", 0.25, 0.5)


def test_last_override_wins_and_values_are_yaml() -> None:
    overrides = ["learner.steps=30", "learner.steps=70", "env.options={operation: copy}", "redis.url=null"]
    config = load_config(DEMO, overrides)
    assert (config.learner.steps, config.env.options, config.redis.url) == (70, {"operation": "copy"}, None)
    assert load_config(DEMO, ["env.options.length=4"]).env.options["length"] == 4


@pytest.mark.parametrize(
    ("override", "loss"),
    [
        ("learner.loss=cispo", {"name": "cispo", "entropy_bonus": 0.05}),
        ("learner.loss.name=gspo", {"name": "gspo", "entropy_bonus": 0.05, "clip_low": 3e-4}),
        ("learner.loss.clip_low=0.1", {"name": "ppo", "entropy_bonus": 0.05, "clip_low": 0.1}),
    ],
)
def test_other_name_keeps_what_was_set(override: str, loss: Mapping[str, Any]) -> None:
    config = load_config(DEMO)
    changed = override_config(config, [override])
    assert changed.learner.loss.model_dump().items() >= loss.items()
    assert changed.model_dump(exclude={"learner": {"loss"}}) == config.model_dump(exclude={"learner": {"loss"}})
    with pytest.raises(ConfigError, match="learner\\.los"):
        override_config(config, ["learner.los=ppo"])


@pytest.mark.parametrize(
    ("override", "value"),
    [("123", "123"), ("1e3", "1e3"), ("on", "on"), ("2026-01-31", "2026-01-31"), ("'7'", "7"), ("'on'", "on")],
)
def test_override_of_a_text_needs_no_quotes(override: str, value: str) -> None:
    config = load_config(DEMO, [f"run.name={override}", f"security.keys={override}", f"weights.host={override}"])
    assert (config.run.name, config.security.keys, config.weights.host) == (value, Path(value), value)


@pytest.mark.parametrize("key", ["run.dir", "security.keys", "weights.folder", "rollout.engine.python"])
def test_path_may_begin_with_the_home_directory(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    value: object = load_config(DEMO, [f"{key}=~/here"])
    for name in key.split("."):
        value = getattr(value, name)
    assert value == tmp_path / "here"


def test_extended_path_may_begin_with_home(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write("base.yaml", "a: 7\n")
    assert read_tree(write("other/own.yaml", "extends: ~/base.yaml\n")) == {"a": 7}


# --- extends ---------------------------------------------------------------------------------------------------------


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
        ("env: {options: {length: 3}}", "env: {name: rows}", {"env": {"name": "rows"}}),
        ("a: 1", "", {"a": 1}),
        ("", "a: 1", {"a": 1}),
    ],
    ids=str,
)
def test_mappings_are_merged_and_other_values_replaced(
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
        ("optimizer: {lr: 1}", "optimizer: {name: muon}", {"optimizer": {"lr": 1, "name": "muon"}}),
        ("advantage: {epsilon: 1}", "advantage: rloo", {"advantage": {"name": "rloo"}}),
        ("advantage: {epsilon: 1}", "advantage: grpo", {"advantage": {"name": "grpo", "epsilon": 1}}),
        ("advantage: gdpo", "advantage: {epsilon: 1}", {"advantage": {"name": "gdpo", "epsilon": 1}}),
        ("advantage: {name: 'm:f', options: {x: 1}}", "advantage: {name: 'm:g'}", {"advantage": {"name": "m:g"}}),
    ],
    ids=str,
)  # fmt: skip
def test_section_with_another_name_is_replaced(write: Write, base: str, own: str, merged: dict[str, object]) -> None:
    write("base.yaml", f"learner: {{{base}}}")
    assert read_tree(write("own.yaml", f"extends: base.yaml\nlearner: {{{own}}}")) == {"learner": merged}


def test_extended_path_is_relative_to_the_file_that_names_it(write: Write) -> None:
    write("base.yaml", "run: {name: a, seed: 1}\nmodel: {build: digits}\n")
    write("team/shared.yaml", "extends: ../base.yaml\nrun: {name: b, log_level: debug}\n")
    config = load_config(write("own.yaml", "extends: team/shared.yaml\nrun: {name: c}\n"), ["run.seed=2"])
    assert (config.run.name, config.run.seed, config.run.log_level) == ("c", 2, "debug")
    assert "extends" not in dump_config(config)
    assert read_tree(write("own.yaml", "extends: null\na: 1")) == {"a": 1}


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("~nobody-here/x.yaml", "own.yaml: ~nobody-here/x.yaml: home"),
        ("none.yaml", "none.yaml own.yaml"),
        ("own.yaml", "circle: own.yaml -> own.yaml"),
        ("two.yaml", "circle: own.yaml -> two.yaml -> own.yaml"),
        ("list.yaml", "list.yaml mapping"),
        ("[a.yaml, b.yaml]", "own.yaml: extends"),
        ("3", "own.yaml: extends"),
        ("{name: a.yaml}", "own.yaml: extends"),
        ("/", "directory"),
        ('"a\\0b"', "null byte"),
    ],
)
def test_unusable_extended_path_is_named(write: Write, tmp_path: Path, value: str, parts: str) -> None:
    write("two.yaml", "extends: own.yaml")
    write("list.yaml", "- a")
    (problem,) = problems_of(write("own.yaml", f"extends: {value}"))
    problem = problem.replace(f"{tmp_path}/", "")
    assert len(problem.splitlines()) == 1
    assert not [part for part in parts.split() if part not in problem], problem
