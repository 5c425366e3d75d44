"""The steps of a session that the buffer keeps, from which another server goes on."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.env.base import AgentReward
from slipstream.models.images import decode_image
from slipstream.rewards import base as rewards
from slipstream.rollout_servers.engines.base import PromptImage
from slipstream.rollout_servers.rollouts import record
from slipstream.rollout_servers.rollouts.gateway.tree import Node


class Opened(msgspec.Struct, frozen=True, tag=True):
    """An agent from outside has the session under this id and key."""

    id: str
    key: str


class Image(msgspec.Struct, frozen=True):
    """An image of a prompt, with its place."""

    encoded: bytes
    start: int
    tokens: int


class Called(msgspec.Struct, frozen=True, tag=True):
    """An answered call; see `Node` and `Answer`. Messages are JSON: msgpack has no integers of more than 64 bits."""

    id: str
    parent: str | None
    fingerprint: bytes
    digest: bytes
    context: bytes
    completion: record.EncodedCompletion
    messages: bytes
    message: bytes
    agent: str
    trainable: bool
    reasoning: str
    stopped_by: str | None
    images: list[Image]

    @classmethod
    def of(cls, node: Node, fingerprint: bytes, *, reasoning: str, stopped_by: str | None) -> bytes:
        """The step of a node, encoded."""
        called = cls(
            id=node.id,
            parent=None if node.parent is None else node.parent.id,
            fingerprint=fingerprint,
            digest=node.digest,
            context=np.asarray(node.context, dtype=m.TOKEN_DTYPE).tobytes(),
            completion=record.EncodedCompletion.of(node.completion),
            messages=msgspec.json.encode(node.messages),
            message=msgspec.json.encode(node.answer),
            agent=node.agent,
            trainable=node.trainable,
            reasoning=reasoning,
            stopped_by=stopped_by,
            images=[Image(each.encoded, each.start, each.tokens) for each in node.images],
        )
        return encode(called)

    def node(self, nodes: Mapping[str, Node]) -> Node | None:
        """The node, whose parent is among `nodes`; None if that was not kept."""
        if self.parent is not None and self.parent not in nodes:
            return None
        return Node(
            id=self.id,
            parent=None if self.parent is None else nodes[self.parent],
            digest=self.digest,
            context=np.frombuffer(self.context, dtype=m.TOKEN_DTYPE).tolist(),
            completion=self.completion.completion(),
            messages=_messages(self.messages),
            answer=msgspec.json.decode(self.message),
            agent=self.agent,
            trainable=self.trainable,
            images=[
                PromptImage(each.encoded, decode_image(each.encoded), start=each.start, tokens=each.tokens)
                for each in self.images
            ],
        )


def _messages(encoded: bytes) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = msgspec.json.decode(encoded)
    for message in messages:
        if isinstance(message.get("content"), list):
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = base64.b64decode(part["image"])
    return messages


class Rewarded(msgspec.Struct, frozen=True, tag=True):
    """A reward was posted; see `Reward`."""

    value: float
    parts: dict[str, float]
    completion_id: str | None
    agent: str | None
    more: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The agent has ended; see `Session`. Its reward, if it returned one, and the answers that it did not get."""

    state: str
    limit: rewards.Ended | None
    reward: AgentReward | None
    undelivered: list[str]


Event = Opened | Called | Rewarded | Ended

_decoder = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    """The content of an `EpisodeEvent`."""
    return msgspec.msgpack.encode(event)


def decode(events: Sequence[m.EpisodeEvent]) -> list[Event]:
    """The steps of a session, in order."""
    return [_decoder.decode(event.content) for event in events]
