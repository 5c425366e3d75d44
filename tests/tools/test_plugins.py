"""`slipstream plugins` on entry points of packages that a test lays out as installed ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.env.registry import ENVS
from slipstream.tools.plugins import command

MODULE = """
import slipstream_absent_package
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a good env, one that can't be imported, and a reward with a built-in name."""
    info = tmp_path / "plugged-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[slipstream.envs]\nplugged_good = json:loads\nplugged_bad = plugged_broken:Env\n"
        "[slipstream.rewards]\nexact_match = json:dumps\n"
    )
    (tmp_path / "plugged_broken.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def _listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[tuple[str, str], Any]]:
    code = command(["--json", *arguments])
    return code, {
        (plugin["kind"], f"{plugin['name']} {plugin['target']}".strip()): plugin
        for plugin in json.loads(capsys.readouterr().out)
    }


@pytest.mark.usefixtures("installed")
def test_installed_plugins_are_listed_with_package_and_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _listed(capsys)
    assert code == 1
    good = found["env", "plugged_good json:loads"]
    assert (good["package"], good["problem"]) == ("plugged 1.5", "")
    assert "slipstream_absent_package" in found["env", "plugged_bad plugged_broken:Env"]["problem"]
    assert "slipstream" in found["reward", "exact_match json:dumps"]["problem"]
    assert found["reward", "exact_match"]["problem"] == ""
    assert all(plugin["description"] for plugin in found.values() if plugin["package"] == "slipstream")
    assert found["env", "textarena"]["options"]["game"] == ""  # required
    assert found["env", "textarena"]["options"]["opponent"] == '"random"'
    assert found["loss", "ppo"]["options"]["clip_low"] == "0.2"
    assert found["tool", "calculator"]["options"] == found["reward", "none"]["options"] == {}
    assert ENVS.load("plugged_good") is json.loads


@pytest.mark.usefixtures("installed")
def test_table_shows_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--kind", "reward"]) == 1
    shown = capsys.readouterr().out
    assert "plugged 1.5" in shown
    assert "gymnasium" not in shown


def test_every_built_in_env_is_usable_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _listed(capsys, "--kind", "env")
    assert code == 0
    assert {name for _, name in found} >= {"digits", "rows", "gymnasium", "reasoning_gym"}


def test_env_without_its_package_is_listed_with_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.tools.plugins.find_spec", lambda name: None)
    code, found = _listed(capsys, "--kind", "env")
    assert code == 0
    assert "slipstream[reasoning-gym]" in found["env", "reasoning_gym"]["problem"]
