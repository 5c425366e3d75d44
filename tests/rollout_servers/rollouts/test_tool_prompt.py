"""Tools in a system message, in the format that the parser of answers expects."""

from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.configs.schema.rollout import EpisodeConfig
from slipstream.configs.schema.run import EnvConfig, ToolConfig
from slipstream.env.base import Observation
from slipstream.env.registry import build_env
from slipstream.env.tools.parsers import ToolFormat, call_text, parse_tool_calls, plain_messages, system_text
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from slipstream.rollout_servers.tokenizer import Tokenizer
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.test_conversation import RESULT, SCHEMA, USER, Scripted, chat_answer, run_config
from tests.rollout_servers.scripted import build_player

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
