"""OpenAI's chat completions."""

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
from slipstream.rollout_servers.rollouts.gateway.session import Answer, Session

NEUTRAL: Final[Mapping[str, Any]] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "seed": None,
    "top_logprobs": 0,
}
"""Parameters that would change the policy, with the values that don't; others are not applied, and counted."""


class Body(msgspec.Struct):
    """A request; other parameters are without effect on what is sampled."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    seed: int | None = None
    top_logprobs: int | None = None


_DECODER: Final = msgspec.json.Decoder(Body)


def read(body: bytes, session: Session) -> Call:
    """The call of a request's body. Raises: CallRefused, msgspec.DecodeError."""
    given = _DECODER.decode(body)
    if given.n not in (None, 1):
        raise CallRefused(f"n={given.n}: a call has one answer; call again for another", code="unsupported_parameter")
    if given.logit_bias:
        raise CallRefused("logit_bias would change the policy; leave it out", code="unsupported_parameter")
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    return Call(
        messages=read_messages(given.messages),
        tools=given.tools or (),
        max_tokens=positive(given.max_completion_tokens or given.max_tokens),
        stop=[each for each in stop if each],
        logprobs=bool(given.logprobs),
        stream=bool(given.stream),
        ignored=ignored(given, session.temperature),
    )


def ignored(given: msgspec.Struct, temperature: float) -> list[str]:
    """Names of the parameters that are not applied."""
    names = [
        name
        for name, neutral in NEUTRAL.items()
        if getattr(given, name, None) is not None and getattr(given, name) != neutral
    ]
    asked = getattr(given, "temperature", None)
    return names if asked is None or asked == temperature else [*names, "temperature"]


def positive(tokens: int | None) -> int | None:
    """Raises: CallRefused for a number of tokens below 1."""
    if tokens is not None and tokens < 1:
        raise CallRefused(f"{tokens} tokens are no answer: ask for at least 1")
    return tokens


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the form of `Call`. Raises: CallRefused."""
    if not messages:
        raise CallRefused("messages is empty")
    try:
        return [_message(message) for message in messages]
    except (KeyError, TypeError, AttributeError) as error:
        raise CallRefused(f"messages: {type(error).__name__}: {error}") from None


_ROLES: Final = {"developer": "system", "function": "tool"}


def _message(message: Mapping[str, Any]) -> Message:
    role = message["role"]
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise CallRefused(f"messages: there is no role {str(role)[:40]!r}")
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    if role == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id") or "")
    if message.get("name"):
        read["name"] = str(message["name"])
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = [
            tool_call(str(call.get("id") or ""), str(call["function"]["name"]), call["function"].get("arguments", {}))
            for call in message["tool_calls"]
        ]
    return read


def _content(content: object) -> str | list[Mapping[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise CallRefused(f"messages: a content is a text or a list of parts, not {type(content).__name__}")
    return joined([_part(part) for part in content])


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "text":
            return text_part(str(part["text"]))
        case "refusal":
            return text_part(str(part["refusal"]))
        case "image_url":
            return image_part(part["image_url"]["url"])
    raise CallRefused(f"messages: parts of type {str(part['type'])[:40]!r} are not supported")


def sent_calls(answer: Message) -> list[dict[str, Any]]:
    """The tool calls of an answer, with their arguments as JSON."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": msgspec.json.encode(call["function"]["arguments"]).decode(),
            },
        }
        for call in answer.get("tool_calls") or ()
    ]


def whole(answer: Answer, call: Call, session: Session) -> dict[str, Any]:
    """The body of a plain response."""
    message = {"role": "assistant", "content": answer.node.answer["content"] or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls := sent_calls(answer.node.answer):
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, session) if call.logprobs else None,
    }
    return {**_head(answer, session, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, call: Call, session: Session) -> Iterator[bytes]:
    """The events of a streamed response."""
    head = _head(answer, session, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
        return event({**head, "choices": [choice]})

    logprobs: dict[str, Any] = {"logprobs": _logprobs(answer, session)} if call.logprobs else {}
    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.node.answer["content"] or logprobs:
        yield chunk({"content": answer.node.answer["content"]}, **logprobs)
    calls = sent_calls(answer.node.answer)
    if calls:
        yield chunk({"tool_calls": [{"index": index, **each} for index, each in enumerate(calls)]})
    yield chunk({}, answer.finish_reason)
    yield event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event."""
    prefix = f"event: {name}\n".encode() if name else b""
    return prefix + b"data: " + msgspec.json.encode(data) + b"\n\n"


def error(message: str, status: int, code: str) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _head(answer: Answer, session: Session, kind: str) -> dict[str, Any]:
    return {"id": answer.node.id, "object": kind, "created": int(time.time()), "model": session.model}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, len(answer.node.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(answer: Answer, session: Session) -> dict[str, Any]:
    completion = answer.node.completion
    tokens = [session.token_text(token) for token in completion.token_ids]
    content = [
        {"token": token, "logprob": float(logprob), "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
