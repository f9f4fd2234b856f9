"""The calculator that a model calls: arithmetic, and .count() on a string literal.

    calculate("12 * (3 + 4)") == "84"; calculate("'strawberry'.count('r')") == "3"; calculate("x") is None

The text is parsed to a syntax tree. Only numbers, + - * / and .count() are computed; other nodes are refused.
Nothing is evaluated as Python. The limit on the length of the text also limits depth and time.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable

LONGEST = 200  # characters of an expression
LARGEST = 10**30  # an absolute result above it is refused
ARITHMETIC = re.compile(r"[0-9+\-*/.() ]+")
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(text: str) -> str | None:
    """The result of an expression as text; None if it is refused, too long, too large or not valid.

    Arithmetic has digits, + - * / . ( ) and blanks; commas are removed. There is no power and no //. The
    other form is 'text'.count('part') on string literals.
    """
    if len(text) > LONGEST:
        return None
    plain = text.replace(",", "").strip()
    is_arithmetic = ARITHMETIC.fullmatch(plain) is not None and "**" not in plain
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as an invalid escape in a literal
            body = ast.parse(plain if is_arithmetic else text.strip(), mode="eval").body
        result = _number(body) if is_arithmetic else _count(body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return str(result)


def _number(node: ast.expr) -> float:
    """The value of an arithmetic node. Raises ValueError or ArithmeticError."""
    match node:
        case ast.Constant(value=int() | float() as value):
            result: float = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_number(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _number(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_number(left), _number(right))
        case _:
            raise ValueError("no arithmetic")
    if not math.isfinite(result) or abs(result) > LARGEST:
        raise ValueError("too large")
    return result


def _count(node: ast.expr) -> int:
    """The value of 'text'.count('part'). Raises ValueError for any other node."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            return text.count(part)
    raise ValueError("no .count() of a literal")
