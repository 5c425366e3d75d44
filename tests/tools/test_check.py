"""`slipstream check` and the checks before `slipstream up` starts anything."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import Split, Task
from slipstream.models.digits import build_digits_model
from slipstream.rewards.base import RewardUnavailable
from slipstream.tools.check import command
from slipstream.tools.play import command as play
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.tools.run_command import DEMO, slipstream

VISION = DEMO.parent / "recipes" / "colours.yaml"


def _checked(capsys: pytest.CaptureFixture[str], *overrides: str, config: Path = DEMO) -> tuple[int, dict[str, Any]]:
    code = command([str(config), "--json", *overrides])
    return code, json.loads(capsys.readouterr().out)


def test_sound_configuration_shows_prompts_and_scores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = _checked(capsys, f"run.dir={tmp_path}")
    assert (code, report["problems"]) == (0, [])
    assert report["prompts"]["train"]["tokens"] == 4
    assert report["prompts"]["train"]["text"] == report["prompts"]["train"]["reference"][::-1] + "r"
    assert report["rewards"]["exact_match"] == {"reference": 1.0, "wrong": 0.0}
    assert report["rewards"]["sum"]["reference"] == 1.0  # exact_match has the weight 0
    assert not list(tmp_path.iterdir())


def test_session_is_opened_for_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    options = "env.options={id: Blackjack-v1, chat: false, instructions: '1'}"
    code, report = _checked(capsys, "env.name=gymnasium", options, "rollout.sampling.ignore_eos=false")
    assert code == 1  # the demo's alphabet has digits only
    assert "prompt" in report["problems"][0]


def test_images_count_as_their_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = _checked(capsys, config=VISION)
    assert (code, report["problems"]) == (0, [])
    assert report["prompts"]["train"]["text"].count("<|image_pad|>") == 1
    assert report["prompts"]["train"]["tokens"] > 29, "those of the text and one placeholder"


def test_missing_image_is_named_and_logs_stay_out_of_the_json(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>colour?", "answer": "r", "image": "no.png"}))
    options = "env.options={path: rows.jsonl, image_key: image, chat: true}"
    done = slipstream("check", VISION, "--json", "env.name=rows", options, "eval.tasks=0", folder=tmp_path)
    (problem,) = json.loads(done.stdout)["problems"]
    assert all(part in problem for part in ("no.png", "image_unreadable"))
    assert (done.returncode, "rows read" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.engine.max_model_len=8", "rollout.sampling.max_tokens=6"], ["4 tokens", "4 tokens"]),
        (["rewards=[{name: tests.tools.test_check:failing}]", "eval.reward=null"], ["reward_error"]),
        (["env.name=tests.tools.test_check:Chat", "env.options={}"], ["no chat template", "no chat template"]),
        (["learner.loss.name=tests.tools.test_check:nowhere"], ["nowhere"]),
        (["buffer.filters=[{name: dynamic_sampling, score: env}]"], ["no sessions"]),
    ],
)
def test_problems_are_listed(capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]) -> None:
    code, report = _checked(capsys, *overrides)
    assert (code, report["warnings"]) == (1, [])
    assert len(report["problems"]) == len(parts)
    assert all(part in problem for part, problem in zip(parts, report["problems"], strict=True))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["rewards=[{name: tests.tools.test_check:constant}]", "eval.reward=exact_match"], "nothing"),
        (["env.options={operation: copy, eval_tasks: 0}"], "held-out"),
        (["env.name=tests.tools.test_check:Silent", "env.options={}", "rewards=[{name: exact_match}]"], "none"),
        (["rewards=[{name: tests.tools.test_check:away}]", "eval.reward=null"], "reward_unavailable"),
        (["env.name=tests.tools.test_check:Mixed", "env.options={}"], "task 0 of train"),
    ],
)
def test_what_costs_a_run_only_a_part_is_a_warning(
    capsys: pytest.CaptureFixture[str], overrides: list[str], part: str
) -> None:
    code, report = _checked(capsys, *overrides)
    assert (code, report["problems"]) == (0, [])
    assert part in report["warnings"][0]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose template ignores tools, as SmolLM2's does."""
    return build_chat_model(tmp_path_factory.mktemp("chatml"), "chatml")


def with_tools(model: Path) -> list[str]:
    """Overrides of the demo."""
    return [
        f"model={{path: {model}, dtype: float32}}", "env.tools=[{name: calculator}]", "rollout.engine.name=hf",
        "rollout.engine.kv_cache_bytes=null", "rollout.engine.max_model_len=2000", "rollout.sampling.ignore_eos=false",
    ]  # fmt: skip


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_tools_that_the_policy_never_sees_are_refused(
    capsys: pytest.CaptureFixture[str], chatml: Path, tool_format: str
) -> None:
    overrides = [*with_tools(chatml), f"rollout.episode.tool_format={tool_format}"]
    code, report = _checked(capsys, *overrides)
    (problem,) = report["problems"]
    assert code == 1
    assert all(part in problem for part in (str(chatml), "tool_prompt=system", "chat_template.jinja"))
    with pytest.raises(ConfigError) as refusal:
        play([str(DEMO), "--keyboard", *overrides])
    assert refusal.value.problems == (problem,)


def test_tools_in_a_system_message_are_part_of_the_prompt(capsys: pytest.CaptureFixture[str], chatml: Path) -> None:
    code, report = _checked(capsys, *with_tools(chatml), "rollout.episode.tool_prompt=system")
    assert (code, report["problems"]) == (0, [])
    shown = report["prompts"]["train"]["text"]
    assert all(part in shown for part in ('"name": "calculator"', "<tool_call>", report["tools"][0]["type"]))


def test_built_model_of_texts_sees_tools(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = _checked(capsys, *with_tools(Path("x")), "model={build: text, dtype: float32}")
    assert (code, report["problems"]) == (0, [])
    assert '"name": "calculator"' in report["prompts"]["train"]["text"]


def test_damaged_weights_and_targets_without_layers_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build_digits_model(tmp_path / "model", seed=0)
    model = f"path: {tmp_path / 'model'}, dtype: float32"
    _, report = _checked(capsys, f"model={{{model}, lora: {{targets: [c_attn]}}}}")
    assert "c_attn" in report["problems"][0]
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _, report = _checked(capsys, f"model={{{model}}}")
    assert str(weights) in report["problems"][0]


class Silent:
    """An env without references, whose prompts the demo's model can read."""

    def size(self, split: Split) -> int:
        return 300

    def task(self, split: Split, index: int) -> Task:
        return Task("12c", "")

    def fingerprint(self) -> str:
        return "silent"


class Chat(Silent):
    """An env of chat messages."""

    def task(self, split: Split, index: int) -> Task:
        return Task([{"role": "user", "content": "12c"}], "12")


class Mixed(Chat):
    """An env whose first task is one of chat messages, and whose others are texts."""

    def task(self, split: Split, index: int) -> Task:
        return Task("12c", "12") if index else super().task(split, index)


class Programs(Silent):
    """An env whose references are the tests of a program."""

    def task(self, split: Split, index: int) -> Task:
        return Task("12c", "assert r == 3", {"data_source": "apps"})


_CODE = "{name: code, options: {allow_unconfined: true}}"


@pytest.mark.parametrize("reward", [_CODE, f"{{name: by_source, options: {{rewards: {{apps: {_CODE}}}}}}}"])
def test_reference_of_tests_is_no_answer(capsys: pytest.CaptureFixture[str], reward: str) -> None:
    env = ["env.name=tests.tools.test_check:Programs", "env.options={}"]
    code, report = _checked(capsys, *env, f"rewards=[{reward}]", "eval.reward=null")
    assert (code, report["problems"]) == (0, [])
    assert report["rewards"]["sum"] == {"empty": 0.0, "wrong": 0.0}


def constant(answer: str, reference: str, info: object) -> float:
    return 0.5


def away(answer: str, reference: str, info: object) -> float:
    raise RewardUnavailable("its server does not answer")


def failing(answer: str, reference: str, info: object) -> float:
    raise RuntimeError("not today")


def test_all_names_that_are_wrong_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        names = ["env.name=digts", "rewards=[{name: exact_matc}]", "env.tools=[{name: calculater}]"]
        command([str(DEMO), *names, "rollout.sampling.ignore_eos=false"])
    problems = caught.value.problems
    assert len(problems) == 3
    assert all(name in problem for name, problem in zip(("digits", "calculator", "exact_match"), problems, strict=True))


def test_text_shows_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(DEMO)]) == 0
    shown = capsys.readouterr().out
    assert "744 train tasks" in shown
    assert "reference 1, wrong 0" in shown
