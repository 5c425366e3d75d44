"""What consists of commands names each of them, and finds it."""

import pytest

from slipstream.tools import cli
from slipstream.tools.bench.cli import PARTS
from slipstream.tools.ledger.cli import COMMANDS

NAMED = {
    "slipstream": cli.COMMANDS,
    "slipstream bench": PARTS,
    "slipstream ledger": COMMANDS,
}


@pytest.mark.parametrize("prog", NAMED)
def test_the_help_names_each_command_and_each_has_a_help_of_its_own(
    prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *words = prog.split()
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    overview = capsys.readouterr().out
    for name, (_, purpose) in NAMED[prog].items():
        assert f"  {name} " in overview
        assert purpose in overview
        with pytest.raises(SystemExit, match="0"):
            cli.main([*words, name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: {prog} {name} ")


def test_a_command_that_there_is_not_is_a_mistake_in_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["ledger", "burn"])
    assert "invalid choice: 'burn' (choose from" in capsys.readouterr().err
