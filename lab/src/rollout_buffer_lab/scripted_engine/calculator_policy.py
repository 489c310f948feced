"""Policy for sums with a calculator: calls the tool once, then answers with the tool's result."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Final

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.math_policy import MathQuestion, read_question, wrong_answer
from rollout_buffer_lab.scripted_engine.rng import SessionRng

_RESULT: Final = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def is_calculator_task(conversation: Conversation) -> bool:
    """Returns True if the prompt offers a calculator and asks for a sum."""
    system = conversation.turns[0].text if conversation.turns and conversation.turns[0].role == "system" else ""
    return "calculat" in system and _sum_asked(conversation) is not None


def use_calculator(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """Returns a call with the sum; after the call an answer, wrong with probability 1 - ``skill``."""
    question = _sum_asked(conversation)
    assert question is not None, "call is_calculator_task first"
    results = _RESULT.findall(conversation.user_turns[-1].text)
    if not results:
        call = {"name": "calculate", "arguments": {"expression": question.expression}}
        return f"I'll use the calculator.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    randomness = rng.about("calculator", question.expression)
    result = results[-1]
    if randomness.random() >= skill and re.fullmatch(r"-?\d+", result):
        result = str(wrong_answer(Fraction(result), randomness))
    return f"The result is {result}."


def _sum_asked(conversation: Conversation) -> MathQuestion | None:
    """Returns the newest sum in a user message; tool results are ignored."""
    for turn in reversed(conversation.user_turns):
        question = None if _RESULT.search(turn.text) else read_question(turn.text)
        if question is not None and not question.unknown:
            return question
    return None
