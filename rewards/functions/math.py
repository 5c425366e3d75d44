"""The reward `math`: an answer that equals the reference as a number or expression.

Equal texts and plain numbers are compared here. Everything else is compared by math-verify in a process of its own,
which is killed at a limit of time: some expressions keep it busy for ever. `python -m` of this module is that process.
"""

import importlib.util
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.processes import die_with
from slipstream.rewards.answers import behind_hashes, boxed, final_answer
from slipstream.rewards.base import RewardUnavailable, Score

Extract = Literal["auto", "boxed", "hashes", "latex", "number", "plain"]
Form = Literal["marked", "latex", "any"]
"""An answer without anything around it, or a text in which formulas, or formulas and numbers, are to be found."""
Verdict = Literal["equal", "different", "unparsed", "timeout", "bad reference"]

_START_S: Final = 120.0  # the comparing process imports sympy
_KILL_S: Final = 2.0  # beyond the limit that it observes itself
_REMEMBERED: Final = 4096
_MODULE: Final = "slipstream.rewards.functions.math"
_MEMORY_BYTES: Final = 4 << 30
_TAIL: Final = 2000  # characters that are searched for an answer without a mark
_NUMBER: Final = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_LONGEST_NUMBER: Final = 200
_ANSWER_IS: Final = re.compile(
    rf"answer(?:\s+is)?\s*:?\s*\**\$?\s*({_NUMBER.pattern})\s*\$?\.?\**\.?\s*$", re.IGNORECASE
)
"""The answer in words, at the end of a text."""
_IGNORED: Final = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;$ ]|\$|\s|(?<=\{),(?=\})")
_ROUNDING: Final = 6
"""Decimals to which numbers are compared, as math-verify does."""


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class Math:
    r"""1 if the answer equals the reference, else 0, with the parts `parsed` and `timeout` (0 or 1).

    The reference is the content of its last \boxed{}, else what follows its last `####`, else the whole text. If it is
    a plain number, the answer must be one too: an expression of the same value may be a copy of the question.

    Raises: ConfigError without math-verify. When called: ValueError for a reference that can't be parsed.
    """

    extract: Extract = "auto"
    r"""Where the answer is: the last \boxed{} (`boxed`), behind the last `####` (`hashes`), the last LaTeX formula
    (`latex`), the last number (`number`), the whole text (`plain`); `auto`: boxed, else hashes, else the last formula
    or number."""
    timeout_s: float = Field(default=2.0, gt=0, le=600)
    """Time to compare one answer; then its score is 0, with the part `timeout`."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError('math-verify is not installed: pip install "slipstream[math]"')
        self._comparer = Comparer(self.timeout_s)
        self.worst_case_s = _START_S + self.timeout_s + _KILL_S

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> Score:
        """See the class."""
        wanted = final_answer(reference)
        if not wanted:
            raise ValueError("math needs a reference that is not empty")
        given, form = extract(answer, self.extract)
        verdict = _compare_texts(wanted, given) if given else "unparsed"
        if verdict is None:
            verdict = self._comparer.compare(wanted, given, form)
        if verdict == "bad reference":
            raise ValueError(f"math can't parse the reference {wanted[:200]!r}")
        parts = {"parsed": float(verdict != "unparsed"), "timeout": float(verdict == "timeout")}
        return Score(float(verdict == "equal"), parts)


def extract(answer: str, where: Extract) -> tuple[str, Form]:
    """The part of an answer that is compared, empty if it is missing; and its form."""
    tail = answer[-_TAIL:].strip()
    if where == "latex":
        return tail, "latex"
    in_words = _ANSWER_IS.search(tail)
    finders: dict[Extract, Callable[[], str]] = {
        "boxed": lambda: boxed(answer),
        "hashes": lambda: behind_hashes(answer),
        "plain": answer.strip,
        "number": lambda: ([*_NUMBER.findall(answer)] or [""])[-1],
        "auto": lambda: boxed(answer) or behind_hashes(answer) or (in_words.group(1) if in_words else ""),
    }
    found = finders[where]()
    return (found, "marked") if found or where != "auto" else (tail, "any")


def _compare_texts(wanted: str, given: str) -> Verdict | None:
    """The verdict for equal texts and for plain numbers; None for others."""
    first, second = _IGNORED.sub("", wanted), _IGNORED.sub("", given)
    if first == second:
        return "equal"
    numbers = _number(first), _number(second)
    if numbers[0] is None or numbers[1] is None:
        return None
    return "equal" if round(numbers[0], _ROUNDING) == round(numbers[1], _ROUNDING) else "different"


def _number(text: str) -> Fraction | None:
    text = text.removesuffix(".").replace("{}", ",")
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))


class Comparer:
    """A process that compares expressions, started when it is needed, and again after it was killed."""

    def __init__(self, timeout_s: float) -> None:
        """A comparison has `timeout_s`."""
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, str, Form], Verdict] = {}

    def compare(self, wanted: str, given: str, form: Form) -> Verdict:
        """The verdict; that of an earlier call if there was one, as a group's answers are often equal.

        Raises: RewardUnavailable if the process does not start.
        """
        pair = (wanted, given, form)
        with self._lock:
            if pair not in self._verdicts:
                if len(self._verdicts) >= _REMEMBERED:
                    self._verdicts.clear()
                self._verdicts[pair] = self._ask(*pair)
            return self._verdicts[pair]

    def _ask(self, wanted: str, given: str, form: Form) -> Verdict:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([wanted, given, form]).encode() + b"\n")
            process.stdin.flush()
            verdict: Verdict = json.loads(_line(process, self._timeout_s + _KILL_S))
        except (OSError, TimeoutError):  # a deep recursion may crash it
            self._process = None
            _end(process)
            return "timeout"
        return verdict

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", _MODULE, str(os.getpid()), str(self._timeout_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, process)
        try:
            _line(process, _START_S)
        except (OSError, TimeoutError):
            _end(process)
            why = f"the process of the reward math did not start within {_START_S:g} s; its error is in the log"
            raise RewardUnavailable(why) from None
        self._process = process
        return process


def _line(process: "subprocess.Popen[bytes]", within_s: float) -> bytes:
    """The next line that it writes. Raises: TimeoutError; ConnectionError when it has ended."""
    assert process.stdout is not None
    until, line = time.monotonic() + within_s, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), 1 << 12)
        if not piece:
            raise ConnectionError
        line += piece
    return line


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what it has not read is lost
                pipe.close()


# --- in the comparing process -----------------------------------------------------------------------------------------


class _Late(BaseException):
    """The limit of time has passed. No Exception: math-verify catches those."""


def _raise_late(*_: object) -> None:
    raise _Late


def _is_literal(value: Any, text: str, *, whole: bool) -> bool:
    """True for a number that is written out, not computed: `38`, `x = 38`, `50\\%`, `3.8 \\times 10^{1}`, not `44 - 6`.

    Args:
        value: sympy's expression of `text`, unevaluated.
        whole: a fraction is no such number.
    """
    import sympy

    if whole and ("frac" in text or "/" in text):
        return False
    while isinstance(value, sympy.Eq):
        value = value.rhs
    if isinstance(value, sympy.FiniteSet) and len(value.args) == 1:
        (value,) = value.args
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    factors = value.args if isinstance(value, sympy.Mul) else (value,)
    scales = [each for each in factors if each in (-1, percent) or (each.is_Pow and each.base == 10)]
    numbers = [each for each in factors if each not in scales]
    return len(numbers) == 1 and bool(numbers[0].is_Number)


def main() -> None:
    """Compares pairs from stdin, a JSON line each, until it is closed."""
    parent, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _raise_late)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    import logging

    import math_verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.disable()
    formulas = LatexExtractionConfig(boxed_match_priority=0)
    targets: dict[Form, Any] = {"marked": (formulas,), "latex": (formulas,), "any": (formulas, ExprExtractionConfig())}

    @lru_cache(256)
    def parse(text: str, form: Form) -> Any:
        found = math_verify.parse(text, targets[form], parsing_timeout=None)
        return found if any(not isinstance(each, str) for each in found) else []  # the text alone: it is no expression

    def compare(wanted: str, given: str, form: Form) -> Verdict:
        verdict: Verdict = "bad reference"
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            gold = parse(f"${wanted.strip('$')}$", "any")
            if gold:
                verdict = "timeout"
                target = parse(f"\\boxed{{{given}}}" if form == "marked" else given, form)
                verdict = "unparsed"
                if target:
                    verdict = "timeout"
                    number = _number(_IGNORED.sub("", wanted))
                    is_answer = number is None or _is_literal(target[0], target[-1], whole=number.denominator == 1)
                    equal = is_answer and math_verify.verify(gold, target, timeout_seconds=None)
                    verdict = "equal" if equal else "different"
        except _Late:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return verdict

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(compare(*json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
