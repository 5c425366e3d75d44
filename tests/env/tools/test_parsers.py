"""Tool calls in texts: good ones, bad ones beside good ones, texts without any."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.env.tools.parsers import ToolFormat, parse_tool_calls

FORMATS: tuple[ToolFormat, ...] = ("hermes", "qwen3_xml", "llama_json")
each_format = pytest.mark.parametrize("format", FORMATS)


def written(format: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model is trained to write it."""
    if format == "hermes":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    if format == "llama_json":
        return json.dumps({"name": name, "parameters": arguments})
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def joined(format: ToolFormat, *calls: str) -> str:
    return ("; " if format == "llama_json" else "\n").join(calls)


BROKEN: dict[ToolFormat, str] = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
    "llama_json": '{"name": "f", "parameters": {"a": }}',
}


@each_format
def test_parallel_calls_have_ids_of_their_own(format: ToolFormat) -> None:
    text = joined(format, written(format, "f", {"a": "1"}), written(format, "g", {}))
    content, calls = parse_tool_calls(f"I look.\n{text}", format)
    assert content == "I look.\n"
    assert [(call.name, call.arguments, call.error) for call in calls] == [("f", {"a": "1"}, ""), ("g", {}, "")]
    assert len({call.id for call in calls}) == 2


@each_format
@pytest.mark.parametrize("place", [0, 1, 2])
def test_broken_call_keeps_its_neighbours(format: ToolFormat, place: int) -> None:
    texts = [written(format, name, {"a": "1"}) for name in "gh"]
    texts.insert(place, BROKEN[format])
    _, calls = parse_tool_calls(joined(format, *texts), format)
    assert [call.error != "" for call in calls] == [index == place for index in range(3)]
    assert [call.name for call in calls if not call.error] == ["g", "h"]


@each_format
@pytest.mark.parametrize("text", ["", "The answer is 4.", "The set {1, 2} and \\frac{1}{2}", '{"answer": 4}', "<tool>"])
def test_text_without_calls_is_content(format: ToolFormat, text: str) -> None:
    assert parse_tool_calls(text, format) == (text, [])


@each_format
def test_calls_in_reasoning_are_ignored(format: ToolFormat) -> None:
    call = written(format, "f", {})
    thought = f"<think>I might send {BROKEN[format]} or {call}</think>\n"
    content, calls = parse_tool_calls(thought + call, format)
    assert (content, len(calls)) == (thought, 1)
    assert parse_tool_calls(thought, format) == (thought, [])


@pytest.mark.parametrize(
    ("format", "text", "name"),
    [
        ("hermes", "<tool_call>[1]</tool_call>", ""),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', ""),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', ""),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100_000}', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "f"),
        ("hermes", "<tool_call>", ""),
        ("qwen3_xml", "<tool_call></tool_call>", ""),
        ("qwen3_xml", "<tool_call><function=></function></tool_call>", ""),
        ("qwen3_xml", "<tool_call><function=f><parameter=a>1</tool_call>", "f"),
        ("qwen3_xml", "<tool_call><function=f>1</function></tool_call>", "f"),
        ("qwen3_xml", "<tool_call><function=f>", "f"),
        ("qwen3_xml", "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 2 + "</function></tool_call>", "f"),
        ("llama_json", '{"name": "f"}', "f"),
        ("llama_json", '{"name": "f", "parameters": [1]}', "f"),
        ("llama_json", '{"type": "function", "name": "f", "parameters": {"a": 1}', ""),
    ],
)
def test_bad_call_has_the_reason(format: ToolFormat, text: str, name: str) -> None:
    _, (call,) = parse_tool_calls(text, format)
    assert call.error
    assert (call.name, call.arguments) == (name, {})


def test_quoted_tags_do_not_end_a_call() -> None:
    text = written("hermes", "f", {"a": "</tool_call> <tool_call>"})
    assert [call.arguments for call in parse_tool_calls(text, "hermes")[1]] == [{"a": "</tool_call> <tool_call>"}]
    text = written("qwen3_xml", "f", {"a": "</function></tool_call>\n"})
    assert [call.arguments for call in parse_tool_calls(text, "qwen3_xml")[1]] == [{"a": "</function></tool_call>\n"}]


@pytest.mark.parametrize("end", ["", "\n"])
def test_end_of_text_replaces_the_end_tag(end: str) -> None:
    for format in ("hermes", "qwen3_xml"):
        text = written(format, "f", {"a": "1"}).removesuffix("\n</tool_call>") + end
        assert [(call.name, call.error) for call in parse_tool_calls(text, format)[1]] == [("f", "")]


def test_llama_calls_may_have_a_tag_or_arguments() -> None:
    content, calls = parse_tool_calls('So: <|python_tag|> {"name": "f", "arguments": {"a": {"name": 1}}}', "llama_json")
    assert (content, [(call.name, call.arguments) for call in calls]) == ("So: ", [("f", {"a": {"name": 1}})])


@each_format
@given(parts=st.lists(st.text('<>/{}"=:;, \nafe') | st.sampled_from(["<tool_call>", "</tool_call>", '{"name":'])))
def test_any_text_is_parsed(format: ToolFormat, parts: list[str]) -> None:
    text = "".join(parts)
    content, calls = parse_tool_calls(text, format)
    assert text.startswith(content)
    assert all(call.error or call.name for call in calls)
