"""`examples/plugin` as a user installs it: a package outside of the repository, found by its entry points."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which the example is installed from its wheel."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, folder / "source")  # a build leaves files behind
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", folder / "source"],
        check=True,
        timeout=200,
    )
    return folder / "site"


def _slipstream(installed: Path, *arguments: object) -> str:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.tools.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plugins_of_the_package_are_listed(installed: Path) -> None:
    listed = json.loads(_slipstream(installed, "plugins", "--json"))
    found = {(plugin["kind"], plugin["name"]): plugin for plugin in listed if plugin["package"].startswith("sums-")}
    assert set(found) == {("env", "sums"), ("tool", "add"), ("reward", "last_number")}
    assert not [plugin for plugin in found.values() if plugin["problem"]]


def test_run_file_uses_env_tool_and_reward(installed: Path) -> None:
    report = json.loads(_slipstream(installed, "check", EXAMPLE / "run.yaml", "model={build: text}", "--json"))
    assert report["problems"] == []
    assert report["env"]["name"] == "sums"
    assert report["rewards"]["last_number"] == {"reference": 1.0, "wrong": 0.0}
    assert [tool["function"]["name"] for tool in report["tools"]] == ["add"]
