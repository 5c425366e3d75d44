"""The codec: round trips, golden frames, and one error type for invalid frames."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import (
    FrameError,
    SchemaVersionError,
    action_mask,
    behaviour_logprobs,
    decode,
    decode_group,
    encode,
    encode_group,
    kept_tokens,
    token_ids,
    version_range,
)
from tests.buffer.groups import train_group, trajectory
from tests.buffer.wire.golden import EXAMPLES, stored_frames
from tests.buffer.wire.strategies import MESSAGES, message
from tests.faults.frames import OUT_OF_BOUNDS

each_example = pytest.mark.parametrize("name", EXAMPLES)


def fields_of(name: str) -> dict[str, Any]:
    """The frame decoded without message types."""
    fields: dict[str, Any] = msgspec.msgpack.decode(stored_frames()[name])
    return fields


# --- round trips and golden frames ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MESSAGES)
@settings(max_examples=15)
@given(data=st.data())
def test_round_trip(kind: type[m.Message], data: st.DataObject) -> None:
    sent = data.draw(message(kind))
    assert decode(encode(sent), kind) == sent


def test_counters_of_a_long_run_are_accepted() -> None:
    many = 1 << 40
    status = m.ServerStatus(tokens_generated=many, prompt_tokens=many, cached_tokens=many)
    credits = m.Credits(capacity=1, status=status, held=[])
    assert decode(encode(credits), m.ToService) == credits


def test_every_message_has_golden_frame() -> None:
    assert sorted(type(example).__name__ for _, example in EXAMPLES.values()) == [kind.__name__ for kind in MESSAGES]
    assert list(EXAMPLES) == list(stored_frames())


@each_example
def test_golden_frame(name: str) -> None:
    kind, expected = EXAMPLES[name]
    assert decode(stored_frames()[name], kind) == expected
    assert encode(expected) == stored_frames()[name]


# --- named fields --------------------------------------------------------------------------------------------------


@each_example
def test_field_order_and_added_fields_are_ignored(name: str) -> None:
    kind, expected = EXAMPLES[name]
    newer = {"added_later": [1, {"deep": None}], **dict(reversed(fields_of(name).items()))}
    assert decode(msgspec.msgpack.encode(newer), kind) == expected


def test_unknown_nested_fields_are_ignored() -> None:
    fields = fields_of("group")
    for record in (fields["trajectories"][0], fields["trajectories"][0]["spans"][0]):
        record["added_later"] = 1
    assert decode_group(msgspec.msgpack.encode(fields)) == EXAMPLES["group"][1]


# --- invalid frames ------------------------------------------------------------------------------------------------


@each_example
def test_missing_field_is_named(name: str) -> None:
    kind, example = EXAMPLES[name]
    optional = {field.name for field in msgspec.structs.fields(example) if not field.required}
    for missing in set(example.__struct_fields__) - optional:
        fields = {key: value for key, value in fields_of(name).items() if key != missing}
        with pytest.raises(FrameError, match=missing):
            decode(msgspec.msgpack.encode(fields), kind)


@each_example
def test_field_of_wrong_type_is_named(name: str) -> None:
    kind, example = EXAMPLES[name]
    wrong = msgspec.msgpack.Ext(1, b"")  # not the type of any field
    for field in example.__struct_fields__:
        with pytest.raises(FrameError, match=rf"\$\.{field}"):
            decode(msgspec.msgpack.encode({**fields_of(name), field: wrong}), kind)


@each_example
def test_other_schema_version_names_both(name: str) -> None:
    frame = msgspec.msgpack.encode({**fields_of(name), "v": m.SCHEMA_VERSION + 1})
    with pytest.raises(SchemaVersionError, match=rf"{m.SCHEMA_VERSION + 1}\b.*\b{m.SCHEMA_VERSION}\b"):
        decode(frame, EXAMPLES[name][0])


@each_example
def test_frame_of_wrong_length_is_an_error(name: str) -> None:
    frame = stored_frames()[name]
    for damaged in [*(frame[:end] for end in range(len(frame))), frame + b"\x00"]:
        with pytest.raises(FrameError):
            decode(damaged, EXAMPLES[name][0])


@pytest.mark.parametrize("message", OUT_OF_BOUNDS, ids=lambda message: type(message).__name__)
def test_field_out_of_bounds_is_an_error(message: m.Message) -> None:
    with pytest.raises(FrameError):
        decode(encode(message), m.ToService)


def test_message_of_other_direction_is_an_error() -> None:
    with pytest.raises(FrameError, match="Tickets"):
        decode(stored_frames()["tickets"], m.ToService)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_frames_raise_only_frame_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(EXAMPLES)))
    frame = bytearray(stored_frames()[name])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        decode_group(bytes(frame)) if name == "group" else decode(bytes(frame), EXAMPLES[name][0])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
def test_deeply_nested_frame_is_an_error(opening: bytes) -> None:
    # Inside an unknown field, which the decoder skips.
    head = msgspec.msgpack.encode({"type": "StateRequest", "v": 1, "request": 1})
    frame = b"\x84" + head[1:] + b"\xa1?" + opening * 100_000 + b"\xc0"
    with pytest.raises(FrameError):
        decode(frame, m.ToService)


def test_array_longer_than_frame_is_an_error() -> None:
    frame = bytearray(stored_frames()["deliver"])
    where = frame.index(b"\xa3ids") + 4
    frame[where : where + 1] = b"\xdd\xff\xff\xff\xff"
    with pytest.raises(FrameError):
        decode(bytes(frame), m.ToService)


# --- groups --------------------------------------------------------------------------------------------------------


def test_arrays_keep_dtype_and_values() -> None:
    group = decode_group(stored_frames()["group"])
    (sent,) = group.trajectories
    assert token_ids(sent).tolist() == [1, 2, 255]
    assert action_mask(sent).tolist() == [0, 1, 1]
    assert behaviour_logprobs(sent).tolist() == [0.0, -0.5, -0.25]
    assert (token_ids(sent).dtype, action_mask(sent).dtype, behaviour_logprobs(sent).dtype) == (
        np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4"),
    )  # fmt: skip


def test_version_range_of_group() -> None:
    mixed = m.Group(
        id="1", kind=m.TRAIN, epoch=0, indices=[0],
        trajectories=[trajectory(versions=(5, 6)), trajectory(versions=(4, 7, 8))],
    )  # fmt: skip
    assert version_range(mixed) == (4, 8)


Change = Callable[[m.Trajectory], m.Trajectory]


def changed(**fields: Any) -> Change:
    return lambda one: msgspec.structs.replace(one, **fields)


def agents(*spans: tuple[int, float]) -> Change:
    return changed(agents=[m.AgentSpan(end=end, agent="main", reward=reward) for end, reward in spans])


def kept(counts: list[int], ids: list[int]) -> Change:
    """The tokens 0, 1, 2, 3, the last two of them actions, with these to choose from."""
    of_ids, of_counts, tokens = (np.array(each, dtype=m.TOKEN_DTYPE).tobytes() for each in (ids, counts, range(4)))
    return changed(
        token_ids=tokens, action_mask=b"\0\0\1\1", behaviour_logprobs=bytes(16),
        kept_tokens=m.KeptTokens(counts=of_counts, ids=of_ids),
    )  # fmt: skip


def test_tokens_to_choose_from_keep_their_places() -> None:
    good = train_group("17")
    change = kept([0, 0, 2, 0], [7, 2])
    (_, one) = decode_group(
        encode(msgspec.structs.replace(good, trajectories=[good.trajectories[0], change(good.trajectories[1])]))
    ).trajectories
    found = kept_tokens(one)
    assert found is not None
    assert [each.tolist() for each in found] == [[0, 0, 2, 0], [7, 2]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(token_ids=b"\0" * 12), "different lengths"), (changed(token_ids=b"\0" * 15), "different lengths"),
        (changed(behaviour_logprobs=b"\0" * 20), "different lengths"),
        (changed(teacher_logprobs=b"\0" * 5), "teacher"), (changed(teacher_prompt=b"\0" * 5), "teacher"),
        (changed(teacher_top_ids=b"\0" * 8), "teacher"),
        (changed(action_mask=b"\0\0\1\1\1"), "different lengths"),
        (changed(spans=[m.VersionSpan(version=0, start=2, end=5)]), "version span"),
        (changed(spans=[m.VersionSpan(version=0, start=2, end=2)]), "version span"),
        (changed(spans=[m.VersionSpan(version=0, start=3, end=2)]), "version span"),
        (changed(reward=float("nan")), "reward"), (changed(reward=float("-inf")), "reward"),
        (changed(reward=1.1e8), "reward"), (changed(scores={"unweighted": float("inf")}), "unweighted"),
        (changed(rewards=[m.RewardSpan(end=5, value=0.0)]), "reward span"),
        (changed(rewards=[m.RewardSpan(end=4, value=float("nan"))]), "reward"), (changed(episode=0), "scores"),
        (agents((5, 0.0)), "agent spans"), (agents((3, 0.0), (3, 0.0)), "agent spans"),
        (agents((4, float("nan"))), "reward of an agent"),
        (changed(images=["aa"]), "image aa"), (kept([0, 0, 1], [9]), "choose from"),
        (kept([0, 0, 1, 1], [9]), "choose from"), (kept([0, 0, -1, 2], [9]), "choose from"),
        (kept([0, 0, 2, 0], [9, 8]), "none of those"), (kept([0, 1, 0, 0], [1]), "none of those"),
    ],
)  # fmt: skip
def test_inconsistent_group_is_named(change: Change, reason: str) -> None:
    good = train_group("17")
    bad = msgspec.structs.replace(good, trajectories=[good.trajectories[0], change(good.trajectories[1])])
    with pytest.raises(FrameError, match=f"group 17, trajectory 1: .*{reason}"):
        decode_group(encode(bad))


def test_more_lost_than_missing_episodes_are_named() -> None:
    bad = msgspec.structs.replace(train_group("17"), missing=1, lost={"reward_error": [1, 2]})
    with pytest.raises(FrameError, match=r"group 17: 2 .* 1 missing"):
        decode_group(encode(bad))


LONG = train_group("17", versions=range(1000))
"""Large enough to be compressed."""


@pytest.mark.parametrize(("group", "is_compressed"), [(train_group("17"), False), (LONG, True)])
def test_long_group_is_compressed(group: m.Group, is_compressed: bool) -> None:
    frame = encode_group(group)
    assert (len(frame) < len(encode(group))) == is_compressed
    assert decode_group(frame) == decode_group(memoryview(frame)) == decode_group(encode(group)) == group


@pytest.mark.parametrize(
    "damage",
    [
        lambda frame: frame[:-1], lambda frame: frame[:5], lambda frame: frame[:4] + b"\xff" * 4 + frame[8:],
        lambda frame: frame[:100] + bytes(50) + frame[150:],
        lambda frame: zstandard.ZstdCompressor(write_content_size=False).compress(zstandard.decompress(frame)),
        lambda frame: zstandard.compress(b""), lambda frame: zstandard.compress(b"no group"),
    ],
)  # fmt: skip
def test_damaged_compressed_group_is_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FrameError):
        decode_group(damage(encode_group(LONG)))


def test_decompressed_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode_group(LONG)
    monkeypatch.setattr("slipstream.buffer.wire.codec.MOST_GROUP_BYTES", len(encode(LONG)) - 1)
    with pytest.raises(FrameError, match=str(len(encode(LONG)))):
        decode_group(frame)


@pytest.mark.parametrize("reward", [m.MOST_REWARD, -m.MOST_REWARD])
def test_largest_reward_is_accepted(reward: float) -> None:
    group = m.Group(
        id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=[trajectory(reward=reward)], greedy_reward=reward
    )
    assert decode_group(encode(group)) == group


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1.1e8])
def test_baseline_out_of_range_is_named(reward: float) -> None:
    bad = msgspec.structs.replace(train_group("17"), greedy_reward=reward)
    with pytest.raises(FrameError, match="group 17: greedy_reward"):
        decode_group(encode(bad))


def test_image_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    group = msgspec.structs.replace(train_group("17"), images={"aa": b"1234"})
    assert decode_group(encode(group)).images == {"aa": b"1234"}
    monkeypatch.setattr("slipstream.buffer.wire.codec.MOST_IMAGE_BYTES", 3)
    with pytest.raises(FrameError, match="group 17: image aa"):
        decode_group(encode(group))
