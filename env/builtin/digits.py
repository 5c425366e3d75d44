"""Exact problems over decimal digits: copy, reverse, sort, add; task i is computed, not stored."""

import hashlib
import json
from typing import Literal, get_args

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import MOST_TASKS, Split, Task

Operation = Literal["copy", "reverse", "sort", "add"]

_LARGEST_SPACE_DIGITS = len(str(MOST_TASKS)) - 1
_ROUNDS = 8  # four rounds make a Feistel network look random; the halves here are uneven, so twice that


class Digits:
    """Tasks over numbers of `length` digits (leading zeros count); the operator letter ends the prompt.

    `copy` "123c" -> "123", `reverse` "123r" -> "321", `sort` "312s" -> "123", `add` "12+34=" -> "046".
    `eval_tasks` problems, drawn by `seed`, are held out; all the others are the train split.

    Raises: ConfigError for an unknown operation, a length out of range, or more eval tasks than problems.
    """

    def __init__(self, operation: Operation, length: int = 3, eval_tasks: int = 256, seed: int = 0) -> None:
        if operation not in get_args(Operation):
            raise ConfigError(f"env digits: operation={operation!r} is unknown; use {', '.join(get_args(Operation))}")
        operands = 2 if operation == "add" else 1
        longest = _LARGEST_SPACE_DIGITS // operands
        if not isinstance(length, int) or not 1 <= length <= longest:
            raise ConfigError(
                f"env digits: length={length!r} must be a whole number from 1 to {longest} for {operation}"
            )
        self._digits = length * operands
        self._space = 10**self._digits
        if not isinstance(eval_tasks, int) or not 0 <= eval_tasks < self._space:
            raise ConfigError(
                f"env digits: eval_tasks={eval_tasks!r} must be from 0 to {self._space - 1}: there are "
                f"{self._space} problems and train needs one; lower eval_tasks or raise length"
            )
        self._operation = operation
        self._length = length
        self._eval_tasks = eval_tasks
        self._seed = seed

    def size(self, split: Split) -> int:
        """Number of problems in the split."""
        return self._eval_tasks if split == "eval" else self._space - self._eval_tasks

    def task(self, split: Split, index: int) -> Task:
        """The problem at `index`; its prompt occurs once over both splits.

        Raises: IndexError unless 0 <= index < size(split).
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"env digits: {split} task {index} does not exist; there are {self.size(split)}")
        position = index if split == "eval" else self._eval_tasks + index
        digits = f"{permuted(position, digits=self._digits, seed=self._seed):0{self._digits}d}"
        match self._operation:
            case "copy":
                return Task(prompt=f"{digits}c", reference=digits)
            case "reverse":
                return Task(prompt=f"{digits}r", reference=digits[::-1])
            case "sort":
                return Task(prompt=f"{digits}s", reference="".join(sorted(digits)))
            case "add":
                left, right = digits[: self._length], digits[self._length :]
                total = int(left) + int(right)
                return Task(prompt=f"{left}+{right}=", reference=f"{total:0{self._length + 1}d}")

    def fingerprint(self) -> str:
        """Hash of the options, which alone determine every task."""
        options = [self._operation, self._length, self._eval_tasks, self._seed]
        return hashlib.sha256(json.dumps(["digits", 1, *options]).encode()).hexdigest()


def permuted(position: int, *, digits: int, seed: int) -> int:
    """The image of `position` under a seeded bijection of 0 .. 10**digits - 1, in constant time.

    An alternating Feistel network over pairs (left < 2**digits, right < 5**digits); the product of both sizes
    is the range itself, so no cycle walking is needed.
    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains".
    """
    left_size: int = 2**digits
    right_size: int = 5**digits
    left, right = divmod(position, right_size)
    for number in range(_ROUNDS):
        if number % 2:
            left = (left + _hashed(seed, number, right)) % left_size
        else:
            right = (right + _hashed(seed, number, left)) % right_size
    return left * right_size + right


def _hashed(seed: int, number: int, value: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}/{value}".encode(), digest_size=16).digest())
