"""The generated reference of configuration keys and metrics."""

import json
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.reference import FOLDER, command, count_keys, descriptions, main, pages

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
    assert count_keys() <= 282


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


def test_config_lists_the_keys_of_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--key", "learner.loss", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert {key["path"] for key in keys} >= {"learner.loss.clip_low", "learner.loss.options"}
    assert all(key["path"].startswith("learner.loss.") and key["meaning"] for key in keys)
    low = [key for key in keys if key["path"] == "learner.loss.clip_low" and "gspo" in key["variants"]]
    assert [key["default"] for key in low] == ["0.0003"]
    assert command(["--key", "run.seed"]) == 0
    assert capsys.readouterr().out.startswith("run.seed  (int ≥ 0")


def test_config_covers_every_key_of_the_pages() -> None:
    assert len({key.path for key in descriptions()}) == count_keys()


def test_config_suggests_a_known_key() -> None:
    with pytest.raises(ConfigError, match=r"'learner\.loss'"):
        command(["--key", "learner.los"])
