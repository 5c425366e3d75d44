"""Tools in plain chat messages, for chat templates that have no place for them (`rollout.episode.tool_prompt: system`).

The system message has the schemas and the form of a call; results are messages of the user.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from slipstream.env.base import Message
from slipstream.env.tools.parsers import ToolFormat

Schema = Mapping[str, Any]


def system_text(tools: Sequence[Schema], format: ToolFormat) -> str:
    """The tools' schemas, and how they are called in a format.

    Sources: the chat templates of Qwen2.5 (`hermes`), Qwen3.5 (`qwen3_xml`) and Llama 3.1 (`llama_json`).
    """
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"# Tools\n\nYou may call these functions:\n<tools>\n{schemas}\n</tools>\n\n{_INSTRUCTIONS[format]}"


def call_text(name: str, arguments: Mapping[str, Any], format: ToolFormat) -> str:
    """A call as the policy should write it."""
    return _CALLS[format](name, arguments)


def plain_messages(messages: Sequence[Message], tools: Sequence[Schema], format: ToolFormat) -> list[Message]:
    """The messages of a dialogue without fields for tools.

    The schemas are in the first message, behind an env's own system prompt; calls are part of an answer's text, and
    results that follow each other are one message of the user.
    """
    plain = list[Message]()
    for are_results, found in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results:
            texts = [f"<tool_response>\n{message.get('content', '')}\n</tool_response>" for message in found]
            plain.append({"role": "user", "content": "\n".join(texts)})
        else:
            plain += [_with_calls(message, format) for message in found]
    return _with_system(plain, system_text(tools, format)) if tools else plain


def _with_calls(message: Message, format: ToolFormat) -> Message:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    texts = [call_text(call["name"], call["arguments"], format) for call in calls]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [message.get("content"), *texts]))}


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    (first, *others), text = messages, f"\n\n{text}"
    content = first["content"]
    joined = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [{**first, "content": joined}, *others]


def _hermes_call(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _xml_call(name: str, arguments: Mapping[str, Any]) -> str:
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _llama_call(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


_CALLS: Final[Mapping[ToolFormat, Callable[[str, Mapping[str, Any]], str]]] = {
    "hermes": _hermes_call,
    "qwen3_xml": _xml_call,
    "llama_json": _llama_call,
}
_INSTRUCTIONS: Final[Mapping[ToolFormat, str]] = {
    "hermes": (
        "For each function call, return a JSON object with the function's name and arguments within <tool_call> "
        'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    "qwen3_xml": (
        "For each function call, use this form, with one <parameter> for each argument:\n"
        "<tool_call>\n<function=function-name>\n<parameter=argument-name>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "llama_json": (
        'For each function call, return a JSON object of the form {"name": function name, "parameters": dictionary of '
        "argument name and its value}, several separated by `;`. Do not use variables."
    ),
}
