"""Plug-ins by name: built in, installed as an entry point, or `module:attribute`."""

import math
import re
import signal
import sys
from pathlib import Path

import pytest

from slipstream.configs.registry import Registry, code_fingerprint
from slipstream.configs.runtime.errors import ConfigError

REWARDS = Registry("reward", {"exact_match": "math:e", "digit_match": "math:pi"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with a distribution of two entry points, as pip installs it."""
    (tmp_path / "my_rewards.py").write_text("def length(answer, reference, info):\n    return len(answer)\n")
    (tmp_path / "my_broken.py").write_text("import there_is_no_such_module\n")
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[slipstream.rewards]\nlength = my_rewards:length\nbroken = my_broken:x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_built_in_installed_and_imported_plugins_are_found() -> None:
    assert REWARDS.load("digit_match") == math.pi
    assert REWARDS.load("pathlib:Path") is Path
    assert REWARDS.load("length")("abc", "", {}) == 3


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = 1\ny = undefined\n", "NameError: .*FILE:2"),
        ("def f(:\n", r"SyntaxError: .*my_module.py, line 1"),
        ("import json\njson.loads('{')\n", "JSONDecodeError: "),
        ("import json\n\njson.loads('{')\n", "FILE:3"),
        ("import sys\nsys.exit()\n", "SystemExit: .*FILE:2"),
        ("from math import pie\n", "ImportError: .*'pie' from 'math'"),
    ],
)
def test_error_of_a_module_is_reported_with_its_line(folder: Path, source: str, why: str) -> None:
    file = folder / "my_module.py"
    file.write_text(source)
    match = f"reward 'my_module:x': module 'my_module' .*{why.replace('FILE', re.escape(str(file)))}"
    with pytest.raises(ConfigError, match=match):
        REWARDS.load("my_module:x")


def test_signal_during_an_import_exits_the_process(folder: Path) -> None:
    (folder / "my_slow_module.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with pytest.raises(SystemExit):
            REWARDS.load("my_slow_module:x")
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("q", "'q'; known: broken, digit_match, exact_match, length, "),
        ("exact_mach", r"'exact_mach' \(.* 'exact_match'\?\)"),
        ("broken", r"'my_broken:x': module 'my_broken' .*ModuleNotFoundError: .*my_broken\.py:1"),
        ("no_such_module:x", "'no_such_module'; install it.* PYTHONPATH"),
        ("no_such.module:x", "'no_such'; install it"),
        ("pathlib:Pth", "module 'pathlib' has no 'Pth'"),
        (":x", "module:attribute"),
        ("pathlib:", "module:attribute"),
    ],
)
def test_unknown_plugin_is_refused_with_the_reason(name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        REWARDS.load(name)


CODE = "def score(answer):\n    return len(answer)\n"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (CODE, True),
        ("# One point a letter.\ndef score( answer ):\n\n    return len(answer)  # all\n", True),
        (CODE.replace("len(answer)", "len(answer) + 1"), False),
        ("def score(:\n", False),
    ],
    ids=["equal", "comment and layout", "code", "not Python"],
)
@pytest.mark.parametrize("file", ["pack/__init__.py", "pack/inner/helper.py", "single.py"])
def test_fingerprint_changes_with_code_alone(folder: Path, file: str, change: str, same: bool) -> None:
    for name in ("pack/__init__.py", "pack/inner/helper.py", "single.py"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(CODE)
    module = "single" if file == "single.py" else "pack"
    before = code_fingerprint(module)
    assert before
    (folder / file).write_text(change)
    assert (code_fingerprint(module) == before) is same


@pytest.mark.parametrize("module", ["there_is_none", "sys", "_json"])
def test_module_without_source_has_no_fingerprint(module: str) -> None:
    assert code_fingerprint(module) == ""
