"""Names of envs and rewards: built in, installed, or module:attribute."""

import re
import signal
import sys
from pathlib import Path

import pytest

from slipstream.configs.plugins import find_plugin
from slipstream.configs.runtime.errors import ConfigError

BUILT_IN = {"exact_match": 1, "digit_match": 2}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with two entry points, as pip would leave it."""
    (tmp_path / "my_rewards.py").write_text("def length(answer, reference, info):\n    return len(answer)\n")
    (tmp_path / "my_broken.py").write_text("import there_is_no_such_module\n")
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[slipstream.rewards]\nlength = my_rewards:length\nbroken = my_broken:x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_built_in_name_is_found() -> None:
    assert find_plugin("reward", "digit_match", BUILT_IN) == 2


def test_a_module_and_attribute_are_imported() -> None:
    assert find_plugin("reward", "pathlib:Path", BUILT_IN) is Path


@pytest.mark.usefixtures("installed")
def test_an_installed_entry_point_is_found_by_its_name() -> None:
    assert find_plugin("reward", "length", BUILT_IN)("abc", "", {}) == 3


@pytest.mark.usefixtures("installed")
def test_an_entry_point_whose_module_does_not_import_is_named() -> None:
    problem = (
        r"'my_broken:x': module 'my_broken' can't be imported: ModuleNotFoundError: No module named .*my_broken\.py:1"
    )
    with pytest.raises(ConfigError, match=problem):
        find_plugin("reward", "broken", BUILT_IN)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = 1\ny = undefined\n", "NameError: name 'undefined' is not defined (FILE:2)"),
        ("def f(:\n", "SyntaxError: invalid syntax (my_module.py, line 1)"),
        ("import json\njson.loads('{')\n", "JSONDecodeError: "),
        ("import json\n\njson.loads('{')\n", "(FILE:3)"),
        ("import sys\nsys.exit()\n", "SystemExit:  (FILE:2)"),
        ("from math import pie\n", "ImportError: cannot import name 'pie' from 'math'"),
    ],
)
def test_whatever_a_module_raises_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    file = tmp_path / "my_module.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(why.replace("FILE", str(file)))) as caught:
        find_plugin("reward", "my_module:x", BUILT_IN)
    assert str(caught.value).startswith("reward 'my_module:x': module 'my_module' can't be imported: ")


def test_a_signal_that_comes_during_an_import_ends_the_process_and_is_no_mistake_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_slow_module.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with pytest.raises(SystemExit):
            find_plugin("loss", "my_slow_module:x", {})
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_lists_what_is_there() -> None:
    with pytest.raises(
        ConfigError, match=r"no reward 'q'; known: broken, digit_match, exact_match, length, or module:"
    ):
        find_plugin("reward", "q", BUILT_IN)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("exact_mach", r"there is no reward 'exact_mach' \(did you mean 'exact_match'\?\)"),
        (
            "no_such_module:x",
            "No module named 'no_such_module'; install it, or put the folder that it is in on PYTHONPATH",
        ),
        ("no_such.module:x", "No module named 'no_such'; install it, or"),
        ("pathlib:Pth", "module 'pathlib' has no 'Pth'"),
        (":x", "must look like module:attribute"),
        ("pathlib:", "must look like module:attribute"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_reason(name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        find_plugin("reward", name, BUILT_IN)
