"""The majority among several answers to a task (self-consistency; Wang et al. 2022, arXiv 2203.11171)."""

import re
from collections import Counter
from collections.abc import Sequence


def majority(answers: Sequence[str]) -> int:
    """Index of the first answer whose final answer most others have too; of equally frequent ones, the first."""
    finals = [final_answer(answer) for answer in answers]
    winner, _ = Counter(finals).most_common(1)[0]
    return finals.index(winner)


def final_answer(text: str) -> str:
    r"""What an answer ends with: the content of its last `\boxed{}`, what follows its last `####`, or all of it."""
    _, boxed, rest = text.rpartition(r"\boxed{")
    if boxed:
        return re.sub(r"\s+", "", rest[: _closing(rest)])
    return text.rpartition("####")[2].strip()


def _closing(text: str) -> int:
    """Index of the brace that closes the group in which the text begins; its length without one."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return index
    return len(text)
