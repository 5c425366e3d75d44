"""Checks of delivered groups: against themselves, and against what any ticket asks for."""

import contextlib
import math
import re
import tracemalloc
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.buffer.handlers.inspection import InvalidGroupError, check_group
from slipstream.buffer.wire.codec import FrameError, behaviour_logprobs, encode
from slipstream.buffer.wire.messages import (
    EVAL,
    TRAIN,
    ExpertLayout,
    Group,
    RewardSpan,
    RoutedExperts,
    Trajectory,
    VersionSpan,
)
from slipstream.configs.schema.rollout import RolloutConfig
from tests.buffer.groups import train_group, trajectory

LIMITS = RolloutConfig.model_validate(
    {
        "group_size": 2,
        "sampling": {"max_tokens": 4},
        "episode": {"tokens": 6},
        "engine": {"max_model_len": 10},
    }
)
check = partial(check_group, rollout=LIMITS, eval_samples=1)


def with_logprob(value: float) -> Group:
    """A group whose last token has this log-probability."""
    first, last = train_group("1").trajectories
    logprobs = behaviour_logprobs(last).copy()
    logprobs[-1] = value
    last = msgspec.structs.replace(last, behaviour_logprobs=logprobs.tobytes())
    return msgspec.structs.replace(train_group("1"), trajectories=[first, last])


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.01, 5.0, -1e3, -1e30])
def test_impossible_logprob_is_refused(value: float) -> None:
    with pytest.raises(InvalidGroupError, match="group 1: ") as refused:
        check("1", encode(with_logprob(value)))
    assert refused.value.reason == "invalid_logprob"


@pytest.mark.parametrize("value", [0.0, 1e-6, -100.0])
def test_possible_logprob_is_accepted(value: float) -> None:
    check("1", encode(with_logprob(value)))


@pytest.mark.parametrize(
    ("tokens", "extra", "largest", "experts", "valid"),
    [
        (3, 0, 7, 8, True),
        (1, 0, 7, 8, True),  # only of the last
        (0, 0, 0, 8, True), (3, 0, 300, 301, True),
        (4, 0, 7, 8, False),  # the last token is no input
        (3, 1, 7, 8, False), (3, 0, 8, 8, False), (3, 0, 301, 301, False),
    ],
)  # fmt: skip
def test_experts_must_fit_tokens_and_layout(tokens: int, extra: int, largest: int, experts: int, valid: bool) -> None:
    layout = ExpertLayout(layers=2, per_token=2, experts=experts)
    ids = np.zeros((tokens, 2, 2), dtype=layout.dtype)
    ids[..., -1] = largest
    routed = RoutedExperts(layout=layout, ids=ids.tobytes() + bytes(extra))
    first, last = train_group("1").trajectories
    group = msgspec.structs.replace(
        train_group("1"), trajectories=[first, msgspec.structs.replace(last, routed_experts=routed)]
    )
    if valid:
        check("1", encode(group))
        return
    with pytest.raises(InvalidGroupError) as refused:
        check("1", encode(group))
    assert refused.value.reason == "invalid_experts"


def spanning(*spans: tuple[int, int], mask: bytes) -> Group:
    """A group whose last trajectory has these version spans."""
    first, last = train_group("1").trajectories
    of_one = [VersionSpan(version=0, start=start, end=end) for start, end in spans]
    last = msgspec.structs.replace(last, spans=of_one, action_mask=mask)
    return msgspec.structs.replace(train_group("1"), trajectories=[first, last])


@pytest.mark.parametrize(
    ("spans", "mask"),
    [
        ([(2, 3)], b"\0\0\1\1"), ([(3, 4)], b"\0\0\1\1"), ([(2, 4)], b"\0\0\0\1"), ([(2, 4), (3, 4)], b"\0\0\1\1"),
        ([(3, 4), (2, 3)], b"\0\0\1\1"), ([(1, 2)], b"\0\1\0\1"), ([(2, 4)], b"\0\0\1\2"), ([(2, 4)], b"\0\2\1\1"),
    ],
)  # fmt: skip
def test_spans_must_be_those_of_the_actions(spans: list[tuple[int, int]], mask: bytes) -> None:
    with pytest.raises(InvalidGroupError) as refused:
        check("1", encode(spanning(*spans, mask=mask)))
    assert refused.value.reason == "uncovered_action"


@pytest.mark.parametrize(
    ("spans", "mask"), [([(2, 3), (3, 4)], b"\0\0\1\1"), ([(1, 2), (3, 4)], b"\0\1\0\1"), ([(0, 2)], b"\1\1\0\0")]
)
def test_spans_of_several_turns_are_accepted(spans: list[tuple[int, int]], mask: bytes) -> None:
    check("1", encode(spanning(*spans, mask=mask)))


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({"action_mask": bytes(4)}, False),
        ({"action_mask": b"\1\0\0\0"}, False),  # the first token has no log-probability
        ({"spans": []}, False),
        ({"action_mask": b"\0\1\0\0", "spans": [VersionSpan(version=0, start=1, end=2)]}, True),
    ],
)
def test_every_trajectory_needs_an_action(change: Mapping[str, Any], accepted: bool) -> None:
    first, last = train_group("1").trajectories
    group = msgspec.structs.replace(train_group("1"), trajectories=[first, msgspec.structs.replace(last, **change)])
    with contextlib.nullcontext() if accepted else pytest.raises(FrameError, match="action"):
        check("1", encode(group))


@pytest.mark.parametrize("kind", [TRAIN, EVAL])
def test_group_without_task_is_malformed(kind: str) -> None:
    with pytest.raises(FrameError, match="group 1: "):
        check("1", encode(msgspec.structs.replace(train_group("1"), kind=kind, indices=[])))


@pytest.mark.parametrize(
    ("versions", "missing", "failed", "error"),
    [
        ((3, 3), 0, 0, "missing"), ((3, 3), 1, 1, None), ((3, 3), 1, 0, "missing"), ((3, 3), 2, 2, "missing"),
        ((3, 4), 1, 1, r"\[3, 4\]"),
    ],
)  # fmt: skip
def test_eval_group_is_checked(versions: tuple[int, int], missing: int, failed: int, error: str | None) -> None:
    answers = [trajectory(versions=(version,), episode=number) for number, version in enumerate(versions)]
    answers.append(trajectory(versions=versions[-1:], episode=len(versions) - 1))  # of the same episode
    group = Group(
        id="e3-0", kind=EVAL, epoch=0, indices=[0, 1, 2], trajectories=answers, missing=missing,
        failures={"superseded": failed},
    )  # fmt: skip
    with pytest.raises(FrameError, match=error) if error else contextlib.nullcontext():
        check("e3-0", encode(group))


def refusal(group: Group, limits: RolloutConfig = LIMITS) -> str | None:
    """The reason to refuse a group; None for one that is accepted."""
    try:
        check_group(group.id, encode(group), limits, eval_samples=1)
    except FrameError as error:
        return error.reason
    return None


def episode(*parts: str, number: int = 0, finish_reason: str = "turns") -> list[Trajectory]:
    """Trajectories of an episode: `p` prompt or context, `a` action, `o` observation, `|` the end of a turn."""
    return [_played(part, number, finish_reason) for part in parts]


def _played(part: str, number: int, finish_reason: str) -> Trajectory:
    ends, text = [], ""
    for turn in part.split("|")[:-1]:
        text += turn
        ends.append(len(text))
    text = part.replace("|", "")
    mask = np.array([letter == "a" for letter in text], dtype="u1")
    return Trajectory(
        token_ids=np.ones(len(text), dtype="<i4").tobytes(), action_mask=mask.tobytes(),
        behaviour_logprobs=np.zeros(len(text), dtype="<f4").tobytes(),
        spans=[VersionSpan(version=0, start=found.start(), end=found.end()) for found in re.finditer("a+", text)],
        reward=1.0, scores={}, finish_reason=finish_reason, episode=number,
        rewards=[RewardSpan(end=end, value=0.0) for end in ends],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (["ppaaaa"], None), (["ppaaaaa"], "answer_too_long"), (["pppppppaaa"], None),
        (["ppppppppaaa"], "context_too_long"),
        (["paa|oaa|oa"], "answer_too_long"),  # observations count
        (["paa|oaa|a"], None),
        (["paaa|aaa|"], None),  # an empty observation between two answers
        (["paaaaaa"], "answer_too_long"),
        (["paaa", "pppppaaa"], None),  # the template has rewritten the context, which does not count again
        (["paaa", "pppppaaaa"], "answer_too_long"), (["paaa", "ppppppppaaa"], "context_too_long"),
    ],
    ids=str,
)  # fmt: skip
def test_lengths_of_answers_episodes_and_contexts_are_bounded(parts: list[str], reason: str | None) -> None:
    group = msgspec.structs.replace(train_group("1"), trajectories=[*episode(*parts), *episode("pa", number=1)])
    assert refusal(group) == reason


@pytest.mark.parametrize(
    ("episodes", "missing", "accepted"),
    [(4, 0, True), (3, 1, True), (2, 2, False), (3, 0, False), (4, 1, False), (5, 0, False), (1, 3, False)],
)
def test_number_of_episodes_must_be_the_tickets(episodes: int, missing: int, accepted: bool) -> None:
    limits = LIMITS.model_copy(update={"group_size": 4, "min_episodes": 3})
    answers = [part for number in range(episodes) for part in episode("pa", "pa", number=number)]
    group = msgspec.structs.replace(train_group("1"), trajectories=answers, missing=missing)
    assert refusal(group, limits) == (None if accepted else "wrong_episodes")


def test_lost_episode_has_at_most_the_tokens_of_an_episode() -> None:
    limits = LIMITS.model_copy(update={"group_size": 3})
    for tokens, reason in ((6, None), (7, "answer_too_long")):
        group = msgspec.structs.replace(train_group("1"), missing=1, lost={"reward_error": [tokens]})
        assert refusal(group, limits) == reason


@pytest.mark.parametrize(
    ("group_id", "change"),
    [
        ("1", {"kind": EVAL}), ("1", {"kind": "other"}), ("1", {"indices": [0, 1]}), ("e3-7", {"kind": TRAIN}),
        ("e3-7", {"indices": [6, 7]}), ("e3-7", {"indices": [7, 9]}), ("e3-7", {"epoch": 1}), ("e4-7", {}),
    ],
)  # fmt: skip
def test_group_of_another_ticket_is_refused(group_id: str, change: Mapping[str, Any]) -> None:
    group = train_group(group_id, versions=(3,), index=7)
    if group_id != "1":
        group = msgspec.structs.replace(group, kind=EVAL, indices=[7, 8])
        assert refusal(msgspec.structs.replace(group, id="e3-7-2")) is None
    assert refusal(msgspec.structs.replace(group, **change)) == "other_ticket"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e15, 1.1e8])
@pytest.mark.parametrize("field", ["reward", "scores", "rewards"])
def test_absurd_reward_is_refused(field: str, value: float) -> None:
    """In a part without weight, too."""
    found = {"reward": value, "scores": {"unweighted": value}, "rewards": [RewardSpan(end=4, value=value)]}
    first, last = train_group("1").trajectories
    last = msgspec.structs.replace(last, **{field: found[field]})
    assert refusal(msgspec.structs.replace(train_group("1"), trajectories=[first, last])) == "invalid_reward"


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": "x" * 65}, {"scores": {"x" * 1025: 1.0}},
        {"scores": {str(number): 1.0 for number in range(1025)}}, {"images": ["x" * 65]},
    ],
    ids=["finish reason", "name of a score", "scores", "image"],
)  # fmt: skip
def test_texts_and_counts_are_bounded(change: Mapping[str, Any]) -> None:
    first, last = train_group("1").trajectories
    group = msgspec.structs.replace(train_group("1"), trajectories=[first, msgspec.structs.replace(last, **change)])
    assert refusal(group) == "malformed"


@pytest.mark.parametrize("field", ["trajectories", "indices", "spans", "rewards", "images", "scores"])
def test_header_of_many_elements_allocates_nothing(field: str) -> None:
    """A frame of a few bytes that announces 2^31 elements."""
    inner = {"spans", "rewards", "images", "scores"}
    good = msgspec.msgpack.decode(encode(train_group("1")))
    place = good["trajectories"][0] if field in inner else good
    place[field] = "HERE"
    head = b"\xdf" if field == "scores" else b"\xdd"
    frame = msgspec.msgpack.encode(good).replace(b"\xa4HERE", head + b"\x7f\xff\xff\xff")
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            check("1", frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
