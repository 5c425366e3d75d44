"""The generated reference of configuration keys and metrics."""

from pathlib import Path

import pytest

from slipstream.tools.reference import FOLDER, count_keys, main, pages

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", pages())
def test_committed_page_is_current(name: str) -> None:
    committed = (CHECKOUT / FOLDER / name).read_text(encoding="utf-8")
    assert committed == pages()[name], "run python -m slipstream.tools.reference"


@pytest.mark.parametrize("name", pages())
def test_every_row_has_a_meaning(name: str) -> None:
    rows = [line for line in pages()[name].splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert not [row for row in rows if row.endswith(("|  |", "Of |"))]


def test_number_of_keys_stays_small() -> None:
    assert count_keys() <= 170


def test_section_default_overrides_key_default() -> None:
    critic = pages()["configuration.md"].split("learner.critic.optimizer\n")[1]
    assert critic.index("`1e-05`") < critic.index("`betas`")


def test_command_writes_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert not list(tmp_path.iterdir())
    main([])
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / FOLDER).iterdir()} == pages()
