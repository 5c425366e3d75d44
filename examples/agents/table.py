"""The table of a lookup task, as its env has it, and the parts of the reward; standard library only."""

import hashlib
from collections.abc import Sequence
from typing import Any

KEYS = "0123456789"


def value_of(info: dict[str, Any], key: str) -> str:
    """The value of a key in the task's table; E for what is no key."""
    if len(key) != 1 or key not in KEYS:
        return "E"
    text = f"{info['table']}/{key}"
    return str(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % 10)


def right_key(info: dict[str, Any], asked: Sequence[str]) -> float:
    """1.0 for one lookup of the task's key."""
    return float(list(asked) == [info["key"]])


def parts(info: dict[str, Any], asked: Sequence[str], answer: str) -> dict[str, float]:
    """The parts of the reward, 1.0 in all: half for the lookup, half for the answer."""
    is_right = answer == value_of(info, info["key"])
    return {"lookup": right_key(info, asked) / 2, "answer": is_right / 2}
