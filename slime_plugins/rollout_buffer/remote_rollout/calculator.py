"""The arithmetic tools of the reference agent. Expressions are parsed, not executed as Python.

``calculate`` takes a whole expression; ``add``, ``subtract``, ``multiply`` and ``divide`` take two numbers.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

MAX_EXPRESSION: Final = 500
"""In characters."""
MAX_DEPTH: Final = 60
MAX_EXPONENT: Final = 1000
MAX_DIGITS: Final = 400
"""Digits of the numerator and of the denominator of each value, intermediate ones included."""

_BINARY: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
_TWO_NUMBERS: Final = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def calculator(tool: str, /, **arguments: Any) -> str:
    """Returns the result of one of the calculator's tools as text.

    Raises:
        ValueError: the tool is unknown, or an argument is missing or invalid, or ``evaluate`` raised it.
    """
    if tool == "calculate":
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            raise ValueError("calculate needs an expression, a text like '15 * 23'")
        return evaluate(expression)
    if tool not in _TWO_NUMBERS:
        raise ValueError(f"there is no tool {tool!r}")
    for key in ("a", "b"):
        if type(arguments.get(key)) not in (int, float, str):
            raise ValueError(f"{key} must be a number")
    return evaluate(f"({arguments['a']}) {_TWO_NUMBERS[tool]} ({arguments['b']})")


def evaluate(expression: str) -> str:
    """Returns the value of an arithmetic expression as text: a whole number, exactly, or else a rounded float.

    Raises:
        ValueError: the expression is not arithmetic or divides by zero; or it exceeds a limit of length, nesting,
            exponent or digits.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_EXPRESSION} are allowed")
    plain = expression.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip()
    try:
        tree = ast.parse(plain, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return _as_text(_value(tree.body, MAX_DEPTH))


def _value(node: ast.expr, depth: int) -> Fraction:
    if depth == 0:
        raise ValueError(f"the expression is nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, depth - 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _apply(type(node.op), _value(node.left, depth - 1), _value(node.right, depth - 1))
    raise ValueError("only numbers, + - * / // % ** and brackets are arithmetic")


def _apply(kind: type[ast.operator], left: Fraction, right: Fraction) -> Fraction:
    if kind is ast.Pow:
        return _checked(_power(left, right))
    if kind not in _BINARY:
        raise ValueError("only + - * / // % and ** are arithmetic")
    if right == 0 and kind in (ast.Div, ast.FloorDiv, ast.Mod):
        raise ValueError("division by zero")
    return _checked(_BINARY[kind](left, right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponents must be whole numbers up to {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    # A lower bound of the result's bits, so that no result far above the limit is computed.
    bits = (max(abs(base.numerator), base.denominator).bit_length() - 1) * abs(int(exponent))
    if bits > 4 * MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return base ** int(exponent)


def _checked(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value


def _fraction(value: Any) -> Fraction:
    """Returns a finite number as a fraction; a float as its shortest decimal form, so that 0.1 is a tenth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    return _checked(Fraction(str(value)) if isinstance(value, float) else Fraction(value))


def _as_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return repr(float(value))
    except OverflowError as error:
        raise ValueError("the result is too large for a decimal number") from error


def _schema(name: str, description: str, **parameters: tuple[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    shape = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shape}}


CALCULATOR_SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    _schema(
        "calculate",
        "Evaluate an arithmetic expression",
        expression=("string", "Numbers, + - * / // % ** and brackets, like 15 * 23"),
    ),
    _schema("add", "Add two numbers", a=("number", "First number"), b=("number", "Second number")),
    _schema("subtract", "Subtract b from a", a=("number", "First number"), b=("number", "What is subtracted")),
    _schema("multiply", "Multiply two numbers", a=("number", "First number"), b=("number", "Second number")),
    _schema("divide", "Divide a by b", a=("number", "Numerator"), b=("number", "Denominator, not zero")),
)
CALCULATOR_TOOLS: Final = ("calculate", *_TWO_NUMBERS)
