"""Episodes with `env.tools`, from the configuration to the trajectory, with a scripted engine."""

from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.buffer.wire import codec
from slipstream.configs.runtime import tracing
from slipstream.configs.schema.rollout import EpisodeConfig
from slipstream.configs.schema.run import EnvConfig, ToolConfig
from slipstream.env.base import Observation
from slipstream.env.registry import build_env
from slipstream.env.tools.parsers import ToolFormat, call_text, parse_tool_calls, plain_messages, system_text
from slipstream.env.tools.schema import ToolUnavailable
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.test_conversation import RESULT, SCHEMA, USER, Scripted, chat_answer, run_config
from tests.rollout_servers.scripted import build_player

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def closed_shop(goods: str) -> str:
    raise ToolUnavailable("the shop is closed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_chat_model(tmp_path_factory.mktemp("tools"), "chatml")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


async def test_calls_run_and_their_results_are_observed(model: Path) -> None:
    env = build_env(EnvConfig(options={"operation": "add"}, tools=(ToolConfig(name="calculator"),)))
    texts = [
        'Two.<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
        '<tool_call>{"name": "calculator", "arguments": {</tool_call><|im_end|>',
        f"{env.task('train', 0).reference}<|im_end|>",
    ]
    tokenizer = Tokenizer(model)
    answers = [chat_answer(tokenizer, text) for text in texts]
    engine = Scripted(answers)
    player = build_player(run_config(model, sampling={"max_tokens": 1000}), model, engine, env=env)
    (trajectory,) = await player.play("train", 0, samples=1)

    assert '"name": "calculator"' in tokenizer.decode_whole(engine.contexts[0])
    added = tokenizer.decode_whole(engine.contexts[1][len(engine.contexts[0]) + len(answers[0].token_ids) :])
    assert "<|im_start|>tool\n42<|im_end|>" in added
    assert "error: not valid JSON" in added
    counts = {name: trajectory.scores[f"env/{name}"] for name in ("tool_calls", "tool_errors", "tool_calls/calculator")}
    assert counts == {"tool_calls": 2, "tool_errors": 1, "tool_calls/calculator": 1}
    assert codec.action_mask(trajectory).sum() == sum(len(answer.token_ids) for answer in answers)


async def test_unavailable_tool_fails_the_group_with_its_reason(model: Path) -> None:
    env = build_env(EnvConfig(options={"operation": "add"}, tools=(ToolConfig(name=f"{__name__}:closed_shop"),)))
    call = '<tool_call>{"name": "closed_shop", "arguments": {"goods": "eggs"}}</tool_call><|im_end|>'
    engine = Scripted([chat_answer(Tokenizer(model), call)])
    player = build_player(run_config(model, sampling={"max_tokens": 1000}), model, engine, env=env)
    with pytest.raises(EpisodeFailed, match="the shop is closed") as caught:
        await player.play("train", 0, samples=1)
    assert caught.value.reason == "env_error"


async def test_spans_of_an_episode_nest(model: Path, tmp_path: Path) -> None:
    """Also those of its tools, which run in the thread of the sessions."""
    env = build_env(EnvConfig(options={"operation": "add"}, tools=(ToolConfig(name="calculator"),)))
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call><|im_end|>'
    engine = Scripted([chat_answer(Tokenizer(model), text) for text in (call, "42<|im_end|>")])
    player = build_player(run_config(model, sampling={"max_tokens": 1000}), model, engine, env=env)
    tracing.start_tracing("file", tmp_path, run="a-run", process="rollout")
    try:
        with tracing.span("group", of=("group", "1"), root=True):
            await player.play("train", 0, samples=1)
    finally:
        tracing.stop_tracing()
    spans = {span.span_id: span for span in tracing.read_spans(tmp_path)}
    nested = sorted((span.name, spans[span.parent].name) for span in spans.values() if span.parent)
    steps = [("env step", "episode"), ("env step", "episode"), ("episode", "group")]
    assert nested == [*steps, *[("generate", "episode")] * 2, ("rewards", "group"), ("tool", "env step")]
    (tool,) = (span for span in spans.values() if span.name == "tool")
    assert tool.attributes == {"tool": "calculator"}
    assert {span.trace for span in spans.values()} == {tracing.derived_ids("a-run", "group", "1")[0]}


# --- tools in a system message, in the format that the parser of answers expects --------------------------------------


FORMATS = get_args(ToolFormat)
MARKS = {"hermes": "<tool_call>", "qwen3_xml": "<function=", "llama_json": '"parameters": '}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("chatml"), "chatml")


def asked(**episode: Any) -> EpisodeConfig:
    return EpisodeConfig(tool_prompt="system", **episode)


@pytest.mark.parametrize("format", FORMATS)
def test_written_calls_are_parsed(format: ToolFormat) -> None:
    arguments = {"text": 'say "<b>"', "more": "x"}
    text = f"So: {call_text('add', arguments, format)}"
    content, (call,) = parse_tool_calls(text, format)
    assert (content, call.name, call.arguments, call.error) == ("So: ", "add", arguments, "")
    assert MARKS[format] in system_text([SCHEMA], format)
    assert all(part in system_text([SCHEMA], format) for part in ("Adds.", '"a": {"type": "integer"}'))


def test_system_prompt_of_the_env_stays_in_front() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "tool_calls": [call]}]
    system, user, answer, results = plain_messages([*messages, RESULT, RESULT], [SCHEMA], "hermes")
    assert str(system["content"]).startswith("Be brief.\n\n# Tools")
    assert (user, answer) == (USER, {"role": "assistant", "content": call_text("add", {"a": 1}, "hermes")})
    assert results["role"] == "user"
    assert results["content"].count("<tool_response>\n42\n</tool_response>") == 2
    assert plain_messages([USER], [], "hermes") == [USER]


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("format", FORMATS)
async def test_policy_sees_and_calls_tools(chatml: Path, format: ToolFormat, history: str) -> None:
    env = build_env(EnvConfig(options={"operation": "add"}, tools=(ToolConfig(name="calculator"),)))
    tokenizer = Tokenizer(chatml)
    call = call_text("calculator", {"expression": "6*7"}, format)
    answers = [chat_answer(tokenizer, f"{call}<|im_end|>"), chat_answer(tokenizer, "42<|im_end|>")]
    engine = Scripted(answers)
    rollout = {"episode": {"tool_prompt": "system", "tool_format": format, "history": history}}
    config = run_config(chatml, sampling={"max_tokens": 900}, **rollout)
    (trajectory,) = await build_player(config, chatml, engine, env=env).play("train", 0, samples=1)
    prompt = tokenizer.decode_whole(engine.contexts[0])
    assert all(part in prompt for part in ('"name": "calculator"', MARKS[format]))
    added = tokenizer.decode_whole(engine.contexts[1][len(engine.contexts[0]) + len(answers[0].token_ids) :])
    assert added == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert trajectory.scores["env/tool_calls/calculator"] == 1


@pytest.mark.parametrize("template", ["chatml", "qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma3"])
def test_templates_of_models_take_a_system_prompt(tmp_path: Path, template: str) -> None:
    format = ChatFormat.of(Tokenizer(build_chat_model(tmp_path, template)), asked())
    format.check(tools=True)
    format.require_visible(Observation([USER], [SCHEMA]))
    assert format.tool_format == ("llama_json" if template == "llama3_1" else "hermes")
