"""Which folders the sandbox shows of an interpreter."""

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.sandbox import SandboxUnavailable, interpreter, run_python
from slipstream.sandbox.interpreter import find_interpreter

pytestmark = pytest.mark.usefixtures("sandbox")
SYSTEM = "/usr/bin/python3"
LOOKS = """
import os, sys
print(sys.prefix != sys.base_prefix, [each for each in (HOME + "/id_rsa", HOME + "/bin") if os.path.exists(each)])
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with a key, which every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(folder, "id_rsa").write_text("secret")
        monkeypatch.setenv("HOME", folder)
        yield Path(folder)


async def looks(python: Path, home: Path) -> str:
    """What a program sees: whether it runs in a virtual environment, and of the home folder."""
    result = await run_python(f"HOME = {str(home)!r}\n{LOOKS}", python=str(python))
    return result.stdout.strip() or result.stderr


async def test_link_in_a_home_folder_shows_nothing_of_it(home: Path) -> None:
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to(SYSTEM)
    assert await looks(home / "bin" / "python", home) == "False []"


@pytest.mark.parametrize("link", [None, "env"])
async def test_virtual_environment_in_a_home_folder_is_shown_alone(home: Path, link: str | None) -> None:
    subprocess.run([SYSTEM, "-m", "venv", "--without-pip", home / ".venv"], check=True)
    if link:
        (home / link).symlink_to(home / ".venv")
    assert await looks(home / (link or ".venv") / "bin" / "python", home) == "True []"


def test_home_folder_as_prefix_is_refused(home: Path) -> None:
    venv.create(home, symlinks=True)
    with pytest.raises(SandboxUnavailable, match=r"home folder.*venv"):
        find_interpreter(str(home / "bin" / "python"))


@pytest.mark.parametrize("folder", ["/", "/root", str(Path.home())])
def test_folders_that_hold_homes_are_refused(folder: str) -> None:
    with pytest.raises(SandboxUnavailable):
        interpreter._check_no_home(os.path.realpath(folder))


def test_folder_of_this_interpreter_is_its_own() -> None:
    described = interpreter._described(sys._base_executable, confined=True)  # type: ignore[attr-defined]
    assert {folder for _, folder in described.folders} <= {os.path.realpath(sys.base_prefix)}


def test_missing_interpreter_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="/nowhere/python"):
        find_interpreter("/nowhere/python")
