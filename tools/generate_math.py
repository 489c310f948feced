"""Writes a small input file for the ``math`` task type: sums, products, equations and fractions with their answers.

    python tools/generate_math.py [--lines 200] [--output data/demo_math.jsonl]

The problems come from a fixed seed: the same number of lines gives the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "data" / "demo_math.jsonl"
SEED = 7
INSTRUCTION = "Put your final answer within \\boxed{}."

Problem = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns 0."""
    parser = argparse.ArgumentParser(prog="generate_math", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=200, help="how many problems (default: 200)")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="default: data/demo_math.jsonl")
    options = parser.parse_args(arguments)
    if options.lines < 1:
        parser.error("--lines must be at least 1")
    options.output.write_text("".join(f"{line}\n" for line in generate(options.lines)), encoding="utf-8")
    sys.stdout.write(f"{options.lines} problems written to {options.output}\n")
    return 0


def generate(count: int) -> list[str]:
    """Returns ``count`` input lines, no problem twice."""
    source = random.Random(SEED)
    problems: dict[str, str] = {}
    while len(problems) < count:
        question, answer = source.choice(KINDS)(source)
        problems.setdefault(question, answer)
    return [_line(number, *problem) for number, problem in enumerate(problems.items())]


def _line(number: int, question: str, answer: str) -> str:
    prompt = [{"role": "user", "content": f"{question} {INSTRUCTION}"}]
    return json.dumps({"instance_id": f"math_{number}", "prompt": prompt, "label": answer})


def _sum(source: random.Random) -> Problem:
    a, b, c = (source.randint(-99, 999) for _ in range(3))
    return f"What is {a} + ({b}) + ({c})?", str(a + b + c)


def _product(source: random.Random) -> Problem:
    a, b, c = source.randint(2, 99), source.randint(2, 99), source.randint(1, 500)
    return f"What is {a} * {b} - {c}?", str(a * b - c)


def _linear_equation(source: random.Random) -> Problem:
    a, x, b = source.randint(2, 19), source.randint(-20, 20), source.randint(-50, 50)
    return f"Solve {a}x + ({b}) = {a * x + b} for x.", str(x)


def _quadratic_equation(source: random.Random) -> Problem:
    low = source.randint(-9, 8)
    high = source.randint(low + 1, 9)
    return (
        f"What is the larger solution of x^2 + ({-(low + high)})x + ({low * high}) = 0?",
        str(high),
    )


def _fractions(source: random.Random) -> Problem:
    first, second = (Fraction(source.randint(1, 9), source.randint(2, 12)) for _ in range(2))
    return f"Add the fractions {first} and {second}.", str(first + second)


KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    _sum,
    _product,
    _linear_equation,
    _quadratic_equation,
    _fractions,
)


if __name__ == "__main__":
    sys.exit(main())
