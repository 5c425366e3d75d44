"""From a configuration to an env."""

import re
import sys
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig, ToolConfig
from slipstream.env.base import LONGEST_FINGERPRINT, MOST_TASKS, Action, Observation, ToolCall, has_sessions
from slipstream.env.builtin.digits import Digits
from slipstream.env.builtin.rows import Rows
from slipstream.env.registry import build_env
from slipstream.env.tools.session import ToolEnv

PLUGINS = Path(__file__).with_name("env_plugins.py")


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def test_env_is_built_by_name_or_module_with_its_options(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    assert isinstance(build_env(EnvConfig(name="rows", options={"path": str(path)})), Rows)
    env = build_env(EnvConfig(name="digits", options={"operation": "sort", "eval_tasks": 7}))
    assert isinstance(env, Digits)
    assert env.size("eval") == 7
    env = build_env(EnvConfig(name="env_plugins:Constant", options={"word": "yes"}))
    assert env.task("train", 0).reference == "yes"


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("digts", {}, "'digits'?"),
        ("digits", {"operation": "copy", "lenght": 3}, "'length'?); it accepts operation, length"),
        ("digits", {"operaton": "reverse"}, "'operaton' (did you mean 'operation'?)"),
        ("rows", {}, "'path'; it accepts path, split"),
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
    ("fingerprint", "part"), [(12345, "12345"), ("x" * (LONGEST_FINGERPRINT + 1), "1025")], ids=["number", "long"]
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


def with_tools(*tools: ToolConfig, name: str = "digits") -> EnvConfig:
    return EnvConfig(name=name, options={"operation": "copy"} if name == "digits" else {}, tools=tools)


async def test_tools_are_built_by_name_or_module_with_their_options() -> None:
    tools = [
        ToolConfig(name="calculator"),
        ToolConfig(name="env_plugins:shout"),
        ToolConfig(name="env_plugins:Repeater", options={"times": 2}),
        ToolConfig(name="env_plugins:SHOUT", max_output_characters=16),
        ToolConfig(name="env_plugins:Box"),
    ]
    env = build_env(with_tools(*tools))
    assert isinstance(env, ToolEnv)
    assert has_sessions(env)
    session = env.session(env.task("train", 0))
    names = ["calculator", "shout", "Repeater", "SHOUT", "boxed"]
    observed = await session.reset()
    assert isinstance(observed, Observation)
    assert [schema["function"]["name"] for schema in observed.tools] == names
    arguments = [{"expression": "2+2"}, *[{"text": "a"}] * 2, {"text": "a" * 99}, {"text": "a"}]
    calls = [ToolCall(name, name, given) for name, given in zip(names, arguments, strict=True)]
    turn = await session.step(Action("", (), calls))
    results = [message["content"] for message in turn.observation if not isinstance(message, str)]
    assert results[:3] + results[4:] == ["4", "A", "aa", "A"]
    assert len(results[3]) < 99


@pytest.mark.parametrize(
    ("tools", "part"),
    [
        ([ToolConfig(name="calculater")], "'calculator'?"),
        ([ToolConfig(name="calculator", options={"a": 1})], "no options"),
        ([ToolConfig(name="env_plugins:Repeater", options={"time": 2})], "'times'?); it accepts times"),
        ([ToolConfig(name="env_plugins:Repeater", options={"times": 0})], "ZeroDivisionError"),
        ([ToolConfig(name="env_plugins:not_callable")], "is a int"),
        ([ToolConfig(name="calculator")] * 2, "calculator"),
    ],
    ids=["unknown", "options of a function", "wrong option", "raises", "no tool", "twice"],
)
def test_an_unusable_tool_is_refused(tools: list[ToolConfig], part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        build_env(with_tools(*tools))


def test_tools_for_an_env_with_sessions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.tools"):
        build_env(with_tools(ToolConfig(name="calculator"), name="tests.pipeline.two_turns:TwoTurns"))


@pytest.mark.parametrize(
    ("module", "tool", "extra"),
    [
        ("bm25s", ToolConfig(name="search", options={"path": "corpus.jsonl"}), "search"),
        ("mcp", ToolConfig(name="mcp", options={"command": ["server"]}), "mcp"),
    ],
)
def test_missing_package_of_a_tool_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, tool: ToolConfig, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(f"slipstream[{extra}]")):
        build_env(with_tools(tool))
