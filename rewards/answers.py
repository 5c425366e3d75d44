"""Final answers: where a text has one, and the majority of several."""

import re
from collections import Counter
from collections.abc import Sequence


def boxed(text: str) -> str:
    r"""The content of the last complete `\boxed{}`; empty without one."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for index in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[begin:index].strip()
        end = start
    return ""


def behind_hashes(text: str) -> str:
    """The line behind the last `####`; empty without one."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].rstrip() if mark else ""


def final_answer(text: str) -> str:
    r"""The content of the last complete `\boxed{}`, else the line behind the last `####`, else the whole text."""
    return boxed(text) or behind_hashes(text) or text.strip()


def majority(answers: Sequence[str]) -> int:
    """Index of the first answer whose final answer most others have too; of equally frequent ones, the first.

    White space in final answers does not count. Source: self-consistency, Wang et al. 2022, arXiv 2203.11171.
    """
    finals = [re.sub(r"\s+", "", final_answer(answer)) for answer in answers]
    winner, _ = Counter(finals).most_common(1)[0]
    return finals.index(winner)
