r"""Final answers: where a text has one, the number that it gives, and the majority of several.

A text is read as a number only if it holds one number, or one right of its last `=`; the rest must be words or units.
`tests/rewards/functions/math_answers.md` has examples.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

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
    for match in _BRACES.finditer(text):
        box, brace, close = match.groups()
        if box or brace:
            opened.append(match.end() if box else None)
        elif close and opened:
            begin = opened.pop()
            if begin is not None:
                last = max(last, (begin, match.start()))
    begin, end = last
    return text[begin:end].strip() if begin >= 0 else ""


def behind_hashes(text: str) -> str:
    """The line behind the last `####`; empty without one."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].rstrip() if mark else ""


def tagged(text: str) -> str:
    """The text between the last `<answer>` and `</answer>`; empty without them."""
    matches = [*_TAGGED.finditer(text)]
    return matches[-1][1].strip() if matches else ""


def in_words(text: str) -> str:
    """The statement behind the last `answer is` or `answer:`, without its full stop; empty without one."""
    tail = text[-_TAIL:]
    begins = [match.end() for match in _ANSWER_IS.finditer(tail)]
    match = _STATEMENT.match(tail, begins[-1]) if begins else None
    return match[0].lstrip(" \n*_").rstrip(" \n*_.!") if match else ""


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


_ROUNDING: Final = 6
"""Decimals to which numbers are compared, as math-verify does."""
_LONGEST: Final = 500  # characters of a text that is read here

_WRAPPER: Final = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt|bb)|mbox|operatorname|boxed|fbox)\s*\{([^{}]*)\}"
)
_DROPPED: Final = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]$]|\\displaystyle|\$|\*\*|__|`")
_BLANK: Final = re.compile(r"\\(?:[,;:! ]|quad|qquad|newline|\\)|[~\s]")
_THOUSANDS: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|,?\\!|\\[,;: ]|~|[\u00a0\u2009\u202f])\d{3})+(?!\d)")
_DEGREES: Final = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°")
_NUMBER: Final = re.compile(
    r"""(?<![\w.^])(?P<sign>[-+])?[ ]?[$€£¥₹]?
    (?P<digits>\d+(?:\.\d+)?|\.\d+)
    (?:e(?P<exponent>[-+]?\d{1,3})(?!\w)|[ ]*(?:\\times|\\cdot|[×*])[ ]*10[ ]*\^[ ]*\{?(?P<power>[-+]?\d{1,3})\}?)?
    (?:[ ]*/[ ]*(?P<over>\d+(?:\.\d+)?))?""",  # noqa: RUF001
    re.VERBOSE | re.IGNORECASE,
)
_PLAIN: Final = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
_AROUND: Final = re.compile(
    r"""(?> (?:[kcm]?m|ft|in|yd)(?![^\W\d_]) (?:/[hs](?!\w))? (?:\ ?\^\ ?\{?[23]\}?|[²³])?
      | [^\W\d_]{2,} (?:['’-][^\W\d_]+)*                # a word
      | (?<![^\W\d_]) [ai] (?=[ ][^\W\d_]{2})           # a, I
      | /[ ]?(?=[^\W\d_]{2}) | /[hs](?!\w)
      | [\s.,:;()\[\]'"’%$€£¥₹] )*+""",  # noqa: RUF001
    re.VERBOSE | re.IGNORECASE,
)
"""Text around a number: words, units, punctuation."""
_EQUALS: Final = re.compile(r"(?<![<>!:])=|≈|\\approx(?![a-z])")
_ARITHMETIC: Final = re.compile(r"(?>\\[a-z]+|[^\W\d_](?![^\W\d_])|[^\w,;]|[\d_])*+", re.IGNORECASE)
_LIST: Final = re.compile(r"[ ]*(?:[,;–—]|or|and|to)?[ ]*", re.IGNORECASE)  # noqa: RUF001
_REFUSED: Final = re.compile(
    r"\b(?:not|never|cannot|wrong|incorrect|false|neither|nor|or|except|minus|negative)\b|n['’]t\b|\bthan\s*#|"  # noqa: RUF001
    r"#\W*(?:(?:hundred|thousand|million|billion|trillion|dozen)s?|k|mn|bn|pi|squared|cubed)\b|#.*(?:\bhalf\b|\?)",
    re.IGNORECASE,
)
"""Words that deny a number (`#`) or change its value."""


@dataclass(frozen=True)
class Number:
    """A number, and whether it is a percentage."""

    value: Fraction
    is_percent: bool = False

    def equals(self, wanted: Fraction, *, in_percent: bool) -> bool:
        """To six decimals; 38 % is 0.38, and 38 where the wanted number counts percents."""
        values = [self.value / 100] * self.is_percent + [self.value] * (in_percent or not self.is_percent)
        return any(round(value, _ROUNDING) == round(wanted, _ROUNDING) for value in values)


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else, dollar signs and emphasis aside; None for others."""
    if len(text) > _LONGEST:
        return None
    cleaned = _cleaned(text).removesuffix(".")
    return Fraction(cleaned) if _PLAIN.fullmatch(cleaned) else None


def read_number(text: str, *, quotients: bool) -> Number | Literal["none", "unread"]:
    """The number that a text gives as its answer: `none` for several or a denied one, `unread` if it must be parsed.

    Args:
        text: an answer, or a sentence.
        quotients: `76/2` is a number too, not only its value.
    """
    if len(text) > _LONGEST:
        return "unread"
    text = _right_side(_cleaned(text))
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return "unread"
    begin, last = (numbers[-2].end() if len(numbers) > 1 else 0), numbers[-1]
    between, after = text[begin : last.start()], text[last.end() :]
    is_list = len(numbers) > 1 and not last["sign"] and _LIST.fullmatch(between)
    if is_list or _REFUSED.search(f"{between}#{after}"):
        return "none"
    is_alone = len(numbers) == 1 and not after[:1].isalpha() and _AROUND.fullmatch(between) and _AROUND.fullmatch(after)
    over = Fraction(last["over"] or 1)
    if not is_alone or not over or (last["over"] and not quotients):
        return "unread"
    power = int(last["exponent"] or last["power"] or 0)
    value = Fraction((last["sign"] or "") + last["digits"]) * Fraction(10) ** power / over
    return Number(value, after.lstrip().casefold().startswith(("%", "percent")))


def unwrapped(text: str) -> str:
    r"""The text without emphasis, `\text{}` and mathematics' delimiters, with single blanks."""
    previous = None
    while previous != text:
        previous, text = text, _WRAPPER.sub(r" \1 ", text)
    return re.sub(" +", " ", _BLANK.sub(" ", _DROPPED.sub("", text))).strip()


def _cleaned(text: str) -> str:
    text = _DEGREES.sub(" ", _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text))
    return unwrapped(text.replace("−", "-").replace(r"\%", "%"))  # noqa: RUF001


def _right_side(text: str) -> str:
    """The text right of the last `=`, if the left is a name or arithmetic; else the whole text."""
    *left, right = _EQUALS.split(text)
    names_one = not any(re.search(r"\d", part) or _REFUSED.search(part) for part in left)
    return right if names_one or all(map(_ARITHMETIC.fullmatch, left)) else text
