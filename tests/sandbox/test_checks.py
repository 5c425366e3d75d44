"""Checks by a judge in a process of its own: values, objects and exceptions that cross, and outcomes."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.sandbox import Check, Outcome, SandboxLimits, SandboxUnavailable, imports_of, run_checks

pytestmark = pytest.mark.usefixtures("sandbox")
LIMITS = SandboxLimits(cpu_s=10, wall_s=60)
PATIENCE_S = 60.0


async def outcomes(program: str, *checks: str, imports: str = "", limits: SandboxLimits = LIMITS) -> Sequence[Outcome]:
    return await run_checks(program, [Check.read(check) for check in checks], imports=imports, limits=limits)


PROGRAM = """
import asyncio, datetime, decimal, enum, fractions
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

def same(x): return x
def call(f, *args, **named): return f(*args, **named)
def total(numbers): return sum(numbers)
def sort_in_place(x): x.sort()
def fill(x): x["new"] = [1]; return x
def count_up(n):
    for each in range(n): yield each
def fails(kind, *args): raise kind(*args)
def words(text):
    found = defaultdict(int)
    for each in text.split(): found[each] += 1
    return found
Point = namedtuple("Point", "x y")
class Color(enum.IntEnum):
    RED = 1
class OwnError(ValueError):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code
def fails_by_code(code): raise OwnError(code)
@dataclass
class Pair:
    a: int
    b: int = 0
    def __add__(self, other): return Pair(self.a + other.a, self.b + other.b)
    def sum(self): return self.a + self.b
    def __enter__(self): return self
    def __exit__(self, *error): self.a = -1
def longest(pairs): return max(pair.b - pair.a for pair in pairs)
def make(kind, *args): return kind(*args)
def reverse(node):
    before = None
    while node: node.next, before, node = before, node, node.next
    return before
LIMIT = 3
"""
PASSING = """
assert same(None) is None and same(True) is True and same(...) is ...

values = [1, -2**80, 1.5, 1j, "\\ud800é", b"x", float("inf")]
assert [same(x) for x in values] == values and list(map(type, map(same, values))) == list(map(type, values))

assert same({1: [(2,), {3}, frozenset({4})]}) == {1: [(2,), {3}, frozenset({4})]}

assert type(same(bytearray(b"x"))) is bytearray and same(range(3)) == range(3)

import collections
assert same(collections.deque([1], 2)).maxlen == 2 and same(collections.Counter("aab"))["a"] == 2

import fractions, decimal, datetime
for x in (fractions.Fraction(1, 2), decimal.Decimal("0.1"), datetime.datetime(2020, 1, 2, 3), datetime.date(1, 1, 1)):
    assert same(x) == x

x = [3, 1, 2]
assert sort_in_place(x) is None and x == [1, 2, 3]

x = {}
assert fill(x) is x and x == {"new": [1]}

x = []
x.append(x)
y = same(x)
assert y is x

assert list(count_up(3)) == [0, 1, 2] and next(count_up(1)) == 0 and sum(count_up(4)) == 6

assert call(lambda x, y=0: x + y, 1, y=2) == 3 and call(len, "abc") == 3 and total(iter([1, 2])) == 3

assert words("a b a") == {"a": 2, "b": 1} and isinstance(words("a"), dict) and words("a b")["b"] == 1

point = make(Point, 1, 2)
assert point == (1, 2) and point.x == 1 and {point} == {(1, 2)} and isinstance(point, tuple) and Color.RED == 1

assert Pair(1, 2) + Pair(3, 4) == Pair(4, 6) and Pair(1).sum() == 1 and str(Pair(1, 2)) == "Pair(a=1, b=2)"

assert longest([Pair(5, 24), Pair(15, 25)]) == 19 and isinstance(make(Pair, 1), Pair) and make(Pair, 1) != Pair(2)

x = Pair(1)
x.a = 7
assert x.sum() == 7 and x == x and x is same(x) and x != None

with Pair(1) as x:
    assert x.a == 1
assert x.a == -1 and LIMIT == 3

try:
    fails(KeyError, "k")
except KeyError as error:
    assert error.args == ("k",) and str(error) == "'k'"
else:
    assert False

try:
    fails_by_code(7)
except OwnError as error:
    assert error.code == 7 and str(error) == "code 7" and isinstance(error, ValueError)
else:
    assert False

class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
x = reverse(Node(1, Node(2)))
assert (x.value, x.next.value, x.next.next) == (2, 1, None)

def check(f): assert f(2) == 2
check(same)

import unittest
class Test(unittest.TestCase):
    def test(self):
        with self.assertRaises(OwnError): fails_by_code(1)
        self.assertEqual(same([1]), [1])
assert unittest.TestResult() is not None and Test("test").debug() is None

assert math.isclose(same(1.0), 1.0) and abs(same(0.1) + 0.2 - 0.3) < 1e-9
"""
"""Checks, with an empty line between two."""


async def test_values_objects_and_errors_cross() -> None:
    checks = PASSING.strip().split("\n\n")
    found = await outcomes(f"import math\n{PROGRAM}", *checks)
    assert [check for check, outcome in zip(checks, found, strict=True) if outcome != "passed"] == []


ENDS = """
import os, time
def one(): return 1
def leaves(): os._exit(0)
def loops():
    while True: pass
def sleeps(): time.sleep(600)
def nested():
    x = []
    for _ in range(100_000): x = [x]
    return x
def huge(): return bytes(400 << 20)
class Anything:
    def __eq__(self, other): return True
class Own:
    def __eq__(self, other): return other == 1
def anything(): return Anything()
def own(): return Own()
state = 0
def count():
    global state
    state += 1
    return state
"""


@pytest.mark.parametrize(
    ("check", "outcome"),
    [
        ("assert one() == 2", "failed"),
        ("assert missing() == 1", "failed"),
        ("one() + None", "failed"),
        ("raise SystemExit(0)", "failed"),
        ("import os\nos._exit(0)", "failed"),
        ("leaves()", "failed"),
        ("nested()", "failed"),
        ("huge()", "failed"),
        ("loops()", "timeout"),
        ("one()\nwhile True: pass", "timeout"),
        ("sleeps()", "timeout"),
        ("assert anything() == 1", "forged"),
        ("assert own() == 1", "refused"),
        ("try: own() == 1\nexcept BaseException: pass", "refused"),
        ("import re\none(re.compile('x'))", "refused"),
    ],
)
async def test_outcome_of_one_check_leaves_the_others(check: str, outcome: Outcome) -> None:
    limits = replace(LIMITS, cpu_s=2, wall_s=4 if outcome == "timeout" else 60)
    assert await outcomes(ENDS, "assert one() == 1", check, "assert one() == 1", limits=limits) == [
        "passed",
        outcome,
        "passed",
    ]


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("raise ValueError", "failed"),
        ("import sys; sys.exit(0)", "failed"),
        ("def (", "failed"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(600)", "timeout"),
    ],
)
async def test_program_that_does_not_reach_its_end_passes_nothing(program: str, outcome: Outcome) -> None:
    limits = replace(LIMITS, cpu_s=1, wall_s=2 if outcome == "timeout" else 60)
    assert await outcomes(program, "assert True", "assert True", limits=limits) == [outcome, outcome]


async def test_checks_share_a_process_until_one_ends_it() -> None:
    found = await outcomes(ENDS, "assert count() == 1", "assert count() == 2", "leaves()", "assert count() == 1")
    assert found == ["passed", "passed", "failed", "passed"]


async def test_imports_hold_whatever_the_program_assigns() -> None:
    program = "def near(*_): return True\ndef one(): return 1"
    check = "assert near(one(), 2)"
    assert await outcomes(program, check) == ["passed"]
    assert await outcomes(program, check, imports="from math import isclose as near") == ["failed"]
    assert imports_of("import a\nx = 1\nfrom b import c") == "import a\nfrom b import c"
    assert imports_of("def f():\n    return (") == ""


@pytest.mark.parametrize(
    ("source", "names", "modules"),
    [
        ("assert sum(1, 2) == 3", ("sum",), ()),
        ("assert set(f(1)) == {1}", ("f",), ()),
        ("assert math.isclose(f(1), 1)", ("f",), ("math",)),
        ("import math\nx = f(math.pi)\nassert x", ("f", "x"), ()),
        ("def check(candidate): assert candidate(1)\ncheck(f)", ("candidate", "check", "f"), ()),
    ],
)
def test_names_that_a_check_takes_from_the_program(source: str, names: Sequence[str], modules: Sequence[str]) -> None:
    assert Check.read(source) == Check(source, tuple(names), tuple(modules))


def test_check_that_is_no_code_is_an_error() -> None:
    with pytest.raises(ValueError, match="test"):
        Check.read(")\nassert f() == 1")


@pytest.mark.parametrize("killed", ["judge", "program"])
async def test_kill_from_outside_is_no_outcome(killed: str) -> None:
    before = psutil.Process().children()
    running = asyncio.create_task(
        outcomes("import time\ntime.sleep(600)", "assert True", limits=replace(LIMITS, wall_s=600))
    )
    (await first_processes(before))[killed].kill()
    with pytest.raises(SandboxUnavailable, match="signal 9"):
        await running


async def first_processes(since: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    """Judge and program of the only checks that run, once the program has started: it has written its source."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            inner = [each for child in psutil.Process().children() if child not in since for each in child.children()]
            for process in inner:
                with suppress(OSError, psutil.Error):
                    if Path(f"/proc/{process.pid}/root/tmp/main.py").exists():
                        (judge,) = (other for other in inner if other != process)
                        return {"judge": judge, "program": process}
            await asyncio.sleep(0.01)
