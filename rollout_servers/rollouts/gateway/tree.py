"""The tree of a session's calls: each call is a node, which continues an earlier one or begins a new sequence.

A node has only the tokens that it adds, exactly as the engine saw and sampled them. The paths from a root to the leaves
are the token sequences of one episode; a sampled token that several share is trained on in one of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.env.base import Message
from slipstream.rollout_servers.engines.base import Completion, PromptImage
from slipstream.rollout_servers.rollouts.base import Prompt, Transcript


@dataclass(eq=False)
class Node:
    """An answered call.

    Attributes:
        id: of the completion.
        parent: the call that it continues.
        digest: of the dialogue, this answer included.
        context: tokens between the parent's answer and this one; of a root the prompt.
        messages: those between the two answers; of a root the prompt's.
        answer: the message as the agent got it.
        agent: label that the agent gave the call.
        trainable: whether its tokens may be trained on.
        delivered: whether the agent got the answer.
        images: of a root.
    """

    id: str
    parent: "Node | None"
    digest: bytes
    context: Sequence[int]
    completion: Completion
    messages: Sequence[Message]
    answer: Message
    agent: str = ""
    trainable: bool = True
    delivered: bool = False
    images: Sequence[PromptImage] = ()

    @property
    def path(self) -> list["Node"]:
        """From the root to this node."""
        nodes, node = list[Node](), self
        while True:
            nodes.append(node)
            if node.parent is None:
                return nodes[::-1]
            node = node.parent

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of the answer."""
        return [token for node in self.path for part in (node.context, node.completion.token_ids) for token in part]


@dataclass(frozen=True)
class Branch:
    """The token sequence of a leaf.

    Attributes:
        nodes: those that are trained on in it, each with the end of its answer in the transcript.
    """

    transcript: Transcript
    nodes: Sequence[tuple[Node, int]]


@dataclass
class Tree:
    """The calls of a session, in the order in which they were answered."""

    nodes: list[Node] = field(default_factory=list)
    _by_digest: dict[bytes, Node] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Adds an answered call."""
        self.nodes.append(node)

    def deliver(self, node: Node) -> None:
        """The agent gets the answer; from now on a call may continue it."""
        node.delivered = True
        self._by_digest[node.digest] = node

    def find(self, node_id: str) -> Node | None:
        """The call of an id."""
        return next((node for node in self.nodes if node.id == node_id), None)

    def parent(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[Node | None, int]:
        """The call that a dialogue continues, and the number of its messages up to that answer.

        All that follows the dialogue's last answer is new; if that answer, behind just these messages, is none that was
        sampled here, the dialogue is a new root.
        """
        places = (place for place in range(len(messages) - 1, -1, -1) if messages[place]["role"] == "assistant")
        last = next(places, None)
        if last is None or last == len(messages) - 1:
            return None, 0
        return self._by_digest.get(digests[last]), last + 1

    @property
    def roots(self) -> int:
        """Number of token sequences that were begun."""
        return sum(node.parent is None for node in self.delivered)

    @property
    def delivered(self) -> list[Node]:
        """The calls whose answers the agent got."""
        return [node for node in self.nodes if node.delivered]

    def branches(self) -> list[Branch]:
        """The token sequences to train on, in the order of their last calls; each ends with a trained answer.

        A node is trained on in the first branch that has it, those first whose last call is trainable: a branch that
        the agent has rejected takes no shared node from one that it kept.
        """
        leaves = self._leaves()
        owner: dict[Node, Node] = {}
        for leaf in sorted(leaves, key=lambda leaf: not leaf.trainable):  # stable
            for node in leaf.path:
                if node.trainable:
                    owner.setdefault(node, leaf)
        branches = (_branch(leaf, owner) for leaf in leaves)
        return [branch for branch in branches if branch.nodes]

    def _leaves(self) -> list[Node]:
        delivered = self.delivered
        inner = {node.parent for node in delivered}
        return [node for node in delivered if node not in inner]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


def _branch(leaf: Node, owner: dict[Node, Node]) -> Branch:
    path, trained = leaf.path, list[tuple[Node, int]]()
    transcript = Transcript.begin(Prompt(path[0].context, path[0].images))
    for node in path:
        if node.parent is not None:
            transcript.add_observation(node.context)
        if owner.get(node) is leaf:
            transcript.add_action(node.completion)
            trained.append((node, len(transcript.token_ids)))
        else:
            transcript.add_observation(node.completion.token_ids)
    if trained:
        transcript.end_with_action()
    return Branch(transcript, trained)
