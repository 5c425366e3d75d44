"""The command `slipstream` in this process."""

from contextlib import chdir
from pathlib import Path

import pytest

from slipstream.tools.cli import main


class CommandLine:
    """Runs `slipstream`, or a group of its commands; the output is in `out` and `err`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *group: str) -> None:
        self._capsys = capsys
        self._group = group
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: object, folder: Path = Path()) -> int:
        """The exit code, in a working directory."""
        with pytest.raises(SystemExit) as ended, chdir(folder):
            main([*self._group, *map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)
