r"""Numbers as answers write them: with units, currency signs and words around them.

A text is read as a number only if it holds one number, or one right of its last `=`; the rest must be words or units.
`tests/rewards/functions/math_answers.md` has examples.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

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
    found = _cleaned(text).removesuffix(".")
    return Fraction(found) if _PLAIN.fullmatch(found) else None


def read_number(text: str, *, quotients: bool) -> Number | Literal["none", "unread"]:
    """The number that a text gives as its answer: `none` for several or a denied one, `unread` if it must be parsed.

    Args:
        text: an answer, or a sentence.
        quotients: `76/2` is a number too, not only its value.
    """
    if len(text) > _LONGEST:
        return "unread"
    text = _right_side(_cleaned(text))
    found = list(_NUMBER.finditer(text))
    if not found:
        return "unread"
    begin, last = (found[-2].end() if len(found) > 1 else 0), found[-1]
    between, after = text[begin : last.start()], text[last.end() :]
    is_list = len(found) > 1 and not last["sign"] and _LIST.fullmatch(between)
    if is_list or _REFUSED.search(f"{between}#{after}"):
        return "none"
    is_alone = len(found) == 1 and not after[:1].isalpha() and _AROUND.fullmatch(between) and _AROUND.fullmatch(after)
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
