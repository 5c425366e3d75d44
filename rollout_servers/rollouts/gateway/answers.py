"""An engine's answer as the message that an agent gets."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.env.base import Message
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from slipstream.rollout_servers.rollouts.gateway.calls import tool_call


def cut_at_stop(completion: Completion, stop: Sequence[str], tokenizer: Tokenizer) -> tuple[Completion, str | None]:
    """The answer up to the token that completes one of the texts `stop`, as if sampling had ended there."""
    (text,) = tokenizer.decode([completion.token_ids])
    if not any(each in text for each in stop):
        return completion, None
    low, high = 1, len(completion.token_ids)
    while low < high:  # the shortest prefix that has one
        middle = (low + high) // 2
        (part,) = tokenizer.decode([completion.token_ids[:middle]])
        low, high = (low, middle) if any(each in part for each in stop) else (middle + 1, high)
    (part,) = tokenizer.decode([completion.token_ids[:low]])
    spans = [
        type(span)(version=span.version, start=span.start, end=min(span.end, low))
        for span in completion.spans
        if span.start < low
    ]
    shorter = replace(
        completion,
        token_ids=completion.token_ids[:low],
        logprobs=completion.logprobs[:low],
        spans=spans,
        finish_reason="stop",
        kept=None if completion.kept is None else completion.kept[:low],
        routed_experts=completion.routed_experts if low == len(completion.token_ids) else None,
    )
    return shorter, next(each for each in stop if each in part)


def message_of(
    completion: Completion, format: ChatFormat, *, parses: bool, stopped_by: str | None
) -> tuple[Message, str]:
    """The message of an answer, and its reasoning; `parses` its tool calls."""
    (text,) = format.tokenizer.decode([completion.token_ids])
    content, calls = text, list[dict[str, Any]]()
    if parses:
        before, parsed = format.parse(completion)
        if parsed and not any(each.error for each in parsed):
            content = before
            # Nine letters and digits: Mistral's chat templates take no other ids.
            calls = [tool_call(secrets.token_hex(5)[:9], each.name, each.arguments) for each in parsed]
    reasoning, content = split_reasoning(content)
    if stopped_by is not None:
        content = content.partition(stopped_by)[0]
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    return (answer | {"tool_calls": calls} if calls else answer), reasoning


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and the rest of an answer; the template may have opened the reasoning in the prompt."""
    before, mark, after = text.partition("</think>")
    if mark:
        return before.partition("<think>")[2].strip() or before.strip(), after.lstrip("\n")
    if text.startswith("<think>"):
        return text.removeprefix("<think>").strip(), ""
    return "", text
