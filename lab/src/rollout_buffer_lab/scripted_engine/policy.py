"""The scripted policy: from a conversation, as a model would see it, to a reply that a model might have given."""

from __future__ import annotations

from typing import Final, Protocol

from rollout_buffer_lab.scripted_engine.calculator_policy import is_calculator_task, use_calculator
from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.document_policy import is_document_task, work_on_document
from rollout_buffer_lab.scripted_engine.math_policy import read_question, solve, worked_solution, wrong_answer
from rollout_buffer_lab.scripted_engine.phone_policy.policy import is_phone_task, play_phone
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.scripted_engine.web_policy.policy import is_web_task, play_page

POLITE_REPLY: Final = (
    "I am a stand-in engine, not a model: I operate the simulated phone and web pages, and work out simple sums and "
    "equations. I cannot answer this, but thank you for asking."
)


class Policy(Protocol):
    """Writes the replies of the engine. ``rng.session`` begins with the caller's name for the conversation."""

    def __call__(self, conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
        """Returns the text of the next assistant turn."""
        ...


def reply_to(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """Returns the text of the next assistant turn; the same conversation, skill and rng give the same text."""
    if is_web_task(conversation):
        return play_page(conversation, skill=skill, rng=rng)
    if is_phone_task(conversation):
        return play_phone(conversation, skill=skill, rng=rng)
    if is_document_task(conversation):
        return work_on_document(conversation, skill=skill, rng=rng)
    if is_calculator_task(conversation):
        return use_calculator(conversation, skill=skill, rng=rng)
    return _answer_question(conversation, skill=skill, rng=rng)


def _answer_question(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    text = conversation.user_turns[-1].text if conversation.user_turns else ""
    question = read_question(text)
    answer = solve(question) if question is not None else None
    if question is None or answer is None:
        return POLITE_REPLY
    randomness = rng.about("math", text)
    if randomness.random() >= skill:
        answer = wrong_answer(answer, randomness)
    return worked_solution(question, answer, randomness)
