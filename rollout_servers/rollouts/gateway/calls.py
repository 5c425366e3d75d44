"""A call of an agent, whatever its dialect, and the canonical form of its messages, by which calls are joined."""

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.env.base import Message

DIGEST_BYTES: Final = 16


class CallRefused(SlipstreamError):
    """A call that is not answered.

    Attributes:
        status: of the HTTP response.
        code: for programs.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Call:
    """A call with messages as OpenAI's chat completions have them, but the arguments of tool calls as objects.

    Attributes:
        messages: a part of a content that is an image has its bytes as `image`.
        tools: schemas, each whole.
        max_tokens: most tokens of the answer, if the agent limits it.
        stop: texts that end the answer.
        logprobs: whether the agent asks for log-probs.
        stream: whether the answer is sent as events.
        ignored: parameters that would change the policy, and are not applied.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    logprobs: bool = False
    stream: bool = False
    ignored: Sequence[str] = ()

    def digests(self) -> list[bytes]:
        """Of the prefixes of 1, 2, … messages, together with the tools."""
        return chain(_hashed(msgspec.json.encode(self.tools, order="sorted")), self.messages)

    def fingerprint(self, last: bytes, agent: str) -> bytes:
        """Digest of the whole call of an agent; `last` is that of all its messages."""
        return _hashed(msgspec.json.encode([last, agent, self.max_tokens, self.stop]))


def chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Digests of a dialogue after each of these messages; `start` is that of what came before them."""
    digests = list[bytes]()
    for message in messages:
        start = _hashed(start + msgspec.json.encode(canonical(message), order="sorted"))
        digests.append(start)
    return digests


def canonical(message: Message) -> list[Any]:
    """The form in which messages are compared.

    No content is an empty one, texts of parts are joined, arguments are JSON values; of a tool call the id does not
    count, of a result it does. Reasoning and what SDKs add to answers (`refusal`, `audio`, `annotations`) is left out.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    role = message["role"]
    name = "" if role == "tool" else message.get("name") or ""
    return [role, name, _canonical_content(message.get("content")), calls, message.get("tool_call_id") or ""]


def _canonical_content(content: str | Sequence[Mapping[str, Any]] | None) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return [part["text"] if part["type"] == "text" else [_hashed(part["image"])] for part in content]


def text_part(text: str) -> dict[str, Any]:
    """A part of a content."""
    return {"type": "text", "text": text}


def image_part(url: object) -> dict[str, Any]:
    """The part of an image in a data URL. Raises: CallRefused for any other address: nothing is fetched."""
    if not isinstance(url, str) or not url.startswith("data:") or ";base64," not in url[:100]:
        raise CallRefused("an image must come as a data URL (data:image/png;base64,...); no other address is read")
    return image_bytes(url.partition(";base64,")[2])


def image_bytes(encoded: object) -> dict[str, Any]:
    """The part of an image in base64. Raises: CallRefused."""
    try:
        return {"type": "image", "image": base64.b64decode(str(encoded), validate=True)}
    except (binascii.Error, ValueError) as error:
        raise CallRefused(f"an image is not valid base64: {error}") from None


def joined(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """The content of parts: a text, unless one is an image."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def tool_call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    """A tool call of a message; `arguments` is an object, or its JSON."""
    if isinstance(arguments, str):
        # Else a model's own words, which the agent sends back: a text that the template shows.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
