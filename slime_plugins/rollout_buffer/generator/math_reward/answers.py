"""Extracts the answer of a reply and of an input line, and compares them as text; ``judge_process.py`` does the rest.

Answers that differ as text may still be equal as mathematical expressions. All functions are pure, and linear in the
text.
"""

from __future__ import annotations

import re

from slime_plugins.rollout_buffer.errors import EnvironmentSetupError
from slime_plugins.rollout_buffer.types import Instance

MAX_ANSWER_CHARACTERS = 500

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_NOISE = str.maketrans({"$": "", " ": "", "\n": "", "−": "-"})


def final_answer(text: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{}``; without a box the last number; without a number None.

    An answer of more than ``MAX_ANSWER_CHARACTERS`` is ignored.
    """
    answer = _last_boxed(text)
    if answer is None and (numbers := _NUMBER.findall(text)):
        answer = numbers[-1].rstrip(",")
    return answer if answer and len(answer) <= MAX_ANSWER_CHARACTERS else None


def is_same_text(answer: str, label: str) -> bool:
    """Returns True if the texts are equal apart from spaces, dollar signs, commas in numbers and a final full stop."""
    return _plain(answer) == _plain(label)


def label_of(instance: Instance) -> str:
    """Returns the right answer of an input line.

    Raises:
        EnvironmentSetupError: the line has no label.
    """
    label = instance.data.get("label", instance.data.get("answer"))
    if not isinstance(label, str | int | float) or not str(label).strip():
        raise EnvironmentSetupError(f"instance {instance.instance_id} needs a label: the right answer")
    return str(label)


def _last_boxed(text: str) -> str | None:
    """Scans all braces once; of nested boxes the outermost is returned, because it closes last."""
    opened: list[int | None] = []
    content: str | None = None
    for brace in _BRACES.finditer(text):
        symbol = brace.group()
        if symbol.startswith("\\boxed"):
            opened.append(brace.end())
        elif symbol == "{":
            opened.append(None)
        elif symbol == "}" and opened:
            start = opened.pop()
            content = content if start is None else text[start : brace.start()].strip()
    return content


def _plain(text: str) -> str:
    plain = text.translate(_NOISE).rstrip(".")
    without_commas = plain.replace(",", "")
    return without_commas if re.fullmatch(r"-?\d{1,3}(,\d{3})*(\.\d+)?", plain) else plain
