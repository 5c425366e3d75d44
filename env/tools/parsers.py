"""Tool calls as text, in the formats of the chat templates that models are trained with: read from answers, and written
into plain chat messages for templates that have no place for tools (`rollout.episode.tool_prompt: system`).

A call that can't be read does not affect the others: it is returned with the reason in `ToolCall.error`.

- `hermes` (Hermes, Qwen2.5, Qwen3): `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`
- `qwen3_xml` (Qwen3-Coder, Qwen3.5 and later), whose values are texts:
  `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`
- `llama_json` (Llama 3.1 and later): `{"name": "f", "parameters": {"a": 1}}`, several separated by `;`
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal, NoReturn, get_args

from slipstream.env.base import Message, ToolCall

ToolFormat = Literal["hermes", "qwen3_xml", "llama_json"]

_REASONING_END: Final = "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>")
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_SPACE = re.compile(r"\s*")

Found = tuple[int, int, ToolCall]
"""Start and end of a call in the text, and the call."""


def parse_tool_calls(text: str, format: ToolFormat) -> tuple[str, list[ToolCall]]:
    """The text before the first call, and the calls in order; their ids are unique within the answer.

    Text before the first `</think>` is reasoning; calls in it are ignored.
    """
    reasoning_end = text.find(_REASONING_END)
    begin = 0 if reasoning_end < 0 else reasoning_end + len(_REASONING_END)
    found = list(_SCANNERS[format](text, begin))
    content = text[: found[0][0]] if found else text
    calls = [
        ToolCall(id=f"call_{index}", name=call.name, arguments=call.arguments, error=call.error)
        for index, (_, _, call) in enumerate(found)
    ]
    return content, calls


class _BadCall(ValueError):
    """A call can't be read; has the reason, and the name if that could be read."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def _refuse_constant(constant: str) -> NoReturn:
    raise _BadCall(f"{constant} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, and its end. Raises: _BadCall."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair can't be sent anywhere
    except json.JSONDecodeError as error:
        raise _BadCall(f"not valid JSON: {error.msg} at character {error.pos - start} of the call") from None
    except RecursionError:
        raise _BadCall("nested too deeply") from None
    except UnicodeEncodeError:
        raise _BadCall("not valid Unicode") from None
    except ValueError as error:  # a number of thousands of digits
        raise error if isinstance(error, _BadCall) else _BadCall(str(error)) from None
    return value, end


def _json_call(value: Any, keys: tuple[str, ...]) -> ToolCall:
    """The call in a JSON value whose arguments are under one of `keys`. Raises: _BadCall."""
    if not isinstance(value, Mapping):
        raise _BadCall(f"must be a JSON object with name and {keys[0]}, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _BadCall("has no name")
    given = [key for key in keys if key in value]
    if not given:
        raise _BadCall(f"has no {keys[0]}", name)
    arguments = value[given[0]]
    if not isinstance(arguments, Mapping):
        raise _BadCall(f"{given[0]} must be a JSON object, not {type(arguments).__name__}", name)
    return ToolCall(id="", name=name, arguments=arguments)


def _bad(error: _BadCall) -> ToolCall:
    return ToolCall(id="", name=error.name, arguments={}, error=str(error))


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None, "the pattern matches an empty text"
    return match.end()


def _scan_tagged(text: str, begin: int, read: Callable[[str, int], tuple[ToolCall, int]]) -> Iterator[Found]:
    """Calls between `<tool_call>` and `</tool_call>`, the last of which the end of the text may replace."""
    start = text.find(_OPEN, begin)
    while start >= 0:
        inner = start + len(_OPEN)
        try:
            call, end = read(text, inner)
            end = _skip_space(text, end)
            if text.startswith(_CLOSE, end):
                end += len(_CLOSE)
            elif end < len(text):
                raise _BadCall(f"is followed by {text[end : end + 20]!r} instead of {_CLOSE}", call.name)
        except _BadCall as error:
            call, end = _bad(error), _resume(text, inner)
        yield start, end, call
        start = text.find(_OPEN, end)


def _resume(text: str, inner: int) -> int:
    """Start of the search for the call after a bad one: behind its end tag, or at the next start tag."""
    close, open_ = text.find(_CLOSE, inner), text.find(_OPEN, inner)
    if close >= 0 and not 0 <= open_ < close:
        return close + len(_CLOSE)
    return open_ if open_ >= 0 else len(text)


def _read_hermes(text: str, start: int) -> tuple[ToolCall, int]:
    """Raises: _BadCall."""
    value, end = _decode(text, _skip_space(text, start))
    return _json_call(value, ("arguments",)), end


def _read_xml(text: str, start: int) -> tuple[ToolCall, int]:
    """Raises: _BadCall."""
    function = _FUNCTION.match(text, _skip_space(text, start))
    if function is None or not function[1].strip():
        raise _BadCall("has no <function=name>")
    name, arguments = function[1].strip(), dict[str, str]()
    at = _skip_space(text, function.end())
    while parameter := _PARAMETER.match(text, at):
        key, end = parameter[1].strip(), text.find(_PARAMETER_END, parameter.end())
        if end < 0 or _FUNCTION.search(text, parameter.end(), end) or _PARAMETER.search(text, parameter.end(), end):
            raise _BadCall(f"parameter {key!r} has no {_PARAMETER_END}", name)
        if key in arguments:
            raise _BadCall(f"parameter {key!r} is given twice", name)
        # The template puts each value on lines of its own.
        arguments[key] = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        at = _skip_space(text, end + len(_PARAMETER_END))
    if not text.startswith(_FUNCTION_END, at):
        what = f"{text[at : at + 20]!r} instead of a parameter or" if at < len(text) else "no"
        raise _BadCall(f"has {what} {_FUNCTION_END}", name)
    return ToolCall(id="", name=name, arguments=arguments), at + len(_FUNCTION_END)


def _scan_llama(text: str, begin: int) -> Iterator[Found]:
    """JSON objects with a name and parameters; other objects belong to the content."""
    at = begin
    while match := _LLAMA_CALL.search(text, at):
        start = match.start()
        try:
            value, at = _decode(text, start)
            if "name" not in value:
                continue
            call = _json_call(value, ("parameters", "arguments"))
        except _BadCall as error:
            call, at = _bad(error), max(at, match.end())
        tag = text.rfind(_LLAMA_TAG, begin, start)
        yield (tag if tag >= 0 and not text[tag + len(_LLAMA_TAG) : start].strip() else start), at, call


_SCANNERS: Final[Mapping[ToolFormat, Callable[[str, int], Iterator[Found]]]] = {
    "hermes": lambda text, begin: _scan_tagged(text, begin, _read_hermes),
    "qwen3_xml": lambda text, begin: _scan_tagged(text, begin, _read_xml),
    "llama_json": _scan_llama,
}
assert set(_SCANNERS) == set(get_args(ToolFormat)), "each format has a scanner"


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
    for are_results, consecutive in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results:
            texts = [f"<tool_response>\n{message.get('content', '')}\n</tool_response>" for message in consecutive]
            plain.append({"role": "user", "content": "\n".join(texts)})
        else:
            plain += [_with_calls(message, format) for message in consecutive]
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
