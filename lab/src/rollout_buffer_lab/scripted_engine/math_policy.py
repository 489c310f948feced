"""Policy for sums, and linear and quadratic equations with one unknown: solves them exactly and boxes the answer."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

_OPERATIONS: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_POWER_BITS: Final = 4096
_MAX_ANSWER_BITS: Final = 1000
_MAX_QUESTION: Final = 2000
# What people and LaTeX write, as regular expressions, and what Python's parser reads instead.
_SPELLINGS: Final = (
    (r"\\(?:times|cdot)\b|[×·]", "*"),
    (r"\\div\b|÷", "/"),
    (r"[−–]", "-"),
    (r"\^", "**"),
    (r"\\left|\\right|\$|\\,|\\!", ""),
    (r"\\d?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"(?<=[\d)])\s*(?=[a-z(])(?=\(|[a-z](?![a-z]))", "*"),  # 3x and 2(x + 1) are products
)
# A number matches completely or not at all: backtracking over the parts of a long one would take exponential time.
_TERM: Final = r"(?:\d++(?:\.\d++)?+|\b[a-z]\b|[()+\-*/\s])"
_EQUATION: Final = re.compile(rf"(?<![\w.])({_TERM}{{1,100}}+)=({_TERM}{{1,100}})(?![\w=])")
_EXPRESSION: Final = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?|[()+\-*/\s])+")
_NUMBER: Final = r"(-?\d+(?:/\d+)?)"
_WORDED_SUM: Final = re.compile(
    rf"\b(add|sum|multiply|product)\b(?: the| of| fractions| numbers)* {_NUMBER} (?:and|by) {_NUMBER}(?!\d)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MathQuestion:
    """An ``expression`` to compute; with ``unknown``, an equation ``expression`` = ``other_side`` to solve for it.

    ``largest`` says which of two solutions is asked for; None if the question does not say.
    """

    expression: str
    other_side: str = ""
    unknown: str = ""
    largest: bool | None = None


def read_question(text: str) -> MathQuestion | None:
    """Returns the sum or equation in ``text``; None if it has none, or none with a unique answer."""
    text = text[-_MAX_QUESTION:]
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    question = _read_equation(text) or _read_worded_sum(text) or _read_sum(text)
    return question if question is not None and solve(question) is not None else None


def solve(question: MathQuestion) -> Fraction | None:
    """Returns the only exact answer; None if there is no or more than one, or if it is irrational or long."""
    answer = _exact_answer(question)
    if answer is None or max(abs(answer.numerator), answer.denominator).bit_length() > _MAX_ANSWER_BITS:
        return None
    return answer


def _exact_answer(question: MathQuestion) -> Fraction | None:
    try:
        if not question.unknown:
            return _value(question.expression, {})
        roots = _roots(question)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError, RecursionError):
        return None
    if len(roots) == 2 and question.largest is not None:
        return max(roots) if question.largest else min(roots)
    return roots[0] if len(roots) == 1 else None


def worked_solution(question: MathQuestion, answer: Fraction, randomness: random.Random) -> str:
    """Returns a short solution that ends in the boxed ``answer``, right or wrong."""
    shown = _shown(answer, question)
    if question.unknown:
        equation = f"{question.expression} = {question.other_side}"
        opening = randomness.choice(
            [
                f"The equation is {equation}. I bring the terms with {question.unknown} to one side.",
                f"I solve {equation} for {question.unknown} step by step.",
            ]
        )
        return f"{opening} That gives {question.unknown} = {shown}. The answer is \\boxed{{{shown}}}."
    opening = randomness.choice(["First I compute", "I work it out:", "Step by step:"])
    return f"{opening} {question.expression} = {shown}. The answer is \\boxed{{{shown}}}."


def wrong_answer(answer: Fraction, randomness: random.Random) -> Fraction:
    """Returns an answer near the right one, and never the right one."""
    slips = [Fraction(1), Fraction(-1), Fraction(10), Fraction(-10), Fraction(2)]
    return answer + randomness.choice(slips)


def _read_equation(text: str) -> MathQuestion | None:
    for match in _EQUATION.finditer(text):
        left, right = match.group(1).strip(), match.group(2).strip()
        letters = sorted(set(re.findall(r"[a-z]", left + right)))
        if len(letters) == 1:
            return MathQuestion(expression=left, other_side=right, unknown=letters[0], largest=_largest(text))
    return None


def _largest(text: str) -> bool | None:
    if re.search(r"\b(larger|largest|greater|greatest|bigger)\b", text, re.IGNORECASE):
        return True
    return False if re.search(r"\b(smaller|smallest|lesser|least)\b", text, re.IGNORECASE) else None


def _read_worded_sum(text: str) -> MathQuestion | None:
    match = _WORDED_SUM.search(text)
    if match is None:
        return None
    sign = "+" if match.group(1).lower() in ("add", "sum") else "*"
    return MathQuestion(expression=f"{match.group(2)} {sign} {match.group(3)}")


def _read_sum(text: str) -> MathQuestion | None:
    """Returns the longest expression in the text that can be computed."""
    expressions = (match.group().strip() for match in _EXPRESSION.finditer(text))
    sums = [MathQuestion(expression=each) for each in expressions if re.search(r"\d[\s)]*[-+*/]", each)]
    return max((sum_ for sum_ in sums if solve(sum_) is not None), key=lambda sum_: len(sum_.expression), default=None)


def _roots(question: MathQuestion) -> list[Fraction]:
    """Returns the solutions of an equation whose sides differ by a polynomial a x² + b x + c.

    Three values of the difference give a, b and c; a fourth one shows whether it is such a polynomial.

    Raises:
        ValueError: the difference is of a higher degree, or has no rational roots.
        ZeroDivisionError: the difference is constant, so that all numbers or none are solutions.
    """
    values = [_difference(question, Fraction(point)) for point in range(4)]
    a = (values[2] - 2 * values[1] + values[0]) / 2
    b, c = values[1] - values[0] - a, values[0]
    if 9 * a + 3 * b + c != values[3]:
        raise ValueError("more than quadratic")
    if a == 0:
        return [-c / b]
    root = _square_root(b * b - 4 * a * c)
    return sorted({(-b - root) / (2 * a), (-b + root) / (2 * a)})


def _difference(question: MathQuestion, point: Fraction) -> Fraction:
    unknowns = {question.unknown: point}
    return _value(question.expression, unknowns) - _value(question.other_side, unknowns)


def _square_root(number: Fraction) -> Fraction:
    if number < 0:
        raise ValueError("no real root")
    root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
    if root * root != number:
        raise ValueError("no rational root")
    return root


def _value(expression: str, unknowns: dict[str, Fraction]) -> Fraction:
    return _node_value(ast.parse(expression.strip(), mode="eval").body, unknowns)


def _node_value(node: ast.expr, unknowns: dict[str, Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(str(node.value))
        case ast.Name(id=name):
            return unknowns[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_node_value(operand, unknowns)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _node_value(operand, unknowns)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_node_value(left, unknowns), _node_value(right, unknowns))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_node_value(left, unknowns), _node_value(right, unknowns))
    raise ValueError("not a sum of numbers and letters")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    digits = base.numerator.bit_length() + base.denominator.bit_length()
    if exponent.denominator != 1 or exponent < 0 or exponent * digits > _MAX_POWER_BITS:
        raise ValueError("an unsupported power")
    return base**exponent.numerator


def _shown(answer: Fraction, question: MathQuestion) -> str:
    """Formats the answer: a decimal for a question in decimals, else a fraction."""
    if answer.denominator == 1:
        return str(answer.numerator)
    decimal = str(float(answer))
    if "." in question.expression + question.other_side and Fraction(decimal) == answer:
        return decimal
    sign = "-" if answer < 0 else ""
    return f"{sign}\\frac{{{abs(answer.numerator)}}}{{{answer.denominator}}}"
