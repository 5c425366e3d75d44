"""Invalid frames: random bytes, truncated and changed messages, oversized fields and counts."""

import random
from collections.abc import Iterator, Sequence

import msgspec

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.service import CONTROL_BYTES, FRAMES_PER_MESSAGE
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode, encode
from tests.buffer.groups import train_group
from tests.buffer.wire.golden import EXAMPLES

VOCABULARY = 32
IDS = [str(10**9 + number) for number in range(8)]
"""Of groups: never issued, so that no ticket decides whether one is refused."""
TOO_MANY = m.Deliver(ids=["1"] * (m.GROUPS_PER_DELIVERY + 1))
OUT_OF_BOUNDS = (
    m.GroupFailed(id="9" * 5000, kind=m.TRAIN, reason="broken", detail=""),
    m.GroupFailed(id="1", kind=m.TRAIN, reason="x" * 1025, detail=""),
    m.GroupFailed(id="1", kind=m.TRAIN, reason="x", detail="x" * (m.DETAIL_CHARACTERS + 1)),
    m.Deliver(ids=["9" * 5000]), TOO_MANY, m.Credits(capacity=1, status=m.ServerStatus(server="x" * 1025), held=[]),
    m.Credits(capacity=1, status=m.ServerStatus(), held=["9" * 65]),
    m.Credits(capacity=1, status=m.ServerStatus(version=-1), held=[]),
)  # fmt: skip
"""Well-formed, but with fields that are too long or too small."""
OVERSIZED_HEADERS = (*(head + b"\xff" * 4 for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")), b"\x91" * 5000)
"""msgpack headers of an array, a map, a text and bytes of 4 Gi elements, and deeply nested arrays."""


def mutated_messages(count: int, *, seed: int, run: str) -> Iterator[list[bytes]]:
    """Messages of one or several frames: damaged ones, wrong deliveries, oversized headers and fields."""
    rng = random.Random(seed)
    good = _good(run)
    groups = [encode(train_group(group_id)) for group_id in IDS]
    for number in range(count):
        choice = rng.random()
        if number % 10_000 == 0:
            yield [b"\x00" * (CONTROL_BYTES + 1)]
        elif number % 1000 == 1:
            yield [b""] * rng.randint(FRAMES_PER_MESSAGE, FRAMES_PER_MESSAGE + 10)
        elif number % 1000 == 2:  # no more often: its frames are thousands
            yield [encode(TOO_MANY)] + [b""] * len(TOO_MANY.ids)
        elif choice < 0.05:
            ids = [rng.choice(IDS) for _ in range(rng.randint(0, 4))]
            blobs = [_damaged(rng.choice(groups), rng) for _ in range(rng.randint(0, 4))]
            yield [encode(m.Deliver(ids=ids)), *blobs]
        elif choice < 0.1:
            yield [rng.choice(OVERSIZED_HEADERS) + rng.randbytes(rng.randrange(50))]
        elif choice < 0.15:
            long = rng.choice([each for each in OUT_OF_BOUNDS if each is not TOO_MANY])
            yield [encode(long)] + [b""] * (len(long.ids) if isinstance(long, m.Deliver) else 0)
        else:
            yield [_damaged(rng.choice(good), rng), *(rng.randbytes(9) for _ in range(rng.choice([0, 0, 0, 3])))]


def drops(message: Sequence[bytes], inspector: Inspector) -> int:
    """Drops that the service must count for a message of a known server."""
    control, *blobs = message
    if len(message) > FRAMES_PER_MESSAGE or len(control) > CONTROL_BYTES:
        return 1
    try:
        content = decode(control, m.ToService)
    except FrameError:
        return 1
    if not isinstance(content, m.Deliver):
        return 0
    if len(content.ids) != len(blobs):
        return 1
    return sum(not _fits(group_id, blob, inspector) for group_id, blob in zip(content.ids, blobs, strict=True))


def _fits(group_id: str, blob: bytes, inspector: Inspector) -> bool:
    group = inspector.inspect(group_id, blob)
    return not isinstance(group.result, FrameError) and group.largest_token < VOCABULARY


def _good(run: str) -> list[bytes]:
    """Every message to the service, of the given run, except Finish, which would end the run if still valid."""
    messages = [
        message
        for kind, message in EXAMPLES.values()
        if kind is m.ToService and not isinstance(message, m.Finish)
    ]  # fmt: skip
    return [encode(msgspec.structs.replace(each, run=run) if hasattr(each, "run") else each) for each in messages]


def _damaged(good: bytes, rng: random.Random) -> bytes:
    frame = bytearray(good)
    match rng.randrange(3):
        case 0:
            return rng.randbytes(rng.randrange(100))
        case 1:
            del frame[rng.randrange(len(frame)) :]
        case 2:
            for _ in range(rng.randint(1, 5)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame)
