"""Plays MiniWoB++ from the text that a model would see: the goal, and the elements of the page in words."""

from __future__ import annotations

from random import Random

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.phone_policy.error_model import call_text
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, give_up, tap
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import read_goal, step_number
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.scripted_engine.web_policy.screen import Screen, read_screen
from rollout_buffer_lab.scripted_engine.web_policy.scripts import next_move

_LOOKS = ("I look at the page first.", "Let me see what the page shows.", "This is the page as it is now.")


def is_web_task(conversation: Conversation) -> bool:
    """Returns True if the conversation describes a page by its elements and asks for something to be done on it."""
    return read_goal(conversation) is not None and read_screen(conversation) is not None


def play_page(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """Returns the reply to the latest state of the page: thinking, one ``mobile_use`` call, conclusion.

    About ``skill`` of the sessions are played without a mistake; the others only tap elements at random.
    """
    goal, step = read_goal(conversation) or "", step_number(conversation)
    screen = read_screen(conversation) or Screen(())
    careless = rng.about("web", goal).random() >= skill
    scripted = _stray_tap(screen, rng.about("web", goal, step)) if careless else next_move(goal, screen)
    randomness = rng.about("words", step)
    move = scripted or give_up(f'I am a stand-in and know no way to do this: "{goal}".')
    return (
        f"<thinking>\n{randomness.choice(_LOOKS)} {move.thought}\n</thinking>\n"
        f"{call_text(move, None)}"
        f"<conclusion>\n{move.conclusion}\n</conclusion>"
    )


def _stray_tap(screen: Screen, randomness: Random) -> Move | None:
    if not screen.elements:
        return None
    element = randomness.choice(screen.elements)
    return tap(element.center, "That looks right to me.", f'Tapped "{element.text or element.kind}".')
