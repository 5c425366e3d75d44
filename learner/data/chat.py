"""Token sequences of demonstrations: chats with the assistant's tokens as targets, prompts with completions, texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.schema.trainers import DataConfig
from slipstream.learner.data.examples import UnusableRow
from slipstream.learner.data.packing import TokenSequence
from slipstream.models.row_sources import Row, plain, value_at
from slipstream.models.tokenizer import PromptError, Tokenizer

log = get_log("learner.rows")

Message = Mapping[str, Any]

PROMPTS: Final = ("prompt", "question", "instruction", "problem")
COMPLETIONS: Final = ("completion", "response", "answer", "output", "solution")
"""Columns by which prompt and completion are recognised, unless `columns` names them; the first that a row has."""


UNENDED_S: Final = 3600.0
"""Time between two warnings of templates without stop tokens."""


@dataclass(frozen=True)
class Chat:
    """A chat; the assistant's turns from `first` on are demonstrations."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    first: int = 0


@dataclass(frozen=True)
class Completion:
    """A text with a completion, without a chat template; the prompt may be empty."""

    prompt: str
    completion: str


def read_demonstration(row: Row, config: DataConfig) -> Chat | Completion:
    """The demonstration in a row, in TRL's or verl's form.

    `messages`, or `prompt` and `completion` as texts or messages, or `text`; `tools` beside messages.

    Raises: UnusableRow when it is malformed.
    """
    messages, text = column(row, config, "messages"), column(row, config, "text")
    prompt, completion = prompt_of(row, config), column(row, config, "completion", COMPLETIONS)
    tools = tools_of(column(row, config, "tools"))
    if messages is not None:
        return Chat(messages_of(messages), tools)
    if prompt is not None and completion is not None:
        return with_completion(prompt, completion, tools, chat=config.chat)
    if isinstance(text, str):
        return Completion("", text)
    raise UnusableRow(
        "malformed",
        f"has neither messages, nor prompt and completion, nor text (learner.trainer.data.columns); its columns are "
        f"{sorted(row)}",
    )


def column(row: Row, config: DataConfig, name: str, others: Sequence[str] = ()) -> Any:
    """The value of a column; None if there is none."""
    if name in config.columns:
        return plain(value_at(row, config.columns[name]), images=True)
    found = next((key for key in others or (name,) if row.get(key) is not None), None)
    return None if found is None else plain(row[found], images=True)


def prompt_of(row: Row, config: DataConfig) -> Any:
    """The value of the prompt's column; None if there is none.

    Raises: UnusableRow for an instruction with an input of its own, which would be lost.
    """
    if "prompt" not in config.columns and row.get("instruction") and row.get("input") and row.get("prompt") is None:
        raise UnusableRow(
            "malformed",
            "has an instruction and an input: join them in one column, or choose one (learner.trainer.data.columns)",
        )
    return column(row, config, "prompt", PROMPTS)


def with_completion(
    prompt: Any, completion: Any, tools: Sequence[Mapping[str, Any]], *, chat: bool
) -> Chat | Completion:
    """An answer to a prompt, both texts or messages; of two texts no chat, unless that is requested."""
    if isinstance(prompt, str) and isinstance(completion, str) and not chat:
        return Completion(prompt, completion)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_of(prompt)
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else messages_of(completion)
    return Chat([*before, *after], tools, first=len(before))


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them. Raises: UnusableRow."""
    if not isinstance(value, list) or not value:
        raise UnusableRow("malformed", f"messages must be a list with at least one, not {_short(value)}")
    return [_message(each) for each in value]


def _message(value: Any) -> dict[str, Any]:
    """A message as templates expect it: contents of text parts joined, arguments of calls decoded."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UnusableRow("malformed", f"a message needs a role: {_short(value)}")
    content, calls = value.get("content"), value.get("tool_calls")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
            raise UnusableRow("images", f"a message has parts other than text: {_short(content)}")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and (calls or value["role"] == "assistant"):
        content = ""
    if not isinstance(content, str):
        raise UnusableRow("malformed", f"the content of a message must be a text: {_short(value)}")
    message = {**value, "content": content}
    if not calls:
        return message
    if not isinstance(calls, list):
        raise UnusableRow("malformed", f"tool_calls must be a list: {_short(calls)}")
    return {**message, "tool_calls": [_call(each) for each in calls]}


def _call(value: Any) -> dict[str, Any]:
    """A tool call with its arguments as a mapping: data sets have them as JSON text too."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow("malformed", f"a tool call needs a function with a name: {_short(value)}")
    arguments = _decoded(function.get("arguments", {}), "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise UnusableRow("malformed", f"the arguments of a tool call must be an object: {_short(arguments)}")
    others = {key: each for key, each in value.items() if key not in ("name", "arguments")}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Schemas of tools; none without a value. Raises: UnusableRow."""
    tools = _decoded(value, "tools")
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRow("malformed", f"tools must be a list of schemas: {_short(tools)}")
    return tools


def _decoded(value: Any, what: str) -> Any:
    """JSON text as its value, other values as they are."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UnusableRow("malformed", f"{what} are no JSON: {error}") from None


def _short(value: Any) -> str:
    return repr(value)[:200]


@dataclass(frozen=True)
class DemonstrationEncoder:
    """Makes token sequences of demonstrations, under a model's tokenizer and chat template."""

    tokenizer: Tokenizer
    assistant_only: bool
    """Targets are the assistant's tokens, or those of the completion; otherwise all."""
    unended: LogInterval = field(default_factory=lambda: LogInterval(UNENDED_S))

    def encode(self, demonstration: Chat | Completion) -> list[TokenSequence]:
        """Its token sequences, with its targets as actions: one, or of some chats one for each answer.

        Raises: UnusableRow.
        """
        try:
            if isinstance(demonstration, Completion):
                sequences = [self._completion(demonstration)]
            else:
                sequences = self._chat(demonstration)
        except PromptError as error:
            raise UnusableRow("template", str(error)) from error
        targets = [sequence for sequence in sequences if sequence.action_mask[1:].any()]
        if not targets:
            raise UnusableRow("no_target", "no token of it is in the loss")
        return targets

    def _completion(self, text: Completion) -> TokenSequence:
        """Prompt, completion and the stop token."""
        before = self.tokenizer.encode(text.prompt) if text.prompt else []
        whole = self.tokenizer.encode(text.prompt + text.completion)
        if not _is_prefix(before, whole):  # as an engine would have it: the prompt's tokens, then the completion's
            whole = before + self.tokenizer.encode_observation(text.completion)
        end = self.tokenizer.end_token_id
        if end is not None and whole[-1:] != [end]:
            whole.append(end)
        return _sequence(whole, [(len(before) if self.assistant_only else 0, len(whole))])

    def _chat(self, chat: Chat) -> list[TokenSequence]:
        """The whole chat as one sequence, if its template only ever appends; else a sequence for each answer.

        The targets of an answer are the tokens that an engine would generate: those between the prompt of the messages
        before it, with the template's generation prompt, and its stop token. That the prompt's tokens begin the
        answer's, and these the whole chat's, is checked here for every row. Templates that strip the thoughts of
        earlier answers do not preserve prefixes.
        """
        answers = [
            index
            for index, message in enumerate(chat.messages)
            if message["role"] == "assistant" and index >= chat.first
        ]
        if not answers:
            raise UnusableRow("no_target", "it has no message of the assistant")
        wholes = [self._encode(chat, index + 1, generation_prompt=False) for index in answers]
        if not self.assistant_only:
            return [_sequence(wholes[-1], [(0, len(wholes[-1]))])]
        spans = []
        for index, whole in zip(answers, wholes, strict=True):
            before = self._encode(chat, index, generation_prompt=True)
            if not _is_prefix(before, whole):
                raise UnusableRow(
                    "template",
                    "the chat template does not begin an answer with its own generation prompt, so that the answer's "
                    f"tokens can't be told: {self._difference(before, whole)}",
                )
            spans.append((len(before), self._end(whole, len(before))))
        last = wholes[-1]
        if all(_is_prefix(whole[:end], last) for whole, (_, end) in zip(wholes, spans, strict=True)):
            return [_sequence(last, spans)]
        return [_sequence(whole, [span]) for whole, span in zip(wholes, spans, strict=True)]

    def _encode(self, chat: Chat, count: int, *, generation_prompt: bool) -> list[int]:
        """Tokens of the first messages of a chat."""
        text = self.tokenizer.render(chat.messages[:count], tools=chat.tools, generation_prompt=generation_prompt)
        return self.tokenizer.encode_observation(text)

    def _end(self, token_ids: Sequence[int], start: int) -> int:
        """The place behind the last stop token from `start` on; the end where there is none.

        What a template puts behind the stop token, such as a line break, is not generated.
        """
        stops = self.tokenizer.eos_token_ids
        backwards = range(len(token_ids), start, -1)
        found = next((end for end in backwards if token_ids[end - 1] in stops), None)
        if found is None and self.unended.due():
            log.warning(
                "the chat template ends answers without a stop token: the model will not learn to end them",
                stops=sorted(self.tokenizer.decode_whole([stop]) for stop in stops),
            )
        return len(token_ids) if found is None else found

    def _difference(self, before: Sequence[int], whole: Sequence[int]) -> str:
        place = next((place for place, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), 0)
        shown = [self.tokenizer.decode_whole(tokens[place : place + 8]) for tokens in (before, whole)]
        return f"{shown[0]!r} in the prompt, {shown[1]!r} in the chat"


def _is_prefix(part: Sequence[int], whole: Sequence[int]) -> bool:
    return list(whole[: len(part)]) == list(part)


def _sequence(token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> TokenSequence:
    """A sequence whose tokens in the spans are actions."""
    mask = np.zeros(len(token_ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return TokenSequence(np.asarray(token_ids, dtype=np.int64), mask)
