"""Final answers: where a text has one, and the majority of several."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

_BRACES: Final = re.compile(r"(\\(?:boxed|fbox)\s*\{)|(\{)|(\})|\\.", re.DOTALL)
_TAGGED: Final = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_ANSWER_IS: Final = re.compile(r"\banswer\b[*_\s]*(?:is\b|[:=])[\s:*_]*", re.IGNORECASE)
_STATEMENT: Final = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$|.*?(?:[.!?](?=\s|\*|$)|\n|$)", re.DOTALL)
_END_TOKENS: Final = re.compile(r"(?:\s|<[|｜][^<>|｜]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>)*\Z")  # noqa: RUF001
_TAIL: Final = 2000
"""Characters at a text's end that are searched for an answer in words."""


def boxed(text: str) -> str:
    r"""The content of the last complete `\boxed{}` or `\fbox{}`; empty without one."""
    opened: list[int | None] = []  # where the content of each open brace begins; None if it is not a box's
    last = (-1, -1)
    for found in _BRACES.finditer(text):
        box, brace, close = found.groups()
        if box or brace:
            opened.append(found.end() if box else None)
        elif close and opened:
            begin = opened.pop()
            if begin is not None:
                last = max(last, (begin, found.start()))
    begin, end = last
    return text[begin:end].strip() if begin >= 0 else ""


def behind_hashes(text: str) -> str:
    """The line behind the last `####`; empty without one."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].rstrip() if mark else ""


def tagged(text: str) -> str:
    """The text between the last `<answer>` and `</answer>`; empty without them."""
    found = [*_TAGGED.finditer(text)]
    return found[-1][1].strip() if found else ""


def in_words(text: str) -> str:
    """The statement behind the last `answer is` or `answer:`, without its full stop; empty without one."""
    tail = text[-_TAIL:]
    begins = [found.end() for found in _ANSWER_IS.finditer(tail)]
    found = _STATEMENT.match(tail, begins[-1]) if begins else None
    return found[0].lstrip(" \n*_").rstrip(" \n*_.!") if found else ""


def last_statement(text: str, pattern: str) -> str:
    """The last sentence or line in which the regular expression occurs; empty without one."""
    statements = [found[0].strip() for found in _STATEMENT.finditer(text[-_TAIL:])]
    return next((each for each in reversed(statements) if re.search(pattern, each)), "")


def without_end_tokens(text: str) -> str:
    """The text without special tokens such as `<|im_end|>` and white space at its end."""
    tail = text[-_TAIL:]
    return text[: len(text) - len(tail)] + _END_TOKENS.sub("", tail)


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
