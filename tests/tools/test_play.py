"""`slipstream try`: one episode by keyboard or with a model, through the rollouts' own machinery."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.logging import enable_progress_bar

from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.digits import build_digits_model
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.tools.play import command
from tests.tools.run_command import DEMO


def _typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def _record(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_typed_actions_play_a_game(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _typed(monkeypatch, "down", "nonsense", "down", "right", "right", "down", "right")
    options = "env.options={id: FrozenLake-v1, make: {is_slippery: false}, chat: false}"
    record = _record(capsys, "gymnasium", options, "--keyboard")
    assert [turn["text"] for turn in record["turns"]] == [
        "down", "nonsense", "down", "right", "right", "down", "right",
    ]  # fmt: skip
    (trajectory,) = record["trajectories"]
    assert trajectory["reward"] == trajectory["scores"]["env"] == 1.0
    assert trajectory["scores"] == {"none": 0.0, "env": 1.0, "env/invalid_actions": 1.0}
    generated = [token["text"] for token in trajectory["tokens"] if token["mask"]]
    assert "".join(generated).startswith("down<|im_end|>nonsense<|im_end|>")
    assert max(token["turn"] for token in trajectory["tokens"]) == 7
    assert trajectory["tokens"][0]["turn"] == 0


def test_model_answers_the_task_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_digits_model(tmp_path / "model", seed=1)
    record = _record(capsys, str(DEMO), "--model", str(tmp_path / "model"), "--task", "5", "--eval")
    (trajectory,) = record["trajectories"]
    assert [token["mask"] for token in trajectory["tokens"]] == [0, 0, 0, 0, 1, 1, 1]
    assert all(token["logprob"] < 0 and token["version"] == 0 for token in trajectory["tokens"][4:])
    assert trajectory["scores"].keys() == {"exact_match"}  # a held-out task is scored as in evaluations


def test_tables_show_tokens_turns_and_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    enable_progress_bar()
    assert command([str(DEMO), f"run.dir={tmp_path}"]) == 0
    shown, errors = capsys.readouterr()
    assert "Loading" not in errors  # a progress bar
    assert all(part in shown for part in ("log-prob", "digit_match", "reward", "train task 0"))


def test_reward_of_the_env_is_chosen_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _typed(monkeypatch, "no number")
    record = _record(capsys, "reasoning_gym", "env.options={dataset: prime_factorization}", "--keyboard")
    assert record["trajectories"][0]["scores"] == {"reasoning_gym": 0.0, "reasoning_gym/parsed": 0.0}


def test_end_of_the_input_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    _typed(monkeypatch)
    with pytest.raises(EngineError):
        command(["digits", "env.options.operation=copy", "--keyboard"])


@pytest.mark.parametrize("arguments", [["digits"], ["digits", "--keyboard", "--model", "x"]])
def test_source_of_actions_is_named_once(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--keyboard"):
        command(arguments)


def test_task_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _typed(monkeypatch)
    with pytest.raises(ConfigError, match="744"):
        command(["digits", "env.options={operation: copy, length: 3}", "--keyboard", "--task", "744"])
