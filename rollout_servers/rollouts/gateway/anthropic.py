"""Anthropic's messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from slipstream.env.base import Message
from slipstream.rollout_servers.rollouts.gateway.calls import (
    Call,
    CallRefused,
    image_bytes,
    image_part,
    joined,
    text_part,
    tool_call,
)
from slipstream.rollout_servers.rollouts.gateway.chat import event, ignored, positive
from slipstream.rollout_servers.rollouts.gateway.session import Answer, Session


class Body(msgspec.Struct):
    """A request; other parameters are without effect on what is sampled."""

    messages: list[dict[str, Any]]
    max_tokens: int = 0
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tool_choice: dict[str, Any] | None = None


_DECODER: Final = msgspec.json.Decoder(Body)
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: bytes, session: Session) -> Call:
    """The call of a request's body. Raises: CallRefused, msgspec.DecodeError."""
    given = _DECODER.decode(body)
    return _call(given, session, positive(given.max_tokens))


def read_to_count(body: bytes, session: Session) -> Call:
    """The call whose prompt is to be counted. Raises: CallRefused, msgspec.DecodeError."""
    return _call(_DECODER.decode(body), session, None)


def _call(given: Body, session: Session, max_tokens: int | None) -> Call:
    """Raises: CallRefused."""
    if given.tool_choice is not None and given.tool_choice.get("type") == "auto":
        given.tool_choice = None
    try:
        messages = [message for each in given.messages for message in _messages(each)]
        if given.system:
            messages.insert(0, {"role": "system", "content": _content(given.system)})
        tools = [_tool(tool) for tool in given.tools or ()]
    except (KeyError, TypeError, AttributeError) as error:
        raise CallRefused(f"messages: {type(error).__name__}: {error}") from None
    if not given.messages:
        raise CallRefused("messages is empty")
    return Call(
        messages=messages,
        tools=tools,
        max_tokens=max_tokens,
        stop=[each for each in given.stop_sequences or () if each],
        stream=bool(given.stream),
        ignored=ignored(given, session.temperature),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool in OpenAI's form. Raises: CallRefused for one that Anthropic's servers would run."""
    if "input_schema" not in tool:
        raise CallRefused(f"tools: {str(tool.get('type') or tool['name'])[:40]!r} is not supported: it has no schema")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """A message, whose results of tools are messages of their own."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise CallRefused(f"messages: there is no role {str(role)[:40]!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": str(block["tool_use_id"]), "content": _content(block.get("content") or "")}
        for block in content
        if block["type"] == "tool_result"
    ]
    calls = [
        tool_call(str(each["id"]), str(each["name"]), each["input"]) for each in content if each["type"] == "tool_use"
    ]
    said = _content([block for block in content if block["type"] not in ("tool_result", "tool_use")])
    if role == "assistant":
        return [{"role": role, "content": said} | ({"tool_calls": calls} if calls else {})]
    return results if results and not said else [*results, {"role": role, "content": said}]


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    if isinstance(content, str):
        return content
    return joined([_part(block) for block in content if block["type"] not in ("thinking", "redacted_thinking")])


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return text_part(str(block["text"]))
    if block["type"] == "image":
        source = block["source"]
        return image_bytes(source["data"]) if source["type"] == "base64" else image_part(source.get("url"))
    raise CallRefused(f"messages: blocks of type {str(block['type'])[:40]!r} are not supported")


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    calls = answer.node.answer.get("tool_calls") or ()
    if answer.node.answer["content"] or not calls:
        blocks.append({"type": "text", "text": answer.node.answer["content"]})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _head(answer: Answer, session: Session) -> dict[str, Any]:
    return {"id": answer.node.id, "type": "message", "role": "assistant", "model": session.model}


def _end(answer: Answer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stopped_by is not None else _STOP_REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.node.completion.token_ids)}


def whole(answer: Answer, call: Call, session: Session) -> dict[str, Any]:
    """The body of a plain response."""
    return {**_head(answer, session), "content": _blocks(answer), **_end(answer), "usage": _usage(answer)}


def events(answer: Answer, call: Call, session: Session) -> Iterator[bytes]:
    """The events of a streamed response."""

    def named(data: dict[str, Any]) -> bytes:
        return event(data, data["type"])

    start = {**_head(answer, session), "content": [], "stop_reason": None, "stop_sequence": None}
    yield named({"type": "message_start", "message": {**start, "usage": {**_usage(answer), "output_tokens": 0}}})
    for index, block in enumerate(_blocks(answer)):
        empty, deltas = _delta(block)
        yield named({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield named({"type": "content_block_delta", "index": index, "delta": delta})
        yield named({"type": "content_block_stop", "index": index})
    yield named({"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)})
    yield named({"type": "message_stop"})


def _delta(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its content, and that as deltas."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
    arguments = msgspec.json.encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def error(message: str, status: int, code: str) -> dict[str, Any]:
    """The body of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
