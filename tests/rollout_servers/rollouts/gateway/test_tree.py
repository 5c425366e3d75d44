"""Trees of calls: which call is continued, and what each branch is trained on. One letter is one token."""

from typing import Any

import pytest

from slipstream.rollout_servers.rollouts.gateway.calls import Call, CallRefused, canonical
from slipstream.rollout_servers.rollouts.gateway.chat import read_messages
from slipstream.rollout_servers.rollouts.gateway.tree import Node, Tree
from tests.rollout_servers.scripted import completion


def add(
    tree: Tree, parent: Node | None, context: str, answer: str, *, trainable: bool = True, delivered: bool = True
) -> Node:
    node = Node(
        id=answer,
        parent=parent,
        digest=answer.encode(),
        context=list(map(ord, context)),
        completion=completion(list(map(ord, answer))),
        messages=[{"role": "user", "content": context}],
        answer={"role": "assistant", "content": answer},
        trainable=trainable,
    )
    tree.add(node)
    if delivered:
        tree.deliver(node)
    return node


def masked(tree: Tree) -> list[str]:
    """Each branch, with what it is trained on in capitals."""
    texts = []
    for branch in tree.branches():
        text = "".join(map(chr, branch.transcript.token_ids)).lower()
        for start, action in branch.transcript.actions:
            end = start + len(action.token_ids)
            text = text[:start] + text[start:end].upper() + text[end:]
        assert [end for _, end in branch.nodes] == [
            start + len(each.token_ids) for start, each in branch.transcript.actions
        ]
        texts.append(text)
    return texts


def test_shared_answers_are_trained_on_in_one_branch() -> None:
    tree = Tree()
    plan = add(tree, None, "p", "abc")
    add(tree, plan, "x", "de")
    second = add(tree, plan, "y", "fg")
    add(tree, second, "z", "h")
    add(tree, None, "sub", "ij")  # a sub-agent's own context
    assert masked(tree) == ["pABCxDE", "pabcyFGzH", "subIJ"]
    assert tree.roots == 2


def test_rejected_branch_takes_no_shared_answer() -> None:
    """The agent compacts its context, rejects that, and goes on; each answer is trained on once."""
    tree = Tree()
    work = add(tree, None, "p", "ab")
    more = add(tree, work, "q", "cd")
    add(tree, more, "compact", "ef", trainable=False)
    add(tree, more, "r", "gh")
    assert masked(tree) == ["pABqCDrGH"]


def test_only_rejected_branch_keeps_its_earlier_answers() -> None:
    tree = Tree()
    add(tree, add(tree, None, "p", "ab"), "compact", "ef", trainable=False)
    add(tree, None, "s", "gh")  # from the compacted context
    assert masked(tree) == ["pAB", "sGH"]


def test_undelivered_answer_is_no_branch() -> None:
    tree = Tree()
    first = add(tree, None, "p", "ab")
    add(tree, first, "x", "cd", delivered=False)
    add(tree, first, "x", "ef")
    assert masked(tree) == ["pABxEF"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ANSWER, ANSWER | {"content": "", "refusal": None, "annotations": [], "audio": None}, True),
        (ANSWER, ANSWER | {"content": []}, True),
        (ANSWER, ANSWER | {"tool_calls": [CALL | {"id": "other", "index": 0}]}, True),
        (ANSWER, ANSWER | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a":1,"b":2}'}}]}, True),
        (ANSWER, ANSWER | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a":1}'}}]}, False),
        (ANSWER, ANSWER | {"content": "Well"}, False),
        (ANSWER, ANSWER | {"reasoning_content": "Hm"}, True),
        (USER, USER | {"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, True),
        (USER, USER | {"content": "Hi "}, False),
        (USER, USER | {"name": "Ann"}, False),
        (USER | {"role": "developer"}, USER | {"role": "system"}, True),
        (RESULT, RESULT | {"tool_call_id": "2"}, False),
        (RESULT, RESULT | {"name": "add"}, True),
    ],
)  # fmt: skip
def test_messages_are_compared_by_their_meaning(one: Any, other: Any, same: bool) -> None:
    first, second = read_messages([one]), read_messages([other])
    assert (canonical(first[0]) == canonical(second[0])) is same
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert (Call(first, tools).digests() == Call(second, tools).digests()) is same
    assert Call(first).digests() != Call(first, tools).digests()


@pytest.mark.parametrize(
    ("messages", "continues"),
    [
        ([USER, ANSWER, USER], True),
        ([USER, ANSWER], False),  # nothing new
        ([USER, ANSWER, USER, ANSWER, USER], False),  # the second answer was not sampled here
        ([USER], False),
        ([USER, USER, ANSWER, USER], False),
    ],
)
def test_dialogue_continues_its_last_answer(messages: list[Any], continues: bool) -> None:
    tree, sampled = Tree(), read_messages([USER, ANSWER])
    node = add(tree, None, "p", "ab")
    node.digest = Call(sampled).digests()[-1]
    tree.deliver(node)
    call = Call(read_messages(messages))
    assert (tree.parent(call.messages, call.digests()) == (node, 2)) is continues


@pytest.mark.parametrize(
    "messages",
    [
        [], [{}], [{"role": "robot", "content": ""}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "video"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{}]}],
    ],
)  # fmt: skip
def test_unreadable_messages_are_refused(messages: list[Any]) -> None:
    with pytest.raises(CallRefused):
        read_messages(messages)
