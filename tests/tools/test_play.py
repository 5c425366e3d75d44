"""`slipstream try`: one episode by keyboard or with a model, through the rollouts' own machinery."""

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers.utils.logging import enable_progress_bar

from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.digits import build_digits_model
from slipstream.models.tiny import CALLS, build_model
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.tools.play import build_bytes_model, command
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
    assert shown.index("observation") < shown.index("digit_match") < shown.index("log-prob")


def test_long_prompts_are_folded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_bytes_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    prompt = "\n".join(f"line {number}" for number in range(100))
    rows.write_text("\n".join(json.dumps({"prompt": f"{prompt} {n}", "answer": "4"}) for n in range(2)))
    config = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "env": {"name": "rows", "options": {"path": str(rows), "eval_rows": 1}},
        "rewards": [{"name": "exact_match"}],
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    shown = {}
    for flags in ([], ["--full"]):
        _typed(monkeypatch, "4")
        assert command([str(tmp_path / "run.yaml"), "--keyboard", *flags]) == 0
        shown[bool(flags)] = capsys.readouterr().out
    assert "line 50" not in shown[False] and "line 99" in shown[False]
    assert len(shown[False].splitlines()) < 80
    assert "line 50" in shown[True]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["digts"], "'digits'"),
        (["digits", "env.options.operaton=copy"], "'operation'"),
        (["digits", "learner.stps=1"], "'steps'"),
    ],
)
def test_typo_is_answered_before_anything_is_loaded(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.tools.play.build_bytes_model", None)  # it loads transformers
    with pytest.raises(ConfigError, match=named):
        command([*arguments, "--keyboard"])


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ("textarena", ("env.options.game", "TicTacToe-v0")),
        ("reasoning_gym", ("env.options.dataset", "prime_factorization")),
        ("gymnasium", ("env.options.id", "Taxi-v4")),
        ("digits", ("operation (required)",)),
    ],
)
def test_what_an_env_offers_is_listed(env: str, shown: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert command([env, "--list"]) == 0
    found = capsys.readouterr().out
    assert all(part in found for part in shown)


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


# --- an agent by hand -------------------------------------------------------------------------------------------------

DEADLINE_S = 120.0


def _follow(commands: str) -> None:
    """Does what the proposed commands do."""
    for proposed in re.findall("curl (.*)", commands):
        words = [word for word in shlex.split(proposed) if word != "-X"]
        url = next(word for word in words if word.startswith("http"))
        name, _, value = words[words.index("-H") + 1].partition(": ")
        body = words[words.index("-d") + 1] if "-d" in words else ""
        httpx.post(url, headers={name: value}, content=body, timeout=DEADLINE_S).raise_for_status()


class _Screen(io.StringIO):
    """Standard error; the proposed commands are followed in a thread of their own."""

    def write(self, text: str, /) -> int:
        if "Ctrl-C" in text:
            threading.Thread(target=_follow, args=(text,), daemon=True).start()
        return super().write(text)


def test_agent_by_hand_gets_the_tree_of_its_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_model(tmp_path / "model", CALLS, seed=1)
    monkeypatch.setattr(sys, "stderr", _Screen())
    assert command(["lookup", "--gateway", "--json", "--model", str(tmp_path / "model")]) == 0
    shown = capsys.readouterr().out
    record = json.loads(shown[shown.index("{\n") :])  # behind the log of this process
    (node,), (trajectory,) = record["session"]["nodes"], record["trajectories"]
    assert record["session"]["roots"] == trajectory["reward"] == 1
    assert node["context_ids"] + node["token_ids"] == [token["id"] for token in trajectory["tokens"]]
    sampled = len(node["token_ids"])
    assert record["session"]["tokens"] == {"sampled": sampled, "trained": sampled, "unused": 0}


def test_interrupt_gives_the_session_up() -> None:
    arguments = ["-m", "slipstream.tools.cli", "try", "lookup", "--gateway", "--keyboard"]
    with subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        shown = list[str]()
        while not shown or "Ctrl-C" not in shown[-1]:
            shown.append(process.stderr.readline())
            assert shown[-1], shown
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors
    assert process.returncode == 130
