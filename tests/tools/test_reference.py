"""The generated reference of the configuration."""

from pathlib import Path

import pytest

from slipstream.tools.reference import TARGET, count_keys, main, render

CHECKOUT = Path(__file__).parents[2]


def test_committed_reference_is_current() -> None:
    assert (CHECKOUT / TARGET).read_text(encoding="utf-8") == render(), "run python -m slipstream.tools.reference"


def test_every_key_and_section_is_documented() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `") or line.startswith("## ")]
    assert len(rows) > 100
    assert not [row for row in rows if row.endswith("|  |") or row.endswith("Of |")]


def test_number_of_keys_stays_small() -> None:
    assert count_keys() <= 170


def test_section_default_overrides_key_default() -> None:
    critic = render().split("learner.critic.optimizer\n")[1]
    assert critic.index("`1e-05`") < critic.index("`betas`")


def test_command_writes_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main()
    assert (tmp_path / TARGET).read_text(encoding="utf-8") == render()
