"""The reward `math`: an answer that equals the reference as a number or expression.

Numbers, words and equal texts are compared here. Everything else is compared by math-verify in a process of its own,
with a limit of CPU time: some expressions keep it busy for ever. `python -m` of this module is that process.
"""

import importlib.util
import json
import math
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.processes import die_with
from slipstream.rewards.answers import (
    Number,
    behind_hashes,
    boxed,
    final_answer,
    in_words,
    last_statement,
    plain_number,
    read_number,
    tagged,
    unwrapped,
    without_end_tokens,
)
from slipstream.rewards.base import RewardUnavailable, Score

Extract = Literal["auto", "boxed", "hashes", "latex", "number", "plain"]
Form = Literal["marked", "latex", "any"]
"""An answer without anything around it, or a text in which formulas, or formulas and numbers, are to be found."""
Verdict = Literal["equal", "different", "unparsed", "timeout", "bad reference", "late reference"]

_WALL_S: Final = 120.0  # for the start of the comparing process, which imports sympy, and for its share of a busy CPU
_WALL_FACTOR: Final = 10.0
_KILL_S: Final = 2.0  # CPU time beyond the limit that it observes itself, between two operations of Python
_REMEMBERED: Final = 4096
_MODULE: Final = "slipstream.rewards.functions.math"
_MEMORY_BYTES: Final = 4 << 30
_TAIL: Final = 2000  # characters that are searched for an answer without a mark
_DIGITS: Final = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_FORMULA: Final = re.compile(r"(?<!\\)\$([^$]*[^$\\])\$|\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
_IGNORED: Final = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!$]|\$")
_BLANKS: Final = re.compile(r"(?:\\[,; ]|\s)+")
_NO_BLANKS: Final = re.compile(r"(?<!\w) | (?!\w)")
_PERCENT: Final = re.compile(r"%|\bpercent", re.IGNORECASE)
_WORD: Final = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")  # noqa: RUF001
_LONGEST_WORDS: Final = 200
_OPTION: Final = re.compile(r"(?:option|choice)?\s*[(\[]?([A-Za-z])(?:[)\].:]+\s+(.*))?", re.IGNORECASE | re.DOTALL)
_OTHER_OPTION: Final = re.compile(r"\b[B-HJ-Z]\b|\([A-Za-z]\b|\b(?:or|not)\b")


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class Math:
    r"""1 if the answer equals the reference, else 0, with the parts `parsed` and `timeout` (0 or 1).

    The reference is the content of its last \boxed{}, else what follows its last `####`, else the whole text. If it is
    a plain number, the answer must be one too: an expression of the same value may be a copy of the question. If it is
    a letter or words, capitals do not count.

    Attributes:
        worst_case_s: longest time of a call, also on a busy machine.

    Raises: ConfigError without math-verify. When called: ValueError for a reference that can't be parsed,
        RewardUnavailable if the comparing process can't be run or the reference is not parsed in time.
    """

    extract: Extract = "auto"
    r"""Where the answer is: the last \boxed{} (`boxed`), behind the last `####` (`hashes`), the last LaTeX formula
    (`latex`), the last number (`number`), the whole text (`plain`); `auto`: boxed, else hashes, else between
    `<answer>` tags, else behind the last `answer is` or `answer:`, else the last formula or number."""
    timeout_s: float = Field(default=2.0, gt=0, le=600)
    """CPU time to compare one answer; then its score is 0, with the part `timeout`."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError('math-verify is not installed: pip install "slipstream[math]"')
        self._comparer = Comparer(self.timeout_s)
        self.worst_case_s = wall_limit_s(self.timeout_s) + _KILL_S

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> Score:
        """1 if the answer equals the reference, else 0; the form in which it was found is a part."""
        wanted = final_answer(reference)
        if not wanted:
            raise ValueError("math needs a reference that is not empty")
        given, form = extract(answer, self.extract)
        verdict = compare_texts(wanted, given, form, in_percent=_PERCENT.search(reference) is not None)
        verdict = verdict or self._comparer.compare(wanted, given, form)
        if verdict == "bad reference":
            raise ValueError(f"math can't parse the reference {wanted[:200]!r}")
        if verdict == "late reference":
            raise RewardUnavailable(
                f"math can't parse the reference {wanted[:200]!r} in {self.timeout_s:g} s of CPU time: raise timeout_s"
            )
        parts = {"parsed": float(verdict != "unparsed"), "timeout": float(verdict == "timeout")}
        return Score(float(verdict == "equal"), parts)


def wall_limit_s(timeout_s: float) -> float:
    """Time of one comparison on a busy machine, the start of its process included."""
    return _WALL_S + _WALL_FACTOR * timeout_s


def extract(answer: str, where: Extract) -> tuple[str, Form]:
    """The part of an answer that is compared, empty if it is missing; and its form."""
    answer = without_end_tokens(answer)
    tail = answer[-_TAIL:].strip()
    if where == "latex":
        return tail, "latex"
    finders: dict[Extract, Callable[[], str]] = {
        "boxed": lambda: boxed(answer),
        "hashes": lambda: behind_hashes(answer),
        "plain": answer.strip,
        "number": lambda: ([*_DIGITS.findall(answer)] or [""])[-1],
        "auto": lambda: boxed(answer) or behind_hashes(answer) or tagged(answer) or in_words(answer),
    }
    found = finders[where]()
    return (found, "marked") if found or where != "auto" else (tail, "any")


def compare_texts(wanted: str, given: str, form: Form, *, in_percent: bool = False) -> Verdict | None:
    """The verdict for equal texts, numbers and words; None for what must be parsed.

    Args:
        in_percent: the reference is a number of percents, so that 38 % is 38 too, not only 0.38.
    """
    if not given:
        return "unparsed"
    if _bare(wanted) == _bare(given):
        return "equal"
    if form == "latex":
        return None
    number = plain_number(wanted)
    if number is not None:
        found = read_number(given if form == "marked" else last_statement(given, r"\d"), quotients=form == "marked")
        if isinstance(found, Number):
            return "equal" if found.equals(number, in_percent=in_percent) else "different"
        return "unparsed" if found == "none" else None
    if form == "any":
        given = last_statement(given, r"\S")
        given = next((found[found.lastindex or 0] for found in reversed([*_FORMULA.finditer(given)])), given)
    return _compare_words(wanted, given, form)


def _compare_words(wanted: str, given: str, form: Form) -> Verdict | None:
    """The verdict for a reference that is a letter or words; None for others, and for letters that may be variables."""
    if len(wanted) > _LONGEST_WORDS or not _WORD.fullmatch(words := _words(wanted)):
        return None
    if len(given) <= _LONGEST_WORDS and words in (_words(given), _option(given)):
        return "equal"
    if len(words) < 3 and "\\text" not in wanted:
        return None
    return "different" if form == "marked" else "unparsed"


def _words(text: str) -> str:
    return unwrapped(text).strip(" ()[].,:;!\"'").casefold()


def _option(text: str) -> str:
    """The letter of `(B)`, `option B` or `B) 12 apples`; empty without one."""
    found = _OPTION.fullmatch(unwrapped(text).rstrip(".)]"))
    return found[1].casefold() if found and not _OTHER_OPTION.search(found[2] or "") else ""


def _bare(text: str) -> str:
    """The text without what LaTeX does not show; blanks count only between letters or digits."""
    return _NO_BLANKS.sub("", _BLANKS.sub(" ", _IGNORED.sub("", text)).strip())


class Comparer:
    """A process that compares expressions, started when it is needed, and again after it was killed."""

    def __init__(self, timeout_s: float) -> None:
        """A comparison has `timeout_s` of CPU time."""
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, str, Form], Verdict] = {}

    def compare(self, wanted: str, given: str, form: Form) -> Verdict:
        """The verdict; that of an earlier call if there was one, as a group's answers are often equal.

        Raises: RewardUnavailable if the process does not start, is killed, or gets too little CPU time.
        """
        pair = (wanted, given, form)
        with self._lock:
            verdict = self._verdicts.get(pair)
            if verdict is None:
                verdict = self._ask(*pair)
                if verdict not in ("timeout", "late reference"):  # CPU time, too, depends on the machine
                    if len(self._verdicts) >= _REMEMBERED:
                        self._verdicts.clear()
                    self._verdicts[pair] = verdict
            return verdict

    def _ask(self, wanted: str, given: str, form: Form) -> Verdict:
        """A process that ends is replaced once: it may have been killed from outside."""
        until = time.monotonic() + wall_limit_s(self._timeout_s)
        request, exit_code = json.dumps([wanted, given, form]).encode() + b"\n", 0
        for _ in range(2):
            process = self._process or self._start(until)
            assert process.stdin is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                verdict: Verdict = json.loads(_line(process, until))
            except TimeoutError:
                self._end()
                limit = f"{wall_limit_s(self._timeout_s):g} s"
                raise RewardUnavailable(f"the process of the reward math did not answer within {limit}") from None
            except OSError:
                exit_code = self._end()
            else:
                return verdict
            if exit_code == -signal.SIGXCPU:
                return "timeout"
        if exit_code == -signal.SIGKILL:
            raise RewardUnavailable("the process of the reward math was killed twice; is memory short?")
        return "timeout"  # a deep recursion may crash it

    def _start(self, until: float) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", _MODULE, str(os.getpid()), str(self._timeout_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, process)
        try:
            _line(process, until)
        except (OSError, TimeoutError):
            _end(process)
            why = "the process of the reward math did not start in time; its error, if it has one, is in the log"
            raise RewardUnavailable(why) from None
        self._process = process
        return process

    def _end(self) -> int:
        """Ends the process; returns its exit code."""
        process, self._process = self._process, None
        assert process is not None, "it was asked"
        return _end(process)


def _line(process: "subprocess.Popen[bytes]", until: float) -> bytes:
    """The next line that it writes. Raises: TimeoutError; ConnectionError when it has ended."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), 1 << 12)
        if not piece:
            raise ConnectionError
        line += piece
    return line


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Ends a process; returns its exit code."""
    process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what it has not read is lost
                pipe.close()
    return code


# --- in the comparing process -----------------------------------------------------------------------------------------


class _Late(BaseException):
    """The limit of time has passed. No Exception: math-verify catches those."""


def _raise_late(*_: object) -> None:
    raise _Late


@contextmanager
def _limited(timeout_s: float) -> Iterator[None]:
    """Limits this process's CPU time: a load of the machine does not count. Raises: _Late.

    The kernel ends the process if the exception has no effect, as within one operation on long integers.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + timeout_s + _KILL_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _is_literal(value: Any, text: str, *, quotients: bool) -> bool:
    """True for a number that is written out, not computed: `38`, `x = 38`, `50\\%`, `3.8 \\times 10^{1}`, not `44 - 6`.

    Args:
        value: sympy's expression of `text`, unevaluated.
        quotients: a fraction is such a number.
    """
    import sympy

    if not quotients and ("frac" in text or "/" in text):
        return False
    while isinstance(value, sympy.Eq):
        value = value.rhs
    if isinstance(value, sympy.FiniteSet) and len(value.args) == 1:
        (value,) = value.args
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    factors = value.args if isinstance(value, sympy.Mul) else (value,)
    scales = [each for each in factors if each in (-1, percent) or (isinstance(each, sympy.Pow) and each.base == 10)]
    numbers = [each for each in factors if each not in scales]
    return len(numbers) == 1 and isinstance(numbers[0], sympy.Number)


def main() -> None:
    """Compares pairs from stdin, a JSON line each, until it is closed."""
    parent, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _raise_late)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
        verdict: Verdict = "late reference"
        try:
            with _limited(timeout_s):
                gold = parse(f"${wanted.strip('$')}$", "any")
            if not gold:
                return "bad reference"
            verdict = "timeout"
            with _limited(timeout_s):
                if form == "marked" and not _FORMULA.search(given):
                    target = parse(f"\\boxed{{{given}}}", form)
                else:
                    target = parse(given, "latex" if form == "latex" else "any")
                if not target:
                    return "unparsed"
                number = plain_number(wanted)
                quotients = number is None or number.denominator != 1 or form == "marked"
                is_answer = number is None or _is_literal(target[0], target[-1], quotients=quotients)
                equal = is_answer and math_verify.verify(gold, target, timeout_seconds=None)
                return "equal" if equal else "different"
        except _Late:
            return verdict

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(compare(*json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
