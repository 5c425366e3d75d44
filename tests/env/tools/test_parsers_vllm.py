"""Contract: vLLM's parsers find the same calls in the same well-formed texts."""

import json
from functools import cache
from typing import Any

import pytest

from slipstream.env.tools.parsers import ToolFormat, parse_tool_calls
from slipstream.models.tiny import PAD
from tests.env.tools.test_parsers import FORMATS, joined, written

pytest.importorskip("vllm")

VLLM: dict[ToolFormat, str] = {"hermes": "hermes", "qwen3_xml": "qwen3_xml", "llama_json": "llama3_json"}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Paris"},
    {"code": 'print("{}")\nif 1 < 2:\n    pass', "language": "Python 3"},
    {"text": "naïve 日本 \\ \t'quoted'", "empty": ""},
]
"""Texts as values: qwen3_xml has no others without a schema."""
NESTED: list[dict[str, Any]] = [{"a": 1, "b": [1.5, None, {"c": True}]}]


class Vocabulary:
    """The part of a tokenizer that vLLM's parsers read."""

    def get_vocab(self) -> dict[str, int]:
        tokens = (PAD, "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
        return {token: index for index, token in enumerate(tokens)}

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()


@cache
def tool_parsers() -> Any:
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager


def calls_of_vllm(text: str, format: ToolFormat) -> tuple[str, list[tuple[str, Any]]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parser = tool_parsers().get_tool_parser(VLLM[format])(Vocabulary(), None)
    request = ChatCompletionRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "u"}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    found = parser.extract_tool_calls(text, request)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    return found.content or "", calls


@pytest.mark.parametrize("format", FORMATS)
def test_vllm_finds_the_same_calls(format: ToolFormat) -> None:
    cases = [*ARGUMENTS, *(NESTED if format != "qwen3_xml" else [])]
    texts = [written(format, "look_up", arguments) for arguments in cases]
    texts += [joined(format, *texts), "no call", f"I look.\n\n{texts[1]}"]
    for text in texts:
        content, calls = parse_tool_calls(text, format)
        their_content, their_calls = calls_of_vllm(text, format)
        assert [(call.name, dict(call.arguments)) for call in calls] == their_calls
        assert not any(call.error for call in calls)
        if format != "llama_json":  # vLLM drops the content beside Llama's calls
            assert content.strip() == their_content.strip()
