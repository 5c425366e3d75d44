"""vLLM's plug-in, which stands in for torchvision."""

import importlib.machinery
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.rollout_servers.engines.vllm import plugin

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, plugin._Finder)])


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"]["slipstream"] == f"{plugin.__name__}:register"


@pytest.mark.parametrize("installed", [False, True])
def test_nothing_is_replaced_where_torchvision_is(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("torchvision", None) if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    before = list(sys.meta_path)
    for _ in range(2):  # vLLM may load a plug-in more than once
        plugin.register()
    assert len(sys.meta_path) == len(before) + (not installed)
