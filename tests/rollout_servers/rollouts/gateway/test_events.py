"""Steps of sessions as the buffer keeps them."""

import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.env.base import Message
from slipstream.rollout_servers.engines.base import Completion, PromptImage
from slipstream.rollout_servers.rollouts.gateway.calls import text_part, tool_call
from slipstream.rollout_servers.rollouts.gateway.events import Called, decode
from slipstream.rollout_servers.rollouts.gateway.tree import Node
from tests.models.test_images import encoded


def step(node: Node, place: int) -> m.EpisodeEvent:
    content = Called.of(node, b"call", reasoning="why", stopped_by=None)
    return m.EpisodeEvent(episode=0, place=place, tokens=len(node.completion.token_ids), content=content)


def test_nodes_are_the_same_after_they_were_kept() -> None:
    kept = [np.array([5, 7], dtype=np.int32), np.array([6], dtype=np.int32)]
    completion = Completion([5, 6], [-0.5, -0.25], [m.VersionSpan(version=3, start=0, end=2)], "stop", kept=kept)
    image = encoded()
    question: Message = {"role": "user", "content": [text_part("What?"), {"type": "image", "image": image}]}
    call = tool_call("a", "add", {"big": 10**30, "infinite": [1e308, None]})
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    images = [PromptImage(image, None, start=1, tokens=4)]
    root = Node("1", None, b"root", [1, 2], completion, [question], answer, "main", images=images)
    leaf = Node("2", root, b"leaf", [3], completion, [{"role": "tool", "content": "4"}], answer, trainable=False)
    nodes = dict[str, Node]()
    for event in decode([step(root, 0), step(leaf, 1)]):
        assert isinstance(event, Called)
        node = event.node(nodes)
        assert node is not None
        nodes[node.id] = node
    for found, expected in zip(nodes.values(), (root, leaf), strict=True):
        assert (found.messages, found.answer, found.context) == (expected.messages, expected.answer, expected.context)
        assert (found.agent, found.trainable, found.digest) == (expected.agent, expected.trainable, expected.digest)
        assert found.completion.token_ids == [5, 6]
        assert [each.tolist() for each in found.completion.kept or ()] == [[5, 7], [6]]
    assert nodes["2"].parent is nodes["1"]
    assert [(each.encoded, each.start, each.tokens) for each in nodes["1"].images] == [(image, 1, 4)]
    (orphan,) = decode([step(leaf, 1)])
    assert isinstance(orphan, Called)
    assert orphan.node({}) is None
