"""Answers to simple sums and equations, worked out and put in a box."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

__all__ = ["MathQuestion", "read_question", "solve"]

_OPERATIONS: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LARGEST_POWER: Final = 64
# Letters of other alphabets and signs for the four operations, as people and LaTeX write them.
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
_TERM: Final = r"(?:\d+(?:\.\d+)?|\b[a-z]\b|[()+\-*/\s])"
_EQUATION: Final = re.compile(rf"(?<![\w.])({_TERM}+)=({_TERM}+)(?![\w=])")
_EXPRESSION: Final = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?|[()+\-*/\s])+")


@dataclass(frozen=True, kw_only=True, slots=True)
class MathQuestion:
    """``expression`` to compute; or, with ``unknown``, an equation ``expression`` = ``other_side`` to solve for it."""

    expression: str
    other_side: str = ""
    unknown: str = ""


def read_question(text: str) -> MathQuestion | None:
    """The sum or linear equation that ``text`` asks about; None if it asks about something else."""
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    for match in _EQUATION.finditer(text):
        left, right = match.group(1).strip(), match.group(2).strip()
        letters = set(re.findall(r"[a-z]", left + right))
        question = MathQuestion(expression=left, other_side=right, unknown="".join(sorted(letters)))
        if len(letters) == 1 and solve(question) is not None:
            return question
    candidates = [match.group().strip() for match in _EXPRESSION.finditer(text)]
    sums = [MathQuestion(expression=found) for found in candidates if re.search(r"\d\s*[-+*/)]", found)]
    return max((sum_ for sum_ in sums if solve(sum_) is not None), key=lambda sum_: len(sum_.expression), default=None)


def solve(question: MathQuestion) -> Fraction | None:
    """The exact answer; None where there is none, or not exactly one, or the question is no linear one."""
    try:
        if not question.unknown:
            return _value(question.expression, {})
        return _root(question)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError, RecursionError):
        return None


def work_out(question: MathQuestion, answer: Fraction, randomness: random.Random) -> str:
    """A short working that ends in ``answer``, right or wrong, in its box."""
    shown = _shown(answer)
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
    """An answer near the right one, as a slip would give it, and never the right one."""
    slips = [Fraction(1), Fraction(-1), Fraction(10), Fraction(-10), Fraction(2)]
    return answer + randomness.choice(slips)


def _root(question: MathQuestion) -> Fraction | None:
    """Where both sides meet, from three points of their difference, which a linear equation has on one line."""
    at_0, at_1, at_2 = (
        _value(question.expression, {question.unknown: point}) - _value(question.other_side, {question.unknown: point})
        for point in map(Fraction, (0, 1, 2))
    )
    slope = at_1 - at_0
    if slope == 0 or at_2 - at_1 != slope:
        return None
    return -at_0 / slope


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
    if exponent.denominator != 1 or not 0 <= exponent <= _LARGEST_POWER:
        raise ValueError("a power that is not worked out here")
    return base**exponent.numerator


def _shown(answer: Fraction) -> str:
    if answer.denominator == 1:
        return str(answer.numerator)
    decimal = float(answer)
    if Fraction(str(decimal)) == answer:
        return str(decimal)
    sign = "-" if answer < 0 else ""
    return f"{sign}\\frac{{{abs(answer.numerator)}}}{{{answer.denominator}}}"
