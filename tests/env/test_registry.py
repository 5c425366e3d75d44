"""From a configuration to an env."""

import re
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.base import LONGEST_FINGERPRINT, MOST_TASKS
from slipstream.env.builtin.digits import Digits
from slipstream.env.builtin.jsonl import Rows
from slipstream.env.registry import build_env

PLUGINS = Path(__file__).with_name("env_plugins.py")


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def test_env_is_built_by_name_or_module_with_its_options(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    assert isinstance(build_env(EnvConfig(name="jsonl", options={"path": str(path)})), Rows)
    env = build_env(EnvConfig(name="digits", options={"operation": "sort", "eval_tasks": 7}))
    assert isinstance(env, Digits)
    assert env.size("eval") == 7
    env = build_env(EnvConfig(name="env_plugins:Constant", options={"word": "yes"}))
    assert env.task("train", 0).reference == "yes"


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("digts", {}, "'digits'?"),
        ("digits", {"operation": "copy", "lenght": 3}, "'lenght'; it accepts operation, length"),
        ("jsonl", {}, "'path'; it accepts path, eval_path"),
        ("env_plugins:without_tasks", {"a": 1}, "no options"),
        ("env_plugins:without_tasks", {}, "size, task, fingerprint"),
        ("builtins:dict", {}, "size, task, fingerprint"),  # of C, without a signature
        ("env_plugins:not_callable", {}, "'env_plugins:not_callable' is a int"),
    ],
)
def test_an_unusable_factory_is_refused(name: str, options: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        build_env(EnvConfig(name=name, options=options))


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("size", [MOST_TASKS + 1, -1, 2.0])
def test_a_size_out_of_range_is_refused(split: str, size: object) -> None:
    made = EnvConfig(name="env_plugins:Sized", options={"split": split, "size": size})
    with pytest.raises(ConfigError, match=rf"'env_plugins:Sized' has size\('{split}'\)={size};"):
        build_env(made)
    assert build_env(EnvConfig(name=made.name, options={"split": split, "size": MOST_TASKS}))


@pytest.mark.parametrize(
    ("fingerprint", "part"),
    [(12345, "12345"), ("x" * (LONGEST_FINGERPRINT + 1), "1025")],
    ids=["number", "long"],
)
def test_a_fingerprint_that_does_not_fit_the_wire_is_refused(fingerprint: object, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"'env_plugins:Constant' .*fingerprint\(\).*{part}"):
        build_env(EnvConfig(name="env_plugins:Constant", options={"word": fingerprint}))
    assert build_env(EnvConfig(name="env_plugins:Constant", options={"word": "x" * LONGEST_FINGERPRINT}))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("with_a_bug", "TypeError: Constant.__init__() got an unexpected keyword argument 'wrd' ("),
        ("Sizeless", "KeyError: 'eval' ("),
        ("leaves", "SystemExit: 0 ("),
    ],
)
def test_an_error_of_an_env_is_reported_with_its_line(name: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_env(EnvConfig(name=f"env_plugins:{name}"))
    problem = str(caught.value)
    assert problem.startswith(f"env 'env_plugins:{name}' with env.options={{}}: {what}{PLUGINS}:")
    line = int(problem.removesuffix(")").rpartition(":")[2])
    assert "the bug" in PLUGINS.read_text().splitlines()[line - 1]
