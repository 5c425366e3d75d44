"""The code of plug-ins in a server's hello."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.plugins import plugin_code


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({}, []),
        ({"rewards": [{"name": "style", "function": "code_a:style"}]}, ["code_a"]),
        ({"rewards": [{"name": "code_a:style"}, {"name": "code_a:other"}]}, ["code_a"]),
        ({"eval": {"reward": "code_a:style"}}, ["code_a"]),
        ({"env": {"name": "code_a:Env", "tools": [{"name": "code_b:look"}]}}, ["code_a", "code_b"]),
        ({"env": {"name": "mix", "options": {"envs": [{"name": "code_a:Env"}, {"name": "digits"}]}}}, ["code_a"]),
        ({"rewards": [{"name": "by_source", "options": {"rewards": {"gsm8k": "code_b:x"}}}]}, ["code_b"]),
        ({"rewards": [{"name": "judge", "options": {"url": "http://judge:80", "model": "no_such:x"}}]}, []),
    ],
)
def test_hello_has_the_code_of_own_plugins(
    settings: dict[str, Any], modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("code_a", "code_b"):
        (tmp_path / f"{name}.py").write_text("def style(answer, reference, info):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig.model_validate({"model": {"build": "digits"}, **settings})
    found = plugin_code(config.env, (*config.rewards, *config.evaluated))
    assert list(found) == [f"code of {module}" for module in modules]
    assert all(found.values())
