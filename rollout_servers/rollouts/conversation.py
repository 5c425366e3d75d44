"""The context of an episode of several turns: prompt, generated tokens, and new chat messages as tokens.

What an engine generated is never encoded again. New messages are the *delta* that the chat template puts behind an
answer: the end of the assistant's turn behind its stop token, the messages, and the generation prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.rollout import EpisodeConfig
from slipstream.env.base import Action, Message, Observation, ToolCall
from slipstream.env.images import has_images
from slipstream.env.tools.parsers import ToolFormat, parse_tool_calls, plain_messages
from slipstream.models.tokenizer import PromptError, Tokenizer
from slipstream.rollout_servers.engines.base import Completion, PromptImage
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, Prompt, Transcript

log = get_log("rollout.conversation")

_SENTINEL: Final = "\ue000"
"""Content of the answer in a rendered dialogue, a character that no template has."""
_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
"""Of the tool in a check's dialogue."""
_FORMATS: Final[tuple[tuple[str, ToolFormat | None], ...]] = (
    ("<arg_key>", None),  # GLM: neither of the formats below
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama_json"),
)
"""Texts in chat templates, with the format of calls that they belong to; the first that is found counts."""


@dataclass(frozen=True)
class Delta:
    """The part of a chat template between an answer and the next message.

    Attributes:
        text: begins with the stop token.
        token_ids: of the text; the first is the stop token.
    """

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class ChatFormat:
    """A model's chat template, with its stop tokens and its format of tool calls."""

    tokenizer: Tokenizer
    stops: Mapping[int, str]
    """Stop tokens with their texts."""
    tool_format: ToolFormat | None
    always_parses: bool
    """True if answers are parsed in episodes without tools too."""
    writes_tools: bool = False
    """True if tools, calls and results are plain messages; otherwise the template gets them."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: EpisodeConfig) -> "ChatFormat":
        """The format of a model."""
        template, chosen = tokenizer.chat_template or "", config.tool_format
        found = next((each for mark, each in _FORMATS if mark in template), None)
        writes_tools = config.tool_prompt == "system"
        if writes_tools:
            found = found or "hermes"
        return cls(
            tokenizer,
            stops={token: tokenizer.decode_whole([token]) for token in tokenizer.eos_token_ids},
            tool_format=found if chosen == "auto" else None if chosen == "none" else chosen,
            always_parses=chosen != "auto",
            writes_tools=writes_tools,
        )

    def for_template(self, opening: Observation) -> Observation:
        """Arguments of the chat template for an opening: its messages and schemas, or plain messages with both."""
        if not self.writes_tools or self.tool_format is None or isinstance(opening.messages, str):
            return opening
        return Observation(plain_messages(opening.messages, opening.tools, self.tool_format))

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of a dialogue, with the generation prompt. Raises: PromptError."""
        shown = self.for_template(Observation(messages, tools))
        assert not isinstance(shown.messages, str), "messages stay messages"
        return self.tokenizer.render(shown.messages, tools=shown.tools)

    def require_visible(self, opening: Observation) -> None:
        """Compares a prompt of messages with the same without its tools.

        Raises: ConfigError if nothing changes, so that the policy would not know of them; PromptError.
        """
        messages = opening.messages
        if isinstance(messages, str) or not opening.tools:
            return
        if self.render(messages, tools=opening.tools) == self.render(messages):
            raise ConfigError(
                f"the chat template of {self.tokenizer.model} ignores tools, so no prompt would contain their schemas: "
                "set rollout.episode.tool_prompt=system, which writes them into a system message, or give the model a "
                "chat template with tools (chat_template.jinja in its folder)"
            )

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """True if an answer has its stop token."""
        return len(token_ids) > 0 and token_ids[-1] in self.stops

    def parse(self, completion: Completion) -> tuple[str, list[ToolCall]]:
        """An answer's text before its first call, and its calls."""
        if self.tool_format is None:
            return "", []
        ids = completion.token_ids
        # Special tokens are kept: in some tokenizers the marks of a call are such.
        text = self.tokenizer.decode_whole(ids[:-1] if self.is_stopped(ids) else ids)
        return parse_tool_calls(text, self.tool_format)

    def delta(self, new: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> Delta:
        """The delta of new messages, found in a dialogue whose answer is a sentinel.

        Raises: PromptError when the template can't render the messages, or ends an answer without a stop token.
        """
        calls: list[Message] = [
            {
                "type": "function",
                "id": message.get("tool_call_id", ""),
                "function": {"name": message.get("name", ""), "arguments": {}},
            }
            for message in new
            if message["role"] == "tool"
        ]
        try:
            return self._delta(new, calls, tools)
        except PromptError:
            if not calls:
                raise
        return self._delta(new, [], tools)  # Llama 3.1 refuses two calls, but not two results

    def _delta(self, new: Sequence[Message], calls: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Delta:
        answer: Message = {"role": "assistant", "content": _SENTINEL, **({"tool_calls": calls} if calls else {})}
        dialogue: list[Message] = [{"role": "user", "content": "u"}, answer]
        text = self.render([*dialogue, *new], tools=tools)
        place = text.find(_SENTINEL)
        if place >= 0:
            ends = [text.find(stop, place) for stop in self.stops.values()]
            begin = min((end for end in ends if end >= 0), default=-1)
        else:  # Llama 3.1 drops the content of a message with calls
            shared = text[: _common(text, self.render(dialogue, tools=tools))]
            begin = max((shared.rfind(stop) for stop in self.stops.values()), default=-1)
        if begin < 0:
            end = text[place + 1 :][:40] if place >= 0 else text[-40:]
            raise PromptError(
                f"the chat template continues an answer with {end!r}, and has none of the stop tokens "
                f"{sorted(self.stops.values())} there; correct eos_token_id in generation_config.json"
            )
        return self.encoded(text[begin:])

    def continued(self, context: Sequence[int], delta: Delta) -> "Continuation":
        """A delta behind the answer that ends a context; one that was cut off gets a stop token, which is no action."""
        if not self.is_stopped(context):
            return Continuation(delta.token_ids, delta.text)
        return Continuation(delta.token_ids[1:], delta.text.removeprefix(self.stops[delta.token_ids[0]]))

    def encoded(self, text: str) -> Delta:
        """A text that begins with a stop token, which is encoded with it. Raises: PromptError.

        Some tokenizers add a space in front of a text, or drop spaces behind a special token.
        """
        token_ids = self.tokenizer.encode_observation(text)
        if not token_ids or token_ids[0] not in self.stops:
            raise PromptError(f"{text[:40]!r} does not begin with one of the stop tokens {sorted(self.stops.values())}")
        return Delta(text, token_ids)

    def check(self, *, tools: bool) -> None:
        """Compares deltas with the whole, for dialogues of three turns.

        Args:
            tools: whether the env has tools.

        Raises: ConfigError when they differ, the template can't render such a dialogue, or ignores tools.
        """
        if self.tokenizer.chat_template is None:
            return
        first, second, third = ({"role": "user", "content": text} for text in ("First?", "Second?", "Third?"))
        answer = {"role": "assistant", "content": "Answer."}
        dialogues: list[tuple[list[Message], list[Mapping[str, Any]]]] = [
            ([first, answer, second, answer, third], []),
        ]
        if tools:
            call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {}}}
            result = {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "Result"}
            dialogues.append(([first, {**answer, "tool_calls": [call]}, result, answer, third], [_SCHEMA]))
        try:
            if tools:
                self._check_tools(Observation([first], [_SCHEMA]))
            rewritten = [self._is_rewritten(messages, schemas) for messages, schemas in dialogues]
        except PromptError as error:
            raise ConfigError(f"the chat template of {self.tokenizer.model}, for several turns: {error}") from error
        if rewritten[0]:  # of the others the calls are missing in what was generated
            log.info(
                "the chat template rewrites earlier turns; rollout.episode.history decides which form is trained on",
                model=str(self.tokenizer.model),
            )

    def _check_tools(self, opening: Observation) -> None:
        self.require_visible(opening)
        if self.tool_format is None:
            raise ConfigError(
                f"the chat template of {self.tokenizer.model} has no known format of tool calls: choose "
                "rollout.episode.tool_format"
            )

    def _is_rewritten(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> bool:
        """Whether the template changes earlier turns of a dialogue. Raises: ConfigError where a delta differs."""
        whole, end = self.render(messages, tools=tools), 0
        stream = self.render(messages[:1], tools=tools)
        for answer, message in zip(messages[1::2], messages[2::2], strict=True):
            content, delta = str(message["content"]), self.delta([message], tools=tools)
            if content not in whole[end:] or content not in delta.text:
                self._raise_difference(whole[end:], delta.text)
            end = whole.index(content, end) + len(content)
            inside = delta.text.index(content) + len(content)
            self._require_equal(whole[:end][-inside:], delta.text[:inside])
            stream += str(answer["content"]) + delta.text
            encoded = self.tokenizer.encode_observation(stream)[-len(delta.token_ids) :]
            if encoded != delta.token_ids:
                self._raise_difference(*map(self.tokenizer.decode_whole, (encoded, delta.token_ids)))
        self._require_equal(whole[end:], delta.text[inside:])
        return stream != whole

    def _require_equal(self, whole: str, part: str) -> None:
        if whole != part:
            common = _common(whole, part)
            self._raise_difference(whole[common:], part[common:])

    def _raise_difference(self, whole: str, part: str) -> NoReturn:
        raise ConfigError(
            f"the chat template of {self.tokenizer.model} can't be continued turn by turn: the whole dialogue has "
            f"{whole[:40]!r} where new messages give {part[:40]!r}; use another chat template"
        )


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    places = (place for place, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)
    return next(places, min(len(one), len(other)))


@dataclass(frozen=True)
class Continuation:
    """The context of the next answer.

    Attributes:
        token_ids: are appended; or the whole context, if that is rewritten.
        text: of the tokens.
        is_rewritten: whether it is a new token sequence.
        images: of a rewritten context.
    """

    token_ids: Sequence[int]
    text: str
    is_rewritten: bool = False
    images: Sequence[PromptImage] = ()


@dataclass
class Conversation:
    """An episode's dialogue as messages, and as one token sequence or several."""

    format: ChatFormat
    history: Literal["sampled", "template"]
    expand: Callable[[Sequence[int], Sequence[bytes]], Prompt] = lambda token_ids, _images: Prompt(token_ids)
    """Repeats the placeholders of a rewritten context's images."""
    opening: Observation = field(default_factory=lambda: Observation(""))
    transcripts: list[Transcript] = field(default_factory=list)
    used_tokens: int = 0
    """Tokens after the prompt, observations included."""
    _messages: list[Message] = field(default_factory=list)
    _text: str = ""
    """Of the last token sequence; only kept where the template decides about the history."""

    def begin(self, opening: Observation, prompt: Prompt) -> None:
        """Starts with an opening, which has these tokens."""
        self.opening = opening
        self.transcripts.append(Transcript.begin(prompt))
        messages = opening.messages
        if isinstance(messages, str):
            self.history = "sampled"  # a template knows nothing of it
        elif self.history == "template":
            self._messages = list(messages)
            self._text = self.format.render(messages, tools=self.opening.tools)

    @property
    def context(self) -> list[int]:
        """The tokens before the next answer."""
        return self.transcripts[-1].token_ids

    @property
    def end(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(transcript.token_ids) for transcript in self.transcripts)

    def add_answer(self, completion: Completion) -> tuple[Action, str]:
        """Appends an answer of at least one token. Returns the action, and its text before the first call."""
        self.transcripts[-1].add_action(completion)
        self.used_tokens += len(completion.token_ids)
        tokenizer = self.format.tokenizer
        (text,) = tokenizer.decode([completion.token_ids])
        calls, content = list[ToolCall](), ""
        if self.opening.tools or self.format.always_parses:
            content, calls = self.format.parse(completion)
        if self.history == "template":
            self._text += tokenizer.decode_whole(completion.token_ids)
            self._messages.append(_assistant(text, content, () if self.format.writes_tools else calls))
        finish_reason = "stop" if completion.finish_reason == "stop" else "length"
        return Action(text, tuple(completion.token_ids), calls, finish_reason), content

    def continuation(self, observation: str | Sequence[Message]) -> Continuation:
        """The context with an observation. Raises: EpisodeFailed."""
        tokenizer = self.format.tokenizer
        try:
            if has_images(observation):
                raise PromptError("an observation has images: they belong to the first prompt")
            if isinstance(observation, str):
                found = Continuation(tokenizer.encode_observation(observation), observation)
            elif self.history == "template":
                found = self._by_template(observation)
            else:
                found = self.format.continued(self.context, self.format.delta(observation, tools=self.opening.tools))
            if not found.is_rewritten:
                self.expand(found.token_ids, ())  # a text may name a placeholder
        except PromptError as error:
            raise EpisodeFailed("prompt_untokenizable", str(error)) from error
        return found

    def fits(self, continuation: Continuation, *, room: int) -> bool:
        """Whether it leaves room for an answer; `room` is that of the present context."""
        return self._growth(continuation) < room

    def _growth(self, continuation: Continuation) -> int:
        return len(continuation.token_ids) - (len(self.context) if continuation.is_rewritten else 0)

    def add(self, observation: str | Sequence[Message], continuation: Continuation) -> None:
        """Appends an observation, whose continuation this is."""
        self.used_tokens += max(0, self._growth(continuation))
        if continuation.is_rewritten:
            self.transcripts.append(Transcript.begin(Prompt(continuation.token_ids, continuation.images)))
            self._text = continuation.text
        else:
            self.transcripts[-1].add_observation(continuation.token_ids)
            self._text += continuation.text
        if isinstance(observation, str):
            self.history = "sampled"
        elif self.history == "template":
            self._messages += observation

    def finish(self) -> None:
        """Drops what follows the last answer, a rewritten context without an answer too."""
        self.transcripts = [transcript for transcript in self.transcripts if transcript.actions]
        for transcript in self.transcripts:
            transcript.end_with_action()

    def _by_template(self, new: Sequence[Message]) -> Continuation:
        tokenizer = self.format.tokenizer
        whole = self.format.render([*self._messages, *new], tools=self.opening.tools)
        following = self.format.stops.get(self.context[-1], "") + whole[len(self._text) :]
        if whole.startswith(self._text) and following.startswith(tuple(self.format.stops.values())):
            return self.format.continued(self.context, self.format.encoded(following))
        images = [image.encoded for image in self.transcripts[0].images]
        prompt = self.expand(tokenizer.encode_observation(whole), images)
        return Continuation(prompt.token_ids, whole, is_rewritten=True, images=prompt.images)


def _assistant(text: str, content: str, calls: Sequence[ToolCall]) -> Message:
    """The message of an answer; one with a call that can't be read stays as it is."""
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }


CUT_MARK: Final = "\n[... cut]"


def shorten(
    observation: str | Sequence[Message], tokenizer: Tokenizer, most_tokens: int
) -> tuple[str | Sequence[Message], bool]:
    """The observation with at most so many tokens of contents and marks of cuts; and whether something was cut.

    Short messages leave their share to longer ones. Raises: EpisodeFailed.
    """
    try:
        if isinstance(observation, str):
            text = _prefix(observation, tokenizer, most_tokens)
            return text, text != observation
        texts = [message["content"] if isinstance(message.get("content"), str) else "" for message in observation]
        lengths = [len(tokenizer.encode_observation(text)) for text in texts]
        if sum(lengths) <= most_tokens:
            return observation, False
        shortened, left = [dict(message) for message in observation], most_tokens
        for rest, index in enumerate(sorted(range(len(texts)), key=lengths.__getitem__)):
            share = left // (len(texts) - rest)
            if lengths[index] > share:
                shortened[index]["content"] = _prefix(texts[index], tokenizer, share)
            left -= min(share, lengths[index])
    except PromptError as error:
        raise EpisodeFailed("prompt_untokenizable", str(error)) from error
    return shortened, True


def _prefix(text: str, tokenizer: Tokenizer, most_tokens: int) -> str:
    """The text, or its beginning with a mark, of at most `most_tokens` tokens (as far as the mark leaves room)."""
    if tokenizer.prefix(text, most_tokens) == text:
        return text
    mark = len(tokenizer.encode_observation(CUT_MARK))
    return tokenizer.prefix(text, max(0, most_tokens - mark)) + CUT_MARK
