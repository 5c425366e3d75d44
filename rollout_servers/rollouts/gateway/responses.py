"""OpenAI's responses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from slipstream.env.base import Message
from slipstream.rollout_servers.rollouts.gateway.calls import (
    Call,
    CallRefused,
    image_part,
    joined,
    text_part,
    tool_call,
)
from slipstream.rollout_servers.rollouts.gateway.chat import event, ignored, positive, sent_calls
from slipstream.rollout_servers.rollouts.gateway.session import Answer, Session


class Body(msgspec.Struct):
    """A request; other parameters are without effect on what is sampled."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None


_DECODER: Final = msgspec.json.Decoder(Body)
_ROLES: Final = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def read(body: bytes, session: Session) -> Call:
    """The call of a request's body. Raises: CallRefused, msgspec.DecodeError."""
    given = _DECODER.decode(body)
    if given.background:
        raise CallRefused("background responses are not supported", code="unsupported_parameter")
    try:
        items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
        messages = _earlier(given.previous_response_id, session) + _messages(items)
        tools = [_tool(tool) for tool in given.tools or ()]
    except (KeyError, TypeError, AttributeError) as error:
        raise CallRefused(f"input: {type(error).__name__}: {error}") from None
    if not messages:
        raise CallRefused("input is empty")
    if given.instructions and given.previous_response_id is None:
        messages.insert(0, {"role": "system", "content": given.instructions})
    return Call(
        messages=messages,
        tools=tools,
        max_tokens=positive(given.max_output_tokens),
        stream=bool(given.stream),
        ignored=ignored(given, session.temperature),
    )


def _earlier(response_id: str | None, session: Session) -> list[Message]:
    """The dialogue up to an earlier response. Raises: CallRefused."""
    if response_id is None:
        return []
    node = session.tree.find(response_id)
    if node is None:
        raise CallRefused(f"there is no response {response_id[:80]!r} in this session", status=404, code="not_found")
    return [message for each in node.path for message in (*each.messages, each.answer)]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: CallRefused for a tool that OpenAI's servers would run."""
    if tool["type"] != "function":
        raise CallRefused(f"tools: {str(tool['type'])[:40]!r} is not supported; functions are")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
    }


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The items as messages; an assistant's text and calls that follow each other are one."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "function_call":
            if last is None:
                messages.append(last := {"role": "assistant", "content": ""})
            call = tool_call(str(item["call_id"]), str(item["name"]), item["arguments"])
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        elif kind == "function_call_output":
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": str(item["call_id"]), "content": content})
        elif kind == "message":
            if item["role"] not in _ROLES:
                raise CallRefused(f"input: there is no role {str(item['role'])[:40]!r}")
            messages.append({"role": _ROLES[item["role"]], "content": _content(item["content"])})
        elif kind != "reasoning":
            raise CallRefused(f"input: items of type {str(kind)[:40]!r} are not supported")
    return list(messages)


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    return content if isinstance(content, str) else joined([_part(part) for part in content])


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "input_text" | "output_text" | "text":
            return text_part(str(part["text"]))
        case "refusal":
            return text_part(str(part["refusal"]))
        case "input_image":
            return image_part(part.get("image_url"))
    raise CallRefused(f"input: parts of type {str(part['type'])[:40]!r} are not supported")


def _output(answer: Answer) -> list[dict[str, Any]]:
    number, output = answer.node.id.removeprefix("chatcmpl-"), list[dict[str, Any]]()
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary, "status": "completed"})
    calls = sent_calls(answer.node.answer)
    if answer.node.answer["content"] or not calls:
        part = {"type": "output_text", "text": answer.node.answer["content"], "annotations": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for index, call in enumerate(calls):
        function = call["function"]
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{index}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return output


def whole(answer: Answer, call: Call, session: Session) -> dict[str, Any]:
    """The body of a plain response."""
    is_cut, tokens = answer.finish_reason == "length", len(answer.node.completion.token_ids)
    return {
        "id": answer.node.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": session.model,
        "output": _output(answer),
        "parallel_tool_calls": True,
        "temperature": session.temperature,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in call.tools],
        "top_p": 1.0,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + tokens,
        },
    }


def events(answer: Answer, call: Call, session: Session) -> Iterator[bytes]:
    """The events of a streamed response."""
    response = whole(answer, call, session)
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    sequence: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        sequence += _item_events(index, item)
    end = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
    sequence.append({"type": end, "response": response})
    for number, data in enumerate(sequence):
        yield event({**data, "sequence_number": number}, data["type"])


def _item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    inner: list[dict[str, Any]] = []
    empty = {**item, "status": "in_progress"}
    if item["type"] == "message":
        (part,) = item["content"]
        empty["content"] = []
        of_part = {**at, "content_index": 0}
        inner = [
            {"type": "response.content_part.added", **of_part, "part": {**part, "text": ""}},
            {"type": "response.output_text.delta", **of_part, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **of_part, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **of_part, "part": part},
        ]
    elif item["type"] == "function_call":
        empty["arguments"] = ""
        inner = [
            {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]},
            {
                "type": "response.function_call_arguments.done",
                **at,
                "name": item["name"],
                "arguments": item["arguments"],
            },
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": empty},
        *inner,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]
