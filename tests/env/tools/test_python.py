"""Python programs as a tool, in the real sandbox."""

import pytest

from slipstream.configs.schema.run import ToolConfig
from slipstream.env.registry import build_tools
from slipstream.env.tools import python
from slipstream.env.tools.python import Python
from slipstream.env.tools.schema import ToolUnavailable
from slipstream.sandbox import SandboxUnavailable

pytestmark = pytest.mark.usefixtures("sandbox")


async def run(code: str, **options: float) -> str:
    return await Python(**options).tools[0].call({"code": code})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("print(6 * 7)", ["42"]),
        ("print('a'); 1 / 0", ["a\n", "ZeroDivisionError"]),
        ("print(", ["SyntaxError"]),
        ("1 + 1", ["[no output]"]),
        ("raise SystemExit(3)", ["[exit code 3]"]),
        ("x = bytearray(1 << 34)", ["MemoryError", "memory]"]),
    ],
    ids=["prints", "raises", "syntax", "silent", "exits", "memory"],
)
async def test_observation_has_output_and_end(code: str, parts: list[str]) -> None:
    result = await run(code)
    assert all(part in result for part in parts), result


async def test_endless_program_ends_at_its_limit() -> None:
    assert (await run("print(1, flush=True)\nwhile True: pass", wall_s=1.0)) == "1\n[ended by its limit: wall]"


async def test_unusable_sandbox_is_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Python().tools[0]

    async def unavailable(*_: object, **__: object) -> None:
        raise SandboxUnavailable("bwrap is gone")

    monkeypatch.setattr(python, "run_python", unavailable)
    with pytest.raises(ToolUnavailable):
        await tool.call({"code": "print(1)"})


def test_tool_is_built_by_name() -> None:
    (box,) = build_tools((ToolConfig(name="python", options={"cpu_s": 1}),))
    assert [limited.tool.name for limited in box.tools] == ["python"]
