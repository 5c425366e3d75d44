"""Arithmetic on the text of an expression, bounded in time and memory.

Written here: libraries that evaluate expressions (asteval, simpleeval, sympy) bound neither the digits of a product nor
the depth of an expression, and a policy in training tries both.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, Final

MOST_CHARACTERS: Final = 1000
MOST_BITS: Final = 4096
"""Of any whole number on the way; larger ones take too long, and Python does not print them."""

Number = int | float


def _round(value: Number, digits: int | None = None) -> Number:
    """Raises: ValueError for digits with which Python would compute a power of ten of that size."""
    if digits is not None and abs(digits) > MOST_BITS:
        raise ValueError(f"{digits} digits are too many")
    return round(value, digits)


_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Final[dict[type[ast.unaryop], Callable[[Any], Any]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil")
} | {"abs": abs, "round": _round, "min": min, "max": max, "gcd": math.gcd}
_CONSTANTS: Final = {"pi": math.pi, "e": math.e}
_SIGNS: Final = str.maketrans({"\N{MULTIPLICATION SIGN}": "*", "·": "*", "÷": "/", "\N{MINUS SIGN}": "-", "^": "**"})


async def calculator(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Supports + - * / // % and ** (or ^), parentheses, pi, e, and functions: sqrt, exp, log, log2, log10, sin, cos, tan,
    asin, acos, atan, floor, ceil, abs, round, min, max, gcd.

    Args:
        expression: such as (3 + 4) * 2 ** 0.5
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MOST_CHARACTERS}")
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:  # MemoryError: too many nested parentheses
        raise ValueError(f"not an arithmetic expression: {expression[:100]!r}") from error
    value = _value(tree.body)
    return str(value) if isinstance(value, int) else format(value, ".15g")  # .15g: 0.1 + 0.2 is 0.3


calculator.resumable = True  # type: ignore[attr-defined]  # a function; see `Toolbox`


def _value(node: ast.expr) -> Number:
    """The value of a part of an expression. Raises: ValueError, ArithmeticError, TypeError."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _checked(_UNARY[type(sign)](_value(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _checked(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)[:100]!r} is no arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        bits = base.bit_length() * exponent
        if bits > 2 * MOST_BITS:  # before it is computed: 9 ** 9 ** 9 has 10 ** 9 bits
            raise ValueError(f"a number of about {bits} bits is too large")
    return _checked(base**exponent)


def _checked(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits is too large")
    assert isinstance(value, int | float), "arithmetic on numbers gives numbers"
    return value
